"""From the fronts of a trial's seeds to the one number that Optuna is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dask_mohpo.errors import UnknownNameError
from dask_mohpo.indicators import hypervolume
from dask_mohpo.records import SeedResult

__all__ = ["AGGREGATES", "FAILED_SEEDS", "OBJECTIVES", "check_choice", "seed_value", "trial_value"]

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "median": lambda values: float(np.median(values)),
    "min": lambda values: float(np.min(values)),
}
FAILED_SEEDS = ("fail", "worst")
OBJECTIVES = ("hypervolume",)


def check_choice(what: str, given: str, valid: Sequence[str]) -> None:
    """Raise UnknownNameError where a name is not among the valid ones."""
    if given not in valid:
        raise UnknownNameError(what, given, valid)


def seed_value(result: SeedResult) -> float | None:
    """Hypervolume of a finished seed's front; None for a seed that did not finish."""
    return None if result.front is None else hypervolume(result.front, result.ref_point)


def trial_value(values: Sequence[float | None], aggregate: str, failed_seeds: str) -> float | None:
    """What a trial is told.

    Parameters
    ----------
    values : one per seed, None for a failed seed.
    aggregate : a name in `AGGREGATES`.
    failed_seeds : ``"fail"``: one failed seed fails the trial; ``"worst"``: a failed seed counts
        as an empty front, whose hypervolume is 0.

    Returns
    -------
    The value, or None where the trial failed.
    """
    if any(value is None for value in values) and failed_seeds == "fail":
        return None
    return AGGREGATES[aggregate]([0.0 if value is None else value for value in values])
