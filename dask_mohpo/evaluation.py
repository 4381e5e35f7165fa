"""Roll out many policies together: (learner × policy × episode) in one batched loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dask_mohpo.agents._contract import Policies
from dask_mohpo.agents._envs import EVALUATION, FlatEnvs, episode_seed
from dask_mohpo.fronts import non_dominated

__all__ = ["Evaluator"]


class Evaluator:
    """Measures fronts, always on the same seeded episodes.

    Parameters
    ----------
    env_id : the env; the evaluator makes copies of its own and keeps them.
    seeds : one per learner; episode i of learner s starts from a seed derived from
        (seeds[s], i), the same for each of its policies.
    gamma : the evaluation discount, whatever discount the agent trains with.
    num_episodes : episodes per policy.
    """

    def __init__(
        self, env_id: str, seeds: Sequence[int], *, gamma: float, num_episodes: int
    ) -> None:
        self._envs = FlatEnvs(env_id, 1)
        self._seeds = list(seeds)
        self._gamma = gamma
        self._num_episodes = num_episodes

    def fronts(self, policies: Policies) -> list[np.ndarray]:
        """Each learner's non-dominated mean discounted returns, (n_points, n_objectives)."""
        returns = self.returns(policies)
        return [non_dominated(r.mean(axis=1)) for r in returns]

    def returns(self, policies: Policies) -> list[np.ndarray]:
        """Each learner's discounted returns (n_policies, num_episodes, n_objectives)."""
        counts = list(policies.counts)
        num_learners, episodes = len(counts), self._num_episodes
        width = max(counts) * episodes
        # Row (s, n) plays episode n % episodes of policy n // episodes; a learner with fewer
        # policies than the widest repeats its last one, without stepping an env for it.
        policy = np.arange(width)[None, :] // episodes
        alive = policy < np.array(counts)[:, None]
        policy = np.minimum(policy, np.array(counts)[:, None] - 1)
        self._envs.grow(num_learners * width)

        obs = np.zeros((num_learners, width, self._envs.obs_dim), np.float32)
        starts = [[episode_seed(s, EVALUATION, e) for e in range(episodes)] for s in self._seeds]
        for s, n in zip(*np.nonzero(alive), strict=True):
            obs[s, n] = self._envs.reset(s * width + n, starts[s][n % episodes])
        objectives = self._envs.num_objectives
        totals = np.zeros((num_learners * width, objectives))
        first_copy = np.arange(num_learners)[:, None] * width
        actor = policies.start(policy)
        rows = np.broadcast_to(np.arange(width), (num_learners, width))
        discount = 1.0
        while True:
            actions = actor.act(obs)
            rewards = np.zeros((*rows.shape, objectives))
            running = np.flatnonzero(alive)
            copies = (first_copy + rows).ravel()[running]
            by_row = rewards.reshape(alive.size, objectives)
            terminated, truncated = self._envs.step(
                copies.tolist(),
                actions.reshape(alive.size, *actions.shape[2:]),
                obs.reshape(alive.size, -1),
                by_row,
                running.tolist(),
            )
            totals[copies] += discount * by_row[running]
            alive = alive & ~(terminated | truncated).reshape(alive.shape)
            if not alive.any():
                break
            actor.observe(rewards)
            discount *= self._gamma
            most = int(alive.sum(axis=1).max())
            if most <= 0.75 * alive.shape[1]:
                # running rows first; the rest of a learner's rows, finished, fill up to the widest
                kept = np.argsort(~alive, axis=1, kind="stable")[:, :most]
                actor.keep(kept)
                obs = np.take_along_axis(obs, kept[..., None], axis=1)
                alive = np.take_along_axis(alive, kept, axis=1)
                rows = np.take_along_axis(rows, kept, axis=1)
        return [
            part[: count * episodes].reshape(count, episodes, objectives)
            for part, count in zip(np.split(totals, num_learners), counts, strict=True)
        ]

    def close(self) -> None:
        self._envs.close()
