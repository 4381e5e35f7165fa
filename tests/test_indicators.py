"""Hypervolume against known values and against computations that share nothing with pymoo."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from dask_mohpo.errors import FrontError, UsageError
from dask_mohpo.fronts import non_dominated
from dask_mohpo.indicators import hypervolume


def test_golden_minecart_like_front():
    assert hypervolume([(1.5, 0, -10), (0, 1.5, -12)], (-1, -1, -200)) == pytest.approx(757.0)


def test_golden_front_with_repeated_dominated_and_outside_points():
    front = [(1, 2), (1, 2), (0.5, 0.5), (2, 1), (-1, 5)]
    assert hypervolume(front, (0, 0)) == pytest.approx(3.0)


@pytest.mark.parametrize("front", [[], np.empty((0, 2)), [(-1, 5)], [(0, 1)], [(0, 0)]])
def test_nothing_better_than_the_reference_point_counts_nothing(front):
    assert hypervolume(front, [0, 0]) == 0.0


@pytest.mark.parametrize("ref_point", [[0, -50], (0.0, -50.0), np.array([0, -50])])
def test_reference_point_may_be_any_sequence(ref_point):
    value = hypervolume([[10.0, -40.0]], ref_point)
    assert value == 100.0
    assert type(value) is float


def swept(front, ref_point):
    """Area in two objectives: from the best first objective down, add strips."""
    area, height = 0.0, ref_point[1]
    for x, y in sorted(front.tolist(), reverse=True):
        if x > ref_point[0] and y > height:
            area += (x - ref_point[0]) * (y - height)
            height = y
    return area


def included_and_excluded(front, ref_point):
    """Volume of a union of boxes by inclusion and exclusion."""
    sides = np.clip(np.asarray(front) - ref_point, 0.0, None)
    return sum(
        (-1) ** (size + 1) * np.min(subset, axis=0).prod()
        for size in range(1, len(sides) + 1)
        for subset in itertools.combinations(sides, size)
    )


@pytest.mark.parametrize("seed", range(5))
def test_two_objectives_against_a_sweep(seed):
    random = np.random.default_rng(seed)
    front = random.normal(scale=[1.0, 100.0], size=(50, 2))
    ref_point = np.array([-0.5, -120.0])
    assert hypervolume(front, ref_point) == pytest.approx(swept(front, ref_point), rel=1e-12)


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("n_points", [1, 2, 9])
def test_against_inclusion_and_exclusion(num_objectives, n_points):
    random = np.random.default_rng(100 * num_objectives + n_points)
    front = random.normal(size=(n_points, num_objectives))
    ref_point = np.full(num_objectives, -0.8)
    expected = included_and_excluded(front, ref_point)
    assert hypervolume(front, ref_point) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_many_points_in_six_objectives_against_monte_carlo():
    random = np.random.default_rng(3)
    front = np.abs(random.normal(size=(400, 6)))
    front /= np.linalg.norm(front, axis=1, keepdims=True)
    samples = random.random((20_000, 6))
    hit = np.zeros(len(samples), dtype=bool)
    for point in front:
        hit |= (samples <= point).all(axis=1)
    error = np.sqrt(hit.mean() * (1 - hit.mean()) / len(samples))
    assert hypervolume(front, np.zeros(6)) == pytest.approx(hit.mean(), abs=5 * error)


def test_never_falls_when_a_point_is_added_and_ignores_dominated_points():
    random = np.random.default_rng(4)
    points = random.random((40, 3))
    values = [hypervolume(points[:stop], np.zeros(3)) for stop in range(len(points) + 1)]
    assert values == sorted(values)
    assert hypervolume(non_dominated(points), np.zeros(3)) == pytest.approx(values[-1])


def test_scales_and_moves_with_its_objectives():
    random = np.random.default_rng(5)
    front, ref_point = random.random((20, 3)), np.full(3, -0.1)
    scale, shift = np.array([2.0, 10.0, 0.5]), np.array([-7.0, 0.0, 100.0])
    moved = hypervolume(front * scale + shift, ref_point * scale + shift)
    assert moved == pytest.approx(hypervolume(front, ref_point) * scale.prod())


@pytest.mark.parametrize(
    ("front", "ref_point", "said"),
    [
        ([(1, 2, 3)], (0, 0), r"\(1, 3\).*The reference point has 2 numbers"),
        ([(1, 2)], (0, 0, 0), r"\(1, 2\).*The reference point has 3 numbers"),
        ([(1, np.nan)], (0, 0), "row 0"),
        ([(1, 1), (np.inf, 1)], (0, 0), "row 1"),
        ((1.0, 2.0), (0, 0), r"the shape \(1, 2\)"),
        (1.0, (0, 0), "got float"),
        (None, (0, 0), "got None"),
    ],
)
def test_rejects_what_is_no_front(front, ref_point, said):
    with pytest.raises(FrontError, match=said):
        hypervolume(front, ref_point)


@pytest.mark.parametrize("ref_point", [None, 0.0, "0,0", [], [0.0, np.nan], [[0.0, 0.0]]])
def test_rejects_what_is_no_reference_point(ref_point):
    with pytest.raises(UsageError, match="ref_point"):
        hypervolume([(1, 2)], ref_point)


def test_says_nothing_and_imports_pymoo_only_when_called():
    code = (
        "import sys, dask_mohpo.indicators as indicators\n"
        "assert not {'pymoo', 'gymnasium', 'torch'} & set(sys.modules)\n"
        "assert indicators.hypervolume([(1, 2)], (0, 0)) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
