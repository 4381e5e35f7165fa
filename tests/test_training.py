"""What a worker runs, here without Dask: results, faults and stops."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from dask_mohpo import SeedContext, training
from dask_mohpo.devices import cpu_count
from dask_mohpo.errors import UsageError
from dask_mohpo.evaluation import Evaluator
from dask_mohpo.records import SeedResult, SeedRun, SeedTask
from dask_mohpo.training import checkpoint_path, request_stop, resolve_function, train_seeds

Train = Callable[[dict[str, Any], SeedContext], Any]
TINY = {"net_arch": [8], "batch_size": 4, "learning_starts": 10, "num_sample_w": 2}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeedTask:
    monkeypatch.setattr(training, "_stopped_sessions", set())
    return SeedTask(
        study="study",
        runs=(SeedRun(trial=3, seed=7, attempt=1, config={"x": 2.0}),),
        session="now",
        algo="set by the test",
        env_id="deep-sea-treasure-v0",
        total_timesteps=100,
        ref_point=(0.0, -50.0),
        eval_gamma=0.98,
        num_eval_weights=4,
        num_eval_episodes=1,
        milestones=2,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        exclusive=True,
    )


def with_seeds(task: SeedTask, *seeds: int, config: dict[str, Any] | None = None) -> SeedTask:
    """The task with these seeds, and maybe with another configuration, instead of its one seed."""
    [first] = task.runs
    config = dict(first.config) if config is None else config
    return replace(task, runs=tuple(replace(first, seed=s, config=config) for s in seeds))


def run(task: SeedTask, train: Train) -> SeedResult:
    [result] = train_seeds(replace(task, algo=train))
    return result


def test_a_finished_seed(task: SeedTask) -> None:
    def train(config: dict[str, Any], context: SeedContext) -> Any:
        context.report(50, [[1.0, -20.0]])
        return [[config["x"], -10.0], [1.0, -20.0], [config["x"], -10.0]]

    result = run(task, train)

    assert (result.trial, result.seed, result.attempt, result.state) == (3, 7, 1, "finished")
    assert (result.worker, result.device, result.threads) == ("driver", "cpu", cpu_count())
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


def test_a_context_says_what_there_is_to_train(task: SeedTask) -> None:
    def train(config: dict[str, Any], context: SeedContext) -> Any:
        assert config == {"x": 2.0}
        assert (context.seed, context.device, context.threads) == (7, "cpu", cpu_count())
        assert (context.env_id, context.total_timesteps) == (task.env_id, 100)
        assert (context.ref_point, context.eval_gamma) == ((0.0, -50.0), 0.98)
        env = context.make_env()
        env.reset(seed=0)
        assert np.asarray(env.step(0)[1]).shape == (2,)
        return [[1.0, -1.0]]

    assert run(task, train).error is None


def test_a_milestone_that_is_no_front_fails_the_seed(task: SeedTask) -> None:
    def train(config: dict[str, Any], context: SeedContext) -> Any:
        context.report(50, [[1.0, -20.0]])
        context.report(60, [[1.0, math.nan]])

    result = run(task, train)

    assert result.state == "failed"
    assert "NaN" in str(result.error)
    assert [m.step for m in result.milestones] == [50]


def test_steps_are_those_of_the_last_milestone_or_else_what_the_state_says(task: SeedTask) -> None:
    def fail_after(*steps: int) -> Train:
        def train(config: dict[str, Any], context: SeedContext) -> Any:
            for step in steps:
                context.report(step, [[1.0, -20.0]])
            raise RuntimeError

        return train

    assert run(task, lambda config, context: [[1.0, -1.0]]).steps == 100
    assert run(task, fail_after(10, 20)).steps == 20
    assert run(task, fail_after()).steps == 0


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

    assert (result.state, result.front) == ("stopped", None)
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


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_worker_with_more_threads_trains_one_task_at_a_time_where_asked(
    task: SeedTask, exclusive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = training.current_slot()
    monkeypatch.setattr(training, "current_slot", lambda: slot)
    held = []

    def train(config: dict[str, Any], context: SeedContext) -> Any:
        held.append(slot.lock.locked())
        raise ValueError

    run(replace(task, exclusive=exclusive), train)
    assert held == [exclusive]
    assert not slot.lock.locked()


def test_an_interrupt_is_no_fault_of_the_seed(task: SeedTask) -> None:
    def train(config: dict[str, Any], context: SeedContext) -> Any:
        raise KeyboardInterrupt

    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        run(task, train)
    assert torch.get_num_threads() == before


def test_the_seeds_of_a_batch_come_in_order_and_as_if_alone(task: SeedTask) -> None:
    task = replace(task, algo="envelope", total_timesteps=40)
    task = with_seeds(task, 5, 6, config=TINY)

    results = train_seeds(task)

    assert [r.seed for r in results] == [5, 6]
    assert {r.state for r in results} == {"finished"}
    assert [[m.step for m in r.milestones] for r in results] == [[20, 40]] * 2
    for result in results:
        own = tuple(r for r in task.runs if r.seed == result.seed)
        [alone] = train_seeds(replace(task, runs=own))
        assert alone.front is not None
        np.testing.assert_array_equal(result.front, alone.front)


def test_seeds_of_a_function_train_one_after_the_other(task: SeedTask) -> None:
    """The fault of one, or what it does to its configuration, is not the next one's."""

    def train(config: dict[str, Any], context: SeedContext) -> Any:
        config["x"] += 1
        if context.seed == 2:
            raise ValueError("seed 2")
        return [[config["x"] + context.seed, -1.0]]

    results = train_seeds(replace(with_seeds(task, 1, 2, 3), algo=train))

    assert [(r.seed, r.state) for r in results] == [(1, "finished"), (2, "failed"), (3, "finished")]
    fronts = [None if r.front is None else r.front.tolist() for r in results]
    assert fronts == [[[4.0, -1.0]], None, [[6.0, -1.0]]]


def test_a_stop_leaves_the_seeds_that_come_after_untrained(task: SeedTask) -> None:
    trained = []

    def train(config: dict[str, Any], context: SeedContext) -> Any:
        trained.append(context.seed)
        request_stop("now")
        return [[1.0, -1.0]]  # without a look at the stop: it is a result

    results = train_seeds(replace(with_seeds(task, 1, 2, 3), algo=train))

    assert trained == [1]
    assert [r.state for r in results] == ["finished", "stopped", "stopped"]


def test_a_function_may_come_pickled(task: SeedTask) -> None:
    def train(config: dict[str, Any], context: SeedContext) -> Any:
        return [[config["x"], -1.0]]

    [result] = train_seeds(replace(task, algo=cloudpickle.dumps(train)))
    assert result.front is not None and result.front.tolist() == [[2.0, -1.0]]

    [result] = train_seeds(replace(task, algo=b"no pickle"))
    assert (result.state, result.front) == ("failed", None)
    assert "UnpicklingError" in str(result.error)


@pytest.mark.parametrize(("milestones", "state"), [(1, "finished"), (2, "stopped")])
def test_a_stop_ends_a_batch_at_a_milestone_but_a_final_front_counts(
    task: SeedTask, milestones: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Evaluator.fronts

    def fronts(self: Evaluator, policies: Any) -> Any:
        request_stop("now")
        return original(self, policies)

    monkeypatch.setattr(Evaluator, "fronts", fronts)
    task = replace(
        with_seeds(task, 5, 6, config=TINY),
        algo="envelope",
        total_timesteps=20,
        milestones=milestones,
    )

    results = train_seeds(task)

    assert [r.state for r in results] == [state] * 2
    assert [r.front is None for r in results] == [state == "stopped"] * 2
    step = 20 // milestones
    assert [[m.step for m in r.milestones] for r in results] == [[step]] * 2
    assert [r.steps for r in results] == [step] * 2


def test_an_agent_is_measured_as_the_study_says(
    task: SeedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discount and episodes are the study's, whatever the agent's own; early fronts are coarse."""
    made, counts = [], []

    class Noting(Evaluator):
        def __init__(self, env_id: str, seeds: Sequence[int], **options: Any) -> None:
            made.append((env_id, seeds, options))
            super().__init__(env_id, seeds, **options)

        def fronts(self, policies: Any) -> list[np.ndarray]:
            counts.append(list(policies.counts))
            return super().fronts(policies)

    monkeypatch.setattr(training, "Evaluator", Noting)
    config = {**TINY, "gamma": 0.5}
    task = replace(task, algo="envelope", total_timesteps=9, milestones=3)
    task = with_seeds(task, 7, config=config)
    task = replace(task, num_eval_weights=15, num_eval_episodes=2)

    [result] = train_seeds(task)

    assert made == [(task.env_id, [7], {"gamma": 0.98, "num_episodes": 2})]
    assert counts == [[3], [3], [15]]
    assert [m.step for m in result.milestones] == [3, 6, 9]
    assert (result.eval_gamma, result.ref_point) == (0.98, (0.0, -50.0))


def test_a_mistake_in_the_configuration_fails_all_seeds_of_a_batch(task: SeedTask) -> None:
    results = train_seeds(replace(with_seeds(task, 5, 6, config={"tau": 7}), algo="envelope"))
    assert [r.state for r in results] == ["failed"] * 2
    assert all(str(r.error).startswith("UsageError: envelope: tau = 7") for r in results)


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


def test_trials_in_one_batch_give_what_each_gives_alone(task: SeedTask) -> None:
    configs = [{**TINY, "gamma": 0.9}, {**TINY, "learning_rate": 0.01, "tau": 0.5, "per": False}]
    runs = tuple(
        SeedRun(trial=trial, seed=seed, attempt=0, config=config)
        for trial, config in enumerate(configs)
        for seed in (5, 6)
    )
    task = replace(task, algo="envelope", total_timesteps=60, runs=runs)

    together = train_seeds(task)

    assert [(r.trial, r.seed, r.state) for r in together] == [
        (0, 5, "finished"),
        (0, 6, "finished"),
        (1, 5, "finished"),
        (1, 6, "finished"),
    ]
    for result, one in zip(together, runs, strict=True):
        [alone] = train_seeds(replace(task, runs=(one,)))
        assert alone.front is not None and result.front is not None
        np.testing.assert_allclose(result.front, alone.front)
        assert [m.hypervolume for m in result.milestones] == pytest.approx(
            [m.hypervolume for m in alone.milestones]
        )


def test_trials_that_cannot_share_a_batch_fail_with_the_reason(task: SeedTask) -> None:
    runs = tuple(
        SeedRun(trial=trial, seed=5, attempt=0, config={**TINY, "batch_size": 4 + trial})
        for trial in range(2)
    )

    results = train_seeds(replace(task, algo="envelope", runs=runs))

    assert [r.state for r in results] == ["failed"] * 2
    assert "must agree in net_arch, batch_size" in str(results[0].error)


@pytest.mark.parametrize("at_milestone", [True, False])
def test_a_bad_front_in_a_batch_fails_its_own_seed_alone(
    task: SeedTask, monkeypatch: pytest.MonkeyPatch, at_milestone: bool
) -> None:
    measured = Evaluator.fronts
    calls = []

    def fronts(self: Evaluator, policies: Any) -> list[np.ndarray]:
        calls.append(policies)
        found = measured(self, policies)
        if len(calls) == (1 if at_milestone else 2):
            found[0] = np.full_like(found[0], np.nan)
        return found

    monkeypatch.setattr(Evaluator, "fronts", fronts)
    task = replace(with_seeds(task, 5, 6, config=TINY), algo="envelope", total_timesteps=20)

    bad, good = train_seeds(task)

    assert (bad.state, good.state) == ("failed", "finished")
    assert "NaN or infinity" in str(bad.error)
    assert (len(bad.milestones), len(good.milestones)) == (0 if at_milestone else 1, 2)
