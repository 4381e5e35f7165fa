"""The picture of a study, drawn from studies made by hand: no Dask, no training."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import optuna
import pytest
from matplotlib.axes import Axes
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from dask_mohpo import ledger
from dask_mohpo.errors import UsageError
from dask_mohpo.records import SeedResult

SCRIPT = Path(__file__).parent.parent / "examples" / "plot_study.py"
REF_POINT = (0.0, -50.0)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_study", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_study(
    run_dir: Path, *, env_id: str = "deep-sea-treasure-v0", aggregate: str = "mean"
) -> optuna.Study:
    settings = ledger.Settings(
        algo="envelope",
        env_id=env_id,
        ref_point=REF_POINT,
        eval_gamma=0.99,
        objectives="hypervolume",
        aggregate=aggregate,
        failed_seeds="fail",
        seeds=(10, 11, 12),
        total_timesteps=100,
        num_eval_weights=10,
        num_eval_episodes=1,
        train_hyperparams={},
        search_space={"parameters": {}},
    )
    return ledger.open_study("hand-made", run_dir / "hand-made", None, settings, None)[0]


def add_trial(
    study: optuna.Study, values: Sequence[float | None], *, told: float | None, over: bool = True
) -> None:
    """A trial with one seed per value, None for a seed that failed; `told` None: it failed."""
    trial = study.ask({"x": FloatDistribution(0, 1)})
    for seed, value in enumerate(values, start=10):
        result = SeedResult(
            trial=trial.number,
            seed=seed,
            attempt=0,
            state="failed" if value is None else "finished",
            # one point, whose hypervolume is its first number times 50
            front=None if value is None else np.array([[value / 50, 0.0]]),
            ref_point=REF_POINT,
        )
        ledger.record_result(trial, result)
    if over and told is None:
        study.tell(trial, state=TrialState.FAIL)
    elif over:
        study.tell(trial, told)


@pytest.fixture
def study(tmp_path: Path) -> optuna.Study:
    """The default and two more trials, a failed one and a running one."""
    study = make_study(tmp_path)
    study.enqueue_trial({"x": 0.5}, user_attrs={ledger.DEFAULT: True})
    add_trial(study, [100, 200, 300], told=200)
    add_trial(study, [500, 600, 700], told=600)
    add_trial(study, [100, 100, 100], told=100)
    add_trial(study, [None, 400], told=None)
    add_trial(study, [650], told=None, over=False)
    return study


def drawn(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Label → places and values of what was drawn under it."""
    found = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        line: Any = handle[0] if isinstance(handle, tuple) else handle
        found[label] = (list(line.get_xdata()), list(line.get_ydata()))
    return found


def test_what_is_drawn(script: ModuleType, study: optuna.Study) -> None:
    (axes,) = script.plot_history(study).axes

    lines = drawn(axes)
    places, values = lines.pop("seed")
    assert values == pytest.approx([100, 200, 300, 500, 600, 700, 100, 100, 100, 400, 650])
    assert [int(place) for place in places] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4]
    assert len(set(places)) == len(places), "no dot hides another"
    places, values = lines.pop("trial: mean ± standard deviation")
    assert places == [0, 1, 2]
    assert values == pytest.approx([200, 600, 100])
    places, values = lines.pop("best mean so far: 600")
    assert places[:3] == [0, 1, 2]
    assert values == pytest.approx([200, 600, 600, 600])
    assert set(lines.pop("default configuration: 200")[1]) == {200.0}
    assert lines.pop("failed trial")[0] == [3]
    assert lines.pop("known front: 854.85")[1] == pytest.approx([854.85] * 2, abs=0.01)
    assert not lines
    (bars,) = axes.containers
    segments = bars[2][0].get_segments()
    heights = [float(high - low) / 2 for (_, low), (_, high) in segments]
    assert heights == pytest.approx([100, 100, 0])
    assert axes.get_title(loc="left") == "hand-made: envelope on deep-sea-treasure-v0"


def test_the_script_writes_the_picture(
    script: ModuleType, study: optuna.Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "history.png"

    assert script.main(["hand-made", "--run-dir", str(tmp_path), "-o", str(target)]) == 0

    assert target.read_bytes().startswith(b"\x89PNG")
    assert str(target) in capsys.readouterr().out


def test_a_study_without_default_and_known_front(script: ModuleType, tmp_path: Path) -> None:
    study = make_study(tmp_path, env_id="mo-mountaincar-timespeed-v0", aggregate="median")
    add_trial(study, [100, 200, 600], told=200)

    (axes,) = script.plot_history(study).axes

    assert list(drawn(axes)) == [
        "seed",
        "best median so far: 200",
        "trial: mean ± standard deviation",
    ]


def test_nothing_to_draw(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(tmp_path)
    with pytest.raises(UsageError, match="no finished seed"):
        script.plot_history(study)

    assert script.main(["absent", "--run-dir", str(tmp_path)]) == 2
    assert "studies there: hand-made" in capsys.readouterr().err
