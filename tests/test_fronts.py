"""What counts as a front, which of its points matter, and the union of several."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from dask_mohpo.errors import FrontError, UsageError
from dask_mohpo.fronts import (
    non_dominated,
    non_dominated_mask,
    union,
    validate_front,
    validate_ref_point,
)

POINTS = [[1.0, 2.0], [3.0, -4.5]]


@pytest.mark.parametrize(
    "value",
    [
        np.array(POINTS),
        np.array(POINTS, dtype=np.float32),
        np.array(POINTS, order="F"),
        POINTS,
        tuple(map(tuple, POINTS)),
        [np.array(row) for row in POINTS],
        torch.tensor(POINTS),
        [torch.tensor(row) for row in POINTS],
    ],
    ids=["array", "float32", "fortran", "lists", "tuples", "arrays", "tensor", "tensors"],
)
def test_accepts(value):
    front = validate_front(value, 2)
    assert front.dtype == np.float64
    assert front.flags.c_contiguous
    assert front.tolist() == POINTS


def test_accepts_integers():
    assert validate_front([[1, 2]], 2).tolist() == [[1.0, 2.0]]


def test_is_a_copy():
    given = np.array(POINTS)
    validate_front(given, 2)[0, 0] = 99.0
    assert given.tolist() == POINTS


@pytest.mark.parametrize("value", [[], (), np.empty(0), np.empty((0, 3)), torch.empty(0, 3)])
def test_accepts_the_empty_front(value):
    front = validate_front(value, 3)
    assert front.shape == (0, 3)
    assert front.dtype == np.float64


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "got None"),
        (3.5, "got float"),
        ("1,2", "got str"),
        ({"front": POINTS}, "got dict"),
        ({1.0, 2.0}, "got set"),
        ((row for row in POINTS), "got generator"),
        ([[1.0, 2.0], [3.0]], "list that NumPy cannot read"),
        ([["1", "2"]], "elements of type <U1"),
        ([[1.0, None]], "elements of type object"),
        (np.array(POINTS, dtype=object), "elements of type object"),
        (np.array(POINTS, dtype=complex), "elements of type complex128"),
        (np.array(POINTS) > 0, "elements of type bool"),
        (torch.tensor(POINTS, requires_grad=True), "detach"),
        (np.zeros((2, 3)), r"ndarray of shape \(2, 3\).*\(n_points, 2\)"),
        (np.empty((0, 3)), r"ndarray of shape \(0, 3\)"),
        ([[]], r"list of shape \(1, 0\)"),
        (np.zeros((2, 2, 2)), r"ndarray of shape \(2, 2, 2\)"),
        (np.zeros(2), r"ndarray of shape \(2,\).*the shape \(1, 2\)"),
        ([1.0, 2.0, 3.0], r"list of shape \(3,\)"),
    ],
)
def test_rejects(value, said):
    with pytest.raises(FrontError, match=said) as caught:
        validate_front(value, 2)
    assert "valid: an array of shape (n_points, 2)" in str(caught.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_names_the_rows_that_are_not_finite(bad):
    front = np.zeros((9, 2))
    front[[2, 7], [0, 1]] = bad
    with pytest.raises(FrontError, match=r"in 2 of 9 rows \(row 2: .*, row 7: "):
        validate_front(front, 2)


def test_names_few_of_many_bad_rows():
    with pytest.raises(FrontError, match=r"in 40 of 40 rows .*row 4: .*, and 35 more\)"):
        validate_front(np.full((40, 2), np.nan), 2)


@pytest.mark.parametrize("value", [(0, -50), [0.0, -50.0], np.array([0, -50])])
def test_accepts_reference_points(value):
    assert validate_ref_point(value, 2) == (0.0, -50.0)
    assert all(type(number) is float for number in validate_ref_point(value))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([0.0, 1.0, 2.0], "got 3 numbers.* 2 objectives"),
        ([0.0, np.nan], "nan"),
        ([0.0, -np.inf], "inf"),
        ("0,-50", "'0,-50'"),
        (["0", "-50"], "'-50'"),
        ([[0.0, -50.0]], "one per objective"),
        ([], "one per objective"),
        (0.0, "one per objective"),
        (None, "got None"),
        ([True, False], "one per objective"),
        ([[1.0], 2.0], "valid: a list of 2 finite numbers"),
    ],
)
def test_rejects_reference_points(value, said):
    with pytest.raises(UsageError, match=f"ref_point: .*{said}"):
        validate_ref_point(value, 2)


def dominates(first, second):
    return bool(np.all(first >= second) and np.any(first > second))


def brute_force_mask(points):
    return [not any(dominates(other, point) for other in points) for point in points]


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 6])
@pytest.mark.parametrize("grid", [None, 4], ids=["continuous", "ties"])
def test_non_dominated_agrees_with_brute_force(num_objectives, grid):
    random = np.random.default_rng(num_objectives)
    for n_points in (1, 2, 7, 60):
        points = random.normal(size=(n_points, num_objectives))
        if grid:
            points = np.round(points * grid / 4)
        mask = brute_force_mask(points)
        assert non_dominated_mask(points).tolist() == mask
        expected = sorted(set(map(tuple, (points[mask] + 0.0).tolist())))
        assert non_dominated(points).tolist() == [list(point) for point in expected]


def test_non_dominated_across_chunks():
    # More points than are compared at once, half of them on the front.
    random = np.random.default_rng(0)
    front = np.abs(random.normal(size=(700, 3)))
    front /= np.linalg.norm(front, axis=1, keepdims=True)
    points = random.permutation(np.concatenate([front, front * 0.999]))
    assert np.array_equal(non_dominated(points), np.unique(front, axis=0))


def test_non_dominated_is_idempotent_and_ignores_order():
    random = np.random.default_rng(1)
    points = random.normal(size=(300, 4))
    kept = non_dominated(points)
    assert np.array_equal(non_dominated(kept), kept)
    assert np.array_equal(non_dominated(random.permutation(points)), kept)


def test_non_dominated_knows_one_zero():
    assert not np.signbit(non_dominated(np.array([[-0.0, 1.0], [0.0, 1.0]]))).any()
    assert non_dominated_mask(np.array([[-0.0, 1.0], [0.0, 1.0]])).all()


@pytest.mark.parametrize("num_objectives", [0, 2])
def test_non_dominated_of_nothing(num_objectives):
    points = np.empty((0, num_objectives))
    assert non_dominated(points).shape == (0, num_objectives)
    assert non_dominated_mask(points).shape == (0,)


def test_non_dominated_rejects_what_is_no_front():
    with pytest.raises(FrontError, match="n_objectives"):
        non_dominated(np.array([[1.0, np.nan]]))
    with pytest.raises(FrontError):
        non_dominated(np.array([1.0, 2.0]))


@pytest.mark.parametrize("shape", [(20_000, 2), (3_000, 6)])
def test_non_dominated_of_many_points_takes_little_memory(shape):
    random = np.random.default_rng(2)
    on_a_sphere = np.abs(random.normal(size=shape))
    on_a_sphere /= np.linalg.norm(on_a_sphere, axis=1, keepdims=True)
    tracemalloc.start()
    try:
        kept = non_dominated(on_a_sphere)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(kept) == shape[0]
    assert peak < 64 * 2**20


def test_union():
    fronts = [[[1.0, 5.0], [2.0, 2.0]], np.array([[2.0, 3.0], [1.0, 5.0]]), []]
    assert union(fronts, 2).tolist() == [[1.0, 5.0], [2.0, 3.0]]


def test_union_of_no_fronts():
    assert union([], 3).shape == (0, 3)
    assert union(iter([[], []]), 3).shape == (0, 3)


def test_union_says_which_front_is_wrong():
    with pytest.raises(FrontError, match=r"front 1 of the union: .*3"):
        union([[[1.0, 2.0]], [[1.0, 2.0, 3.0]]], 2)
