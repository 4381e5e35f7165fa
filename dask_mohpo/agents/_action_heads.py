"""From a network's outputs to actions and to the loss of imitating actions."""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch

from dask_mohpo.agents._envs import FlatEnvs
from dask_mohpo.errors import EnvironmentSpecError

__all__ = ["ActionHead", "BoxHead", "DiscreteHead", "make_head"]


class ActionHead(Protocol):
    """From the network's outputs to actions and to the loss."""

    num_outputs: int
    action_shape: tuple[int, ...]
    action_dtype: type[np.generic]
    draw_shape: tuple[int, ...]
    """Of the random numbers for one action."""

    def random(self, rng: np.random.Generator) -> Any:
        """A uniformly random action."""
        ...

    def greedy(self, outputs: np.ndarray) -> np.ndarray:
        """The most likely actions."""
        ...

    def draws(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """The random numbers that `explore` takes for actions of this shape."""
        ...

    def explore(
        self, outputs: np.ndarray, draws: np.ndarray, *, noise: np.ndarray, random_share: np.ndarray
    ) -> np.ndarray:
        """The actions (S, N, ·) of training.

        Parameters
        ----------
        outputs : of the network, (S, N, num_outputs).
        draws : what `draws` gave, for these rows.
        noise : one per learner, (S,).
        random_share : probability of a uniformly random action, (S, N).
        """
        ...

    def loss_grad(self, outputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Gradient of the loss, a mean over each learner's batch (S, N, ·), by the outputs."""
        ...


class DiscreteHead:
    """Outputs are logits."""

    action_shape: tuple[int, ...] = ()
    draw_shape: tuple[int, ...] = ()
    action_dtype: type[np.generic] = np.int64

    def __init__(self, space: gym.spaces.Discrete) -> None:
        self.num_outputs = int(space.n)

    def random(self, rng: np.random.Generator) -> Any:
        return rng.integers(self.num_outputs)

    def greedy(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(axis=-1)

    def draws(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.random(shape)

    def explore(
        self, outputs: np.ndarray, draws: np.ndarray, *, noise: np.ndarray, random_share: np.ndarray
    ) -> np.ndarray:
        weights = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
        probability = weights / weights.sum(axis=-1, keepdims=True)
        share = random_share[..., None]
        probability = (1 - share) * probability + share / self.num_outputs
        upper = probability.cumsum(axis=-1)[..., :-1]
        return (upper <= draws[..., None]).sum(axis=-1)

    def loss_grad(self, outputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """That of the cross entropy."""
        grad = torch.softmax(outputs, dim=-1)
        taken = actions.unsqueeze(-1)
        grad.scatter_add_(-1, taken, grad.new_full((1, 1, 1), -1.0).expand(taken.shape))
        return grad.mul_(1.0 / actions.shape[1])


class BoxHead:
    """Outputs are actions, in units of half the range around its middle where it is bounded."""

    action_dtype: type[np.generic] = np.float32

    def __init__(self, space: gym.spaces.Box) -> None:
        self.action_shape = tuple(space.shape)
        (self.num_outputs,) = self.draw_shape = self.action_shape
        self._low, self._high = space.low.astype(float), space.high.astype(float)
        self._has_low, self._has_high = np.isfinite(self._low), np.isfinite(self._high)
        self._bounded = self._has_low & self._has_high
        low, high = np.where(self._bounded, [self._low, self._high], [[-1.0], [1.0]])
        self._middle, self._half = (low + high) / 2, (high - low) / 2

    def random(self, rng: np.random.Generator) -> Any:
        """Uniform between bounds; exponential from a single bound; normal without any."""
        uniform = self._middle + self._half * rng.uniform(-1.0, 1.0, self.num_outputs)
        beyond = rng.standard_exponential(self.num_outputs)
        free = rng.standard_normal(self.num_outputs)
        action = np.select(
            [self._bounded, self._has_low, self._has_high],
            [uniform, self._low + beyond, self._high - beyond],
            free,
        )
        return action.astype(np.float32)

    def greedy(self, outputs: np.ndarray) -> np.ndarray:
        return self._action(np.where(self._bounded, np.tanh(outputs), outputs))

    def draws(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal((*shape, self.num_outputs))

    def explore(
        self, outputs: np.ndarray, draws: np.ndarray, *, noise: np.ndarray, random_share: np.ndarray
    ) -> np.ndarray:
        mean = np.where(self._bounded, np.tanh(outputs), outputs)
        return self._action(mean + noise[:, None, None] * draws)

    def _action(self, normal: np.ndarray) -> np.ndarray:
        action = self._middle + self._half * normal
        return np.clip(action, self._low, self._high).astype(np.float32)

    def loss_grad(self, outputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """That of the mean square of the error in units of half the range."""
        device = outputs.device
        middle, half, bounded = (
            torch.from_numpy(x).to(device) for x in (self._middle, self._half, self._bounded)
        )
        target = ((actions - middle) / half).float()
        mean = torch.where(bounded, torch.tanh(outputs), outputs)
        slope = torch.where(bounded, 1 - mean.square(), 1.0)
        return (mean - target) * slope * (2 / (outputs.shape[1] * outputs.shape[2]))


def make_head(envs: FlatEnvs) -> ActionHead:
    space = envs.action_space
    if isinstance(space, gym.spaces.Discrete) and space.start == 0:
        return DiscreteHead(space)
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return BoxHead(space)
    raise EnvironmentSpecError(
        envs.env_id,
        f"pcn takes discrete actions 0 … n-1 or vectors of numbers (a Box of one dimension), "
        f"not {space}.",
    )
