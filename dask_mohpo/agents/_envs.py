"""Environments as agents see them: flat float observations, every episode seeded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from dask_mohpo.environments import make_env
from dask_mohpo.errors import EnvironmentSpecError

__all__ = ["EVALUATION", "TRAINING", "FlatEnvs", "episode_seed"]

TRAINING, EVALUATION = 1, 2


def episode_seed(seed: int, purpose: int, episode: int) -> int:
    """The env's reset seed for one episode of one learner, in training or in evaluation."""
    return int(np.random.SeedSequence([seed, purpose, episode]).generate_state(1)[0])


class FlatEnvs:
    """Copies of one env, stepped one by one, with observations as vectors (obs_dim,) of float32.

    Parameters
    ----------
    env_id : the env.
    num_envs : how many copies; `grow` adds more.

    Raises
    ------
    EnvironmentSpecError
        Observations are arrays of two or more dimensions (images), or cannot be made flat.
    """

    def __init__(self, env_id: str, num_envs: int) -> None:
        self.env_id = env_id
        self.envs: list[gym.Env[Any, Any]] = []
        self.grow(num_envs)
        env = self.envs[0]
        self._space = env.observation_space
        self._plain = isinstance(self._space, gym.spaces.Box)
        if self._plain and len(self._space.shape or ()) != 1:
            raise EnvironmentSpecError(
                env_id,
                f"the built-in agents take vector observations, not arrays of shape "
                f"{self._space.shape}.",
            )
        try:
            self.obs_dim = gym.spaces.flatdim(self._space)
        except (NotImplementedError, ValueError) as error:
            raise EnvironmentSpecError(
                env_id,
                f"observations from {self._space} cannot be made a vector of fixed length.",
            ) from error
        self.action_space = env.action_space
        self.num_objectives = int(env.unwrapped.reward_space.shape[0])  # type: ignore[attr-defined]

    def grow(self, num_envs: int) -> None:
        """Have at least this many copies."""
        while len(self.envs) < num_envs:
            self.envs.append(make_env(self.env_id))

    def reset(self, index: int, seed: int) -> np.ndarray:
        """Begin an episode in one copy."""
        obs, _ = self.envs[index].reset(seed=seed)
        return self._flat(obs)

    def step(
        self,
        copies: Iterable[int],
        actions: np.ndarray,
        obs: np.ndarray,
        rewards: np.ndarray,
        places: Iterable[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Step some copies, each from its place in arrays of N rows to the same place.

        Parameters
        ----------
        copies, places : which copies, and the place of each.
        actions : (N, ·), read.
        obs, rewards : (N, obs_dim) and (N, num_objectives), written; other rows stay.

        Returns
        -------
        terminated, truncated : bool (N,), False in other rows.
        """
        terminated, truncated = np.zeros((2, len(obs)), bool)
        for copy, place in zip(copies, places, strict=True):
            seen, rewards[place], terminated[place], truncated[place], _ = self.envs[copy].step(
                actions[place]
            )
            obs[place] = seen if self._plain else self._flat(seen)
        return terminated, truncated

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _flat(self, obs: Any) -> np.ndarray:
        if not self._plain:
            obs = gym.spaces.flatten(self._space, obs)
        return np.asarray(obs, np.float32)


def require_discrete(envs: FlatEnvs, algo: str, alternatives: Sequence[str]) -> int:
    """The number of actions.

    Raises
    ------
    EnvironmentSpecError
        The env's actions are not discrete.
    """
    space = envs.action_space
    if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
        raise EnvironmentSpecError(
            envs.env_id,
            f"{algo} takes discrete actions 0 … n-1, not {space}; "
            f"algorithms that fit: {', '.join(alternatives)}.",
        )
    return int(space.n)
