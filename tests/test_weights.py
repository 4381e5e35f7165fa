"""Points of the simplex."""

from __future__ import annotations

import numpy as np
import pytest

from dask_mohpo.agents._weights import random_weights, simplex_weights


def has_row(weights, point):
    return bool((np.abs(weights - point).max(axis=1) < 1e-9).any())


@pytest.mark.parametrize("num_objectives", [2, 3, 6])
@pytest.mark.parametrize("num_weights", [1, 2, 3, 6, 20])
def test_simplex_weights(num_objectives, num_weights):
    weights = simplex_weights(num_objectives, num_weights)
    assert weights.shape == (num_weights, num_objectives)
    assert weights.min() >= 0
    assert np.abs(weights.sum(axis=1) - 1).max() < 1e-12
    assert len(np.unique(weights.round(6), axis=0)) == num_weights
    # no objective is forgotten
    assert weights.max(axis=0).min() > 0


@pytest.mark.parametrize("num_objectives", [2, 3, 6])
@pytest.mark.parametrize("num_weights", [6, 20])
def test_simplex_weights_hold_the_corners(num_objectives, num_weights):
    weights = simplex_weights(num_objectives, num_weights)
    assert all(has_row(weights, corner) for corner in np.eye(num_objectives))


def test_two_objectives_make_a_uniform_grid():
    assert simplex_weights(2, 5).tolist() == [
        [0.0, 1.0],
        [0.25, 0.75],
        [0.5, 0.5],
        [0.75, 0.25],
        [1.0, 0.0],
    ]


@pytest.mark.parametrize("num_objectives", [2, 3, 6])
def test_a_single_weight_is_the_centre(num_objectives):
    assert np.allclose(simplex_weights(num_objectives, 1), 1 / num_objectives)


def test_points_keep_apart():
    """20 points on the triangle of side √2: an even spread has neighbours about 0.25 apart."""
    weights = simplex_weights(3, 20)
    distances = np.linalg.norm(weights[:, None] - weights[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert distances.min() > 0.15


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_simplex_weights_are_always_the_same(num_objectives):
    first = simplex_weights(num_objectives, 6).copy()
    simplex_weights.cache_clear()
    np.random.seed(5)
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    assert np.array_equal(simplex_weights(num_objectives, 6), first)
    assert np.array_equal(np.random.get_state()[1], before)  # type: ignore[index]


@pytest.mark.parametrize("num_objectives", [2, 3, 6])
def test_random_weights_are_uniform_on_the_simplex(num_objectives):
    d = num_objectives
    weights = random_weights(np.random.default_rng(0), 100_000, d)
    assert weights.shape == (100_000, d)
    assert weights.min() >= 0
    assert np.abs(weights.sum(axis=1) - 1).max() < 1e-12
    # the uniform distribution is Dirichlet(1, …, 1)
    assert np.abs(weights.mean(axis=0) - 1 / d).max() < 0.005
    assert np.abs(weights.var(axis=0) - (d - 1) / (d**2 * (d + 1))).max() < 0.005
    below = (weights[:, 0] < 0.1).mean()
    assert below == pytest.approx(1 - 0.9 ** (d - 1), abs=0.01)


def test_random_weights_come_from_the_generator():
    first = random_weights(np.random.default_rng(3), 4, 3)
    assert np.array_equal(random_weights(np.random.default_rng(3), 4, 3), first)
    assert not np.array_equal(random_weights(np.random.default_rng(4), 4, 3), first)


def test_random_weights_of_any_shape_are_the_same_draws():
    flat = random_weights(np.random.default_rng(0), 24, 3)
    shaped = random_weights(np.random.default_rng(0), (4, 6), 3)
    assert shaped.shape == (4, 6, 3)
    assert np.array_equal(shaped.reshape(24, 3), flat)
