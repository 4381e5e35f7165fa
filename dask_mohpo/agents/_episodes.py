"""Whole episodes, of which the best are kept, and how near to the front they lie."""

from __future__ import annotations

import numpy as np

from dask_mohpo.fronts import non_dominated_mask

__all__ = ["Episodes", "best_episodes", "crowding_distance", "returns_to_go", "spread"]

MIN_CROWDING = 0.2
"""Episodes whose crowding distance is no more than this are penalised: the paper's threshold."""
MIN_PENALTY = 1e-5
"""Keeps the penalty from vanishing on the front."""
FRONT_SHARE = 0.5
"""Part of a batch that comes from non-dominated episodes."""
AUTO_SCALE = 10.0
"""What the largest number of a command becomes where the scaling factors are chosen here."""


class Episodes:
    """Episodes of one learner, their transitions one after the other in flat arrays.

    Attributes
    ----------
    returns : (n_episodes, n_objectives), of whole episodes.
    lengths : (n_episodes,) steps.
    front : one episode for each distinct non-dominated return.
    """

    def __init__(
        self,
        capacity: int,
        num_objectives: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        action_dtype: type[np.generic],
    ) -> None:
        self._capacity = capacity
        self._obs = np.zeros((0, *obs_shape), np.float32)
        self._commands = np.zeros((0, num_objectives + 1), np.float32)
        self._actions = np.zeros((0, *action_shape), action_dtype)
        self.returns = np.zeros((0, num_objectives))
        self.lengths = np.zeros(0, np.int64)
        self.front = np.zeros(0, np.int64)
        self._front_rows = np.zeros(0, np.int64)

    def add(
        self, obs: np.ndarray, actions: np.ndarray, to_go: np.ndarray, lengths: np.ndarray
    ) -> None:
        """Add episodes, and keep the best.

        Parameters
        ----------
        obs, actions, to_go : what was seen, done and returned from there on, of all steps of the
            first episode, then of the second one, and so on.
        lengths : steps of each episode.
        """
        first = np.cumsum(lengths) - lengths
        horizon = np.repeat(first + lengths, lengths) - np.arange(len(obs))
        commands = np.column_stack([to_go, horizon]).astype(np.float32)
        self._obs = np.concatenate([self._obs, obs])
        self._commands = np.concatenate([self._commands, commands])
        self._actions = np.concatenate([self._actions, actions])
        self.returns = np.concatenate([self.returns, to_go[first]])
        self.lengths = np.concatenate([self.lengths, lengths])
        if len(self.lengths) > self._capacity:
            self._keep(best_episodes(self.returns, self._capacity))
        candidates = np.flatnonzero(non_dominated_mask(self.returns))
        _, index = np.unique(self.returns[candidates], axis=0, return_index=True)
        self.front = candidates[index]
        on_front = np.zeros(len(self.lengths), bool)
        on_front[self.front] = True
        self._front_rows = np.flatnonzero(np.repeat(on_front, self.lengths))

    def _keep(self, episodes: np.ndarray) -> None:
        kept = np.zeros(len(self.lengths), bool)
        kept[episodes] = True
        rows = np.repeat(kept, self.lengths)
        self._obs, self._commands = self._obs[rows], self._commands[rows]
        self._actions = self._actions[rows]
        self.returns, self.lengths = self.returns[kept], self.lengths[kept]

    def draw(
        self, num: int, batch: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Observations, commands and actions of `num` batches, each (num, batch, ·)."""
        share = int(batch * FRONT_SHARE)
        on_front = self._front_rows[rng.integers(len(self._front_rows), size=(num, share))]
        anywhere = rng.integers(len(self._obs), size=(num, batch - share))
        rows = np.concatenate([on_front, anywhere], axis=1)
        return self._obs[rows], self._commands[rows], self._actions[rows]

    def scaling_factor(self) -> np.ndarray:
        returns, lengths = self.returns[self.front], self.lengths[self.front]
        most = np.append(np.abs(returns).max(axis=0), lengths.max())
        return AUTO_SCALE / np.where(most > 0, most, AUTO_SCALE)

    def best_commands(self, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Non-dominated returns (n ≤ num, n_objectives) and their horizons (n,)."""
        if len(self.front) == 0:
            return np.zeros((1, self.returns.shape[1])), np.ones(1)
        index = self.front[spread(self.returns[self.front], num)]
        return self.returns[index], self.lengths[index].astype(float)


def returns_to_go(rewards: np.ndarray, gamma: float | np.ndarray) -> np.ndarray:
    """Discounted sums of the rewards from each step on; time is the first axis."""
    returns = rewards.astype(np.float64)
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += gamma * returns[t + 1]
    return returns


def crowding_distance(points: np.ndarray) -> np.ndarray:
    """How far a point's neighbours are apart, as a share of the extent, summed over objectives.

    Deb et al. 2002 (doi 10.1109/4235.996017). The ends of an objective are infinitely far.
    """
    distance = np.zeros(len(points))
    for values in points.T:
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        extent = ordered[-1] - ordered[0]
        if extent > 0:
            gaps = np.full(len(points), np.inf)
            gaps[1:-1] = (ordered[2:] - ordered[:-2]) / extent
            distance[order] += gaps
    return distance


def best_episodes(returns: np.ndarray, num: int) -> np.ndarray:
    """The `num` episodes to keep in the dataset, best first.

    The better, the closer to the front; the distance counts twice where returns lie densely.
    """
    front = np.unique(returns[non_dominated_mask(returns)], axis=0)
    extent = np.ptp(front, axis=0)
    extent = np.where(extent > 0, extent, np.ptp(returns, axis=0))
    unit = np.where(extent > 0, extent, 1.0)
    offsets = returns[:, None] / unit - front / unit
    score = -np.sqrt(np.square(offsets).sum(axis=2).min(axis=1))
    crowded = crowding_distance(returns) <= MIN_CROWDING
    score[crowded] = 2 * (score[crowded] - MIN_PENALTY)
    _, back = np.unique(returns[::-1], axis=0, return_index=True)
    repeated = np.ones(len(returns), bool)
    repeated[len(returns) - 1 - back] = False
    score[repeated] -= np.ptp(score) + 1.0
    return np.argsort(-score, kind="stable")[:num]


def spread(points: np.ndarray, num: int) -> np.ndarray:
    """Indices of at most `num` points, evenly spread: those best in an objective come first, then
    always the one that is farthest from all chosen so far."""
    if len(points) <= num:
        return np.arange(len(points))
    extent = np.ptp(points, axis=0)
    places = points / np.where(extent > 0, extent, 1.0)
    chosen = list(dict.fromkeys(points.argmax(axis=0).tolist()))[:num]
    offsets = places[:, None] - places[chosen]
    distance = np.square(offsets).sum(axis=2).min(axis=1)
    while len(chosen) < num:
        chosen.append(int(distance.argmax()))
        offset = places - places[chosen[-1]]
        distance = np.minimum(distance, np.square(offset).sum(axis=1))
    return np.sort(chosen)
