"""Envelope Q-learning against the paper, and learners that share a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest
import torch

from dask_mohpo import hypervolume
from dask_mohpo.agents.envelope import Envelope, EnvelopeConfig, search_space
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
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # networks that differ, and values that differ between weights
        for network in (one._online, one._target):
            network.flat.normal_(0, 0.7, generator=generator)
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
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            one._online.flat.normal_(0, 0.7, generator=generator)
            one._target.flat.normal_(0, 0.7, generator=generator)
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


@pytest.mark.parametrize(
    ("decay_steps", "random_steps"), [(0.5, 100), (100, 100), (None, 200), (0.01, 2)]
)
def test_exploration_decays_over_steps_or_a_fraction_of_the_budget(
    decay_steps: float | None, random_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ε from 1 to 0, greedy actions begin to prevail as it falls, and are all after it."""
    one = agent(
        steps=200, epsilon_decay_steps=decay_steps, final_epsilon=0.0, learning_starts=10**6
    )
    greedy: list[int] = []
    original = Envelope.greedy

    def note(self: Envelope, obs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        greedy.append(self._step)
        return original(self, obs, weights)

    monkeypatch.setattr(Envelope, "greedy", note)
    one.train(200)
    after = [step for step in greedy if step >= random_steps]
    assert after == list(range(random_steps, 200))
    assert len(greedy) < 200 or random_steps <= 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rate": 0}, ["learning_rate = 0", "> 0"]),
        ({"gamma": 1.5}, ["gamma = 1.5", "[0, 1]"]),
        ({"net_arch": []}, ["net_arch", "integers ≥ 1"]),
        ({"net_arch": [64, 0]}, ["net_arch = (64, 0)"]),
        ({"tau": 0}, ["tau = 0", "(0, 1]"]),
        ({"batch_size": 2.5}, ["batch_size = 2.5", "int"]),
        ({"num_sample_w": 0}, ["num_sample_w = 0", "≥ 1"]),
        ({"epsilon_decay_steps": -1}, ["epsilon_decay_steps = -1"]),
        ({"max_grad_norm": 0}, ["max_grad_norm = 0"]),
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_pays() -> None:
    seeds = (10, 11)
    config = EnvelopeConfig.from_mapping({"net_arch": [64, 64]})
    one = Envelope(config, ENV_ID, seeds, total_timesteps=5000)
    untrained = [hypervolume(f, (0, -50)) for f in front(one, seeds)]
    one.train(5000)
    trained = [hypervolume(f, (0, -50)) for f in front(one, seeds)]
    assert np.mean(trained) > 500 > np.mean(untrained)


def test_minecart_runs() -> None:
    values = EnvelopeConfig.from_mapping(SMALL)
    one = Envelope(values, "minecart-v0", (1, 2), total_timesteps=150)
    one.train(150)
    assert torch.isfinite(one._online.flat).all()
    assert one.policies(10).counts[0] >= 10
