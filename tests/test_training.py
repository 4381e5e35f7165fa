"""What a worker runs, here without Dask: results, faults and stops."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dask_mohpo import SeedContext, training
from dask_mohpo.errors import UsageError
from dask_mohpo.records import SeedResult, SeedTask
from dask_mohpo.training import checkpoint_path, request_stop, resolve_function, train_seeds

Train = Callable[[dict[str, Any], SeedContext], Any]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeedTask:
    monkeypatch.setattr(training, "_stopped_sessions", set())
    return SeedTask(
        study="study",
        trial=3,
        seeds=(7,),
        attempt=1,
        session="now",
        algo="set by the test",
        env_id="deep-sea-treasure-v0",
        config={"x": 2.0},
        total_timesteps=100,
        ref_point=(0.0, -50.0),
        eval_gamma=0.98,
        num_eval_weights=4,
        num_eval_episodes=1,
        milestones=2,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        exclusive=True,
    )


def run(task: SeedTask, train: Train) -> SeedResult:
    [result] = train_seeds(replace(task, algo=train))
    return result


def test_a_finished_seed(task: SeedTask) -> None:
    def train(config: dict[str, Any], context: SeedContext) -> Any:
        context.report(50, [[1.0, -20.0]])
        return [[config["x"], -10.0], [1.0, -20.0], [config["x"], -10.0]]

    result = run(task, train)

    assert (result.trial, result.seed, result.attempt, result.state) == (3, 7, 1, "finished")
    assert result.front is not None
    assert result.front.tolist() == [[2.0, -10.0]]  # without what is dominated or repeated
    assert [(m.step, m.hypervolume) for m in result.milestones] == [(50, 30.0)]
    assert (result.ref_point, result.eval_gamma, result.steps) == ((0.0, -50.0), 0.98, 50)
    assert result.error is None
    assert 0 <= result.cpu_seconds
    assert 0 < result.wall_seconds <= result.ended - result.started + 0.1
    assert SeedResult.from_json(result.to_json()).front is not None


@pytest.mark.parametrize(
    ("front", "reason"),
    [
        ([[math.nan, 0.0]], "NaN"),
        ([[math.inf, 0.0]], "infinity"),
        ([[1.0, 2.0, 3.0]], "3"),
        ("nonsense", "array"),
        (None, "None"),
    ],
)
def test_what_is_no_front_fails_the_seed_with_the_reason(
    task: SeedTask, front: Any, reason: str
) -> None:
    result = run(task, lambda config, context: front)
    assert result.state == "failed"
    assert result.front is None
    assert reason.lower() in str(result.error).lower()


def test_an_empty_front_is_a_result(task: SeedTask) -> None:
    result = run(task, lambda config, context: np.zeros((0, 2)))
    assert result.state == "finished"
    assert result.front is not None and result.front.shape == (0, 2)


@pytest.mark.parametrize("error", [ValueError("a bad day"), SystemExit(3)])
def test_an_error_is_a_result_with_its_traceback(task: SeedTask, error: BaseException) -> None:
    def train(config: dict[str, Any], context: SeedContext) -> Any:
        raise error

    result = run(task, train)

    assert result.state == "failed"
    assert result.error == f"{type(error).__name__}: {error}"
    assert "in train" in str(result.traceback)


def test_a_milestone_is_where_a_stop_ends_the_training(task: SeedTask) -> None:
    after = []

    def train(config: dict[str, Any], context: SeedContext) -> Any:
        assert not context.should_stop()
        request_stop("another session")
        context.report(10, [[1.0, -1.0]])
        request_stop("now")
        try:
            context.report(20, [[1.0, -1.0]])
        except Exception:  # what careless training code does
            after.append("swallowed")
        after.append("went on")

    result = run(task, train)

    assert result.state == "stopped"
    assert after == []
    assert [m.step for m in result.milestones] == [10, 20]


def test_a_training_that_saw_the_stop_is_not_counted(task: SeedTask) -> None:
    def train(config: dict[str, Any], context: SeedContext) -> Any:
        request_stop("now")
        assert context.should_stop()
        return [[1.0, -1.0]]

    result = run(task, train)
    assert (result.state, result.front) == ("stopped", None)


def test_a_seed_that_starts_after_the_stop_does_not_train(task: SeedTask) -> None:
    request_stop("now")
    result = run(task, lambda config, context: pytest.fail("it trains"))
    assert (result.state, result.wall_seconds) == ("stopped", 0.0)


def test_a_checkpoint_is_found_by_the_next_try(task: SeedTask) -> None:
    found = []

    def train(config: dict[str, Any], context: SeedContext) -> Any:
        found.append(None if context.resume is None else context.resume.read_text())
        context.checkpoint.write_text(f"{len(found)} tries")
        return [[1.0, -1.0]]

    run(task, train)
    run(task, train)

    assert found == [None, "1 tries"]
    assert checkpoint_path(task.checkpoint_dir, 3, 7).read_text() == "2 tries"


def test_torch_uses_the_slots_threads_and_then_as_many_as_before(
    task: SeedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    slot = replace(training.current_slot(), threads=before + 1)
    monkeypatch.setattr(training, "current_slot", lambda: slot)
    seen = []

    def train(config: dict[str, Any], context: SeedContext) -> Any:
        seen.append((torch.get_num_threads(), context.threads))
        raise ValueError

    assert run(task, train).threads == before + 1
    assert seen == [(before + 1, before + 1)]
    assert torch.get_num_threads() == before


def test_the_seeds_of_a_batch_come_in_order_and_as_if_alone(task: SeedTask) -> None:
    config = {"net_arch": [8], "batch_size": 4, "learning_starts": 10, "num_sample_w": 2}
    task = replace(task, algo="envelope", config=config, seeds=(5, 6), total_timesteps=40)

    results = train_seeds(task)

    assert [r.seed for r in results] == [5, 6]
    assert {r.state for r in results} == {"finished"}
    assert [[m.step for m in r.milestones] for r in results] == [[20, 40]] * 2
    for result in results:
        [alone] = train_seeds(replace(task, seeds=(result.seed,)))
        assert alone.front is not None
        np.testing.assert_array_equal(result.front, alone.front)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:train", "module 'no_such_module' cannot be imported here"),
        ("json:parse", "no function 'parse'; it has: .*dumps"),
        ("broken_module:train", "cannot be imported here .SyntaxError"),
    ],
)
def test_functions_that_are_not_there(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("def train(:\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UsageError, match=words):
        resolve_function(name)


def test_a_function_by_its_name() -> None:
    assert resolve_function("math:sqrt") is math.sqrt
