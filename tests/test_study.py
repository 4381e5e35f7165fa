"""run_study on real Dask workers, with trainables that do little."""

from __future__ import annotations

import importlib
import itertools
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from distributed import Client, LocalCluster
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

import trainables
from dask_mohpo import executor, run_study, seed_results
from dask_mohpo import study as study_module
from dask_mohpo.errors import (
    NoWorkersError,
    ResumeError,
    SpaceError,
    StudyFailedError,
    UnknownNameError,
    UsageError,
)
from dask_mohpo.ledger import attempts, stored_config, usage
from dask_mohpo.slots import workers_of
from trainables import ENV_ID, read_log

SPACE = {"x": {"low": 0.0, "high": 1.0}}


@pytest.fixture
def call(client: Client, tmp_path: Path) -> dict[str, Any]:
    """Arguments of a small study on the shared cluster."""
    return {
        "env_id": ENV_ID,
        "search_space": SPACE,
        "train_hyperparams": {"log": str(tmp_path / "log"), "seconds": 0.2},
        "total_timesteps": 100,
        "n_trials": 4,
        "num_seeds": 2,
        "seed": 0,
        "cluster": client,
        "run_dir": tmp_path,
        "study_name": "study",
        "progress": False,
    }


def starts(tmp_path: Path) -> list[tuple[int, int]]:
    return [(line["trial"], line["seed"]) for line in read_log(tmp_path / "log", "start")]


def test_trains_every_seed_of_every_trial_once(call: dict[str, Any], tmp_path: Path) -> None:
    study = run_study(trainables.quick, **call)

    assert isinstance(study, optuna.Study)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 4
    assert sorted(starts(tmp_path)) == [(t, s) for t in range(4) for s in (0, 1)]
    results = seed_results(study)
    assert [(r.trial, r.seed) for r in results] == [(t, s) for t in range(4) for s in (0, 1)]
    for trial in study.trials:
        x = trial.params["x"]
        # the hypervolumes of its two seeds are 50 x and 50 (x + 1)
        assert trial.value == pytest.approx(50 * (x + 0.5))
    for result in results:
        x = study.trials[result.trial].params["x"]
        assert result.front is not None
        np.testing.assert_allclose(result.front, [[x + result.seed, 0.0]])
        assert (result.state, result.attempt, result.error) == ("finished", 0, None)
        assert result.ref_point == (0.0, -50.0)
        assert result.eval_gamma == 0.99
        assert result.steps == 100
        assert result.peak_memory > 10_000_000
        assert result.device == "cpu"
        assert result.threads == 1
        assert result.worker in ("0", "1")
        assert result.started <= result.ended


def test_both_slots_work_and_the_scheduler_keeps_nothing(
    call: dict[str, Any], client: Client, tmp_path: Path
) -> None:
    study = run_study(trainables.sleeper, **call)

    assert len({line["pid"] for line in read_log(tmp_path / "log", "start")}) == 2
    spent = usage(study)
    assert spent.slot_seconds == pytest.approx(2 * spent.elapsed_seconds, rel=0.2)
    deadline = time.monotonic() + 5
    while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
        assert time.monotonic() < deadline, "finished futures are still held"
        time.sleep(0.05)


def test_oldest_trial_first_and_few_trials_open(call: dict[str, Any], tmp_path: Path) -> None:
    run_study(trainables.sleeper, **{**call, "n_trials": 6, "num_seeds": 3})

    began = [trial for trial, _ in starts(tmp_path)]
    # two slots and a look-ahead of one: a seed can start before one of an older trial only
    # where the older one was queued behind a running seed
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(began))
    running: set[tuple[int, int]] = set()
    most = 0
    events = read_log(tmp_path / "log", "start") + read_log(tmp_path / "log", "end")
    for event in sorted(events, key=lambda e: e["time"]):
        key = (event["trial"], event["seed"])
        running.symmetric_difference_update({key})
        most = max(most, len(running))
    assert most == 2


@pytest.mark.parametrize("seeds_per_task", [1, 2, 3])
def test_seeds_per_task(call: dict[str, Any], tmp_path: Path, seeds_per_task: int) -> None:
    study = run_study(
        trainables.quick,
        **{**call, "num_seeds": 5, "n_trials": 2, "seeds_per_task": seeds_per_task},
    )

    assert sorted(starts(tmp_path)) == [(t, s) for t in range(2) for s in range(5)]
    x = study.trials[0].params["x"]
    assert study.trials[0].value == pytest.approx(50 * (x + 2))


@pytest.mark.parametrize(("threshold", "running"), [(0.02, 2), (60.0, 1)])
def test_a_slow_sampler_is_asked_before_a_slot_is_free(
    call: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threshold: float,
    running: int,
) -> None:
    """So few trials that no seed is queued behind another: each ask is seen alone."""
    asked: list[int] = []

    class Slow(optuna.samplers.RandomSampler):
        def before_trial(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            log = tmp_path / "log"
            asked.append(len(read_log(log, "start")) - len(read_log(log, "end")))
            time.sleep(0.1)

    monkeypatch.setattr(executor, "ASK_AHEAD_SECONDS", threshold)
    sleepy = {**call["train_hyperparams"], "seconds": 0.6}
    run_study(
        trainables.sleeper,
        **{**call, "n_trials": 6, "num_seeds": 1, "sampler": Slow(), "train_hyperparams": sleepy},
    )

    assert len(asked) == 6
    assert max(asked[3:]) == running


SHAPES = {"net_arch": [8], "batch_size": 4, "learning_starts": 10, "num_sample_w": 2}


@pytest.mark.parametrize("seeds_per_task", [1, 2])
def test_trials_in_one_batch_give_the_same_study(
    client: Client, tmp_path: Path, seeds_per_task: int
) -> None:
    def search(trials_per_task: int) -> optuna.Study:
        return run_study(
            "envelope",
            "deep-sea-treasure-v0",
            search_space={
                "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
                "gamma": {"low": 0.9, "high": 1.0},
            },
            train_hyperparams=SHAPES,
            total_timesteps=40,
            n_trials=5,
            num_seeds=2,
            seed=3,
            seeds_per_task=seeds_per_task,
            trials_per_task=trials_per_task,
            sampler=optuna.samplers.RandomSampler(seed=0),
            milestones=1,
            cluster=client,
            run_dir=tmp_path / str(trials_per_task),
            progress=False,
        )

    alone, together = search(1), search(3)

    assert [t.params for t in together.trials] == [t.params for t in alone.trials]
    for ours, theirs in zip(seed_results(together), seed_results(alone), strict=True):
        assert (ours.trial, ours.seed, ours.state) == (theirs.trial, theirs.seed, "finished")
        assert ours.front is not None and theirs.front is not None
        np.testing.assert_allclose(ours.front, theirs.front)
    tasks: dict[tuple[float, str], list[tuple[int, int]]] = {}
    for r in seed_results(together):
        tasks.setdefault((r.started, r.worker), []).append((r.trial, r.seed))
    sizes = {len(runs) for runs in tasks.values()}
    assert max(sizes) == 3 * seeds_per_task
    assert len({r.started for r in seed_results(alone)}) == 10 // seeds_per_task


def test_trials_of_different_shapes_do_not_share_a_batch(client: Client, tmp_path: Path) -> None:
    study = run_study(
        "envelope",
        "deep-sea-treasure-v0",
        search_space={"batch_size": {"choices": [4, 8]}},
        train_hyperparams={k: v for k, v in SHAPES.items() if k != "batch_size"},
        total_timesteps=20,
        n_trials=8,
        num_seeds=1,
        trials_per_task=4,
        sampler=optuna.samplers.RandomSampler(seed=0),
        milestones=1,
        cluster=client,
        run_dir=tmp_path,
        progress=False,
    )

    assert {r.state for r in seed_results(study)} == {"finished"}
    shapes: dict[float, set[int]] = {}
    members: dict[float, int] = {}
    for r in seed_results(study):
        shapes.setdefault(r.started, set()).add(study.trials[r.trial].params["batch_size"])
        members[r.started] = members.get(r.started, 0) + 1
    assert all(len(sizes) == 1 for sizes in shapes.values())
    assert max(members.values()) > 1


def test_auto_puts_a_trials_seeds_together_while_there_is_enough_to_do(
    client: Client, tmp_path: Path
) -> None:
    study = run_study(
        "envelope",
        "deep-sea-treasure-v0",
        train_hyperparams=SHAPES,
        total_timesteps=20,
        n_trials=6,
        num_seeds=4,
        seeds_per_task="auto",
        milestones=1,
        cluster=client,
        run_dir=tmp_path,
        progress=False,
    )

    starts_of = [{r.started for r in seed_results(study) if r.trial == t} for t in range(6)]
    assert len(starts_of[0]) == 1  # 24 seeds for two slots
    assert len(starts_of[-1]) == 4  # the last four: two slots share them


def test_trials_of_an_own_algorithm_share_no_task(call: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="trials_per_task = 2 is not valid for an algorithm of"):
        run_study(trainables.quick, **{**call, "trials_per_task": 2})


def test_auto_is_one_seed_a_task_for_an_own_algorithm(call: dict[str, Any], tmp_path: Path) -> None:
    study = run_study(trainables.quick, **{**call, "n_trials": 2, "seeds_per_task": "auto"})

    assert len({r.started for r in seed_results(study)}) == len(seed_results(study))


@pytest.mark.parametrize("value", ["all", 0, 1.5, True])
def test_seeds_per_task_is_checked(call: dict[str, Any], value: Any) -> None:
    with pytest.raises(UsageError, match=r"seeds_per_task = .* give an integer ≥ 1, or 'auto'"):
        run_study(trainables.quick, **{**call, "seeds_per_task": value})


@pytest.mark.parametrize(("aggregate", "expected"), [("mean", 2.0), ("median", 1.0), ("min", 0.0)])
def test_aggregates(call: dict[str, Any], aggregate: str, expected: float) -> None:
    study = run_study(
        _zero_one_five, **{**call, "num_seeds": 3, "n_trials": 1, "aggregate": aggregate}
    )
    assert study.trials[0].value == pytest.approx(50 * expected)


def _zero_one_five(config: dict[str, Any], context: Any) -> list[list[float]]:
    return [[float([0, 1, 5][context.seed]), 0.0]]


def test_a_failed_try_is_repeated(call: dict[str, Any], tmp_path: Path) -> None:
    study = run_study(trainables.fails_once, **call)

    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 4
    assert [(r.state, r.attempt) for r in seed_results(study)] == [("finished", 1)] * 8
    tries = attempts(study.trials[0])
    failed = [r for r in tries if r.state == "failed"]
    assert len(tries) == 4
    assert [r.error for r in failed] == ["RuntimeError: the first try fails"] * 2
    assert all("fails_once" in (r.traceback or "") for r in failed)


def test_no_retries(call: dict[str, Any], tmp_path: Path) -> None:
    study = run_study(trainables.odd_seeds_fail, **{**call, "seed_retries": 0, "seed": 2})

    assert [t.state for t in study.trials] == [TrialState.FAIL] * 4
    assert starts(tmp_path).count((0, 3)) == 1


def test_failed_seeds_fail_the_trial(call: dict[str, Any], tmp_path: Path) -> None:
    study = run_study(trainables.odd_seeds_fail, **call)

    assert [t.state for t in study.trials] == [TrialState.FAIL] * 4
    assert starts(tmp_path).count((0, 1)) == 3, "one try and two retries"
    by_seed = {r.seed: r for r in seed_results(study) if r.trial == 0}
    assert by_seed[0].state == "finished"
    assert by_seed[1].state == "failed"
    assert by_seed[1].error == "RuntimeError: seed 1 is odd"


def test_failed_seeds_count_as_an_empty_front(call: dict[str, Any]) -> None:
    study = run_study(trainables.odd_seeds_fail, **{**call, "failed_seeds": "worst"})

    for trial in study.trials:
        assert trial.state == TrialState.COMPLETE
        assert trial.value == pytest.approx(50 * trial.params["x"] / 2)


def test_stops_where_the_first_trials_all_fail(call: dict[str, Any]) -> None:
    with pytest.raises(StudyFailedError, match="this set-up cannot work") as caught:
        run_study(trainables.always_fails, **{**call, "n_trials": 50, "max_failures": 3})

    assert caught.value.failures == 3
    assert "always_fails" in caught.value.first_error


def test_one_failing_trial_does_not_end_the_study(call: dict[str, Any]) -> None:
    def space(trial: optuna.Trial) -> dict[str, float]:
        if trial.number == 1:
            raise ZeroDivisionError("a bug in the search space")
        return {"x": trial.suggest_float("x", 0, 1)}

    study = run_study(trainables.quick, **{**call, "search_space": space})

    assert [t.state.name for t in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def test_goes_on_to_n_trials_in_all(call: dict[str, Any], tmp_path: Path) -> None:
    first = run_study(trainables.quick, **{**call, "n_trials": 2})
    points = [t.params["x"] for t in first.trials]
    study = run_study(trainables.quick, **{**call, "n_trials": 5})

    assert len(study.trials) == 5
    assert [t.params["x"] for t in study.trials[:2]] == points
    assert sorted(starts(tmp_path)) == [(t, s) for t in range(5) for s in (0, 1)]
    xs = [t.params["x"] for t in study.trials]
    assert len(set(xs)) == 5, "the rebuilt sampler repeats its points"


def test_a_users_sampler_does_not_repeat_itself_either(call: dict[str, Any]) -> None:
    for n_trials in (3, 6):
        study = run_study(
            trainables.quick,
            **{**call, "n_trials": n_trials, "sampler": optuna.samplers.RandomSampler(seed=1)},
        )
    assert len({t.params["x"] for t in study.trials}) == 6


def test_a_finished_study_needs_no_cluster(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_study(trainables.quick, **call)

    def no_cluster(*args: object, **kwargs: object) -> None:
        raise AssertionError("a cluster was opened")

    monkeypatch.setattr(study_module, "connect", no_cluster)
    study = run_study(trainables.quick, **call)
    assert len(study.trials) == 4


def test_takes_up_a_trial_that_was_left_running(call: dict[str, Any], tmp_path: Path) -> None:
    study = run_study(trainables.quick, **{**call, "n_trials": 1})
    # what a driver leaves that dies after one of two seeds, and another right after its ask
    finished = seed_results(study)[0]
    half = study.ask()
    x = half.suggest_float("x", 0, 1)
    half.set_user_attr("mohpo:config", {"x": x, **call["train_hyperparams"]})
    half.set_user_attr("mohpo:seed:0:0", {**finished.to_json(), "trial": 1, "front": [[7.0, 0.0]]})
    bare = study.ask()
    (tmp_path / "log").unlink()

    study = run_study(trainables.quick, **{**call, "n_trials": 3})

    assert [t.number for t in study.trials] == [0, 1, 2]
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 3
    assert sorted(starts(tmp_path)) == [(1, 1), (2, 0), (2, 1)]
    assert study.trials[1].value == pytest.approx(50 * (7.0 + x + 1) / 2)
    assert bare.number == 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ref_point": [0, -40]}, "ref_point"),
        ({"env_id": "deep-sea-treasure-concave-v0"}, "env_id"),
        ({"eval_gamma": 1.0}, "eval_gamma"),
        ({"aggregate": "min"}, "aggregate"),
        ({"seed": 1}, "seeds"),
        ({"num_seeds": 3}, "seeds"),
        ({"total_timesteps": 50}, "total_timesteps"),
        ({"failed_seeds": "worst"}, "failed_seeds"),
        ({"search_space": {"x": {"low": 0.2, "high": 1.0}}}, "x"),
        ({"search_space": {"x": [0.0, 1.0]}}, "x"),
        ({"search_space": {**SPACE, "y": {"low": 0, "high": 3}}}, "y"),
        ({"train_hyperparams": {"z": 1}}, "train_hyperparams"),
    ],
)
def test_changed_settings_are_refused(
    call: dict[str, Any], changed: dict[str, Any], named: str
) -> None:
    run_study(trainables.quick, **{**call, "n_trials": 1})
    with pytest.raises(ResumeError, match="other settings") as caught:
        run_study(trainables.quick, **{**call, **changed})
    assert any(named in name for name in caught.value.differences)
    assert "stored" in str(caught.value)
    assert "now" in str(caught.value)


def test_another_algorithm_is_refused(call: dict[str, Any]) -> None:
    run_study(trainables.quick, **{**call, "n_trials": 1})
    with pytest.raises(ResumeError, match=r"trainables:quick.*trainables:slow"):
        run_study(trainables.slow, **call)


def test_widened_bounds_are_fine(call: dict[str, Any]) -> None:
    run_study(trainables.quick, **{**call, "n_trials": 1})
    wider = {"x": {"low": -1.0, "high": 2.0}}
    study = run_study(trainables.quick, **{**call, "search_space": wider})
    assert len(study.trials) == 4


def test_timeout_stops_at_milestones_and_can_be_resumed(
    call: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call["train_hyperparams"]["seconds"] = 1.0
    with caplog.at_level(logging.WARNING):
        began = time.monotonic()
        study = run_study(trainables.slow, **{**call, "n_trials": 3, "timeout": 0.3})
    assert time.monotonic() - began < 1.0, "running seeds were not stopped at a milestone"
    assert "run the same call again" in caplog.text
    assert not study.get_trials(states=(TrialState.COMPLETE,))
    assert not seed_results(study), "a stopped seed counts as nothing"

    study = run_study(trainables.slow, **{**call, "n_trials": 2})
    assert [t.state for t in study.trials[:2]] == [TrialState.COMPLETE] * 2


def test_no_worker_offers_the_resources(call: dict[str, Any]) -> None:
    began = time.monotonic()
    with pytest.raises(NoWorkersError, match="it needs NPU=1") as caught:
        run_study(trainables.quick, **{**call, "resources": {"NPU": 1}})
    assert time.monotonic() - began < 5
    assert caught.value.request == {"NPU": 1}
    assert sorted(caught.value.offers) == ["0", "1"]


def test_waits_for_workers_that_are_coming_but_not_for_ever(tmp_path: Path) -> None:
    with LocalCluster(
        n_workers=0, processes=False, memory_limit=0, dashboard_address="127.0.0.1:0"
    ) as cluster:
        with pytest.raises(NoWorkersError, match=r"after 1 s.*there are no workers"):
            run_study(
                trainables.quick,
                ENV_ID,
                search_space=SPACE,
                cluster=cluster.scheduler_address,
                worker_timeout=1.0,
                run_dir=tmp_path,
                progress=False,
            )


def test_resources_choose_the_workers(call: dict[str, Any]) -> None:
    with (
        LocalCluster(
            n_workers=1,
            threads_per_worker=2,
            processes=False,
            resources={"SLOT": 1},
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster, set_as_default=False) as other,
    ):
        study = run_study(trainables.quick, **{**call, "cluster": other, "resources": {"SLOT": 1}})
        assert len(study.trials) == 4


def test_one_seed_at_a_time_where_a_worker_has_more_threads(
    call: dict[str, Any], tmp_path: Path
) -> None:
    with LocalCluster(
        n_workers=2,
        threads_per_worker=3,
        processes=False,
        memory_limit=0,
        dashboard_address="127.0.0.1:0",
    ) as cluster:
        study = run_study(trainables.sleeper, **{**call, "n_trials": 5, "cluster": cluster})
        assert cluster.status.name == "running", "a cluster that was handed in is left open"
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for result in seed_results(study):
        by_worker.setdefault(result.worker, []).append((result.started, result.ended))
    assert len(by_worker) == 2
    for spans in by_worker.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_the_default_cluster_is_closed_and_its_workers_are_slots(
    call: dict[str, Any], tmp_path: Path
) -> None:
    study = run_study(
        trainables.quick, **{**call, "cluster": None, "num_workers": 2, "devices": ["cpu"]}
    )
    assert {r.threads for r in seed_results(study)} == {1}
    import psutil

    pids = {line["pid"] for line in read_log(tmp_path / "log", "start")}
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "worker processes are left"
        time.sleep(0.1)


def test_death_of_a_worker_costs_one_try(call: dict[str, Any], tmp_path: Path) -> None:
    study = run_study(trainables.kills_its_worker, **{**call, "cluster": None, "num_workers": 2})

    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 4
    began = starts(tmp_path)
    assert began.count((1, 1)) == 2
    assert len(began) == 9, "a seed that ran elsewhere was trained again"
    result = next(r for r in seed_results(study) if (r.trial, r.seed) == (1, 1))
    assert (result.state, result.attempt) == ("finished", 1)
    lost = next(r for r in attempts(study.trials[1]) if r.state == "failed")
    assert "worker process died" in (lost.error or "")


def test_callbacks_see_each_finished_trial(call: dict[str, Any]) -> None:
    seen: list[tuple[int, float | None]] = []
    study = run_study(
        trainables.quick,
        **{**call, "callbacks": [lambda study, trial: seen.append((trial.number, trial.value))]},
    )
    assert sorted(seen) == [(t.number, t.value) for t in study.trials]


def test_fixed_values_win_over_the_space(call: dict[str, Any]) -> None:
    call["train_hyperparams"]["x"] = 0.25
    study = run_study(trainables.quick, **{**call, "n_trials": 2})
    assert [t.value for t in study.trials] == [pytest.approx(50 * 0.75)] * 2
    assert (stored_config(study.trials[0]) or {})["x"] == 0.25


@pytest.mark.parametrize("kind", ["journal", "sqlite", "instance"])
def test_storages(call: dict[str, Any], tmp_path: Path, kind: str) -> None:
    storage: Any = {
        "journal": f"journal:{tmp_path / 'elsewhere' / 'j.log'}",
        "sqlite": f"sqlite:///{tmp_path / 'study.db'}",
        "instance": optuna.storages.InMemoryStorage(),
    }[kind]
    call["storage"] = storage
    run_study(trainables.quick, **{**call, "n_trials": 2})
    study = run_study(trainables.quick, **{**call, "n_trials": 3})
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 3
    assert len(seed_results(study)) == 6
    assert len(starts(tmp_path)) == 6


def test_builtin_agent_starts_with_its_defaults(client: Client, tmp_path: Path) -> None:
    study = run_study(
        "envelope",
        ENV_ID,
        total_timesteps=200,
        n_trials=2,
        num_seeds=1,
        train_hyperparams={"net_arch": (16,), "batch_size": np.int64(8)},
        milestones=2,
        num_eval_weights=5,
        cluster=client,
        run_dir=tmp_path,
        progress=False,
    )
    assert study.study_name == "envelope-deep-sea-treasure-v0"
    assert study.trials[0].user_attrs["mohpo:default"] is True
    config = stored_config(study.trials[0]) or {}
    assert config["learning_rate"] == 3e-4
    assert config["gamma"] == 0.99
    assert config["net_arch"] == [16]
    assert config["batch_size"] == 8
    result = seed_results(study)[0]
    assert [m.step for m in result.milestones] == [100, 200]
    assert result.steps == 200


@pytest.mark.parametrize(
    ("algo", "changed", "error", "text"),
    [
        ("envelop", {}, UnknownNameError, "Did you mean 'envelope'"),
        ("envelope", {"search_space": {"learnin_rate": [1e-3]}}, UnknownNameError, "learning_rate"),
        ("envelope", {"train_hyperparams": {"taau": 1}}, UnknownNameError, "'tau'"),
        ("envelope", {"train_hyperparams": {"tau": 2}}, UsageError, "tau = 2"),
        ("envelope", {"train_hyperparams": {"tau": object()}}, UsageError, "train_hyperparams"),
        ("envelope", {"env_id": "deep-sea-treasure-v1"}, UsageError, "deep-sea-treasure-v0"),
        ("envelope", {"ref_point": [0, 0, 0]}, UsageError, "3"),
        ("envelope", {"env_id": "mo-mountaincarcontinuous-v0"}, UsageError, "pcn"),
        ("envelope", {"env_id": "CartPole-v1"}, UsageError, "CartPole"),
        ("envelope", {"n_trials": 0}, UsageError, "n_trials = 0"),
        ("envelope", {"num_seeds": 1.5}, UsageError, "num_seeds = 1.5"),
        ("envelope", {"seed": -1}, UsageError, "seed = -1"),
        ("envelope", {"timeout": 0}, UsageError, "timeout = 0"),
        ("envelope", {"aggregate": "avg"}, UnknownNameError, "mean"),
        ("envelope", {"objectives": "hv"}, UnknownNameError, "hypervolume"),
        ("envelope", {"failed_seeds": "ignore"}, UnknownNameError, "worst"),
        ("envelope", {"sampler": "tpe"}, UsageError, "sampler"),
        ("envelope", {"study_name": "a/b"}, UsageError, "a/b"),
        ("envelope", {"storage": "nowhere"}, UsageError, "journal:PATH"),
        ("envelope", {"storage": "nosuchdb://x/y"}, UsageError, "cannot be opened"),
        ("envelope", {"num_workers": 2}, UsageError, "num_workers"),
        ("envelope", {"search_space": "missing.yaml"}, SpaceError, "missing.yaml"),
        ("trainables:nothing", {}, UsageError, "quick"),
        ("no_such_module:f", {}, UsageError, "cannot be imported"),
        ("trainables:quick", {"search_space": None}, UsageError, "search_space"),
        (lambda: None, {}, UsageError, "train(config, context)"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    call: dict[str, Any], algo: Any, changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    call = {**call, "search_space": None, "train_hyperparams": {}}
    if not isinstance(algo, str):
        call["search_space"] = SPACE
    with pytest.raises(error) as caught:
        run_study(algo, **{**call, **changed})
    assert text in str(caught.value)


def test_a_trainable_that_cannot_be_pickled(call: dict[str, Any]) -> None:
    import threading

    lock = threading.Lock()

    def train(config: dict[str, Any], context: Any) -> list[list[float]]:
        with lock:
            return [[0.0, 0.0]]

    with pytest.raises(UsageError, match="cannot be sent to workers"):
        run_study(train, **call)


def test_a_foreign_study_of_that_name(call: dict[str, Any], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    other = optuna.create_study(storage=url, study_name="study", direction="maximize")
    other.add_trial(
        optuna.create_trial(
            params={"x": 0.5}, distributions={"x": FloatDistribution(0, 1)}, value=1.0
        )
    )
    with pytest.raises(UsageError, match="not made by dask_mohpo"):
        run_study(trainables.quick, **{**call, "storage": url})


def test_the_workers_are_all_there_while_the_client_updates_its_own_view(client: Client) -> None:
    """What the client keeps is overwritten with an answer without workers now and then."""

    async def overwrite(stop: list[bool]) -> None:
        while not stop:
            await client._update_scheduler_info(n_workers=0)

    stop: list[bool] = []
    assert client.loop is not None
    client.loop.add_callback(overwrite, stop)
    try:
        counts = {len(workers_of(client)) for _ in range(300)}
    finally:
        stop.append(True)
    assert counts == {2}


def test_a_function_that_workers_cannot_import_fails_with_the_reason(
    call: dict[str, Any], client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it unpickled by Dask, it would end one worker after the other."""
    (tmp_path / "only_here.py").write_text(
        "def train(config, context):\n    return [[1.0, -1.0]]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    train = importlib.import_module("only_here").train
    before = set(client.scheduler_info()["workers"])

    with pytest.raises(StudyFailedError, match="No module named 'only_here'"):
        run_study(train, **{**call, "max_failures": 1})

    assert set(client.scheduler_info()["workers"]) == before
