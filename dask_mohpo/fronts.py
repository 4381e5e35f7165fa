"""Fronts: what counts as one, the rows of it that matter, the union of several.

A front is a float64 array (n_points, n_objectives) of expected returns, all to be maximised.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dask_mohpo.errors import FrontError, UsageError

__all__ = [
    "non_dominated",
    "non_dominated_mask",
    "union",
    "validate_front",
    "validate_ref_point",
]

# Points compared at once in `_dominated`: bounds its memory to this many times the kept points.
_CHUNK = 256


def validate_front(value: object, num_objectives: int) -> np.ndarray:
    """Turn what a training function gave back into a front, or say why it is none.

    Parameters
    ----------
    value : array, list of lists, list of 1-D arrays or CPU tensor of real numbers, of shape
        (n_points, num_objectives). For the empty front, [] will do.
    num_objectives : how many objectives the environment has.

    Returns
    -------
    float64 array (n_points, num_objectives), a copy.

    Raises
    ------
    FrontError
        If `value` is not that: not numbers, another shape, or rows with NaN or infinity.
    """
    return _points(value, num_objectives)


def validate_ref_point(value: object, num_objectives: int | None = None) -> tuple[float, ...]:
    """Turn a user's reference point into a tuple of floats, or say why it is none.

    Parameters
    ----------
    value : sequence of numbers, shape (num_objectives,).
    num_objectives : how many numbers there must be; None takes any number of them.

    Raises
    ------
    UsageError
        If `value` is not a sequence of finite numbers, or has another length.
    """
    wanted = "finite numbers" if num_objectives is None else f"{num_objectives} finite numbers"
    try:
        point = np.asarray(value)
    except Exception as error:
        raise UsageError(
            f"ref_point: got {value!r} ({error}); valid: a list of {wanted}"
        ) from error
    if point.ndim != 1 or point.dtype.kind not in "iuf" or not len(point):
        raise UsageError(f"ref_point: got {value!r}; valid: a list of {wanted}, one per objective")
    if num_objectives is not None and len(point) != num_objectives:
        raise UsageError(
            f"ref_point: got {len(point)} numbers, {point.tolist()}, but there are "
            f"{num_objectives} objectives; valid: a list of {wanted}, one per objective"
        )
    if not np.isfinite(point).all():
        raise UsageError(f"ref_point: got {point.tolist()}; valid: a list of {wanted}")
    return tuple(float(number) for number in point)


def non_dominated(points: np.ndarray) -> np.ndarray:
    """Return the rows that no other row dominates, without duplicates.

    A row dominates another one if it is at least as large everywhere and larger somewhere.

    Parameters
    ----------
    points : finite numbers, shape (n_points, n_objectives).

    Returns
    -------
    float64 array (n_kept, n_objectives) in ascending lexicographic order.

    Raises
    ------
    FrontError
        If `points` is not a front.
    """
    unique, _ = _unique_rows(points)
    return unique[~_dominated(unique)]


def non_dominated_mask(points: np.ndarray) -> np.ndarray:
    """Tell for each row whether no other row dominates it. Equal rows are all kept.

    Parameters
    ----------
    points : finite numbers, shape (n_points, n_objectives).

    Returns
    -------
    bool array (n_points,).

    Raises
    ------
    FrontError
        If `points` is not a front.
    """
    unique, inverse = _unique_rows(points)
    return ~_dominated(unique)[inverse]


def union(fronts: Iterable[object], num_objectives: int) -> np.ndarray:
    """Return the non-dominated points of several fronts together.

    Parameters
    ----------
    fronts : fronts, each of shape (n_points, num_objectives); there may be none.
    num_objectives : how many objectives each of them has.

    Returns
    -------
    float64 array (n_kept, num_objectives) in ascending lexicographic order.

    Raises
    ------
    FrontError
        If one of them is not a front; the message says which.
    """
    parts = [np.empty((0, num_objectives))]
    for index, front in enumerate(fronts):
        try:
            parts.append(validate_front(front, num_objectives))
        except FrontError as error:
            raise FrontError(f"front {index} of the union: {error}") from error
    return non_dominated(np.concatenate(parts))


def _points(value: object, num_objectives: int | None) -> np.ndarray:
    """Do the work of `validate_front`; None takes any number of objectives."""
    points = _numbers(value, num_objectives)
    if points.shape == (0,):
        return np.empty((0, num_objectives or 0))
    if points.ndim == 1:
        raise _front_error(
            f"{_kind(value)} of shape {points.shape}",
            num_objectives,
            f"If this is one point, give it the shape (1, {len(points)}): [point].",
        )
    if points.ndim != 2 or points.shape[1] != (num_objectives or points.shape[1]):
        raise _front_error(
            f"{_kind(value)} of shape {points.shape}",
            num_objectives,
            "Give one row per policy and one column per objective of the environment.",
        )
    bad = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if len(bad):
        shown = ", ".join(f"row {row}: {points[row].tolist()}" for row in bad[:5])
        more = f", and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise _front_error(
            f"NaN or infinity in {len(bad)} of {len(points)} rows ({shown}{more})",
            num_objectives,
            "Look for a diverged network or an unbounded reward, or leave those rows out.",
        )
    return points


def _numbers(value: object, num_objectives: int | None) -> np.ndarray:
    """Copy `value` into a float64 array of whatever shape it has; real numbers only."""
    try:
        array = np.asarray(value)
    except Exception as error:  # uneven lists; tensors that require grad or sit on a GPU
        raise _front_error(
            f"{_kind(value)} that NumPy cannot read ({error})",
            num_objectives,
            "Give every row the same length; for a tensor, pass tensor.detach().cpu().",
        ) from error
    if array.ndim == 0:
        raise _front_error(
            _kind(value), num_objectives, "Return the front; for no policy at all, return []."
        )
    if array.size and array.dtype.kind not in "iuf":
        raise _front_error(
            f"{_kind(value)} with elements of type {array.dtype}",
            num_objectives,
            "Give real numbers only.",
        )
    return np.array(array, dtype=np.float64, order="C") if array.size else np.empty(array.shape)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _front_error(given: str, num_objectives: int | None, advice: str) -> FrontError:
    shape = f"(n_points, {num_objectives or 'n_objectives'})"
    return FrontError(
        f"not a front: got {given}; valid: an array of shape {shape} of finite numbers, "
        f"one row per policy, every objective maximised. {advice}"
    )


def _unique_rows(points: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows in ascending lexicographic order, and where each row went."""
    front = _points(points, None)
    if not len(front):
        return front, np.empty(0, dtype=np.intp)
    # Adding 0.0 turns -0.0 into 0.0, so that equal fronts are equal to the last bit.
    unique, inverse = np.unique(front + 0.0, axis=0, return_inverse=True)
    return unique, inverse.reshape(-1)


def _dominated(rows: np.ndarray) -> np.ndarray:
    """Tell which of the distinct, lexicographically ascending rows another row dominates.

    A row is lexicographically above each row that it dominates. So it is enough to go from the last
    row down and to compare each chunk with what was kept so far and with itself.
    """
    dominated = np.zeros(len(rows), dtype=bool)
    kept = np.empty((0, rows.shape[1]))
    for stop in range(len(rows), 0, -_CHUNK):
        chunk = slice(max(stop - _CHUNK, 0), stop)
        left = np.flatnonzero(~_covers(rows[chunk], kept).any(axis=1)) + chunk.start
        # Rows are distinct, so the only row that covers a non-dominated one is itself.
        left = left[_covers(rows[left], rows[left]).sum(axis=1) == 1]
        dominated[chunk] = True
        dominated[left] = False
        kept = np.concatenate([kept, rows[left]])
    return dominated


def _covers(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Tell for each pair whether the other row is at least as large as the row everywhere."""
    covers = np.ones((len(rows), len(others)), dtype=bool)
    for objective in range(rows.shape[1]):
        covers &= others[:, objective] >= rows[:, objective, np.newaxis]
    return covers
