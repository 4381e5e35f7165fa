"""Envelope Q-learning: one network for all linear preferences.

Yang, Sun and Narasimhan 2019, "A generalized algorithm for multi-objective reinforcement learning
and policy adaptation", arXiv 1908.08342.

The network gives a vector Q(s, a, w) of expected returns, one entry per objective, for every
preference w. Each transition is learned for several sampled preferences at once. The target for
preference w takes, over all actions and all sampled preferences w' of the batch, the vector
Q(s', a, w') that w values most: the envelope of the solution frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from dask_mohpo.agents._buffers import ReplayBuffer
from dask_mohpo.agents._contract import Actor, Config, Schedule, per_learner
from dask_mohpo.agents._draws import Blocks, generators
from dask_mohpo.agents._envelope_learning import EnvelopeLearning, LearningShape
from dask_mohpo.agents._envs import TRAINING, FlatEnvs, episode_seed, require_discrete
from dask_mohpo.agents._networks import no_denormals
from dask_mohpo.agents._weights import random_weights, simplex_weights

if TYPE_CHECKING:
    import optuna

__all__ = ["AGENT", "CONFIG", "Envelope", "EnvelopeConfig", "search_space"]

MIN_PRIORITY = 0.01
PRECISIONS = ("float32", "bf16")
INIT, ACT, LEARN = range(3)


@dataclass(frozen=True, kw_only=True)
class EnvelopeConfig(Config):
    """Hyperparameters of Envelope Q-learning."""

    ALGO: ClassVar[str] = "envelope"
    SHARED: ClassVar[tuple[str, ...]] = (
        "net_arch",
        "batch_size",
        "num_sample_w",
        "learning_starts",
        "gradient_updates",
        "envelope",
        "precision",
    )

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
    precision: str = "float32"
    """Of the products between hidden layers in updates: float32, or bf16, which rounds their
    factors to bfloat16 on CPUs that are faster so and to TF32 on GPUs; all else is float32."""

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
        self._require("precision", self.precision in PRECISIONS, f"one of {PRECISIONS}")
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
    config : the hyperparameters, one for all learners or one for each; those named in
        `EnvelopeConfig.SHARED` must be the same.
    env_id : an env with discrete actions and vector observations.
    seeds : one per learner.
    total_timesteps : the budget of each learner, for decays given as a fraction of it.
    device : torch device.
    """

    def __init__(
        self,
        config: EnvelopeConfig | Sequence[EnvelopeConfig],
        env_id: str,
        seeds: Sequence[int],
        *,
        total_timesteps: int,
        device: str = "cpu",
    ) -> None:
        self._seeds = list(seeds)
        num = len(self._seeds)
        configs = per_learner(config, num)
        self._common = configs[0]
        self._envs = FlatEnvs(env_id, num)
        self._num_actions = require_discrete(self._envs, "envelope", ["pcn"])
        self._num_objectives = self._envs.num_objectives
        self._gamma = np.array([c.gamma for c in configs])
        self._per_alpha = np.array([[c.per_alpha] for c in configs])
        self._tau = np.array([c.tau for c in configs])
        self._copy_every = np.array([c.target_net_update_freq for c in configs])
        self._epsilon = Schedule(
            [c.initial_epsilon for c in configs],
            [c.final_epsilon for c in configs],
            [c.epsilon_decay_steps for c in configs],
            total_timesteps,
        )
        self._homotopy = Schedule(
            [c.initial_homotopy_lambda for c in configs],
            [c.final_homotopy_lambda for c in configs],
            [c.homotopy_decay_steps for c in configs],
            total_timesteps,
        )
        self._buffer = ReplayBuffer(
            [min(c.buffer_size, total_timesteps) for c in configs],
            self._envs.obs_dim,
            self._num_objectives,
            prioritised=[c.per for c in configs],
        )
        self.learning = EnvelopeLearning(
            LearningShape(
                obs_dim=self._envs.obs_dim,
                num_objectives=self._num_objectives,
                num_actions=self._num_actions,
                net_arch=self._common.net_arch,
                batch_size=self._common.batch_size,
                num_sample_w=self._common.num_sample_w,
                envelope=self._common.envelope,
                half=self._common.precision == "bf16",
            ),
            learning_rates=[c.learning_rate for c in configs],
            max_grad_norms=[c.max_grad_norm for c in configs],
            generators=generators(seeds, INIT),
            row=self._buffer.parts,
            device=torch.device(device),
        )
        self._act_rng = generators(seeds, ACT)
        self._act_draws = Blocks(self._act_rng, lambda rng, n: rng.random((n, 2)))
        learn_rng = generators(seeds, LEARN)
        batch, num_w = self._common.batch_size, self._common.num_sample_w
        self._batch_draws = Blocks(learn_rng, lambda rng, n: rng.random((n, batch)))
        self._weight_draws = Blocks(
            learn_rng, lambda rng, n: random_weights(rng, (n, num_w), self._num_objectives)
        )
        self._drawn: np.ndarray | None = None
        self._step = 0
        self._episodes = [0] * num
        self._obs = np.zeros((num, self._envs.obs_dim), np.float32)
        self._weights = np.zeros((num, self._num_objectives))
        for learner in range(num):
            self._begin_episode(learner)

    @property
    def steps(self) -> Sequence[int]:
        return [self._step] * len(self._seeds)

    @no_denormals()
    def train(self, until: int) -> None:
        while self._step < until:
            self._interact()
            self._step += 1
            if self._step > self._common.learning_starts:
                for _ in range(self._common.gradient_updates):
                    self._update()
            share = np.where(self._tau < 1, self._tau, self._step % self._copy_every == 0)
            if share.any():
                self.learning.follow(share)

    def policies(self, num_weights: int) -> EnvelopePolicies:
        weights = simplex_weights(self._num_objectives, num_weights)
        return EnvelopePolicies(self, weights)

    def _begin_episode(self, learner: int) -> None:
        seed = episode_seed(self._seeds[learner], TRAINING, self._episodes[learner])
        self._episodes[learner] += 1
        self._obs[learner] = self._envs.reset(learner, seed)
        self._weights[learner] = random_weights(self._act_rng[learner], 1, self._num_objectives)[0]

    def _interact(self) -> None:
        """One step of every learner's env, ε-greedy for the weights of its episode."""
        draws = self._act_draws.next()
        actions = (draws[:, 1] * self._num_actions).astype(np.int64)
        exploit = draws[:, 0] >= self._epsilon(self._step)
        if exploit.any():
            best = self.learning.greedy(self._obs[:, None], self._weights[:, None])[:, 0]
            actions = np.where(exploit, best, actions)
        num = len(self._seeds)
        next_obs = np.empty_like(self._obs)
        rewards = np.empty((num, self._num_objectives), np.float32)
        every = range(num)
        terminated, truncated = self._envs.step(every, actions, next_obs, rewards, every)
        discounts = np.where(terminated, 0.0, self._gamma)
        self._buffer.add(self._obs, next_obs, rewards, discounts, actions)
        self._obs = next_obs
        for learner in np.flatnonzero(terminated | truncated):
            self._begin_episode(int(learner))

    def _update(self) -> None:
        """One step of Adam for every learner, on a batch of its own.

        Priorities change when the next batch is drawn: a GPU need not be waited for before.
        """
        if self._drawn is not None:
            surprise = np.maximum(self.learning.surprise(), MIN_PRIORITY)
            self._buffer.set_priorities(self._drawn, surprise**self._per_alpha)
        self._drawn = self._buffer.draw(self._batch_draws.next())
        self._buffer.take(self._drawn, out=self.learning.batch)
        self.learning.weights[:] = self._weight_draws.next()
        self.learning.update(self._homotopy(self._step))


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
        return self._agent.learning.greedy(obs, self._weights)

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
