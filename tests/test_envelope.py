"""Envelope Q-learning against the paper, and learners that share a batch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from dask_mohpo import hypervolume
from dask_mohpo.agents._weights import random_weights
from dask_mohpo.agents.envelope import MIN_PRIORITY, Envelope, EnvelopeConfig, search_space
from dask_mohpo.errors import EnvironmentSpecError, UsageError
from dask_mohpo.evaluation import Evaluator

ENV_ID = "deep-sea-treasure-v0"
SMALL: dict[str, Any] = {
    "net_arch": (16, 16),
    "batch_size": 8,
    "num_sample_w": 3,
    "learning_starts": 20,
    "target_net_update_freq": 10,
}


def agent(seeds: tuple[int, ...] = (1,), steps: int = 100, **config: Any) -> Envelope:
    values = EnvelopeConfig.from_mapping({**SMALL, **config})
    return Envelope(values, ENV_ID, seeds, total_timesteps=steps)


def front(trained: Envelope, seeds: tuple[int, ...]) -> list[np.ndarray]:
    return Evaluator(ENV_ID, seeds, gamma=0.99, num_episodes=1).fronts(trained.policies(10))


def randomise(one: Envelope) -> torch.Generator:
    """Networks that differ, and whose values differ between weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for network in (one._online, one._target):
            network.flat.normal_(0, 0.7, generator=generator)
    return generator


def slow_targets(
    one: Envelope,
    rewards: torch.Tensor,
    next_obs: torch.Tensor,
    terminated: torch.Tensor,
    weights: torch.Tensor,
) -> np.ndarray:
    """Equation 6 of the paper with double Q-learning, one transition and weight after the other."""
    learners, batch = next_obs.shape[:2]
    num_w, objectives = weights.shape[1:]
    result = np.zeros((learners, batch, num_w, objectives))

    def q(network: Any, s: int, b: int, w: int) -> np.ndarray:
        rows = next_obs[:, b : b + 1], weights[:, w : w + 1]
        with torch.no_grad():
            return one.q_values(network, *rows)[s, 0].numpy()

    for s in range(learners):
        for b in range(batch):
            for i in range(num_w):
                best, chosen = -np.inf, np.zeros(objectives)
                for j in range(num_w) if one.config.envelope else [i]:
                    online, target = q(one._online, s, b, j), q(one._target, s, b, j)
                    for action in range(len(online)):
                        score = float(online[action] @ weights[s, i].numpy())
                        if score > best:
                            best, chosen = score, target[action]
                alive = 1.0 - float(terminated[s, b])
                result[s, b, i] = rewards[s, b].numpy() + one.config.gamma * alive * chosen
    return result


@pytest.mark.parametrize("envelope", [True, False])
def test_targets_are_those_of_the_paper(envelope: bool) -> None:
    one = agent((1, 2), envelope=envelope, gamma=0.9)
    generator = randomise(one)
    rewards = torch.randn(2, 5, 2, generator=generator)
    next_obs = torch.randn(2, 5, one._envs.obs_dim, generator=generator)
    terminated = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0]] * 2)
    weights = torch.rand(2, 3, 2, generator=generator)
    row_weights = weights.unsqueeze(1).expand(2, 5, 3, 2).flatten(1, 2)

    targets = one._targets(rewards, next_obs, terminated, weights, row_weights)

    expected = slow_targets(one, rewards, next_obs, terminated, weights)
    np.testing.assert_allclose(targets.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_other_preferences_matter_to_an_envelope_target() -> None:
    """Or the test above could not tell the two kinds of targets apart."""
    both = []
    for envelope in (True, False):
        one = agent((1,), envelope=envelope)
        generator = randomise(one)
        next_obs = torch.randn(1, 6, one._envs.obs_dim, generator=generator)
        weights = torch.rand(1, 3, 2, generator=generator)
        rows = weights.unsqueeze(1).expand(1, 6, 3, 2).flatten(1, 2)
        zero = torch.zeros(1, 6, 2)
        both.append(one._targets(zero, next_obs, torch.zeros(1, 6), weights, rows))
    assert not torch.allclose(both[0], both[1])


def test_each_pair_of_next_state_and_weight_is_computed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = agent()
    one.train(25)
    rows = []
    original = Envelope.q_values

    def count(self: Envelope, network: Any, obs: torch.Tensor, weights: torch.Tensor) -> Any:
        rows.append(obs.shape[1])
        return original(self, network, obs, weights)

    monkeypatch.setattr(Envelope, "q_values", count)
    one._update()
    # online and target network at the next states, and the online network at the states
    assert rows == [8 * 3] * 3


@pytest.mark.parametrize("homotopy", [0.0, 0.3, 1.0])
def test_the_loss_is_that_of_the_paper(homotopy: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """(1 − λ)·L_A + λ·L_B, and the errors under the preferences as priorities."""
    one = agent(
        (1, 2),
        initial_homotopy_lambda=homotopy,
        final_homotopy_lambda=homotopy,
        learning_starts=10**6,
        max_grad_norm=None,
        per_alpha=0.5,
    )
    one.train(40)
    randomise(one)
    rngs, reference = copy.deepcopy(one._learn_rng), one._online.copy()
    index = one._buffer.draw(8, rngs)
    obs, actions, rewards, next_obs, terminated = map(
        torch.from_numpy, one._buffer.transitions(index)
    )
    weights = torch.from_numpy(
        np.stack([random_weights(rng, 3, 2) for rng in rngs]).astype(np.float32)
    )
    targets = torch.from_numpy(slow_targets(one, rewards, next_obs, terminated, weights)).float()
    loss, surprise = torch.zeros(()), np.zeros((2, 8))
    for s in range(2):
        for b in range(8):
            for i in range(3):
                rows = obs[:, b : b + 1], weights[:, i : i + 1]
                q = one.q_values(reference, *rows)[s, 0, int(actions[s, b])]
                error = q - targets[s, b, i]
                scalar = torch.dot(weights[s, i], error)
                loss = loss + (1 - homotopy) * error.square().mean() / (8 * 3)
                loss = loss + homotopy * scalar.square() / (8 * 3)
                surprise[s, b] += abs(float(scalar.detach())) / 3
    reference.backward(loss)
    priorities: list[np.ndarray] = []
    monkeypatch.setattr(one._buffer, "set_priorities", lambda _, values: priorities.append(values))

    one._update()

    assert one._online.flat.grad is not None and reference.flat.grad is not None
    torch.testing.assert_close(one._online.flat.grad, reference.flat.grad, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(
        priorities[0], np.maximum(surprise, MIN_PRIORITY) ** 0.5, rtol=1e-3, atol=1e-5
    )


def test_the_same_seed_gives_the_same_front_bit_for_bit() -> None:
    fronts = []
    for _ in range(2):
        trained = agent((4,))
        trained.train(100)
        fronts.append(front(trained, (4,))[0])
    assert np.array_equal(fronts[0], fronts[1])
    other = agent((5,))
    other.train(100)
    assert not torch.equal(other._online.flat, trained._online.flat)


@pytest.mark.parametrize("per", [True, False])
def test_a_learner_does_not_depend_on_who_shares_the_batch(per: bool) -> None:
    alone, together = agent((7,), per=per), agent((3, 7, 9), per=per)
    alone.train(60)
    together.train(60)
    torch.testing.assert_close(
        together._online.flat[1], alone._online.flat[0], rtol=1e-4, atol=1e-5
    )
    assert np.array_equal(together._obs[1], alone._obs[0])
    for mine, shared in zip(
        alone._buffer.transitions(np.arange(60)[None]),
        together._buffer.transitions(np.tile(np.arange(60), (3, 1))),
        strict=True,
    ):
        assert np.array_equal(shared[1], mine[0])


def test_training_in_pieces_is_training_at_once() -> None:
    whole, pieces = agent(), agent()
    whole.train(80)
    for until in (1, 33, 34, 80):
        pieces.train(until)
    assert torch.equal(whole._online.flat, pieces._online.flat)
    assert list(pieces.steps) == [80]


def test_a_hard_update_copies_now_and_then() -> None:
    one = agent(target_net_update_freq=30, learning_starts=0)
    before = one._target.flat.clone()
    one.train(29)
    assert torch.equal(one._target.flat, before)
    one.train(30)
    assert torch.equal(one._target.flat, one._online.flat)
    one.train(31)
    assert not torch.equal(one._target.flat, one._online.flat)


def test_a_soft_update_follows_at_every_step() -> None:
    one = agent(tau=0.25, learning_starts=0)
    before = one._target.flat.clone()
    one.train(1)
    torch.testing.assert_close(one._target.flat, before + 0.25 * (one._online.flat - before))


class FixedDraw:
    """The generator of a learner's actions, with each step's draw against ε given."""

    def __init__(self, generator: np.random.Generator, draw: float) -> None:
        self.generator, self.draw = generator, draw

    def random(self, size: int) -> np.ndarray:
        return np.full(size, self.draw)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)


@pytest.mark.parametrize(
    ("decay_steps", "final", "draw", "first_greedy_step"),
    [
        (0.5, 0.0, 0.5, 50),
        (0.5, 0.0, 0.0, 100),
        (40, 0.0, 0.75, 10),
        (400, 0.0, 0.5, 200),
        (0.01, 0.25, 0.25, 2),
        (0.5, 0.25, 0.2, 200),
        (None, 0.0, 0.9, 200),
    ],
)
def test_epsilon_falls_over_steps_or_a_fraction_of_the_budget(
    decay_steps: float | None,
    final: float,
    draw: float,
    first_greedy_step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 1 to its final value: an action is greedy from where ε is at most the draw."""
    one = agent(
        steps=200, epsilon_decay_steps=decay_steps, final_epsilon=final, learning_starts=10**6
    )
    monkeypatch.setattr(one, "_act_rng", [FixedDraw(one._act_rng[0], draw)])
    greedy: list[int] = []
    original = Envelope.greedy

    def note(self: Envelope, obs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        greedy.append(self._step)
        return original(self, obs, weights)

    monkeypatch.setattr(Envelope, "greedy", note)
    one.train(200)
    assert greedy == list(range(first_greedy_step, 200))


@pytest.mark.parametrize(
    ("decay_steps", "expected"), [(0.5, 0.5), (100, 0.25), (20, 1.0), (None, 0.0)]
)
def test_homotopy_rises_over_steps_or_a_fraction_of_the_budget(
    decay_steps: float | None, expected: float
) -> None:
    """The gradient at step 25 of 100 is that of a constant λ, and not that of another one."""

    def gradient(**config: Any) -> torch.Tensor:
        one = agent(learning_starts=24, max_grad_norm=None, **config)
        one.train(25)
        assert one._online.flat.grad is not None
        return one._online.flat.grad

    def constant(homotopy: float) -> torch.Tensor:
        return gradient(initial_homotopy_lambda=homotopy, final_homotopy_lambda=homotopy)

    found = gradient(homotopy_decay_steps=decay_steps)
    torch.testing.assert_close(found, constant(expected), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(found, constant(abs(expected - 0.1)), rtol=1e-3, atol=1e-7)


def test_what_is_remembered_ends_where_an_episode_terminates_but_not_where_it_is_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = agent(learning_starts=10**6)
    begins = []
    dim = one._envs.obs_dim

    def reset(index: int, seed: int) -> np.ndarray:
        begins.append(seed)
        return np.full(dim, -float(len(begins)), np.float32)

    def step(index: int, action: Any) -> tuple[np.ndarray, np.ndarray, bool, bool]:
        now = one._step
        return np.full(dim, now + 1.0, np.float32), np.array([now, 0.5]), now == 4, now == 2

    monkeypatch.setattr(one._envs, "reset", reset)
    monkeypatch.setattr(one._envs, "step", step)
    one._begin_episode(0)
    one.train(7)

    obs, _, rewards, next_obs, terminated = one._buffer.transitions(np.arange(7)[None])
    assert terminated[0].tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert next_obs[0, :, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert obs[0, :, 0].tolist() == [-1, 1, 2, -2, 4, -3, 6]
    assert rewards[0].tolist() == [[now, 0.5] for now in range(7)]
    assert len(set(begins)) == 3


def test_each_learners_gradient_is_cut_to_the_largest_norm() -> None:
    norms = []
    for limit in (None, 1e-3):
        one = agent((1, 2), max_grad_norm=limit)
        one.train(21)
        assert one._online.flat.grad is not None
        norms.append(torch.linalg.vector_norm(one._online.flat.grad, dim=1))
    assert norms[0].min() > 1e-3
    torch.testing.assert_close(norms[1], torch.full((2,), 1e-3), rtol=1e-2, atol=0)


def test_learning_begins_after_the_first_steps_and_repeats_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = agent(learning_starts=20, gradient_updates=3)
    updates: list[int] = []
    monkeypatch.setattr(Envelope, "_update", lambda self: updates.append(self._step))
    one.train(22)
    assert updates == [21] * 3 + [22] * 3


def test_a_policy_takes_the_action_that_its_weights_value_most() -> None:
    one = agent((1, 2))
    randomise(one)
    policies = one.policies(5)
    assert list(policies.counts) == [5, 5]
    policy = np.array([[0, 4, 2], [1, 1, 3]])
    actor = policies.start(policy)
    obs = np.random.default_rng(0).normal(size=(2, 3, one._envs.obs_dim)).astype(np.float32)

    def expected(s: int, n: int) -> int:
        w = torch.tensor([policy[s, n] / 4, 1 - policy[s, n] / 4], dtype=torch.float32)
        rows = torch.from_numpy(obs[:, n : n + 1]), w.expand(2, 1, 2)
        with torch.no_grad():
            return int((one.q_values(one._online, *rows)[s, 0] @ w).argmax())

    all_rows = [[expected(s, n) for n in range(3)] for s in range(2)]
    assert actor.act(obs).tolist() == all_rows
    kept = np.array([[2, 1], [0, 2]])
    actor.keep(kept)
    left = actor.act(np.take_along_axis(obs, kept[..., None], axis=1))
    assert left.tolist() == np.take_along_axis(np.array(all_rows), kept, axis=1).tolist()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rate": 0}, ["learning_rate = 0", "a number > 0"]),
        ({"gamma": 1.5}, ["gamma = 1.5", "[0, 1]"]),
        ({"initial_epsilon": 1.1}, ["initial_epsilon = 1.1", "[0, 1]"]),
        ({"final_epsilon": -0.1}, ["final_epsilon = -0.1", "[0, 1]"]),
        ({"per_alpha": 2}, ["per_alpha = 2.0", "[0, 1]"]),
        ({"initial_homotopy_lambda": -1}, ["initial_homotopy_lambda = -1.0", "[0, 1]"]),
        ({"final_homotopy_lambda": 2}, ["final_homotopy_lambda = 2.0", "[0, 1]"]),
        ({"net_arch": []}, ["net_arch = ()", "one or more integers ≥ 1"]),
        ({"net_arch": [64, 0]}, ["net_arch = (64, 0)", "one or more integers ≥ 1"]),
        ({"tau": 0}, ["tau = 0", "(0, 1]"]),
        ({"tau": 1.5}, ["tau = 1.5", "(0, 1]"]),
        ({"batch_size": 2.5}, ["batch_size = 2.5", "int"]),
        ({"batch_size": 0}, ["batch_size = 0", "an integer ≥ 1"]),
        ({"buffer_size": 0}, ["buffer_size = 0", "an integer ≥ 1"]),
        ({"gradient_updates": 0}, ["gradient_updates = 0", "an integer ≥ 1"]),
        ({"target_net_update_freq": 0}, ["target_net_update_freq = 0", "an integer ≥ 1"]),
        ({"num_sample_w": 0}, ["num_sample_w = 0", "an integer ≥ 1"]),
        ({"learning_starts": -1}, ["learning_starts = -1", "an integer ≥ 0"]),
        ({"epsilon_decay_steps": -1}, ["epsilon_decay_steps = -1", "a number > 0, or None"]),
        ({"homotopy_decay_steps": 0}, ["homotopy_decay_steps = 0", "a number > 0, or None"]),
        ({"max_grad_norm": 0}, ["max_grad_norm = 0", "a number > 0, or None"]),
        ({"per": "yes"}, ["per = 'yes'", "bool"]),
        ({"learning_rat": 1}, ["'learning_rat'", "Did you mean 'learning_rate'"]),
    ],
)
def test_mistakes_in_a_configuration(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        EnvelopeConfig.from_mapping(values)
    for word in words:
        assert word in str(raised.value)


def test_continuous_actions_are_refused_with_the_algorithm_that_takes_them() -> None:
    with pytest.raises(EnvironmentSpecError, match=r"discrete actions .* fit: pcn"):
        Envelope(EnvelopeConfig(), "mo-mountaincarcontinuous-v0", (1,), total_timesteps=10)


def test_the_built_in_space_gives_valid_configurations_of_both_kinds() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    kinds = set()
    for _ in range(20):
        config = EnvelopeConfig.from_mapping(values := search_space(study.ask()))
        hard = "target_net_update_freq" in values
        assert hard == (config.tau == 1.0)
        assert config.per == ("per_alpha" in values)
        assert 0 < (config.epsilon_decay_steps or 0) <= 1
        kinds.add((hard, config.per))
    assert len(kinds) == 4


class RandomPolicies:
    """Ten policies for each learner that take any action at random."""

    def __init__(self, num_learners: int) -> None:
        self.counts = [10] * num_learners
        self.generator = np.random.default_rng(0)

    def start(self, policy: np.ndarray) -> RandomPolicies:
        return self

    def act(self, obs: np.ndarray) -> np.ndarray:
        return self.generator.integers(4, size=obs.shape[:2])

    def observe(self, rewards: np.ndarray) -> None:
        """They do not care."""

    def keep(self, rows: np.ndarray) -> None:
        """All rows are alike."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_training_beats_random_policies() -> None:
    seeds = (10, 11, 12, 13, 14)
    config = EnvelopeConfig.from_mapping({"net_arch": [32, 32]})
    one = Envelope(config, ENV_ID, seeds, total_timesteps=3000)
    one.train(3000)
    trained = [hypervolume(f, (0, -50)) for f in front(one, seeds)]
    evaluator = Evaluator(ENV_ID, range(10), gamma=0.99, num_episodes=1)
    chance = [hypervolume(f, (0, -50)) for f in evaluator.fronts(RandomPolicies(10))]
    assert np.median(trained) > max(chance)


def test_minecart_runs() -> None:
    values = EnvelopeConfig.from_mapping(SMALL)
    one = Envelope(values, "minecart-v0", (1, 2), total_timesteps=150)
    one.train(150)
    assert torch.isfinite(one._online.flat).all()
    assert one.policies(10).counts[0] >= 10
