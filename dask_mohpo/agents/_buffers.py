"""Replay memory of a batch of S independent learners, with or without priorities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["ReplayBuffer", "SumTree"]


class SumTree:
    """Sums over non-negative leaf values of S learners, to draw leaves in proportion to them.

    The tree is wide (64 children a node) and therefore flat: drawing from, or changing, many
    leaves of all learners takes a handful of NumPy calls. A node is always the fresh sum of its
    children, so rounding errors do not pile up.

    Parameters
    ----------
    num_learners : S.
    capacity : leaves per learner.
    """

    WIDTH = 64

    def __init__(self, num_learners: int, capacity: int) -> None:
        self._rows = np.arange(num_learners)[:, None]
        sizes = [max(1, -(-capacity // self.WIDTH))]
        while sizes[0] > 1:
            sizes.insert(0, -(-sizes[0] // self.WIDTH))
        # levels[k][s, node, child]: the values of the children of each node, root level first
        self._levels = [np.zeros((num_learners, size, self.WIDTH)) for size in sizes]

    def set(self, leaves: np.ndarray, values: np.ndarray) -> None:
        """Set leaves (S, n) to values (S, n)."""
        nodes = leaves
        for level in reversed(self._levels):
            parents = nodes // self.WIDTH
            level[self._rows, parents, nodes % self.WIDTH] = values
            values = level[self._rows, parents].sum(axis=-1)
            nodes = parents

    def total(self) -> np.ndarray:
        """The sum of all leaves of each learner, (S,)."""
        return self._levels[0][:, 0].sum(axis=-1)

    def find(self, fractions: np.ndarray) -> np.ndarray:
        """The leaves (S, n) in which these fractions (S, n), in [0, 1), of the total fall."""
        nodes = np.zeros(fractions.shape, dtype=np.int64)
        remainder = fractions * self.total()[:, None]
        for level in self._levels:
            sums = level[self._rows, nodes].cumsum(axis=-1)
            # rounding must not push a draw past the last child that holds anything
            remainder = np.minimum(remainder, np.nextafter(sums[..., -1], 0.0))
            child = (sums <= remainder[..., None]).sum(axis=-1)
            before = np.take_along_axis(sums, np.maximum(child - 1, 0)[..., None], -1)[..., 0]
            remainder = np.where(child > 0, remainder - before, remainder)
            nodes = nodes * self.WIDTH + child
        return nodes


class ReplayBuffer:
    """The last transitions of S learners, in preallocated arrays.

    All learners add one transition at the same time, so they share one write position.

    Parameters
    ----------
    num_learners, capacity : S, and transitions per learner.
    obs_dim, num_objectives : widths of observations and vector rewards.
    prioritised : draw in proportion to priorities (Schaul et al. 2016, arXiv 1511.05952,
        proportional variant) instead of uniformly.
    """

    def __init__(
        self,
        num_learners: int,
        capacity: int,
        obs_dim: int,
        num_objectives: int,
        *,
        prioritised: bool,
    ) -> None:
        shape = (num_learners, capacity)
        self.obs = np.zeros((*shape, obs_dim), np.float32)
        self.next_obs = np.zeros((*shape, obs_dim), np.float32)
        self.actions = np.zeros(shape, np.int64)
        self.rewards = np.zeros((*shape, num_objectives), np.float32)
        self.terminated = np.zeros(shape, np.float32)
        self.capacity = capacity
        self.size = 0
        self._position = 0
        self._rows = np.arange(num_learners)[:, None]
        self._tree = SumTree(num_learners, capacity) if prioritised else None
        self._max_priority = np.ones((num_learners, 1))

    def add(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_obs: np.ndarray,
        terminated: np.ndarray,
    ) -> None:
        """One transition of each learner; every array has the leading dimension S.

        With priorities, a new transition gets the largest priority seen so far.
        """
        at = self._position
        self.obs[:, at] = obs
        self.actions[:, at] = actions
        self.rewards[:, at] = rewards
        self.next_obs[:, at] = next_obs
        self.terminated[:, at] = terminated
        if self._tree is not None:
            self._tree.set(np.full_like(self._rows, at), self._max_priority)
        self._position = (at + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def draw(self, batch_size: int, generators: Sequence[np.random.Generator]) -> np.ndarray:
        """Indices (S, batch_size) of transitions, each learner's from its own generator."""
        fractions = np.stack([generator.random(batch_size) for generator in generators])
        if self._tree is None:
            return (fractions * self.size).astype(np.int64)
        return self._tree.find(fractions)

    def transitions(self, index: np.ndarray) -> tuple[np.ndarray, ...]:
        """obs, actions, rewards, next_obs, terminated at these indices (S, n)."""
        at = (self._rows, index)
        return (
            self.obs[at],
            self.actions[at],
            self.rewards[at],
            self.next_obs[at],
            self.terminated[at],
        )

    def set_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities (S, n), all positive, of the transitions at these indices."""
        if self._tree is None:
            return
        self._tree.set(index, priorities)
        np.maximum(
            self._max_priority, priorities.max(axis=1, keepdims=True), out=self._max_priority
        )
