"""The networks of S learners of Envelope Q-learning, and one step of their learning.

Everything here lies on the device: what an update needs arrives in one transfer, what it gives back
leaves in one, and nothing else is exchanged. On CUDA the update is recorded once and replayed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dask_mohpo.agents._networks import MLP, StackedAdam, StackedLinear, clip_grad_norm

__all__ = ["EnvelopeLearning", "LearningShape"]

logger = logging.getLogger(__name__)

UPDATES_BEFORE_RECORDING = 3
"""CUDA libraries set themselves up in the first ones."""


@dataclass(frozen=True, kw_only=True)
class LearningShape:
    """What the learners of a batch have in common."""

    obs_dim: int
    num_objectives: int
    num_actions: int
    net_arch: tuple[int, ...]
    batch_size: int
    num_sample_w: int
    envelope: bool
    half: bool


class EnvelopeLearning:
    """Online and target networks and their updates.

    Parameters
    ----------
    shape : what all learners have in common.
    learning_rates, max_grad_norms : one per learner.
    generators : one per learner, for the initial parameters.
    row : where obs, next_obs, rewards, discount and action end in a row of a transition.
    device : torch device.

    Attributes
    ----------
    batch : (S, batch_size, row), weights : (S, num_sample_w, n_objectives), homotopy : (S,):
        what the next update learns from, to be filled; NumPy arrays.
    """

    def __init__(
        self,
        shape: LearningShape,
        *,
        learning_rates: Sequence[float],
        max_grad_norms: Sequence[float | None],
        generators: Sequence[np.random.Generator],
        row: np.ndarray,
        device: torch.device,
    ) -> None:
        self._shape, self._device, self._row = shape, device, row.tolist()
        num, batch, num_w = len(generators), shape.batch_size, shape.num_sample_w
        k, actions = shape.num_objectives, shape.num_actions
        widths = [shape.obs_dim + k, *shape.net_arch, actions * k]
        self.online = StackedLinear(list(itertools.pairwise(widths)), generators, device)
        self.target = self.online.copy()
        self._adam = StackedAdam(self.online, learning_rates)
        norms = [np.inf if norm is None else norm for norm in max_grad_norms]
        self._max_norms = torch.tensor(norms, dtype=torch.float32, device=device)[:, None]
        self._clips = min(norms) < np.inf
        rows = batch * num_w
        self._pass = MLP(self.online, 2 * rows, rows, half=shape.half)
        self._target_pass = MLP(self.target, rows, half=shape.half)

        cuda = device.type == "cuda"
        sizes = [num * batch * row[-1], num * num_w * k, num, num]
        host = torch.zeros(sum(sizes), pin_memory=cuda)
        self._host, self._inputs = host, host.to(device) if cuda else host
        shapes = [(num, batch, row[-1]), (num, num_w, k), (num,), (num,)]
        self.batch, self.weights, self._vector_share, self._scalar_share = (
            part.view(s).numpy() for part, s in zip(host.split(sizes), shapes, strict=True)
        )
        self._on_device = [
            part.view(s) for part, s in zip(self._inputs.split(sizes), shapes, strict=True)
        ]
        self._surprise = torch.zeros(num, batch, device=device)
        self._surprise_host = torch.zeros(num, batch, pin_memory=cuda)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.arange(int(np.prod(shape)), device=device).view(shape)

        # Where the actions of (learner, transition, weight) begin among all rows of Q values.
        self._taken_at = numbers(num, 2, batch, num_w)[:, 0] * actions
        self._delta_at = numbers(num, batch, num_w) * actions
        self._candidates_at = numbers(num, batch, 1) * (num_w * actions)
        self._delta = torch.zeros(num, rows, actions * k, device=device)
        self._share = np.ones(num)
        self._share_on_device = torch.ones(num, 1, device=device)
        self._updates = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._records = cuda

    def greedy(self, obs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Actions (S, N) that the weights (S, N, ·) value most."""
        x = torch.from_numpy(np.concatenate([obs, weights], axis=-1, dtype=np.float32))
        x = x.to(self._device)
        k = self._shape.num_objectives
        q = self.online.mlp(x).unflatten(-1, (self._shape.num_actions, k))
        return (q * x[..., None, -k:]).sum(-1).argmax(-1).cpu().numpy()

    def follow(self, share: np.ndarray) -> None:
        """Move the target networks by these shares (S,) of the way; 1 is a copy."""
        if share.min() == 1.0:
            self.target.flat.copy_(self.online.flat)
        else:
            if not np.array_equal(share, self._share):
                self._share = share
                self._share_on_device = torch.from_numpy(share.astype(np.float32))[:, None].to(
                    self._device
                )
            self.target.flat.lerp_(self.online.flat, self._share_on_device)

    def update(self, homotopy: np.ndarray) -> None:
        """One step of Adam for every learner, on what `batch` and `weights` hold.

        Parameters
        ----------
        homotopy : (S,), weight of the scalarised loss L_B; that of the vector loss L_A is one less.
        """
        shape = self._shape
        rows = shape.batch_size * shape.num_sample_w
        # derivatives of means of squares
        self._vector_share[:] = 2 * (1 - homotopy) / (rows * shape.num_objectives)
        self._scalar_share[:] = 2 * homotopy / rows
        if self._inputs is not self._host:
            self._inputs.copy_(self._host, non_blocking=True)
        self._updates += 1
        if self._records and self._updates > UPDATES_BEFORE_RECORDING:
            self._record()
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        self._surprise_host.copy_(self._surprise, non_blocking=True)

    def surprise(self) -> np.ndarray:
        """|w·(Q - target)| of the last update's transitions, means over the weights, (S, batch)."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._surprise_host.numpy()

    def _record(self) -> None:
        self._records = False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._compute()
        except RuntimeError as error:
            logger.warning("the update cannot be recorded as a CUDA graph: %s", error)
        else:
            self._graph = graph

    def _compute(self) -> None:
        """Losses L_A and L_B of the paper: means per learner, so that gradients do not mix."""
        shape = self._shape
        batch, weights, vector_share, scalar_share = self._on_device
        num, n_batch, num_w, k = len(batch), shape.batch_size, shape.num_sample_w, weights.shape[2]
        obs_end, next_end, reward_end, _, _ = self._row
        # Row b * num_w + i is transition b under weight i; first the states, then the next states.
        x = self._pass.input.view(num, 2, n_batch, num_w, -1)
        states = batch[..., :next_end].unflatten(-1, (2, obs_end)).transpose(1, 2)
        x[..., :obs_end] = states.unsqueeze(3)
        x[..., obs_end:] = weights[:, None, None]
        q = self._pass.forward().view(num, 2, n_batch * num_w * shape.num_actions, k)
        value = self._target_pass.forward(x[:, 1].flatten(1, 2)).view(-1, k)
        goal = value.index_select(0, self._best(q[:, 1], weights).flatten())
        goal = goal.view(num, n_batch, num_w, k).mul_(batch[..., reward_end, None, None])
        goal.add_(batch[..., None, next_end:reward_end])

        action = batch[..., -1:].long()
        taken = (self._taken_at + action).flatten()
        error = q.view(-1, k).index_select(0, taken).view_as(goal).sub_(goal)
        scalar_error = (error * weights.unsqueeze(1)).sum(-1)
        torch.mean(scalar_error.abs(), dim=2, out=self._surprise)

        delta = error.mul_(vector_share.view(num, 1, 1, 1))
        scalar_error.mul_(scalar_share.view(num, 1, 1))
        delta.addcmul_(scalar_error.unsqueeze(3), weights.unsqueeze(1))
        self._delta.zero_().view(-1, k).index_copy_(
            0, (self._delta_at + action).flatten(), delta.view(-1, k)
        )
        self._pass.backward(self._delta)
        if self._clips:
            clip_grad_norm(self.online, self._max_norms)
        self._adam.step()

    def _best(self, next_q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Which next Q vector each (transition, weight) values most, (S, batch, num_sample_w).

        Equation 6 of the paper, with double Q-learning: Q at (next state, sampled weight) is
        computed once, for batch × num_sample_w rows; every weight looks through all of them.
        """
        shape = self._shape
        num, num_w, k = weights.shape
        if shape.envelope:
            scores = torch.bmm(weights, next_q.transpose(1, 2))
            best = scores.view(num, num_w, shape.batch_size, -1).max(-1).indices
            return self._candidates_at + best.transpose(1, 2)
        own = next_q.reshape(num, shape.batch_size, num_w, shape.num_actions, k)
        return self._delta_at + (own * weights[:, None, :, None]).sum(-1).max(-1).indices
