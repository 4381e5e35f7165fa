"""What a finished or running study says about itself, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from dask_mohpo import ledger
from dask_mohpo.environments import known_front
from dask_mohpo.errors import UsageError
from dask_mohpo.indicators import hypervolume
from dask_mohpo.objectives import seed_value

__all__ = ["best_trial", "status_text", "summary_text", "trials_text", "utilisation"]


@dataclass(frozen=True)
class _Score:
    """A trial's value and how its seeds spread."""

    value: float
    mean: float
    sd: float
    seeds: int

    @classmethod
    def of(cls, trial: FrozenTrial) -> _Score:
        values = [seed_value(r) for r in ledger.trial_results(trial)]
        finished = [v for v in values if v is not None]
        sd = float(np.std(finished, ddof=1)) if len(finished) > 1 else 0.0
        assert trial.value is not None
        return cls(trial.value, float(np.mean(finished)), sd, len(finished))

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.sd:.2f} ({self.seeds} seeds)"


def best_trial(study: optuna.Study) -> FrozenTrial:
    """The trial with the highest value.

    Raises
    ------
    UsageError
        No trial is complete yet.
    """
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not trials:
        raise UsageError(f"study {study.study_name!r} has no complete trial yet.")
    return max(trials, key=lambda trial: trial.value or 0.0)


def utilisation(study: optuna.Study) -> float | None:
    """Seconds of training per second of slot, 0 … 1; None before anything was recorded."""
    slot_seconds, _ = ledger.usage(study)
    if not slot_seconds:
        return None
    busy = sum(
        result.wall_seconds
        for trial in study.get_trials(deepcopy=False)
        for result in ledger.attempts(trial)
    )
    return busy / slot_seconds


def summary_text(study: optuna.Study, folder: str) -> str:
    """The outcome in a few lines: best and default configuration, gain, known front, utilisation.

    Parameters
    ----------
    study : a study of this library with at least one complete trial.
    folder : where its files lie.
    """
    settings = ledger.read_settings(study)
    best = best_trial(study)
    rows = [
        ("study", f"{study.study_name}: {settings.algo} on {settings.env_id}"),
        ("trials", _states_text(study)),
        ("best", f"trial {best.number}: hypervolume {_Score.of(best)}"),
    ]
    default = _default_trial(study)
    if default is not None and default.state == TrialState.COMPLETE:
        assert default.value is not None and best.value is not None
        rows.append(("default", f"trial {default.number}: hypervolume {_Score.of(default)}"))
        rows.append(("gain", _gain(best.value, default.value)))
    known = known_front(settings.env_id, settings.eval_gamma)
    if known is not None:
        rows.append(("known front", f"hypervolume {hypervolume(known, settings.ref_point):.2f}"))
    ref_point = ", ".join(f"{x:g}" for x in settings.ref_point)
    rows.append(("measured", f"ref point ({ref_point}), discount {settings.eval_gamma:g}"))
    busy = utilisation(study)
    if busy is not None:
        rows.append(("utilisation", f"{100 * busy:.0f} % of the workers' time spent training"))
    rows.append(("files", folder))
    config = ledger.stored_config(best) or {}
    lines = [f"{name:<12} {text}" for name, text in rows]
    lines += ["best configuration:", *(f"  {k}: {v}" for k, v in sorted(config.items()))]
    return "\n".join(lines)


def trials_text(study: optuna.Study) -> str:
    """A table with a row per trial, best first."""
    trials = study.get_trials(deepcopy=False)
    trials = [t for t in trials if t.state != TrialState.WAITING]
    names = sorted({name for t in trials for name in t.params})
    header = ["trial", "state", "hypervolume", "sd", "seeds", "seconds", *names]
    rows = []
    for trial in sorted(trials, key=lambda t: -np.inf if t.value is None else -t.value):
        results = ledger.trial_results(trial)
        values = [v for r in results if (v := seed_value(r)) is not None]
        sd = f"{np.std(values, ddof=1):.2f}" if len(values) > 1 else "-"
        rows.append(
            [
                str(trial.number),
                trial.state.name.lower(),
                "-" if trial.value is None else f"{trial.value:.2f}",
                sd,
                str(len(values)),
                f"{sum(r.wall_seconds for r in results):.1f}",
                *(_short(trial.params.get(name, "-")) for name in names),
            ]
        )
    return _table(header, rows)


def status_text(study: optuna.Study) -> str:
    """Where a study stands: trials by state, seeds, best value, failures."""
    settings = ledger.read_settings(study)
    results = ledger.seed_results(study)
    lines = [
        f"study {study.study_name}: {settings.algo} on {settings.env_id}",
        f"trials: {_states_text(study)}",
        f"seeds: {sum(r.state == 'finished' for r in results)} finished, "
        f"{sum(r.state == 'failed' for r in results)} failed",
    ]
    if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        best = best_trial(study)
        lines.append(f"best: trial {best.number}, hypervolume {_Score.of(best)}")
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        seeds = [r.seed for r in ledger.trial_results(trial) if r.state == "finished"]
        missing = [s for s in settings.seeds if s not in seeds]
        lines.append(f"trial {trial.number}: seeds {_list(missing)} to go")
    for result in results:
        if result.state == "failed":
            lines.append(f"trial {result.trial}, seed {result.seed} failed: {result.error}")
    return "\n".join(lines)


def _default_trial(study: optuna.Study) -> FrozenTrial | None:
    trials = study.get_trials(deepcopy=False)
    return next((t for t in trials if t.user_attrs.get(ledger.DEFAULT)), None)


def _states_text(study: optuna.Study) -> str:
    counts = ledger.count_states(study)
    parts = [f"{counts['complete']} complete"]
    parts += [f"{n} {name}" for name, n in counts.items() if n and name != "complete"]
    return ", ".join(parts).replace(" fail", " failed")


def _gain(best: float, default: float) -> str:
    relative = f" ({100 * (best - default) / default:+.1f} %)" if default > 0 else ""
    return f"{best - default:+.2f}{relative}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)
