"""Replay memory of a batch of S independent learners, with or without priorities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["ReplayBuffer", "SumTree"]


class SumTree:
    """Sums over non-negative leaf values of S learners, to draw leaves in proportion to them.

    Binary trees, one for each learner, level by level in one array for all of them: the children
    of node n of a level are the nodes 2n and 2n + 1 of the next. A level is a few NumPy calls for
    all draws of all learners. A node is always the fresh sum of its children, so rounding errors do
    not pile up.

    Parameters
    ----------
    num_learners : S.
    capacity : leaves per learner.
    """

    def __init__(self, num_learners: int, capacity: int) -> None:
        depth = (capacity - 1).bit_length()
        self._levels = [np.zeros(num_learners << d) for d in range(depth + 1)]
        self._first = (np.arange(num_learners) << depth)[:, None]

    def set(self, leaves: np.ndarray, values: np.ndarray) -> None:
        """Set leaves (S, n) to values (S, n); of a leaf that appears twice the last one counts."""
        nodes = (leaves + self._first).ravel()
        below = self._levels[-1]
        below[nodes] = values.ravel()
        for level in reversed(self._levels[:-1]):
            if len(level) <= len(nodes):
                np.add(below[::2], below[1::2], out=level)
            else:
                nodes >>= 1
                level[nodes] = np.add.reduce(below.reshape(-1, 2).take(nodes, axis=0), axis=1)
            below = level

    def total(self) -> np.ndarray:
        """The sum of all leaves of each learner, (S,)."""
        return self._levels[0].copy()

    def find(self, fractions: np.ndarray) -> np.ndarray:
        """The leaves (S, n) in which these fractions (S, n), in [0, 1), of the total fall.

        Each learner's total must be positive.
        """
        rest = (fractions * self._levels[0][:, None]).ravel()
        nodes = np.repeat(np.arange(len(fractions)), fractions.shape[1])
        for level in self._levels[1:]:
            nodes += nodes
            left = level.take(nodes)
            right = rest >= left
            rest -= left * right
            nodes += right
        # Rounding may push a draw past the last leaf that holds anything.
        while (empty := self._levels[-1].take(nodes) == 0).any():
            nodes -= empty
        return nodes.reshape(fractions.shape) - self._first


class ReplayBuffer:
    """The last transitions of S learners, one row each in one preallocated array.

    All learners add one transition at the same time.

    Parameters
    ----------
    capacities : transitions that each learner keeps.
    obs_dim, num_objectives : widths of observations and vector rewards.
    prioritised : of each learner, whether to draw in proportion to priorities (Schaul et al. 2016,
        arXiv 1511.05952, proportional variant) instead of uniformly.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        obs_dim: int,
        num_objectives: int,
        *,
        prioritised: Sequence[bool],
    ) -> None:
        num, most = len(capacities), max(capacities)
        self.parts = np.cumsum([obs_dim, obs_dim, num_objectives, 1, 1])
        """Where obs, next_obs, rewards, discount and action end in a row."""
        self.rows = np.zeros((num, most, self.parts[-1]), np.float32)
        self._capacities = np.array(capacities)[:, None]
        self._learners = np.arange(num)
        self._prioritised = np.array(prioritised)[:, None]
        self._tree = SumTree(num, most) if any(prioritised) else None
        self._max_priority = np.ones((num, 1))
        self._added = 0
        self._unranked = 0
        self._changed: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def sizes(self) -> np.ndarray:
        """Transitions that each learner holds, (S,)."""
        return np.minimum(self._added, self._capacities[:, 0])

    def add(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        rewards: np.ndarray,
        discounts: np.ndarray,
        actions: np.ndarray,
    ) -> None:
        """One transition of each learner; every array has the leading dimension S.

        With priorities, a new transition has the largest priority seen so far at the next draw.

        Parameters
        ----------
        discounts : of what comes after it: 0 where the episode terminated.
        """
        row = self.rows[self._learners, self._added % self._capacities[:, 0]] = np.concatenate(
            [obs, next_obs, rewards, discounts[:, None], actions[:, None]], axis=1
        )
        assert row.shape[1] == self.rows.shape[2]
        self._added += 1
        self._unranked += 1

    def draw(self, fractions: np.ndarray) -> np.ndarray:
        """Indices (S, n) of transitions, for uniform random numbers (S, n) in [0, 1)."""
        if self._tree is None:
            return (fractions * self.sizes[:, None]).astype(np.int64)
        if self._unranked:
            new = np.arange(self._added - self._unranked, self._added) % self._capacities
            parts = [(new, np.broadcast_to(self._max_priority, new.shape))]
            if self._changed is not None:
                parts.insert(0, self._changed)  # new transitions may have taken their places
            leaves, values = (np.concatenate(p, axis=1) for p in zip(*parts, strict=True))
            self._tree.set(leaves, values)
        elif self._changed is not None:
            self._tree.set(*self._changed)
        self._unranked, self._changed = 0, None
        return self._tree.find(fractions)

    def take(self, index: np.ndarray, out: np.ndarray) -> None:
        """Copy the transitions at these indices (S, n) into an array (S, n, row)."""
        flat = self.rows.reshape(-1, self.rows.shape[2])
        places = index + (self._learners * self.rows.shape[1])[:, None]
        flat.take(places, axis=0, out=out, mode="clip")

    def set_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities (S, n), all positive, of the transitions drawn last.

        They count from the next draw on. Learners that draw uniformly keep theirs at 1.
        """
        if self._tree is None:
            return
        priorities = np.where(self._prioritised, priorities, 1.0)
        self._changed = index, priorities
        np.maximum(
            self._max_priority, priorities.max(axis=1, keepdims=True), out=self._max_priority
        )
