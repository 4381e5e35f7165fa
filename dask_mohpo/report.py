"""What a finished or running study says about itself, as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

__all__ = ["best_text", "best_trial", "status_text", "summary_text", "trials_text", "utilisation"]

MAX_FAILURES = 10


@dataclass(frozen=True)
class _Score:
    """A complete trial's value and how its seeds spread."""

    value: float
    mean: float
    sd: float
    seeds: int
    aggregate: str

    @classmethod
    def of(cls, trial: FrozenTrial, settings: ledger.Settings) -> _Score:
        # A seed that failed in a complete trial counts as an empty front.
        values = [seed_value(result) or 0.0 for result in ledger.trial_results(trial)]
        assert trial.value is not None
        mean = float(np.mean(values))
        return cls(trial.value, mean, _sd(values), len(values), settings.aggregate)

    def __str__(self) -> str:
        if self.seeds == 1:
            return f"hypervolume {_number(self.value)} (1 seed)"
        spread = f"{_number(self.mean)} ± {_number(self.sd, scale=self.mean)}"
        if self.aggregate == "mean":
            return f"hypervolume {spread} ({self.seeds} seeds)"
        value = f"{self.aggregate} hypervolume {_number(self.value)}"
        return f"{value} (mean {spread} of {self.seeds} seeds)"


def best_trial(study: optuna.Study) -> FrozenTrial:
    """The trial with the highest value.

    Raises
    ------
    UsageError
        No trial is complete yet.
    """
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not trials:
        raise UsageError(
            f"study {study.study_name!r} has no complete trial yet ({_states_text(study)}); "
            f"`dask-mohpo status {study.study_name}` says more."
        )
    return max(trials, key=lambda trial: trial.value or 0.0)


def utilisation(study: optuna.Study) -> float | None:
    """Seconds of training per second of slot, 0 … 1; None before anything was recorded."""
    usage = ledger.usage(study)
    if not usage.slot_seconds:
        return None
    busy = usage.stopped_seconds + sum(
        result.wall_seconds
        for trial in study.get_trials(deepcopy=False)
        for result in ledger.attempts(trial)
    )
    return busy / usage.slot_seconds


def best_text(study: optuna.Study) -> str:
    """The best trial: its value, and its configuration beside the default one.

    Parameters
    ----------
    study : a study of this library with at least one complete trial.
    """
    settings = ledger.read_settings(study)
    best = best_trial(study)
    configs = {"best": ledger.stored_config(best) or {}}
    default = _default_trial(study)
    if default is not None and default.number != best.number:
        configs["default"] = ledger.stored_config(default) or {}
    names = sorted({name for config in configs.values() for name in config})
    table = _config_rows("configuration", configs, names)
    return f"trial {best.number}: {_Score.of(best, settings)}\n{_table(table)}"


def summary_text(study: optuna.Study, folder: str) -> str:
    """The outcome in a few lines: best and default configuration, gain, known front, utilisation.

    Parameters
    ----------
    study : a study of this library with at least one complete trial.
    folder : where its files lie.
    """
    settings = ledger.read_settings(study)
    best = best_trial(study)
    assert best.value is not None
    headline, *table = best_text(study).splitlines()
    rows = [
        ("study", f"{study.study_name}: {settings.algo} on {settings.env_id}"),
        ("trials", _states_text(study)),
        ("best", headline),
    ]
    default = _default_trial(study)
    if default is not None and default.value is not None:
        rows.append(("default", f"trial {default.number}: {_Score.of(default, settings)}"))
        rows.append(("gain", _gain(best.value, default.value)))
    known = known_front(settings.env_id, settings.eval_gamma)
    if known is not None:
        most = hypervolume(known, settings.ref_point)
        reached = f"; best reaches {100 * best.value / most:.1f} % of it" if most > 0 else ""
        rows.append(("known front", f"hypervolume {_number(most)}{reached}"))
    ref_point = ", ".join(f"{x:g}" for x in settings.ref_point)
    rows.append(("measured", f"ref point ({ref_point}), discount {settings.eval_gamma:g}"))
    busy = utilisation(study)
    if busy is not None:
        rows.append(("utilisation", f"{100 * busy:.0f} % of the workers' time spent training"))
    rows.append(("files", folder))
    return "\n".join([*(f"{name:<12} {text}" for name, text in rows), "", *table])


def trials_text(study: optuna.Study, width: int = 100) -> str:
    """A row per trial, best first; then what was searched, a column per trial, best first.

    Parameters
    ----------
    study : a study of this library.
    width : of the terminal, in characters: the second table has as many trials as fit.
    """
    settings = ledger.read_settings(study)
    trials = study.get_trials(deepcopy=False)
    trials = [t for t in trials if t.state != TrialState.WAITING]
    trials.sort(key=lambda t: np.inf if t.value is None else -t.value)
    value = "hypervolume" if settings.aggregate == "mean" else f"{settings.aggregate} hypervolume"
    rows = [["trial", "state", value, "sd", "seeds", "seconds"]]
    for trial in trials:
        results = ledger.trial_results(trial)
        values = [v for r in results if (v := seed_value(r)) is not None]
        rows.append(
            [
                str(trial.number),
                _state(trial.state),
                "-" if trial.value is None else _number(trial.value),
                _number(_sd(values), scale=max(values)) if len(values) > 1 else "-",
                str(len(values)),
                f"{sum(r.wall_seconds for r in results):.1f}",
            ]
        )
    configs = {str(t.number): ledger.stored_config(t) or {} for t in trials}
    fixed = _fixed(settings)
    names = sorted({name for config in configs.values() for name in config if name not in fixed})
    if not names:
        return _table(rows)
    return f"{_table(rows)}\n\n{_table(_config_rows('trial', configs, names), width)}"


def status_text(study: optuna.Study) -> str:
    """Where a study stands: trials by state, seeds, best value, failures."""
    settings = ledger.read_settings(study)
    results = ledger.seed_results(study)
    failures = [r for r in results if r.state == "failed"]
    lines = [
        f"study {study.study_name}: {settings.algo} on {settings.env_id}",
        f"trials: {_states_text(study)}",
        f"seeds: {sum(r.state == 'finished' for r in results)} finished, {len(failures)} failed",
    ]
    if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        best = best_trial(study)
        lines.append(f"best: trial {best.number}: {_Score.of(best, settings)}")
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        seeds = [r.seed for r in ledger.trial_results(trial) if r.state == "finished"]
        missing = [str(s) for s in settings.seeds if s not in seeds]
        lines.append(f"trial {trial.number}: seeds {', '.join(missing)} to go")
    for result in failures[:MAX_FAILURES]:
        error = (result.error or "no reason known").splitlines()[0]
        lines.append(f"trial {result.trial}, seed {result.seed} failed: {error}")
    if len(failures) > MAX_FAILURES:
        lines.append(f"and {len(failures) - MAX_FAILURES} more failed")
    return "\n".join(lines)


def _default_trial(study: optuna.Study) -> FrozenTrial | None:
    trials = study.get_trials(deepcopy=False)
    return next((t for t in trials if t.user_attrs.get(ledger.DEFAULT)), None)


def _states_text(study: optuna.Study) -> str:
    counts = {state: 0 for state in TrialState}
    for trial in study.get_trials(deepcopy=False):
        counts[trial.state] += 1
    first = TrialState.COMPLETE
    others = [f"{n} {_state(state)}" for state, n in counts.items() if n and state != first]
    return ", ".join([f"{counts[first]} {_state(first)}", *others])


def _state(state: TrialState) -> str:
    return "failed" if state == TrialState.FAIL else state.name.lower()


def _sd(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _gain(best: float, default: float) -> str:
    relative = f" ({100 * (best - default) / default:+.1f} %)" if default > 0 else ""
    return f"{_number(best - default, scale=best, sign='+')}{relative}"


def _fixed(settings: ledger.Settings) -> set[str]:
    """Names of the configuration that are the same in all trials."""
    parameters = settings.search_space.get("parameters", {})
    constants = {name for name, entry in parameters.items() if entry["kind"] == "constant"}
    return constants | set(settings.train_hyperparams)


def _number(value: float, *, scale: float | None = None, sign: str = "") -> str:
    """Two decimals, or as many as show three digits of `scale` (None: of the value)."""
    size = abs(value if scale is None else scale)
    decimals = 2 if size >= 1 or size == 0 else 2 - math.floor(math.log10(size))
    return f"{value:{sign}.{decimals}f}"


def _config_rows(
    corner: str, configs: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> list[list[str]]:
    """A row per name and a column per configuration."""
    rows = [[corner, *configs]]
    for name in names:
        rows.append([name, *(_short(c[name]) if name in c else "-" for c in configs.values())])
    return rows


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Aligned columns, the first to the left; with `width`, as many as fit, at least two."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while width is not None and len(widths) > 2 and sum(widths) + 2 * (len(widths) - 1) > width:
        widths.pop()
    lines = []
    for first, *others in rows:
        cells = [c.rjust(w) for c, w in zip(others, widths[1:], strict=False)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
