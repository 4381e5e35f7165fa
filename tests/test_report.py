"""Reports, checked against studies made by hand, without Dask and without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from dask_mohpo import ledger
from dask_mohpo.environments import known_front
from dask_mohpo.errors import UsageError
from dask_mohpo.indicators import hypervolume
from dask_mohpo.records import SeedResult
from dask_mohpo.report import best_text, best_trial, status_text, summary_text, trials_text
from dask_mohpo.report import utilisation as utilisation_of

ENV_ID = "deep-sea-treasure-v0"
REF_POINT = (0.0, -50.0)

Values = Sequence[float | None]
"""Hypervolume of each seed; None for a failed one."""


class Handmade:
    """A study whose trials are written down instead of run."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        values: dict[str, Any] = {
            "algo": "mine:train",
            "env_id": ENV_ID,
            "ref_point": REF_POINT,
            "eval_gamma": 0.99,
            "objectives": "hypervolume",
            "aggregate": "mean",
            "failed_seeds": "fail",
            "seeds": (10, 11, 12),
            "total_timesteps": 1000,
            "num_eval_weights": 50,
            "num_eval_episodes": 1,
            "train_hyperparams": {},
            "search_space": {"callable": "mine:space"},
            **changes,
        }
        storage = optuna.storages.InMemoryStorage()
        settings = ledger.Settings(**values)
        self.study, _ = ledger.open_study("study", folder / "study", storage, settings, None)

    def trial(
        self,
        config: Mapping[str, Any],
        values: Values,
        value: float | None = None,
        *,
        state: TrialState | None = None,
        error: str = "ValueError: no luck",
    ) -> None:
        """Record a trial; with `value` it is told, without it has failed, or is in `state`."""
        trial = self.study.ask()
        ledger.record_config(trial, config)
        for seed, hv in zip((10, 11, 12), values, strict=False):
            ledger.record_result(trial, seed_result(trial.number, seed, hv, error=error))
        if value is not None:
            self.study.tell(trial, value)
        elif state is None:
            self.study.tell(trial, state=TrialState.FAIL)


def seed_result(
    trial: int, seed: int, value: float | None, *, attempt: int = 0, error: str = ""
) -> SeedResult:
    """A front of one point, `value` / 50 and 50 above the reference point."""
    return SeedResult(
        trial=trial,
        seed=seed,
        attempt=attempt,
        state="failed" if value is None else "finished",
        front=None if value is None else np.array([[value / 50, 0.0]]),
        ref_point=REF_POINT,
        eval_gamma=0.99,
        wall_seconds=2.0,
        error=error if value is None else None,
    )


@pytest.fixture
def made(tmp_path: Path) -> Handmade:
    """Trial 0 is the default; trial 2 is the best; trial 1 has failed."""
    made = Handmade(tmp_path, search_space={"parameters": space()}, train_hyperparams={"fixed": 1})
    made.study.enqueue_trial({}, user_attrs={ledger.DEFAULT: True})
    made.trial({"lr": 3e-4, "net_arch": [64, 64], "fixed": 1, "k": 2}, [100, 110, 120], 110.0)
    made.trial({"lr": 0.1, "net_arch": [64, 64], "fixed": 1, "k": 2}, [100, None])
    made.trial({"lr": 0.00123456, "net_arch": [8], "fixed": 1, "k": 2}, [120, 140, 139], 133.0)
    return made


def space() -> dict[str, Any]:
    return {
        "lr": {"kind": "float", "distribution": {}},
        "net_arch": {"kind": "categorical", "distribution": {}},
        "k": {"kind": "constant", "value": 2},
    }


def row(text: str, first: str) -> list[str]:
    """The words after `first` of the line that begins with it."""
    (line,) = [line for line in text.splitlines() if line.startswith(first)]
    return line.removeprefix(first).split()


def test_best_trial_has_the_highest_value(made: Handmade) -> None:
    assert best_trial(made.study).number == 2


def test_best_trial_among_values_of_zero(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    made.trial({}, [0, 0, 0], 0.0)

    assert best_trial(made.study).number == 0


def record_usage(study: optuna.Study, session: str, **seconds: float) -> None:
    zeros = dict.fromkeys(("slot_seconds", "stopped_seconds", "elapsed_seconds"), 0.0)
    ledger.record_usage(study, session, ledger.Usage(**{**zeros, **seconds}))


@pytest.mark.parametrize("report", [best_trial, best_text, lambda s: summary_text(s, "runs")])
def test_no_complete_trial(tmp_path: Path, report: Any) -> None:
    made = Handmade(tmp_path)
    made.trial({}, [None, None, None])

    with pytest.raises(UsageError, match=r"no complete trial yet \(0 complete, 1 failed\)"):
        report(made.study)


def test_a_study_of_another_library() -> None:
    with pytest.raises(UsageError, match="not made by dask_mohpo"):
        status_text(optuna.create_study())


def test_summary(made: Handmade) -> None:
    record_usage(made.study, "first", slot_seconds=13.0, elapsed_seconds=8.0)
    record_usage(made.study, "second", slot_seconds=7.0, elapsed_seconds=5.0)
    known = known_front(ENV_ID, 0.99)
    assert known is not None
    most = hypervolume(known, REF_POINT)

    text = summary_text(made.study, "runs/study")

    assert text == "\n".join(
        [
            "study        study: mine:train on deep-sea-treasure-v0",
            "trials       2 complete, 1 failed",
            "best         trial 2: hypervolume 133.00 ± 11.27 (3 seeds)",
            "default      trial 0: hypervolume 110.00 ± 10.00 (3 seeds)",
            "gain         +23.00 (+20.9 %)",
            f"known front  hypervolume {most:.2f}; best reaches {13300 / most:.1f} % of it",
            "measured     ref point (0, -50), discount 0.99",
            "utilisation  80 % of the workers' time spent training",  # 8 seeds · 2 s of 20 s
            "files        runs/study",
            "",
            "configuration      best   default",
            "fixed                 1         1",
            "k                     2         2",
            "lr             0.001235    0.0003",
            "net_arch            [8]  [64, 64]",
        ]
    )


def test_summary_without_default_usage_and_known_front(tmp_path: Path) -> None:
    made = Handmade(tmp_path, env_id="four-room-v0", ref_point=(0.0, -50.0))
    made.trial({"lr": 0.5}, [100, 100, 100], 100.0)

    text = summary_text(made.study, "runs/study")

    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "study", "trials", "best", "measured", "files", "", "configuration", "lr",
    ]  # fmt: skip


def test_default_that_is_the_best(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    made.study.enqueue_trial({}, user_attrs={ledger.DEFAULT: True})
    made.trial({"lr": 0.5}, [100, 100, 100], 100.0)

    text = summary_text(made.study, "runs/study")

    assert row(text, "gain") == ["+0.00", "(+0.0", "%)"]
    assert row(text, "configuration") == ["best"]


def test_default_that_failed_has_no_gain(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    made.study.enqueue_trial({}, user_attrs={ledger.DEFAULT: True})
    made.trial({"lr": 0.5}, [None])
    made.trial({"lr": 0.25, "extra": True}, [100, 100, 100], 100.0)

    text = summary_text(made.study, "runs/study")

    assert "gain" not in text
    assert row(text, "configuration") == ["best", "default"]
    assert row(text, "lr") == ["0.25", "0.5"]
    assert row(text, "extra") == ["True", "-"]


def test_default_with_an_empty_front_has_no_relative_gain(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    made.study.enqueue_trial({}, user_attrs={ledger.DEFAULT: True})
    made.trial({}, [0, 0, 0], 0.0)
    made.trial({}, [100, 100, 100], 100.0)

    assert row(summary_text(made.study, ""), "gain") == ["+100.00"]


def test_another_aggregate_shows_its_value_and_the_spread(tmp_path: Path) -> None:
    made = Handmade(tmp_path, aggregate="min")
    made.trial({}, [100, 110, 120], 100.0)

    expected = "trial 0: min hypervolume 100.00 (mean 110.00 ± 10.00 of 3 seeds)"
    assert best_text(made.study).splitlines()[0] == expected
    assert "min hypervolume" in trials_text(made.study).splitlines()[0]


def test_a_failed_seed_that_counts_as_an_empty_front(tmp_path: Path) -> None:
    made = Handmade(tmp_path, failed_seeds="worst")
    made.trial({}, [60, 60, None], 40.0)
    made.trial({}, [None, None, None], 0.0)

    assert best_text(made.study).startswith("trial 0: hypervolume 40.00 ± 34.64 (3 seeds)")


def test_a_single_seed_has_no_spread(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    made.trial({}, [60], 60.0)

    assert best_text(made.study).startswith("trial 0: hypervolume 60.00 (1 seed)")
    assert row(trials_text(made.study), "0") == ["complete", "60.00", "-", "1", "2.0"]


def test_small_values_keep_three_digits(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    made.trial({}, [0.0123, 0.0125, 0.0127], 0.0125)

    assert best_text(made.study).startswith("trial 0: hypervolume 0.0125 ± 0.0002 (3 seeds)")


def test_a_retried_seed_counts_once_but_its_time_twice(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    trial = made.study.ask()
    ledger.record_config(trial, {})
    ledger.record_result(trial, seed_result(0, 10, None, error="ValueError: once"))
    ledger.record_result(trial, seed_result(0, 10, 60, attempt=1))
    made.study.tell(trial, 60.0)
    record_usage(made.study, "first", slot_seconds=5.0)

    assert best_text(made.study).startswith("trial 0: hypervolume 60.00 (1 seed)")
    assert utilisation_of(made.study) == pytest.approx(4.0 / 5.0)
    assert "seeds: 1 finished, 0 failed" in status_text(made.study)


def test_training_of_stopped_seeds_is_not_idle_time(made: Handmade) -> None:
    record_usage(made.study, "first", slot_seconds=40.0, stopped_seconds=4.0)

    assert utilisation_of(made.study) == pytest.approx((8 * 2.0 + 4.0) / 40.0)


def test_utilisation_before_anything_was_recorded(tmp_path: Path) -> None:
    assert utilisation_of(Handmade(tmp_path).study) is None


def test_trials(made: Handmade) -> None:
    made.study.enqueue_trial({})
    made.study.enqueue_trial({})
    made.trial({"lr": 0.01, "net_arch": [4], "fixed": 1, "k": 2}, [90], state=TrialState.RUNNING)

    assert trials_text(made.study) == "\n".join(
        [
            "trial     state  hypervolume     sd  seeds  seconds",
            "2      complete       133.00  11.27      3      6.0",
            "0      complete       110.00  10.00      3      6.0",
            "1        failed            -      -      1      4.0",
            "3       running            -      -      1      2.0",
            "",
            "trial            2         0         1     3",
            "lr        0.001235    0.0003       0.1  0.01",
            "net_arch       [8]  [64, 64]  [64, 64]   [4]",
        ]
    )


def test_trials_of_a_narrow_terminal_show_the_best_configurations(made: Handmade) -> None:
    searched = trials_text(made.study, width=30).split("\n\n")[1]

    assert searched.splitlines()[0].split() == ["trial", "2", "0"]
    assert all(len(line) <= 30 for line in searched.splitlines())
    assert trials_text(made.study, width=1).split("\n\n")[1].splitlines()[0].split()[1] == "2"


def test_trials_where_nothing_is_searched(tmp_path: Path) -> None:
    made = Handmade(tmp_path, train_hyperparams={"lr": 0.5})
    made.trial({"lr": 0.5}, [60], 60.0)

    assert len(trials_text(made.study).splitlines()) == 2


def test_trials_before_there_are_any(tmp_path: Path) -> None:
    assert trials_text(Handmade(tmp_path).study).split()[0] == "trial"


def test_trials_of_a_driver_that_died_before_the_configuration_was_stored(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    made.study.ask()

    assert row(trials_text(made.study), "0") == ["running", "-", "-", "0", "0.0"]


def test_status(made: Handmade) -> None:
    made.trial({"lr": 0.01}, [90], state=TrialState.RUNNING)
    made.study.enqueue_trial({})

    assert status_text(made.study) == "\n".join(
        [
            "study study: mine:train on deep-sea-treasure-v0",
            "trials: 2 complete, 1 running, 1 failed, 1 waiting",
            "seeds: 8 finished, 1 failed",
            "best: trial 2: hypervolume 133.00 ± 11.27 (3 seeds)",
            "trial 3: seeds 11, 12 to go",
            "trial 1, seed 11 failed: ValueError: no luck",
        ]
    )


def test_status_before_anything_is_complete(tmp_path: Path) -> None:
    made = Handmade(tmp_path)

    assert status_text(made.study).splitlines()[1:] == [
        "trials: 0 complete",
        "seeds: 0 finished, 0 failed",
    ]


def test_status_shows_ten_failures_and_one_line_of_each(tmp_path: Path) -> None:
    made = Handmade(tmp_path)
    for _ in range(4):
        made.trial({}, [None, None, None], error="ValueError: first line\nsecond line")

    lines = status_text(made.study).splitlines()

    assert sum("failed: ValueError: first line" in line for line in lines) == 10
    assert lines[-1] == "and 2 more failed"
    assert "second" not in "".join(lines)
