"""Envelope Q-learning against the paper, and learners that share a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest
import torch

from dask_mohpo import hypervolume
from dask_mohpo.agents._networks import MLP
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


def agents(
    configs: list[dict[str, Any]], seeds: list[int] | None = None, steps: int = 100, **common: Any
) -> Envelope:
    """Learners with a configuration each."""
    values = [EnvelopeConfig.from_mapping({**SMALL, **common, **config}) for config in configs]
    return Envelope(values, ENV_ID, seeds or [1] * len(configs), total_timesteps=steps)


def front(trained: Envelope, seeds: tuple[int, ...]) -> list[np.ndarray]:
    return Evaluator(ENV_ID, seeds, gamma=0.99, num_episodes=1).fronts(trained.policies(10))


def parameters(one: Envelope) -> torch.Tensor:
    return one.learning.online.flat


def remembered(one: Envelope, num: int) -> list[np.ndarray]:
    """obs, next_obs, rewards, discounts and actions of the first places of the replay memory."""
    num_learners = len(one.steps)
    out = np.zeros((num_learners, num, one._buffer.parts[-1]), np.float32)
    one._buffer.take(np.tile(np.arange(num), (num_learners, 1)), out)
    return np.split(out, one._buffer.parts[:-1], axis=-1)


def everywhere(one: Envelope) -> np.ndarray:
    """Greedy actions at many observations under many weights, one row for each learner."""
    num = len(one.steps)
    obs, weights = np.meshgrid(np.arange(11.0), np.linspace(0, 1, 7))
    rows = np.stack([obs.ravel(), obs.ravel()[::-1]], axis=1).astype(np.float32)
    pair = np.stack([weights.ravel(), 1 - weights.ravel()], axis=1)
    return one.learning.greedy(np.stack([rows] * num), np.stack([pair] * num))


def test_each_pair_of_state_and_weight_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = agent()
    one.train(25)
    rows = []
    original = MLP.forward

    def count(self: MLP, x: torch.Tensor | None = None) -> torch.Tensor:
        rows.append((self.input if x is None else x).shape[1])
        return original(self, x)

    monkeypatch.setattr(MLP, "forward", count)
    one._update()
    # the online network at the states and the next states, the target network at the next states
    assert rows == [2 * 8 * 3, 8 * 3]


def test_an_update_learns_from_what_was_drawn_and_its_errors_become_priorities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = agents([{"per_alpha": 0.5}, {"per_alpha": 1.0}], learning_starts=10**6)
    one.train(40)
    given: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(one._buffer, "set_priorities", lambda *values: given.append(values))
    one._update()
    assert given == []
    index = one._drawn
    assert index is not None and index.shape == (2, 8)
    for s in range(2):
        assert np.array_equal(one.learning.batch[s], one._buffer.rows[s, index[s]])
    assert one.learning.weights.shape == (2, 3, 2)
    np.testing.assert_allclose(one.learning.weights.sum(axis=-1), 1, rtol=1e-6)
    surprise = one.learning.surprise().astype(float)
    surprise[0, 0] = one.learning.surprise()[0, 0] = 1e-6
    one._update()
    [(places, priorities)] = given
    assert np.array_equal(places, index)
    np.testing.assert_allclose(priorities[0, 1:], np.maximum(surprise[0, 1:], 0.01) ** 0.5)
    np.testing.assert_allclose(priorities[1], np.maximum(surprise[1], 0.01))
    assert priorities[0, 0] == pytest.approx(MIN_PRIORITY**0.5, rel=1e-6)
    assert one._drawn is not None and not np.array_equal(one._drawn, index)


def test_the_same_seed_gives_the_same_front_bit_for_bit() -> None:
    fronts = []
    for _ in range(2):
        trained = agent((4,))
        trained.train(100)
        fronts.append(front(trained, (4,))[0])
    assert np.array_equal(fronts[0], fronts[1])
    other = agent((5,))
    other.train(100)
    assert not torch.equal(parameters(other), parameters(trained))


def test_the_same_seed_gives_the_same_parameters_bit_for_bit() -> None:
    first, second = (agents([{}, {"per": False}, {"tau": 0.1}], [3, 4, 5]) for _ in range(2))
    first.train(100)
    second.train(100)
    assert torch.equal(parameters(first), parameters(second))
    assert torch.equal(first.learning.target.flat, second.learning.target.flat)


@pytest.mark.parametrize("per", [True, False])
def test_a_learner_does_not_depend_on_who_shares_the_batch(per: bool) -> None:
    alone, together = agent((7,), per=per), agent((3, 7, 9), per=per)
    alone.train(60)
    together.train(60)
    torch.testing.assert_close(parameters(together)[1], parameters(alone)[0], rtol=1e-4, atol=1e-5)
    assert np.array_equal(together._obs[1], alone._obs[0])
    for mine, shared in zip(remembered(alone, 60), remembered(together, 60), strict=True):
        assert np.array_equal(shared[1], mine[0])


DIFFERENT: list[dict[str, Any]] = [
    {"learning_rate": 3e-3},
    {"gamma": 0.7},
    {"initial_epsilon": 0.3},
    {"final_epsilon": 0.5},
    {"epsilon_decay_steps": 0.1},
    {"epsilon_decay_steps": None},
    {"tau": 0.05},
    {"target_net_update_freq": 7},
    {"buffer_size": 30},
    {"per": False},
    {"per_alpha": 0.1},
    {"initial_homotopy_lambda": 0.5},
    {"final_homotopy_lambda": 0.3},
    {"homotopy_decay_steps": 60},
    {"max_grad_norm": None},
    {"max_grad_norm": 0.05},
    {"per": False, "buffer_size": 60, "tau": 0.2, "gamma": 0.9, "learning_rate": 2e-3},
]


def test_learners_with_configurations_of_their_own_learn_what_they_would_alone() -> None:
    """One batch in which each differs in one thing from the first, whose seed all of them have."""
    steps, num = 200, len(DIFFERENT) + 1
    common: dict[str, Any] = {"learning_rate": 1e-3}
    together = agents([{}, *DIFFERENT], steps=steps, **common)
    together.train(steps)
    actions = everywhere(together)
    plain: torch.Tensor | None = None
    for s, config in enumerate([{}, *DIFFERENT]):
        alone = agent(steps=steps, **{**common, **config})
        alone.train(steps)
        for shared, mine in [
            (parameters(together)[s], parameters(alone)[0]),
            (together.learning.target.flat[s], alone.learning.target.flat[0]),
        ]:
            assert torch.allclose(shared, mine, rtol=1e-3, atol=1e-4), config
        assert np.array_equal(actions[s], everywhere(alone)[0]), config
        size = int(alone._buffer.sizes[0])
        assert together._buffer.sizes[s] == size
        assert np.array_equal(together._buffer.rows[s, :size], alone._buffer.rows[0, :size])
        found = parameters(alone)[0]
        if plain is None:
            plain = found
        else:
            # or what it differs in would not matter
            assert (found - plain).abs().max() > 0.01, config
    assert len(np.unique(actions, axis=0)) > num / 2


def test_what_learners_must_share_is_checked() -> None:
    with pytest.raises(UsageError, match=r"must agree in net_arch, .* precision"):
        agents([{}, {"precision": "bf16"}])
    with pytest.raises(UsageError, match="1 configurations for 2 learners"):
        agents([{}], [1, 2])


def test_bfloat16_trains_nearly_alike() -> None:
    both = [agent((1, 2), net_arch=(32, 32), precision=p) for p in ("float32", "bf16")]
    for one in both:
        one.train(21)  # a single update
    exact, near = map(parameters, both)
    rounds = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert torch.equal(near, exact) != rounds
    torch.testing.assert_close(near, exact, rtol=0, atol=2.1 * 3e-4)
    for one in both:
        one.train(100)
        assert torch.isfinite(parameters(one)).all()


def test_training_in_pieces_is_training_at_once() -> None:
    whole, pieces = agent(), agent()
    whole.train(80)
    for until in (1, 33, 34, 80):
        pieces.train(until)
    assert torch.equal(parameters(whole), parameters(pieces))
    assert list(pieces.steps) == [80]


def test_a_hard_update_copies_now_and_then() -> None:
    one = agent(target_net_update_freq=30, learning_starts=0)
    before = one.learning.target.flat.clone()
    one.train(29)
    assert torch.equal(one.learning.target.flat, before)
    one.train(30)
    assert torch.equal(one.learning.target.flat, parameters(one))
    one.train(31)
    assert not torch.equal(one.learning.target.flat, parameters(one))


def test_a_soft_update_follows_at_every_step() -> None:
    one = agent(tau=0.25, learning_starts=0)
    before = one.learning.target.flat.clone()
    one.train(1)
    torch.testing.assert_close(one.learning.target.flat, before + 0.25 * (parameters(one) - before))


class FixedDraws:
    """Each step's draw against ε, and the same one for the random action."""

    def __init__(self, draw: float) -> None:
        self.draw = draw

    def next(self) -> np.ndarray:
        return np.full((1, 2), self.draw)


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
    monkeypatch.setattr(one, "_act_draws", FixedDraws(draw))
    greedy: list[int] = []
    original = one.learning.greedy

    def note(obs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        greedy.append(one._step)
        return original(obs, weights)

    monkeypatch.setattr(one.learning, "greedy", note)
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
        return one.learning.online.grad

    def constant(homotopy: float) -> torch.Tensor:
        return gradient(initial_homotopy_lambda=homotopy, final_homotopy_lambda=homotopy)

    found = gradient(homotopy_decay_steps=decay_steps)
    torch.testing.assert_close(found, constant(expected), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(found, constant(abs(expected - 0.1)), rtol=1e-3, atol=1e-7)


class Script:
    """An env whose steps, over all episodes, say where they terminate or are cut short."""

    def __init__(self) -> None:
        self.begins: list[int | None] = []
        self.now = 0

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.begins.append(seed)
        return np.full(2, -float(len(self.begins)), np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, np.ndarray, bool, bool, dict[str, Any]]:
        now = self.now
        self.now += 1
        obs = np.full(2, now + 1.0, np.float32)
        return obs, np.array([now, 0.5]), now in (4, 6), now in (2, 6), {}


def test_what_is_remembered_ends_where_an_episode_terminates_but_not_where_it_is_cut_short() -> (
    None
):
    one = agents([{"gamma": 0.9}, {"gamma": 0.5}], learning_starts=10**6)
    scripts = [Script(), Script()]
    one._envs.envs[:] = scripts  # type: ignore[assignment]
    for learner in range(2):
        one._begin_episode(learner)
    one.train(8)

    obs, next_obs, rewards, discounts, _ = remembered(one, 8)
    for s, gamma in enumerate([0.9, 0.5]):
        expected = [gamma, gamma, gamma, gamma, 0, gamma, 0, gamma]
        np.testing.assert_allclose(discounts[s, :, 0], expected, rtol=1e-6)
        assert next_obs[s, :, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert obs[s, :, 0].tolist() == [-1, 1, 2, -2, 4, -3, 6, -4]
        assert rewards[s].tolist() == [[now, 0.5] for now in range(8)]
        assert len(set(scripts[s].begins)) == 4


def test_each_learners_gradient_is_cut_to_its_largest_norm() -> None:
    norms = []
    for limits in [(None, None, None), (1e-3, None, 2e-3)]:
        one = agents([{"max_grad_norm": limit} for limit in limits], [1, 2, 3])
        one.train(21)
        norms.append(torch.linalg.vector_norm(one.learning.online.grad, dim=1))
    free, cut = norms
    assert free.min() > 2e-3
    torch.testing.assert_close(cut, torch.tensor([1e-3, free[1], 2e-3]), rtol=1e-2, atol=0)


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
    parameters(one).normal_(0, 0.7, generator=torch.Generator().manual_seed(0))
    policies = one.policies(5)
    assert list(policies.counts) == [5, 5]
    policy = np.array([[0, 4, 2], [1, 1, 3]])
    actor = policies.start(policy)
    obs = np.random.default_rng(0).normal(size=(2, 3, one._envs.obs_dim)).astype(np.float32)

    def expected(s: int, n: int) -> int:
        first = policy[s, n] / 4
        weights = np.array([first, 1 - first])
        x = torch.from_numpy(np.concatenate([obs[s, n], weights]).astype(np.float32))
        q = one.learning.online.rows([s]).mlp(x.view(1, 1, -1)).view(-1, 2).numpy()
        return int((q @ weights).argmax())

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
        ({"precision": "fp8"}, ["precision = 'fp8'", "'float32'", "'bf16'"]),
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
    seeds = (10, 11, 12)
    config = EnvelopeConfig.from_mapping(
        {"net_arch": [32, 32], "batch_size": 32, "num_sample_w": 2, "learning_rate": 1e-3}
    )
    one = Envelope(config, ENV_ID, seeds, total_timesteps=2000)
    one.train(2000)
    trained = [hypervolume(f, (0, -50)) for f in front(one, seeds)]
    evaluator = Evaluator(ENV_ID, range(10), gamma=0.99, num_episodes=1)
    chance = [hypervolume(f, (0, -50)) for f in evaluator.fronts(RandomPolicies(10))]
    assert np.median(trained) > max(chance)


def test_minecart_runs() -> None:
    values = EnvelopeConfig.from_mapping(SMALL)
    one = Envelope(values, "minecart-v0", (1, 2), total_timesteps=150)
    one.train(150)
    assert torch.isfinite(parameters(one)).all()
    assert one.policies(10).counts[0] >= 10
