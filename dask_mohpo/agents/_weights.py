"""Preference weights: points of the simplex."""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["random_weights", "simplex_weights"]


def random_weights(
    generator: np.random.Generator, shape: int | tuple[int, ...], num_objectives: int
) -> np.ndarray:
    """Weights drawn uniformly from the simplex, (*shape, num_objectives)."""
    sizes = (shape,) if isinstance(shape, int) else shape
    draws = generator.standard_exponential((*sizes, num_objectives))
    return draws / draws.sum(axis=-1, keepdims=True)


@functools.cache
def simplex_weights(num_objectives: int, num_weights: int) -> np.ndarray:
    """Weights equally spaced on the simplex, (num_weights, num_objectives), rows sum to 1.

    Two objectives: a uniform grid with both corners. More: points of least Riesz s-energy
    (Blank et al. 2021, doi 10.1109/TEVC.2020.2992387), from pymoo with a fixed random state.
    """
    if num_weights <= num_objectives:
        # pymoo needs more; each row weighs a share of the objectives, and no objective is left out
        shares = np.array_split(np.eye(num_objectives), num_weights)
        return np.array([share.mean(axis=0) for share in shares])
    if num_objectives == 2:
        first = np.linspace(0.0, 1.0, num_weights)
        return np.stack([first, 1.0 - first], axis=1)
    from pymoo.util.ref_dirs import get_reference_directions

    points = get_reference_directions(
        "energy", num_objectives, num_weights, random_state=np.random.default_rng(0)
    )
    return np.asarray(points, dtype=float)
