"""Envelope Q-learning: one network for all linear preferences.

Yang, Sun and Narasimhan 2019, "A generalized algorithm for multi-objective reinforcement learning
and policy adaptation", arXiv 1908.08342.

The network gives a vector Q(s, a, w) of expected returns, one entry per objective, for every
preference w. Each transition is learned for several sampled preferences at once. The target for
preference w takes, over all actions and all sampled preferences w' of the batch, the vector
Q(s', a, w') that w values most: the envelope of the solution frontier.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import optuna
import torch

from dask_mohpo.agents._buffers import ReplayBuffer
from dask_mohpo.agents._contract import Actor, Config, decay, generators
from dask_mohpo.agents._envs import TRAINING, FlatEnvs, episode_seed, require_discrete
from dask_mohpo.agents._networks import StackedLinear, clip_grad_norm, soft_update
from dask_mohpo.agents._weights import random_weights, simplex_weights

__all__ = ["AGENT", "CONFIG", "Envelope", "EnvelopeConfig", "search_space"]

MIN_PRIORITY = 0.01
INIT, ACT, LEARN = range(3)


@dataclass(frozen=True, kw_only=True)
class EnvelopeConfig(Config):
    """Hyperparameters of Envelope Q-learning."""

    ALGO: ClassVar[str] = "envelope"

    learning_rate: float = 3e-4
    """Step size of Adam."""
    initial_epsilon: float = 1.0
    """Probability of a random action at the start."""
    final_epsilon: float = 0.05
    """Probability of a random action after the decay."""
    epsilon_decay_steps: float | None = 0.5
    """Steps from the initial to the final value, linearly; ≤ 1: a fraction of the budget; None:
    the initial value throughout."""
    tau: float = 1.0
    """1: the target network is a copy, renewed every `target_net_update_freq` steps; < 1: it
    follows by this fraction at every step."""
    target_net_update_freq: int = 500
    """Steps between two copies into the target network; without effect where tau < 1."""
    buffer_size: int = 100_000
    """Transitions that the replay memory holds."""
    net_arch: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""
    batch_size: int = 64
    """Transitions per update."""
    learning_starts: int = 100
    """Steps before the first update."""
    gradient_updates: int = 1
    """Updates per step."""
    gamma: float = 0.99
    """Discount of the returns that the agent learns; not that of the evaluation."""
    max_grad_norm: float | None = 1.0
    """Largest norm of a learner's gradient; None: no limit."""
    envelope: bool = True
    """False: each preference's target looks at its own Q values alone."""
    num_sample_w: int = 4
    """Preferences sampled per update."""
    per: bool = True
    """Prioritised replay instead of uniform."""
    per_alpha: float = 0.6
    """Exponent of the priorities: 0 is uniform."""
    initial_homotopy_lambda: float = 0.0
    """Weight of the scalarised loss L_B at the start; that of the vector loss L_A is 1 − λ."""
    final_homotopy_lambda: float = 1.0
    """Weight of the scalarised loss after the decay."""
    homotopy_decay_steps: float | None = 0.5
    """Steps from the initial to the final λ; read like `epsilon_decay_steps`."""

    def __post_init__(self) -> None:
        for name in ("initial_epsilon", "final_epsilon", "per_alpha", "gamma"):
            self._require(name, 0 <= getattr(self, name) <= 1, "a number in [0, 1]")
        for name in ("initial_homotopy_lambda", "final_homotopy_lambda"):
            self._require(name, 0 <= getattr(self, name) <= 1, "a number in [0, 1]")
        for name in ("epsilon_decay_steps", "homotopy_decay_steps"):
            value = getattr(self, name)
            self._require(name, value is None or value > 0, "a number > 0, or None")
        for name in (
            "target_net_update_freq",
            "buffer_size",
            "batch_size",
            "gradient_updates",
            "num_sample_w",
        ):
            self._require(name, getattr(self, name) >= 1, "an integer ≥ 1")
        self._require("learning_rate", self.learning_rate > 0, "a number > 0")
        self._require("tau", 0 < self.tau <= 1, "a number in (0, 1]")
        self._require("learning_starts", self.learning_starts >= 0, "an integer ≥ 0")
        self._require(
            "net_arch",
            len(self.net_arch) > 0 and min(self.net_arch) >= 1,
            "a list of one or more integers ≥ 1",
        )
        self._require(
            "max_grad_norm",
            self.max_grad_norm is None or self.max_grad_norm > 0,
            "a number > 0, or None",
        )


class Envelope:
    """S learners of Envelope Q-learning, in step with each other.

    Parameters
    ----------
    config : the hyperparameters, the same for all learners.
    env_id : an env with discrete actions and vector observations.
    seeds : one per learner.
    total_timesteps : the budget of each learner, for decays given as a fraction of it.
    device : torch device.
    """

    def __init__(
        self,
        config: EnvelopeConfig,
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
        self._envs = FlatEnvs(env_id, num)
        self._num_actions = require_discrete(self._envs, "envelope", ["pcn"])
        self._num_objectives = self._envs.num_objectives
        self._act_rng = generators(seeds, ACT)
        self._learn_rng = generators(seeds, LEARN)
        widths = [
            self._envs.obs_dim + self._num_objectives,
            *config.net_arch,
            self._num_actions * self._num_objectives,
        ]
        shapes = list(itertools.pairwise(widths))
        self._online = StackedLinear(shapes, generators(seeds, INIT), self.device)
        self._target = self._online.copy()
        self._optimizer = torch.optim.Adam([self._online.flat], lr=config.learning_rate, fused=True)
        self._buffer = ReplayBuffer(
            num,
            min(config.buffer_size, total_timesteps),
            self._envs.obs_dim,
            self._num_objectives,
            prioritised=config.per,
        )
        self._step = 0
        self._episodes = [0] * num
        self._obs = np.zeros((num, self._envs.obs_dim), np.float32)
        self._weights = np.zeros((num, self._num_objectives))
        for learner in range(num):
            self._begin_episode(learner)

    @property
    def steps(self) -> Sequence[int]:
        return [self._step] * len(self._seeds)

    def train(self, until: int) -> None:
        config = self.config
        while self._step < until:
            self._interact()
            self._step += 1
            if self._step > config.learning_starts:
                for _ in range(config.gradient_updates):
                    self._update()
            if config.tau < 1 or self._step % config.target_net_update_freq == 0:
                soft_update(self._target, self._online, config.tau)

    def policies(self, num_weights: int) -> EnvelopePolicies:
        weights = simplex_weights(self._num_objectives, num_weights)
        return EnvelopePolicies(self, weights)

    def q_values(
        self, network: StackedLinear, obs: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Q (S, N, n_actions, n_objectives) for rows obs (S, N, ·) under weights (S, N, ·)."""
        q = network.mlp(torch.cat([obs, weights], dim=-1))
        return q.view(*q.shape[:2], self._num_actions, self._num_objectives)

    def greedy(self, obs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Actions (S, N) that the weights value most."""
        with torch.no_grad():
            w = torch.as_tensor(weights, dtype=torch.float32, device=self.device)
            q = self.q_values(self._online, torch.as_tensor(obs, device=self.device), w)
            scores = torch.matmul(q, w.unsqueeze(-1)).squeeze(-1)
            return scores.argmax(dim=-1).cpu().numpy()

    def _begin_episode(self, learner: int) -> None:
        seed = episode_seed(self._seeds[learner], TRAINING, self._episodes[learner])
        self._episodes[learner] += 1
        self._obs[learner] = self._envs.reset(learner, seed)
        self._weights[learner] = random_weights(self._act_rng[learner], 1, self._num_objectives)[0]

    def _interact(self) -> None:
        """One step of every learner's env, ε-greedy for the weights of its episode."""
        c = self.config
        epsilon = decay(
            c.initial_epsilon, c.final_epsilon, c.epsilon_decay_steps, self._total, self._step
        )
        draws = np.stack([rng.random(2) for rng in self._act_rng])
        actions = (draws[:, 1] * self._num_actions).astype(np.int64)
        exploit = draws[:, 0] >= epsilon
        if exploit.any():
            best = self.greedy(self._obs[:, None], self._weights[:, None])[:, 0]
            actions = np.where(exploit, best, actions)
        num = len(self._seeds)
        next_obs = np.empty_like(self._obs)
        rewards = np.empty((num, self._num_objectives), np.float32)
        terminated = np.empty(num, bool)
        over = np.empty(num, bool)
        for s in range(num):
            next_obs[s], rewards[s], terminated[s], truncated = self._envs.step(s, actions[s])
            over[s] = terminated[s] or truncated
        self._buffer.add(self._obs, actions, rewards, next_obs, terminated)
        self._obs = next_obs
        for learner in np.flatnonzero(over):
            self._begin_episode(int(learner))

    def _update(self) -> None:
        """One step of Adam for every learner, on a batch of its own."""
        c = self.config
        num, batch, num_w = len(self._seeds), c.batch_size, c.num_sample_w
        index = self._buffer.draw(batch, self._learn_rng)
        obs, actions, rewards, next_obs, terminated = (
            torch.from_numpy(x).to(self.device) for x in self._buffer.transitions(index)
        )
        weights = torch.from_numpy(
            np.stack(
                [random_weights(rng, num_w, self._num_objectives) for rng in self._learn_rng]
            ).astype(np.float32)
        ).to(self.device)
        # Rows run over (transition, weight): row b * num_w + i is transition b under weight i.
        row_weights = weights.unsqueeze(1).expand(num, batch, num_w, -1).flatten(1, 2)
        target = self._targets(rewards, next_obs, terminated, weights, row_weights)

        row_obs = obs.unsqueeze(2).expand(num, batch, num_w, -1).flatten(1, 2)
        q = self.q_values(self._online, row_obs, row_weights)
        q = q.view(num, batch, num_w, self._num_actions, self._num_objectives)
        chosen = actions.view(num, batch, 1, 1, 1).expand(-1, -1, num_w, 1, self._num_objectives)
        error = q.gather(3, chosen).squeeze(3) - target
        scalar_error = (error * weights.unsqueeze(1)).sum(-1)
        homotopy = decay(
            c.initial_homotopy_lambda,
            c.final_homotopy_lambda,
            c.homotopy_decay_steps,
            self._total,
            self._step,
        )
        # A mean per learner, summed over learners: their gradients do not mix.
        loss = (1 - homotopy) * error.square().mean(dim=(1, 2, 3)).sum()
        loss = loss + homotopy * scalar_error.square().mean(dim=(1, 2)).sum()
        self._online.backward(loss)
        if c.max_grad_norm is not None:
            clip_grad_norm(self._online, c.max_grad_norm)
        self._optimizer.step()
        if c.per:
            surprise = scalar_error.detach().abs().mean(dim=2).cpu().numpy()
            self._buffer.set_priorities(index, np.maximum(surprise, MIN_PRIORITY) ** c.per_alpha)

    @torch.no_grad()
    def _targets(
        self,
        rewards: torch.Tensor,
        next_obs: torch.Tensor,
        terminated: torch.Tensor,
        weights: torch.Tensor,
        row_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Targets (S, B, W, n_objectives), equation 6 of the paper, with double Q-learning.

        Q at (next state, sampled weight) is computed once, for B × W rows; every weight of the
        batch then looks through all W of them.
        """
        num, batch, num_w = *next_obs.shape[:2], weights.shape[1]
        objectives, actions = self._num_objectives, self._num_actions
        rows = next_obs.unsqueeze(2).expand(num, batch, num_w, -1).flatten(1, 2)
        online = self.q_values(self._online, rows, row_weights)
        value = self.q_values(self._target, rows, row_weights)
        if self.config.envelope:
            # candidates: all (w', a); scores (S, B·W·A, W) of each under each weight
            flat = online.view(num, batch * num_w * actions, objectives)
            scores = torch.bmm(flat, weights.transpose(1, 2))
            best = scores.view(num, batch, num_w * actions, num_w).argmax(dim=2)
            candidates = value.view(num, batch, num_w * actions, objectives)
            best_value = candidates.gather(2, best.unsqueeze(-1).expand(-1, -1, -1, objectives))
        else:
            scores = torch.matmul(online, row_weights.unsqueeze(-1)).squeeze(-1)
            best = scores.argmax(dim=-1).view(num, batch * num_w, 1, 1)
            best_value = value.gather(2, best.expand(-1, -1, 1, objectives))
            best_value = best_value.view(num, batch, num_w, objectives)
        alive = (1.0 - terminated).view(num, batch, 1, 1)
        return rewards.unsqueeze(2) + self.config.gamma * alive * best_value


class EnvelopePolicies:
    """One greedy policy for each weight; all learners have the same weights."""

    def __init__(self, agent: Envelope, weights: np.ndarray) -> None:
        self._agent = agent
        self._weights = weights

    @property
    def counts(self) -> Sequence[int]:
        return [len(self._weights)] * len(self._agent.steps)

    def start(self, policy: np.ndarray) -> Actor:
        return _EnvelopeActor(self._agent, self._weights[policy])


class _EnvelopeActor:
    def __init__(self, agent: Envelope, weights: np.ndarray) -> None:
        self._agent = agent
        self._weights = weights

    def act(self, obs: np.ndarray) -> np.ndarray:
        return self._agent.greedy(obs, self._weights)

    def observe(self, rewards: np.ndarray) -> None:
        """The policies look at observations alone."""

    def keep(self, rows: np.ndarray) -> None:
        self._weights = np.take_along_axis(self._weights, rows[..., None], axis=1)


def search_space(trial: optuna.Trial) -> dict[str, Any]:
    """The built-in search space: the target network follows either by copies or softly."""
    config: dict[str, Any] = {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "gamma": trial.suggest_float("gamma", 0.95, 0.999),
        "batch_size": trial.suggest_categorical("batch_size", [32, 64, 128]),
        "buffer_size": trial.suggest_int("buffer_size", 1_000, 100_000, log=True),
        "final_epsilon": trial.suggest_float("final_epsilon", 0.01, 0.2, log=True),
        "epsilon_decay_steps": trial.suggest_float("epsilon_decay_steps", 0.1, 1.0),
        "num_sample_w": trial.suggest_int("num_sample_w", 2, 8),
        "homotopy_decay_steps": trial.suggest_float("homotopy_decay_steps", 0.1, 1.0),
        "per": trial.suggest_categorical("per", [True, False]),
        "max_grad_norm": trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True),
    }
    if config["per"]:
        config["per_alpha"] = trial.suggest_float("per_alpha", 0.2, 0.8)
    if trial.suggest_categorical("target_update", ["hard", "soft"]) == "hard":
        config["tau"] = 1.0
        config["target_net_update_freq"] = trial.suggest_int(
            "target_net_update_freq", 50, 2_000, log=True
        )
    else:
        config["tau"] = trial.suggest_float("tau", 1e-3, 0.1, log=True)
    return config


CONFIG, AGENT = EnvelopeConfig, Envelope
