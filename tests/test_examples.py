"""The examples run, and what they train learns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_mohpo import SeedContext, hypervolume, seed_results
from dask_mohpo.devices import current_slot
from dask_mohpo.environments import describe, make_env
from dask_mohpo.ledger import load_study
from dask_mohpo.records import SeedRun, SeedTask

EXAMPLES = Path(__file__).parent.parent / "examples"
ENV_ID = "deep-sea-treasure-v0"
CONFIG = {"learning_rate": 0.8, "epsilon": 0.6, "gamma": 0.97, "num_weights": 12}


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., np.ndarray]:
    monkeypatch.syspath_prepend(EXAMPLES)
    import tabular_q_learning  # type: ignore[import-not-found]

    function: Callable[..., np.ndarray] = tabular_q_learning.train
    return function


def make_context(
    folder: Path, env_id: str = ENV_ID, seed: int = 10, total_timesteps: int = 10_000
) -> SeedContext:
    """What a worker would hand to the training."""
    env = describe(env_id)
    task = SeedTask(
        study="study",
        runs=(SeedRun(trial=0, seed=seed, attempt=0, config={}),),
        session="none",
        algo="tabular_q_learning:train",
        env_id=env_id,
        total_timesteps=total_timesteps,
        ref_point=env.ref_point,
        eval_gamma=env.eval_gamma,
        num_eval_weights=10,
        num_eval_episodes=1,
        milestones=5,
        checkpoint_dir=str(folder),
        exclusive=False,
    )
    return SeedContext(task, task.runs[0], current_slot())


def random_hypervolume(gamma: float = 0.99, episodes: int = 300) -> float:
    """Of the uniformly random policy."""
    env = make_env(ENV_ID)
    env.action_space.seed(0)
    total = np.zeros(2)
    for _ in range(episodes):
        env.reset(seed=0)
        discount, done = 1.0, False
        while not done:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += discount * np.asarray(reward)
            discount *= gamma
            done = terminated or truncated
    return hypervolume(total[None] / episodes, describe(ENV_ID).ref_point)


def test_tabular_q_learning_learns(train: Callable[..., np.ndarray], tmp_path: Path) -> None:
    context = make_context(tmp_path)

    front = train(CONFIG, context)

    assert front.shape == (12, 2)
    assert [m.step for m in context.milestones] == [2000, 4000, 6000, 8000, 10_000]
    assert context.milestones[-1].hypervolume == hypervolume(front, context.ref_point)
    assert hypervolume(front, context.ref_point) > 500 > 3 * random_hypervolume()


def test_tabular_q_learning_repeats_itself(
    train: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    first, again, other = (
        train(CONFIG, make_context(tmp_path, seed=seed, total_timesteps=2000))
        for seed in (10, 10, 11)
    )

    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_tabular_q_learning_on_three_objectives(
    train: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    context = make_context(tmp_path, env_id="resource-gathering-v0", total_timesteps=2000)

    assert train(CONFIG, context).shape == (12, 3)


@pytest.mark.slow
def test_the_script_of_tabular_q_learning(tmp_path: Path) -> None:
    """As a user runs it: the training is a function of ``__main__``."""
    script: Any = EXAMPLES / "tabular_q_learning.py"

    ran = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert ran.returncode == 0, ran.stderr
    study = load_study("tabular-q-learning", tmp_path / "runs")
    first, *others = ran.stdout.splitlines()
    assert first == f"best hypervolume: {study.best_value:.1f}"
    assert [line.split(":")[0].strip() for line in others] == list(study.best_params)
    assert {result.state for result in seed_results(study)} == {"finished"}
    values = [trial.value for trial in study.trials]
    assert study.best_value > 550
    assert study.best_value > 1.2 * np.median(np.array(values, dtype=float))
