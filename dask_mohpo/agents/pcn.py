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
from dask_mohpo.agents._contract import Actor, Config, generators
from dask_mohpo.agents._envs import TRAINING, FlatEnvs, episode_seed
from dask_mohpo.agents._episodes import Episodes, returns_to_go
from dask_mohpo.agents._networks import StackedLinear
from dask_mohpo.errors import EnvironmentSpecError

if TYPE_CHECKING:
    import optuna

__all__ = ["AGENT", "CONFIG", "PCN", "PCNConfig", "search_space"]

INIT, RANDOM, COMMAND, ACT, LEARN = range(5)

DESIRED_LIMIT = 1e9
"""Division by gamma at every step must not carry a return that is out of reach to infinity."""
BLOCK = 64
"""Random numbers are drawn for this many steps, and batches for this many updates, at once."""

_Moment = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Which episodes ran, what they saw, did and got: (S, N) and, but for actions maybe, (S, N, ·)."""


@dataclass(frozen=True, kw_only=True)
class PCNConfig(Config):
    """Hyperparameters of Pareto Conditioned Networks."""

    ALGO: ClassVar[str] = "pcn"

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
    config : the hyperparameters, the same for all learners.
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
        config: PCNConfig,
        env_id: str,
        seeds: Sequence[int],
        *,
        total_timesteps: int,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self._total = total_timesteps
        self._seeds = list(seeds)
        num = len(self._seeds)
        self._envs = FlatEnvs(env_id, num * config.num_step_episodes)
        self._num_objectives = self._envs.num_objectives
        self._check_widths()
        self.head = make_head(self._envs)
        self.model = _Model(
            self._envs.obs_dim,
            self._num_objectives + 1,
            config.hidden_dim,
            self.head.num_outputs,
            generators(seeds, INIT),
            torch.device(device),
        )
        if config.scaling_factor is not None:
            for learner in range(num):
                self.model.set_scale(learner, np.array(config.scaling_factor))
        self._random_rng = generators(seeds, RANDOM)
        self._command_rng = generators(seeds, COMMAND)
        self._act_rng = generators(seeds, ACT)
        self._learn_rng = generators(seeds, LEARN)
        self._datasets = [
            Episodes(
                config.max_buffer_size,
                self._num_objectives,
                (self._envs.obs_dim,),
                self.head.action_shape,
                self.head.action_dtype,
            )
            for _ in self._seeds
        ]
        self._steps = [0] * num
        self._episodes = [0] * num
        self._started = [False] * num

    def _check_widths(self) -> None:
        k = self._num_objectives
        for name, value, wanted, what in (
            (
                "scaling_factor",
                self.config.scaling_factor,
                k + 1,
                f"{k} objectives and the horizon",
            ),
            ("max_return", self.config.max_return, k, f"{k} objectives"),
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
        enough = self._episodes[s] >= self.config.num_er_episodes
        return enough or self._steps[s] >= self._total

    def _begin(self, s: int, until: int) -> None:
        """Random episodes of learner s, as many as are still missing and fit."""
        index = s * self.config.num_step_episodes
        while not self._has_begun(s) and self._steps[s] < until:
            obs, actions, rewards = [self._reset(s, index)], [], []
            over = False
            while not over:
                actions.append(self.head.random(self._random_rng[s]))
                next_obs, reward, terminated, truncated = self._envs.step(index, actions[-1])
                obs.append(next_obs)
                rewards.append(reward)
                over = terminated or truncated
            self._steps[s] += len(actions)
            self._datasets[s].add(
                np.stack(obs[:-1]),
                np.stack(actions),
                returns_to_go(np.stack(rewards), self.config.gamma),
                np.array([len(actions)]),
            )
        if not self._started[s] and self._has_begun(s) and self.config.scaling_factor is None:
            self.model.set_scale(s, self._datasets[s].scaling_factor())

    def _commands(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        """What learner s asks for next: returns (num_step_episodes, n_objectives) and horizons.

        Each is a random non-dominated return, two steps sooner, with one random objective raised
        by up to its standard deviation over the non-dominated returns.
        """
        num, rng, data = self.config.num_step_episodes, self._command_rng[s], self._datasets[s]
        known = data.returns[data.front]
        choice = rng.integers(len(known), size=num)
        objective = rng.integers(self._num_objectives, size=num)
        returns = known[choice]
        returns[np.arange(num), objective] += rng.random(num) * known.std(axis=0)[objective]
        if self.config.max_return is not None:
            returns = np.minimum(returns, self.config.max_return)
        return returns, np.maximum(data.lengths[data.front][choice] - 2.0, 1.0)

    def _collect(self, model: _Model, learners: list[int]) -> None:
        """The episodes of one iteration, of all these learners in one loop."""
        num = self.config.num_step_episodes
        returns, horizons = map(np.stack, zip(*(self._commands(s) for s in learners), strict=True))
        random_share = 1.0 / horizons
        actor = _PCNActor(model, self.head, self.config.gamma, returns, horizons)
        obs = np.stack([[self._reset(s, s * num + n) for n in range(num)] for s in learners])
        # Place (i, m) of the batch holds episode rows[i, m] of learner learners[i].
        i = np.arange(len(learners))[:, None]
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
                noise=self.config.noise,
                random_share=random_share[i, rows],
            )
            next_obs = obs.copy()
            rewards = np.zeros((*rows.shape, self._num_objectives))
            for a, m in zip(*np.nonzero(alive), strict=True):
                n = rows[a, m]
                next_obs[a, m], rewards[a, m], terminated, truncated = self._envs.step(
                    learners[a] * num + n, actions[a, m]
                )
                lengths[a, n] += 1
                alive[a, m] = not (terminated or truncated)
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
        to_go = np.moveaxis(returns_to_go(np.moveaxis(rewards, 2, 0), self.config.gamma), 0, 2)
        taken = np.arange(len(history)) < lengths[..., None]
        for a, s in enumerate(learners):
            keep = taken[a]
            self._datasets[s].add(obs[a][keep], actions[a][keep], to_go[a][keep], lengths[a])
            self._steps[s] += int(lengths[a].sum())

    def _learn(self, model: _Model, learners: list[int]) -> None:
        """The updates of one iteration, each learner on batches of its own."""
        for done in range(0, self.config.num_model_updates, BLOCK):
            num = min(BLOCK, self.config.num_model_updates - done)
            batches = [
                self._datasets[s].draw(num, self.config.batch_size, self._learn_rng[s])
                for s in learners
            ]
            obs, commands, actions = (
                torch.from_numpy(np.stack(parts, axis=1)).to(model.device)
                for parts in zip(*batches, strict=True)
            )
            for u in range(num):
                loss = self.head.loss(model(obs[u], commands[u]), actions[u])
                model.network.backward(loss)
                model.adam(self.config.learning_rate)


class _Model:
    """The networks of S learners, their scaling factors, and their states of Adam.

    Each learner counts its own updates, so that rows of a model can be trained without the rest.
    """

    def __init__(
        self,
        obs_dim: int,
        command_dim: int,
        width: int,
        num_outputs: int,
        generators: Sequence[np.random.Generator],
        device: torch.device,
    ) -> None:
        self.device = device
        shapes = [(obs_dim, width), (command_dim, width), (width, width), (width, num_outputs)]
        self.network = StackedLinear(shapes, generators, device)
        num = len(generators)
        self.scale = torch.ones(num, 1, command_dim, device=device)
        self.mean = torch.zeros_like(self.network.flat)
        self.square = torch.zeros_like(self.network.flat)
        self.updates = torch.zeros(num, 1, device=device)

    def set_scale(self, learner: int, factors: np.ndarray) -> None:
        self.scale[learner, 0] = torch.as_tensor(factors, dtype=torch.float32)

    def __call__(self, obs: torch.Tensor, commands: torch.Tensor) -> torch.Tensor:
        """(S, N, obs_dim), (S, N, n_objectives + 1) → (S, N, n_outputs)."""
        net = self.network
        state = torch.sigmoid(net(0, obs))
        command = torch.sigmoid(net(1, commands * self.scale))
        return net(3, torch.relu(net(2, state * command)))

    @torch.no_grad()
    def adam(self, learning_rate: float) -> None:
        """One step of Adam (Kingma and Ba 2015) with its usual constants."""
        grad = self.network.flat.grad
        assert grad is not None
        self.updates += 1
        self.mean.lerp_(grad, 0.1)
        self.square.mul_(0.999).addcmul_(grad, grad, value=0.001)
        rate = -learning_rate / (1 - 0.9**self.updates)
        root = torch.sqrt(self.square / (1 - 0.999**self.updates)).add_(1e-8)
        self.network.flat.add_((self.mean * rate).div_(root))

    def rows(self, learners: Sequence[int]) -> _Model:
        """The model of these learners alone, in memory of its own."""
        other = object.__new__(_Model)
        other.device = self.device
        other.network = self.network.copy()
        other.network.keep(learners)
        for name in ("scale", "mean", "square", "updates"):
            setattr(other, name, getattr(self, name)[learners])
        return other

    @torch.no_grad()
    def put_back(self, learners: Sequence[int], other: _Model) -> None:
        """Take over what was learned with `rows`."""
        self.network.flat[learners] = other.network.flat
        for name in ("mean", "square", "updates"):
            getattr(self, name)[learners] = getattr(other, name)


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
        return _PCNActor(agent.model, agent.head, agent.config.gamma, returns, horizons)


class _PCNActor:
    """Episodes on the way to what they were asked for.

    With G = r + gamma·G', an episode that should bring R in all should, after the reward r, still
    bring (R − r) / gamma, in one step less.
    """

    def __init__(
        self,
        model: _Model,
        head: ActionHead,
        gamma: float,
        returns: np.ndarray,
        horizons: np.ndarray,
    ) -> None:
        self._model, self._head, self._gamma = model, head, gamma
        self._returns, self._horizons = returns, horizons

    @torch.no_grad()
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
