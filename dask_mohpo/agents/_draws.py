"""Random numbers of a batch of learners, each learner's from generators of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["BLOCK", "Blocks", "generators"]

BLOCK = 64
"""Random numbers are drawn for this many steps or updates at once."""


def generators(seeds: Sequence[int], stream: int) -> list[np.random.Generator]:
    """One generator per learner; different streams of one seed are independent."""
    return [np.random.default_rng([seed, stream]) for seed in seeds]


class Blocks:
    """Hands out random numbers step by step, drawn `BLOCK` steps at a time.

    Parameters
    ----------
    generators : one per learner.
    draw : (generator, BLOCK) → array (BLOCK, ·).
    """

    def __init__(
        self,
        generators: Sequence[np.random.Generator],
        draw: Callable[[np.random.Generator, int], np.ndarray],
    ) -> None:
        self._generators = list(generators)
        self._draw = draw
        self._left: list[np.ndarray] = []

    def next(self) -> np.ndarray:
        """The numbers of the next step, (S, ·)."""
        if not self._left:
            drawn = np.stack([self._draw(rng, BLOCK) for rng in self._generators], axis=1)
            self._left = list(drawn[::-1])
        return self._left.pop()
