"""Indicators: one number for a front. The only place that negates for pymoo, which minimises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dask_mohpo.errors import FrontError
from dask_mohpo.fronts import non_dominated, validate_front, validate_ref_point

__all__ = ["hypervolume"]


def hypervolume(front: object, ref_point: Sequence[float] | np.ndarray) -> float:
    """Measure the volume that a front dominates, down to the reference point.

    Zitzler and Thiele, "Multiobjective evolutionary algorithms: a comparative case study and the
    strength Pareto approach", IEEE Transactions on Evolutionary Computation 3(4), 1999; computed by
    pymoo. Every objective is maximised.

    Parameters
    ----------
    front : expected returns, shape (n_points, n_objectives). Points that are not better than the
        reference point in every objective count nothing; so do dominated and repeated points.
    ref_point : the point to measure from, shape (n_objectives,).

    Returns
    -------
    The volume, in the product of the objectives' units; 0.0 for the empty front.

    Raises
    ------
    FrontError
        If `front` is not a front, or has another number of objectives than `ref_point`.
    UsageError
        If `ref_point` is not a list of finite numbers.
    """
    reference = np.array(validate_ref_point(ref_point))
    try:
        points = validate_front(front, len(reference))
    except FrontError as error:
        raise FrontError(f"{error} The reference point has {len(reference)} numbers.") from error
    points = non_dominated(points[(points > reference).all(axis=1)])
    if not len(points):
        return 0.0
    # Here and not at the top: importing dask_mohpo must stay fast.
    from pymoo.indicators.hv import HV

    return float(HV(ref_point=-reference)(-points))
