"""Pareto Conditioned Networks: one network that is told which return to bring home, and when.

Reymond, Bargiacchi and Nowé 2022, "Pareto Conditioned Networks", arXiv 2204.05036.

A dataset holds whole episodes. The network learns, by supervision, which action was taken in a
state, given what the episode still brought from there on: its return-to-go and how many steps it
still took. Asked for a return a little better than any known one, it finds better episodes, and
those that lie far from the front leave the dataset.

Where this departs from the paper:

- Each episode of an iteration has a command of its own; the paper draws one for all of them.
- A discrete action is replaced by a uniformly random one with probability 1 / (desired horizon at
  the start): about one an episode. The network soon grows so sure of itself that its own
  distribution no longer leaves the paths it knows.
- Half of every batch comes from non-dominated episodes, for these are what it will be asked for.
- Distances to the front are measured in units of the front's extent in each objective.
- Of several episodes with equal returns the latest ranks by its return; the others come last.
- An iteration acts first and learns then, so that what was seen last is learned as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from dask_mohpo.agents._action_heads import ActionHead, make_head
from dask_mohpo.agents._contract import Actor, Config, per_learner
from dask_mohpo.agents._draws import BLOCK, generators
from dask_mohpo.agents._envs import TRAINING, FlatEnvs, episode_seed
from dask_mohpo.agents._episodes import Episodes, returns_to_go
from dask_mohpo.agents._networks import (
    StackedAdam,
    StackedLinear,
    no_denormals,
    relu_backward_,
)
from dask_mohpo.errors import EnvironmentSpecError

if TYPE_CHECKING:
    import optuna

__all__ = ["AGENT", "CONFIG", "PCN", "PCNConfig", "search_space"]

INIT, RANDOM, COMMAND, ACT, LEARN = range(5)

DESIRED_LIMIT = 1e9
"""Division by gamma at every step must not carry a return that is out of reach to infinity."""
_Moment = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Which episodes ran, what they saw, did and got: (S, N) and, but for actions maybe, (S, N, ·)."""


@dataclass(frozen=True, kw_only=True)
class PCNConfig(Config):
    """Hyperparameters of Pareto Conditioned Networks."""

    ALGO: ClassVar[str] = "pcn"
    SHARED: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "hidden_dim",
        "num_step_episodes",
        "num_model_updates",
    )

    scaling_factor: tuple[float, ...] | None = None
    """What a command is multiplied by before the network sees it: one number per objective, then
    one for the horizon; None: so that the largest absolute return and the longest horizon among
    the non-dominated initial episodes become 10."""
    learning_rate: float = 3e-3
    """Step size of Adam."""
    gamma: float = 1.0
    """Discount of the returns that the agent is asked for; not that of the evaluation."""
    batch_size: int = 256
    """Transitions per update."""
    hidden_dim: int = 64
    """Width of the embeddings and of the hidden layer."""
    noise: float = 0.1
    """Standard deviation of the noise on continuous actions in training, in units of half the
    range of a bounded action; without effect on discrete actions."""
    num_er_episodes: int = 50
    """Episodes of uniformly random actions at the start."""
    num_step_episodes: int = 10
    """Episodes per iteration."""
    num_model_updates: int = 50
    """Updates per iteration."""
    max_return: tuple[float, ...] | None = None
    """The most that training ever asks for at the start of an episode, one number per objective;
    None: no limit."""
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
        scaling, most = self.scaling_factor, self.max_return
        self._require(
            "scaling_factor",
            scaling is None or (len(scaling) > 0 and min(scaling) > 0),
            "a list of numbers > 0, one per objective and one for the horizon, or None",
        )
        self._require(
            "max_return",
            most is None or len(most) > 0,
            "a list of numbers, one per objective, or None",
        )


class PCN:
    """S learners of Pareto Conditioned Networks, whose iterations run side by side.

    Parameters
    ----------
    config : the hyperparameters, one for all learners or one for each; those named in
        `PCNConfig.SHARED` must be the same.
    env_id : an env with vector observations; actions are discrete or a vector in a Box.
    seeds : one per learner.
    total_timesteps : the budget of each learner; the initial random episodes end where it ends.
    device : torch device.

    Raises
    ------
    EnvironmentSpecError
        The env's actions are of another kind, or `scaling_factor` or `max_return` does not have
        as many numbers as the env's objectives ask for.
    """

    def __init__(
        self,
        config: PCNConfig | Sequence[PCNConfig],
        env_id: str,
        seeds: Sequence[int],
        *,
        total_timesteps: int,
        device: str = "cpu",
    ) -> None:
        self._total = total_timesteps
        self._seeds = list(seeds)
        num = len(self._seeds)
        self._configs = per_learner(config, num)
        self._common = self._configs[0]
        self._envs = FlatEnvs(env_id, num * self._common.num_step_episodes)
        self._num_objectives = self._envs.num_objectives
        for c in dict.fromkeys(self._configs):
            self._check_widths(c)
        self.head = make_head(self._envs)
        self.gamma = np.array([c.gamma for c in self._configs])
        self.model = _Model(
            self._envs.obs_dim,
            self._num_objectives + 1,
            self._common.hidden_dim,
            self.head.num_outputs,
            [c.learning_rate for c in self._configs],
            generators(seeds, INIT),
            torch.device(device),
        )
        for learner, c in enumerate(self._configs):
            if c.scaling_factor is not None:
                self.model.set_scale(learner, np.array(c.scaling_factor))
        self._random_rng = generators(seeds, RANDOM)
        self._command_rng = generators(seeds, COMMAND)
        self._act_rng = generators(seeds, ACT)
        self._learn_rng = generators(seeds, LEARN)
        self._datasets = [
            Episodes(
                c.max_buffer_size,
                self._num_objectives,
                (self._envs.obs_dim,),
                self.head.action_shape,
                self.head.action_dtype,
            )
            for c in self._configs
        ]
        self._steps = [0] * num
        self._episodes = [0] * num
        self._started = [False] * num

    def _check_widths(self, config: PCNConfig) -> None:
        k = self._num_objectives
        for name, value, wanted, what in (
            ("scaling_factor", config.scaling_factor, k + 1, f"{k} objectives and the horizon"),
            ("max_return", config.max_return, k, f"{k} objectives"),
        ):
            if value is not None and len(value) != wanted:
                raise EnvironmentSpecError(
                    self._envs.env_id,
                    f"pcn: {name} = {list(value)} has {len(value)} numbers; it takes {wanted}, "
                    f"for {what}.",
                )

    @property
    def steps(self) -> Sequence[int]:
        return list(self._steps)

    @no_denormals()
    def train(self, until: int) -> None:
        """Train until every learner has taken at least `until` steps; episodes finish.

        A learner that has taken them rests, however far the others are: what it learns does not
        depend on them, nor on how a budget is cut into calls.
        """
        learners = range(len(self._seeds))
        for s in learners:
            self._begin(s, until)
        new = [s for s in learners if not self._started[s] and self._has_begun(s)]
        if new:
            model = self._rows(new)
            self._learn(model, new)
            self._put_back(new, model)
            for s in new:
                self._started[s] = True
        active = self._active(until)
        while active:
            model, now = self._rows(active), active
            while now == active:
                self._collect(model, active)
                self._learn(model, active)
                now = self._active(until)
            self._put_back(active, model)
            active = now

    def policies(self, num_weights: int) -> PCNPolicies:
        """A policy for each non-dominated return of the dataset, but at most `num_weights`."""
        return PCNPolicies(self, [data.best_commands(num_weights) for data in self._datasets])

    def _active(self, until: int) -> list[int]:
        return [s for s, steps in enumerate(self._steps) if self._started[s] and steps < until]

    def _rows(self, learners: list[int]) -> _Model:
        return self.model if len(learners) == len(self._seeds) else self.model.rows(learners)

    def _put_back(self, learners: list[int], model: _Model) -> None:
        if model is not self.model:
            self.model.put_back(learners, model)

    def _reset(self, s: int, index: int) -> np.ndarray:
        """Begin the next episode of learner s in one copy of the env."""
        seed = episode_seed(self._seeds[s], TRAINING, self._episodes[s])
        self._episodes[s] += 1
        return self._envs.reset(index, seed)

    def _has_begun(self, s: int) -> bool:
        enough = self._episodes[s] >= self._configs[s].num_er_episodes
        return enough or self._steps[s] >= self._total

    def _begin(self, s: int, until: int) -> None:
        """Random episodes of learner s, as many as are still missing and fit."""
        index = s * self._common.num_step_episodes
        while not self._has_begun(s) and self._steps[s] < until:
            obs, seen, done, got = self._reset(s, index)[None], [], [], []
            over = False
            while not over:
                seen.append(obs)
                obs, reward = obs.copy(), np.zeros((1, self._num_objectives))
                done.append(np.asarray(self.head.random(self._random_rng[s]))[None])
                ends = self._envs.step([index], done[-1], obs, reward, [0])
                got.append(reward)
                over = bool(np.any(ends))
            self._steps[s] += len(seen)
            self._datasets[s].add(
                np.concatenate(seen),
                np.concatenate(done),
                returns_to_go(np.concatenate(got), self.gamma[s]),
                np.array([len(seen)]),
            )
        chooses = self._configs[s].scaling_factor is None
        if chooses and not self._started[s] and self._has_begun(s):
            self.model.set_scale(s, self._datasets[s].scaling_factor())

    def _commands(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        """What learner s asks for next: returns (num_step_episodes, n_objectives) and horizons.

        Each is a random non-dominated return, two steps sooner, with one random objective raised
        by up to its standard deviation over the non-dominated returns.
        """
        config, rng, data = self._configs[s], self._command_rng[s], self._datasets[s]
        num = config.num_step_episodes
        known = data.returns[data.front]
        choice = rng.integers(len(known), size=num)
        objective = rng.integers(self._num_objectives, size=num)
        returns = known[choice]
        returns[np.arange(num), objective] += rng.random(num) * known.std(axis=0)[objective]
        if config.max_return is not None:
            returns = np.minimum(returns, config.max_return)
        return returns, np.maximum(data.lengths[data.front][choice] - 2.0, 1.0)

    def _collect(self, model: _Model, learners: list[int]) -> None:
        """The episodes of one iteration, of all these learners in one loop."""
        num = self._common.num_step_episodes
        returns, horizons = map(np.stack, zip(*(self._commands(s) for s in learners), strict=True))
        random_share = 1.0 / horizons
        gamma = self.gamma[learners]
        noise = np.array([self._configs[s].noise for s in learners])
        actor = _PCNActor(model, self.head, gamma, returns, horizons)
        obs = np.stack([[self._reset(s, s * num + n) for n in range(num)] for s in learners])
        # Place (i, m) of the batch holds episode rows[i, m] of learner learners[i].
        i = np.arange(len(learners))[:, None]
        first_copy = np.array(learners)[:, None] * num
        rows = np.broadcast_to(np.arange(num), (len(learners), num))
        alive: np.ndarray = np.ones(rows.shape, bool)
        lengths = np.zeros(rows.shape, np.int64)
        history: list[_Moment] = []
        draws = np.zeros((len(learners), BLOCK, num, *self.head.draw_shape))
        while alive.any():
            t = len(history)
            if t % BLOCK == 0:
                # A learner whose episodes are over draws no more, as if it were alone.
                for a in np.flatnonzero(alive.any(axis=1)):
                    draws[a] = self.head.draws(self._act_rng[learners[a]], (BLOCK, num))
            actions = self.head.explore(
                actor.outputs(obs),
                draws[i, t % BLOCK, rows],
                noise=noise,
                random_share=random_share[i, rows],
            )
            next_obs = obs.copy()
            rewards = np.zeros((*rows.shape, self._num_objectives))
            running = np.flatnonzero(alive)
            terminated, truncated = self._envs.step(
                (first_copy + rows).ravel()[running].tolist(),
                actions.reshape(alive.size, *self.head.action_shape),
                next_obs.reshape(alive.size, -1),
                rewards.reshape(alive.size, -1),
                running.tolist(),
            )
            lengths[np.nonzero(alive)[0], rows[alive]] += 1
            alive = alive & ~(terminated | truncated).reshape(alive.shape)
            history.append((rows, obs, actions, rewards))
            actor.observe(rewards)
            obs = next_obs
            most = int(alive.sum(axis=1).max())
            if 0 < most <= 0.75 * alive.shape[1]:
                # running episodes first; finished ones fill up to the learner with the most
                kept = np.argsort(~alive, axis=1, kind="stable")[:, :most]
                actor.keep(kept)
                obs = np.take_along_axis(obs, kept[..., None], axis=1)
                alive = np.take_along_axis(alive, kept, axis=1)
                rows = np.take_along_axis(rows, kept, axis=1)
        self._store(learners, history, lengths)

    def _store(self, learners: list[int], history: list[_Moment], lengths: np.ndarray) -> None:
        """Put episodes that ran side by side into the datasets, one after the other."""
        i = np.arange(len(learners))[:, None]
        obs, actions, rewards = (
            np.zeros((*lengths.shape, len(history), *part.shape[2:]), part.dtype)
            for part in history[0][1:]
        )
        for t, (rows, *parts) in enumerate(history):
            obs[i, rows, t], actions[i, rows, t], rewards[i, rows, t] = parts
        gamma = self.gamma[learners][:, None, None]
        to_go = np.moveaxis(returns_to_go(np.moveaxis(rewards, 2, 0), gamma), 0, 2)
        taken = np.arange(len(history)) < lengths[..., None]
        for a, s in enumerate(learners):
            keep = taken[a]
            self._datasets[s].add(obs[a][keep], actions[a][keep], to_go[a][keep], lengths[a])
            self._steps[s] += int(lengths[a].sum())

    def _learn(self, model: _Model, learners: list[int]) -> None:
        """The updates of one iteration, each learner on batches of its own."""
        config = self._common
        for done in range(0, config.num_model_updates, BLOCK):
            num = min(BLOCK, config.num_model_updates - done)
            batches = [
                self._datasets[s].draw(num, config.batch_size, self._learn_rng[s]) for s in learners
            ]
            obs, commands, actions = (
                torch.from_numpy(np.stack(parts, axis=1)).to(model.device)
                for parts in zip(*batches, strict=True)
            )
            for u in range(num):
                model.learn(obs[u], commands[u], actions[u], self.head)


class _Model:
    """The networks of S learners, their scaling factors, and their states of Adam."""

    def __init__(
        self,
        obs_dim: int,
        command_dim: int,
        width: int,
        num_outputs: int,
        learning_rates: Sequence[float],
        generators: Sequence[np.random.Generator],
        device: torch.device,
    ) -> None:
        self.device = device
        shapes = [(obs_dim, width), (command_dim, width), (width, width), (width, num_outputs)]
        self.network = StackedLinear(shapes, generators, device)
        self.scale = torch.ones(len(generators), 1, command_dim, device=device)
        self._adam = StackedAdam(self.network, learning_rates)

    def set_scale(self, learner: int, factors: np.ndarray) -> None:
        self.scale[learner, 0] = torch.as_tensor(factors, dtype=torch.float32)

    def __call__(self, obs: torch.Tensor, commands: torch.Tensor) -> torch.Tensor:
        """(S, N, obs_dim), (S, N, n_objectives + 1) → (S, N, n_outputs)."""
        net = self.network
        state = torch.sigmoid_(net(0, obs))
        state *= torch.sigmoid_(net(1, commands * self.scale))
        return net(3, torch.relu_(net(2, state)))

    def learn(
        self, obs: torch.Tensor, commands: torch.Tensor, actions: torch.Tensor, head: ActionHead
    ) -> None:
        """One step of Adam for every learner, on a batch (S, N, ·) of its own."""
        net, sigmoid_grad = self.network, torch.ops.aten.sigmoid_backward
        scaled = commands * self.scale
        state = torch.sigmoid_(net(0, obs))
        command = torch.sigmoid_(net(1, scaled))
        both = state * command
        hidden = torch.relu_(net(2, both))
        delta = head.loss_grad(net(3, hidden), actions)
        net.set_grad(3, hidden, delta)
        delta = relu_backward_(net.input_grad(3, delta), hidden)
        net.set_grad(2, both, delta)
        delta = net.input_grad(2, delta)
        net.set_grad(0, obs, sigmoid_grad(delta * command, state))
        net.set_grad(1, scaled, sigmoid_grad(delta.mul_(state), command))
        self._adam.step()

    def rows(self, learners: Sequence[int]) -> _Model:
        """The model of these learners alone, in memory of its own."""
        other = object.__new__(_Model)
        other.device = self.device
        other.network = self.network.rows(learners)
        other.scale = self.scale[list(learners)]
        other._adam = self._adam.rows(other.network, learners)
        return other

    def put_back(self, learners: Sequence[int], other: _Model) -> None:
        """Take over what was learned with `rows`."""
        self.network.flat[list(learners)] = other.network.flat
        self._adam.put_back(learners, other._adam)


class PCNPolicies:
    """One greedy policy for each command of a learner.

    Parameters
    ----------
    agent : its networks are followed as they are when an episode runs.
    commands : for each learner, desired returns (n, n_objectives) and horizons (n,).
    """

    def __init__(self, agent: PCN, commands: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self._agent = agent
        self._commands = commands

    @property
    def counts(self) -> Sequence[int]:
        return [len(horizons) for _, horizons in self._commands]

    def start(self, policy: np.ndarray) -> Actor:
        returns, horizons = (
            np.stack([part[p] for part, p in zip(parts, policy, strict=True)])
            for parts in zip(*self._commands, strict=True)
        )
        agent = self._agent
        return _PCNActor(agent.model, agent.head, agent.gamma, returns, horizons)


class _PCNActor:
    """Episodes on the way to what they were asked for.

    With G = r + gamma·G', an episode that should bring R in all should, after the reward r, still
    bring (R − r) / gamma, in one step less.
    """

    def __init__(
        self,
        model: _Model,
        head: ActionHead,
        gamma: np.ndarray,
        returns: np.ndarray,
        horizons: np.ndarray,
    ) -> None:
        self._model, self._head, self._gamma = model, head, gamma[:, None, None]
        self._returns, self._horizons = returns, horizons

    def outputs(self, obs: np.ndarray) -> np.ndarray:
        commands = np.concatenate([self._returns, self._horizons[..., None]], axis=2)
        device = self._model.device
        return (
            self._model(
                torch.from_numpy(obs).to(device),
                torch.from_numpy(commands.astype(np.float32)).to(device),
            )
            .cpu()
            .numpy()
        )

    def act(self, obs: np.ndarray) -> np.ndarray:
        return self._head.greedy(self.outputs(obs))

    def observe(self, rewards: np.ndarray) -> None:
        left = (self._returns - rewards) / self._gamma
        self._returns = np.clip(left, -DESIRED_LIMIT, DESIRED_LIMIT)
        self._horizons = np.maximum(self._horizons - 1.0, 1.0)

    def keep(self, rows: np.ndarray) -> None:
        self._returns = np.take_along_axis(self._returns, rows[..., None], axis=1)
        self._horizons = np.take_along_axis(self._horizons, rows, axis=1)


def search_space(trial: optuna.Trial) -> dict[str, Any]:
    """The built-in search space; the scaling factors are chosen by the agent itself."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 3e-4, 2e-2, log=True),
        "gamma": trial.suggest_float("gamma", 0.95, 1.0),
        "batch_size": trial.suggest_categorical("batch_size", [64, 128, 256, 512]),
        "hidden_dim": trial.suggest_categorical("hidden_dim", [64, 128, 256]),
        "num_er_episodes": trial.suggest_int("num_er_episodes", 10, 200, log=True),
        "num_step_episodes": trial.suggest_int("num_step_episodes", 5, 20),
        "num_model_updates": trial.suggest_int("num_model_updates", 5, 100, log=True),
        "max_buffer_size": trial.suggest_int("max_buffer_size", 50, 500, log=True),
    }


CONFIG, AGENT = PCNConfig, PCN
