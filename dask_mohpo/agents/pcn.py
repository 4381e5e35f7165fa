"""Pareto Conditioned Networks: one network that is told which return to bring home.

Reymond, Bargiacchi and Nowé 2022, "Pareto Conditioned Networks", arXiv 2204.05036.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F

from dask_mohpo.agents._contract import Config, generators
from dask_mohpo.agents._envs import TRAINING, FlatEnvs, episode_seed
from dask_mohpo.agents._networks import StackedLinear
from dask_mohpo.errors import EnvironmentSpecError
from dask_mohpo.fronts import non_dominated_mask

__all__ = ["PCN", "PCNConfig"]

INIT, RANDOM, COMMAND, ACT, LEARN = range(5)
MIN_CROWDING = 0.2
MIN_PENALTY = 1e-5
NOISE_BLOCK = 64
UPDATE_BLOCK = 64
import os

EPS = float(os.environ.get('EPS','1'))
FRONT = float(os.environ.get('FRONT','0'))
MIN_CROWDING = float(os.environ.get('CROWD', '.2'))


@dataclass(frozen=True, kw_only=True)
class PCNConfig(Config):
    """Hyperparameters of Pareto Conditioned Networks."""

    ALGO: ClassVar[str] = "pcn"

    scaling_factor: tuple[float, ...] | None = None
    """What the desired return and horizon are multiplied by before the network sees them: one
    number per objective, then one for the horizon; None: from the initial random episodes, one
    over the largest absolute return of each objective and over the longest episode."""
    learning_rate: float = 1e-3
    """Step size of Adam."""
    gamma: float = 1.0
    """Discount of the returns that the agent is conditioned on; not that of the evaluation."""
    batch_size: int = 256
    """Transitions per update."""
    hidden_dim: int = 64
    """Width of the embeddings and of the hidden layer."""
    noise: float = 0.1
    """Standard deviation of the noise added to continuous actions in training, in units of half
    the range of a bounded action; without effect on discrete actions."""
    num_er_episodes: int = 50
    """Random episodes at the start."""
    num_step_episodes: int = 10
    """Episodes per iteration."""
    num_model_updates: int = 50
    """Updates per iteration."""
    max_return: tuple[float, ...] | None = None
    """Largest return per objective that is ever asked for; None: no limit."""
    max_buffer_size: int = 200
    """Episodes that the dataset holds."""

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "hidden_dim",
            "num_er_episodes",
            "num_step_episodes",
            "num_model_updates",
            "max_buffer_size",
        ):
            self._require(name, getattr(self, name) >= 1, "an integer ≥ 1")
        self._require("learning_rate", self.learning_rate > 0, "a number > 0")
        self._require("gamma", 0 < self.gamma <= 1, "a number in (0, 1]")
        self._require("noise", self.noise >= 0, "a number ≥ 0")
        self._require(
            "scaling_factor",
            self.scaling_factor is None
            or (len(self.scaling_factor) > 0 and min(self.scaling_factor) > 0),
            "a list of numbers > 0, or None",
        )


class PCN:
    """S learners of Pareto Conditioned Networks."""

    def __init__(
        self,
        config: PCNConfig,
        env_id: str,
        seeds: Sequence[int],
        *,
        total_timesteps: int,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self._total = total_timesteps
        self._seeds = list(seeds)
        num = len(self._seeds)
        self._envs = FlatEnvs(env_id, num * config.num_step_episodes)
        self._head = _head(self._envs)
        self._num_objectives = self._envs.num_objectives
        self._check_widths()
        width, command = config.hidden_dim, self._num_objectives + 1
        shapes = [
            (self._envs.obs_dim, width),
            (command, width),
            (width, width),
            (width, self._head.num_outputs),
        ]
        network = StackedLinear(shapes, generators(seeds, INIT), self.device)
        scale = np.ones(command) if config.scaling_factor is None else config.scaling_factor
        self._model = _Model(
            network, torch.tensor(np.tile(scale, (num, 1, 1)), dtype=torch.float32).to(self.device)
        )
        self._random_rng = generators(seeds, RANDOM)
        self._command_rng = generators(seeds, COMMAND)
        self._act_rng = generators(seeds, ACT)
        self._learn_rng = generators(seeds, LEARN)
        self._datasets = [
            _Dataset(config.max_buffer_size, self._envs.obs_dim, self._head.shape, self._num_objectives)
            for _ in seeds
        ]
        self._steps = [0] * num
        self._episodes = [0] * num
        self._ready = [False] * num

    def _check_widths(self) -> None:
        c, k = self.config, self._num_objectives
        for name, value, wanted, what in (
            ("scaling_factor", c.scaling_factor, k + 1, f"{k} objectives and the horizon"),
            ("max_return", c.max_return, k, f"{k} objectives"),
        ):
            if value is not None and len(value) != wanted:
                raise EnvironmentSpecError(
                    self._envs.env_id,
                    f"pcn: {name} has {len(value)} numbers, {list(value)}, but it takes {wanted}, "
                    f"for {what}.",
                )

    @property
    def steps(self) -> Sequence[int]:
        return list(self._steps)

    def train(self, until: int) -> None:
        for learner in range(len(self._seeds)):
            self._explore(learner, until)
        new = [s for s, ready in enumerate(self._ready) if not ready and self._explored(s)]
        if new:
            model = self._model.subset(new)
            self._learn(model, new)
            self._model.write(new, model)
            for s in new:
                self._ready[s] = True
        active = self._active(until)
        while active:
            whole = len(active) == len(self._seeds)
            model = self._model if whole else self._model.subset(active)
            still = active
            while still == active:
                self._collect(model, active)
                self._learn(model, active)
                still = self._active(until)
            if not whole:
                self._model.write(active, model)
            active = still

    def _active(self, until: int) -> list[int]:
        return [s for s, taken in enumerate(self._steps) if self._ready[s] and taken < until]

    def policies(self, num_weights: int) -> PCNPolicies:
        return PCNPolicies(self, [d.commands(num_weights) for d in self._datasets])

    def _explored(self, s: int) -> bool:
        return self._episodes[s] >= self.config.num_er_episodes or self._steps[s] >= self._total

    def _explore(self, s: int, until: int) -> None:
        index = s * self.config.num_step_episodes
        while not self._explored(s) and self._steps[s] < until:
            obs = [self._reset(s, index)]
            actions, rewards = [], []
            over = False
            while not over:
                actions.append(self._head.random(self._random_rng[s]))
                next_obs, reward, terminated, truncated = self._envs.step(index, actions[-1])
                obs.append(next_obs)
                rewards.append(reward)
                over = terminated or truncated
            self._steps[s] += len(actions)
            returns = returns_to_go(np.stack(rewards), self.config.gamma)
            self._datasets[s].add(np.stack(obs[:-1]), np.stack(actions), returns, np.array([len(actions)]))
        if self._explored(s) and not self._ready[s] and self.config.scaling_factor is None:
            self._model.scale[s, 0] = torch.from_numpy(self._datasets[s].scaling()).to(self.device)

    def _reset(self, s: int, index: int) -> np.ndarray:
        seed = episode_seed(self._seeds[s], TRAINING, self._episodes[s])
        self._episodes[s] += 1
        return self._envs.reset(index, seed)

    def _command(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        num, rng, data = self.config.num_step_episodes, self._command_rng[s], self._datasets[s]
        front = data.front()
        candidates = data.episode_returns[front]
        choice = rng.integers(len(front), size=num)
        objective = rng.integers(self._num_objectives, size=num)
        returns = candidates[choice]
        returns[np.arange(num), objective] += rng.random(num) * candidates.std(axis=0)[objective]
        if self.config.max_return is not None:
            returns = np.minimum(returns, self.config.max_return)
        return returns, np.maximum(data.lengths[front][choice] - 2.0, 1.0)

    def _collect(self, model: _Model, active: list[int]) -> None:
        num, k = self.config.num_step_episodes, self._num_objectives
        commands = [self._command(s) for s in active]
        actor = _PCNActor(
            self, model, np.stack([c[0] for c in commands]), np.stack([c[1] for c in commands])
        )
        horizon0 = np.stack([c[1] for c in commands])
        obs = np.stack([[self._reset(s, s * num + n) for n in range(num)] for s in active])
        learner = np.arange(len(active))[:, None]
        rows = np.broadcast_to(np.arange(num), (len(active), num))
        alive = np.ones(rows.shape, bool)
        lengths = np.zeros(rows.shape, np.int64)
        record = _Record(rows.shape, obs.shape[2], self._head, k)
        noise = np.empty(0)
        t = 0
        while True:
            if t % NOISE_BLOCK == 0:
                shape = (NOISE_BLOCK, num)
                noise = np.stack([self._head.noise(self._act_rng[s], shape) for s in active], axis=1)
                for a in range(len(active)):
                    pass
            actions = self._head.explore(
                actor.outputs(obs), noise[t % NOISE_BLOCK][learner, rows], self.config.noise, EPS / horizon0[learner, rows]
            )
            rewards = np.zeros((*rows.shape, k))
            next_obs = obs.copy()
            for a, m in zip(*np.nonzero(alive), strict=True):
                n = rows[a, m]
                next_obs[a, m], rewards[a, m], terminated, truncated = self._envs.step(
                    active[a] * num + n, actions[a, m]
                )
                lengths[a, n] += 1
                alive[a, m] = not (terminated or truncated)
            record.put(t, learner, rows, obs, actions, rewards)
            obs = next_obs
            t += 1
            if not alive.any():
                break
            actor.observe(rewards)
            most = int(alive.sum(axis=1).max())
            if most <= 0.75 * alive.shape[1]:
                kept = np.argsort(~alive, axis=1, kind="stable")[:, :most]
                actor.keep(kept)
                obs = np.take_along_axis(obs, kept[..., None], axis=1)
                alive = np.take_along_axis(alive, kept, axis=1)
                rows = np.take_along_axis(rows, kept, axis=1)
        for a, s in enumerate(active):
            taken = np.arange(t) < lengths[a][:, None]
            returns = returns_to_go(record.rewards[a, :, :t].swapaxes(0, 1), self.config.gamma)
            self._datasets[s].add(
                record.obs[a, :, :t][taken],
                record.actions[a, :, :t][taken],
                returns.swapaxes(0, 1)[taken],
                lengths[a],
            )
            self._steps[s] += int(lengths[a].sum())

    def _learn(self, model: _Model, active: list[int]) -> None:
        left = self.config.num_model_updates
        while left > 0:
            num = min(left, UPDATE_BLOCK)
            left -= num
            draws = [
                self._datasets[s].draw(self._learn_rng[s], num, self.config.batch_size)
                for s in active
            ]
            obs, commands, actions = (
                torch.from_numpy(np.stack(parts, axis=1)).to(self.device)
                for parts in zip(*draws, strict=True)
            )
            commands = commands * model.scale
            for u in range(num):
                output = model.forward(obs[u], commands[u])
                loss = self._head.loss(output, actions[u])
                model.network.backward(loss)
                model.adam(self.config.learning_rate)


def returns_to_go(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Discounted sums of the rewards from each step on; time runs along the first axis."""
    returns = rewards.astype(np.float64)
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += gamma * returns[t + 1]
    return returns


class _Model:
    """The networks of some learners and the state of their Adam."""

    def __init__(self, network: StackedLinear, scale: torch.Tensor) -> None:
        self.network = network
        self.scale = scale
        self.mean = torch.zeros_like(network.flat)
        self.square = torch.zeros_like(network.flat)
        self.updates = torch.zeros(len(scale), 1, device=scale.device)

    def subset(self, rows: Sequence[int]) -> _Model:
        network = self.network.copy()
        network.keep(rows)
        index = torch.as_tensor(rows, device=self.scale.device)
        other = _Model(network, self.scale[index])
        other.mean, other.square = self.mean[index], self.square[index]
        other.updates = self.updates[index]
        return other

    def write(self, rows: Sequence[int], other: _Model) -> None:
        index = torch.as_tensor(rows, device=self.scale.device)
        with torch.no_grad():
            self.network.flat[index] = other.network.flat
        self.mean[index], self.square[index] = other.mean, other.square
        self.updates[index] = other.updates

    def forward(self, obs: torch.Tensor, command: torch.Tensor) -> torch.Tensor:
        net = self.network
        x = torch.sigmoid(net(0, obs)) * torch.sigmoid(net(1, command))
        return net(3, torch.relu(net(2, x)))

    @torch.no_grad()
    def adam(self, learning_rate: float) -> None:
        grad = self.network.flat.grad
        self.updates += 1
        self.mean.lerp_(grad, 0.1)
        self.square.mul_(0.999).addcmul_(grad, grad, value=0.001)
        rate = learning_rate / (1 - 0.9**self.updates)
        denominator = (self.square / (1 - 0.999**self.updates)).sqrt_().add_(1e-8)
        self.network.flat.sub_(self.mean / denominator * rate)


class _Record:
    def __init__(self, shape, obs_dim, head, num_objectives) -> None:
        self.obs = np.zeros((*shape, NOISE_BLOCK, obs_dim), np.float32)
        self.actions = np.zeros((*shape, NOISE_BLOCK, *head.shape), head.dtype)
        self.rewards = np.zeros((*shape, NOISE_BLOCK, num_objectives))

    def put(self, t, learner, rows, obs, actions, rewards) -> None:
        if t == self.obs.shape[2]:
            for name in ("obs", "actions", "rewards"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)], axis=2))
        self.obs[learner, rows, t] = obs
        self.actions[learner, rows, t] = actions
        self.rewards[learner, rows, t] = rewards


class _Dataset:
    def __init__(self, capacity: int, obs_dim: int, action_shape: tuple[int, ...], k: int) -> None:
        self.capacity = capacity
        self.obs = np.zeros((0, obs_dim), np.float32)
        self.actions: Any = None
        self.commands_ = np.zeros((0, k + 1), np.float32)
        self.lengths = np.zeros(0, np.int64)
        self.episode_returns = np.zeros((0, k))

    def add(self, obs, actions, returns, lengths) -> None:
        first = np.cumsum(lengths) - lengths
        horizon = np.repeat(lengths + first, lengths) - np.arange(len(obs))
        commands = np.concatenate([returns, horizon[:, None]], axis=1).astype(np.float32)
        self.obs = np.concatenate([self.obs, obs])
        self.actions = actions if self.actions is None else np.concatenate([self.actions, actions])
        self.commands_ = np.concatenate([self.commands_, commands])
        self.lengths = np.concatenate([self.lengths, lengths])
        self.episode_returns = np.concatenate([self.episode_returns, returns[first]])
        if len(self.lengths) > self.capacity:
            best = np.argsort(-scores(self.episode_returns), kind="stable")[: self.capacity]
            kept = np.zeros(len(self.lengths), bool)
            kept[best] = True
            rows = np.repeat(kept, self.lengths)
            self.obs, self.actions = self.obs[rows], self.actions[rows]
            self.commands_ = self.commands_[rows]
            self.lengths, self.episode_returns = self.lengths[kept], self.episode_returns[kept]

    def front(self) -> np.ndarray:
        """Indices of the non-dominated episodes, one per distinct return."""
        index = np.flatnonzero(non_dominated_mask(self.episode_returns))
        _, first = np.unique(self.episode_returns[index], axis=0, return_index=True)
        return index[first]

    def commands(self, n: int):
        index = self.front()
        return self.episode_returns[index][:n], self.lengths[index].astype(float)[:n]

    def scaling(self) -> np.ndarray:
        most = np.concatenate([np.abs(self.episode_returns).max(axis=0), [self.lengths.max()]])
        return np.where(most > 0, 1 / np.where(most > 0, most, 1), 1).astype(np.float32)

    def draw(self, rng, num: int, batch: int):
        if FRONT == 0:
            index = rng.integers(len(self.obs), size=(num, batch))
        elif FRONT < 0:
            e = rng.integers(len(self.lengths), size=(num, batch))
            start = np.cumsum(self.lengths) - self.lengths
            index = start[e] + (rng.random((num, batch)) * self.lengths[e]).astype(int)
        else:
            share = int(batch * FRONT)
            mask = np.zeros(len(self.lengths), bool); mask[self.front()] = True
            rows = np.flatnonzero(np.repeat(mask, self.lengths))
            index = np.concatenate([rows[rng.integers(len(rows), size=(num, share))], rng.integers(len(self.obs), size=(num, batch-share))], axis=1)
        return self.obs[index], self.commands_[index], self.actions[index]


def crowding(points: np.ndarray) -> np.ndarray:
    n = len(points)
    total = np.zeros(n)
    for k in range(points.shape[1]):
        order = np.argsort(points[:, k], kind="stable")
        x = points[order, k]
        span = x[-1] - x[0]
        gap = np.empty(n)
        gap[1:-1] = x[2:] - x[:-2]
        gap[[0, -1]] = np.inf
        if span > 0:
            total[order] += gap / span
    return total


def scores(points: np.ndarray) -> np.ndarray:
    front = np.unique(points[non_dominated_mask(points)], axis=0)
    span = np.ptp(front, axis=0)
    span = np.where(span > 0, span, np.where(np.ptp(points, axis=0) > 0, np.ptp(points, axis=0), 1))
    distance = np.sqrt((((points[:, None] - front[None]) / span) ** 2).sum(-1)).min(axis=1)
    crowded = crowding(points) <= MIN_CROWDING
    score = -distance
    score[crowded] = 2 * (score[crowded] - MIN_PENALTY)
    # the latest of equal returns
    _, inverse, count = np.unique(points[::-1], axis=0, return_inverse=True, return_counts=True)
    _, first = np.unique(points[::-1], axis=0, return_index=True)
    dup = np.ones(len(points), bool)
    dup[len(points) - 1 - first] = False
    score[dup] -= score.max() - score.min() + 1
    return score


class PCNPolicies:
    def __init__(self, agent: PCN, commands) -> None:
        self._agent = agent
        self._commands = commands

    @property
    def counts(self) -> Sequence[int]:
        return [len(h) for _, h in self._commands]

    def start(self, policy: np.ndarray) -> _PCNActor:
        returns = np.stack([r[p] for (r, _), p in zip(self._commands, policy, strict=True)])
        horizons = np.stack([h[p] for (_, h), p in zip(self._commands, policy, strict=True)])
        return _PCNActor(self._agent, self._agent._model, returns, horizons)


class _PCNActor:
    def __init__(self, agent, model, returns, horizons) -> None:
        self._agent, self._model = agent, model
        self._returns, self._horizons = returns, horizons

    @torch.inference_mode()
    def outputs(self, obs: np.ndarray) -> np.ndarray:
        commands = np.concatenate([self._returns, self._horizons[..., None]], axis=-1)
        c = torch.from_numpy(commands.astype(np.float32)).to(self._agent.device) * self._model.scale
        return self._model.forward(torch.from_numpy(obs).to(self._agent.device), c).cpu().numpy()

    def act(self, obs: np.ndarray) -> np.ndarray:
        return self._agent._head.greedy(self.outputs(obs))

    def observe(self, rewards: np.ndarray) -> None:
        self._returns = (self._returns - rewards) / self._agent.config.gamma
        self._horizons = np.maximum(self._horizons - 1, 1)

    def keep(self, rows: np.ndarray) -> None:
        self._returns = np.take_along_axis(self._returns, rows[..., None], axis=1)
        self._horizons = np.take_along_axis(self._horizons, rows, axis=1)


class _DiscreteHead:
    dtype = np.int64
    shape = ()

    def __init__(self, space: gym.spaces.Discrete) -> None:
        self.num_outputs = int(space.n)

    def random(self, rng):
        return rng.integers(self.num_outputs)

    def greedy(self, outputs):
        return outputs.argmax(axis=-1)

    def noise(self, rng, shape):
        return rng.random(shape)

    def explore(self, logits, noise, std, eps):
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        eps = np.minimum(eps, 1)[..., None]
        p = p * (1 - eps) + eps / self.num_outputs
        cum = p.cumsum(axis=-1)
        return (cum[..., :-1] < noise[..., None] * cum[..., -1:]).sum(axis=-1)

    def loss(self, outputs, actions):
        # mean per learner, summed over learners
        return F.cross_entropy(outputs.flatten(0, 1), actions.flatten(), reduction="sum") / actions.shape[1]


def _head(envs: FlatEnvs):
    return _DiscreteHead(envs.action_space)
