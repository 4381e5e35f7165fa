"""Pareto Conditioned Networks: commands, episodes, and learners that share a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest
import torch

from dask_mohpo import hypervolume
from dask_mohpo.agents._episodes import (
    Episodes,
    best_episodes,
    crowding_distance,
    returns_to_go,
    spread,
)
from dask_mohpo.agents.pcn import PCN, PCNConfig, search_space
from dask_mohpo.errors import EnvironmentSpecError, UsageError
from dask_mohpo.evaluation import Evaluator

ENV_ID = "deep-sea-treasure-v0"
CONTINUOUS = "mo-mountaincarcontinuous-v0"
SMALL: dict[str, Any] = {
    "hidden_dim": 16,
    "batch_size": 16,
    "num_er_episodes": 10,
    "num_step_episodes": 4,
    "num_model_updates": 3,
    "max_buffer_size": 20,
}


def agent(seeds: tuple[int, ...] = (1,), steps: int = 1000, **config: Any) -> PCN:
    values = PCNConfig.from_mapping({**SMALL, **config})
    return PCN(values, ENV_ID, seeds, total_timesteps=steps)


def agents(
    configs: list[dict[str, Any]], seeds: list[int], steps: int, env_id: str = ENV_ID, **common: Any
) -> PCN:
    """Learners with a configuration each."""
    values = [PCNConfig.from_mapping({**SMALL, **common, **config}) for config in configs]
    return PCN(values, env_id, seeds, total_timesteps=steps)


def front(trained: PCN, seeds: tuple[int, ...], num: int = 10) -> list[np.ndarray]:
    return Evaluator(ENV_ID, seeds, gamma=1.0, num_episodes=1).fronts(trained.policies(num))


def test_returns_to_go() -> None:
    rewards = np.array([[0.0, -1.0], [0.0, -1.0], [8.0, -1.0]])
    np.testing.assert_allclose(returns_to_go(rewards, 1.0), [[8, -3], [8, -2], [8, -1]])
    half = np.array([[2, -1.75], [4, -1.5], [8, -1]])
    np.testing.assert_allclose(returns_to_go(rewards, 0.5), half)
    both = np.stack([rewards, rewards], axis=1)
    found = returns_to_go(both, np.array([[1.0], [0.5]]))
    np.testing.assert_allclose(found[:, 0], returns_to_go(rewards, 1.0))
    np.testing.assert_allclose(found[:, 1], half)


def test_crowding_distance() -> None:
    points = np.array([[0.0, 10.0], [1.0, 6.0], [4.0, 5.0], [10.0, 0.0]])
    # the middle ones: (4 - 0)/10 + (10 - 5)/10 and (10 - 1)/10 + (6 - 0)/10
    expected: np.ndarray = np.array([np.inf, 0.9, 1.5, np.inf])
    np.testing.assert_allclose(crowding_distance(points), expected)
    assert crowding_distance(np.ones((3, 2))).tolist() == [0, 0, 0]


def test_the_front_is_kept_before_all_else_and_repeats_last() -> None:
    returns = np.array([[1.0, -1], [5.0, -5], [1.0, -1], [0.5, -9], [9.0, -9], [4.9, -5.1]])
    kept = best_episodes(returns, 3)
    assert set(kept.tolist()) == {1, 2, 4}  # of the equal ones the latest
    assert best_episodes(returns, 6)[-1] == 0


def test_spread_takes_the_ends_and_then_the_farthest() -> None:
    points = np.array([[0.0, 4.0], [1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [4.0, 0.0]])
    assert spread(points, 3).tolist() == [0, 2, 4]
    assert spread(points, 9).tolist() == [0, 1, 2, 3, 4]
    assert len(spread(points, 1)) == 1


def test_episodes_know_what_was_still_to_come() -> None:
    data = Episodes(2, 2, (1,), (), np.int64)
    data.add(
        np.arange(3, dtype=np.float32)[:, None],
        np.array([0, 1, 2]),
        np.array([[5.0, -2], [5.0, -1], [1.0, -1]]),
        np.array([2, 1]),  # an episode of two steps, then one of a single step
    )
    assert data.returns.tolist() == [[5, -2], [1, -1]]
    assert data._commands.tolist() == [[5, -2, 2], [5, -1, 1], [1, -1, 1]]
    data.add(np.full((1, 1), 9, np.float32), np.array([3]), np.array([[0.0, -1]]), np.array([1]))
    assert data.returns.tolist() == [[5, -2], [1, -1]]  # the dominated one did not stay
    obs, _, actions = data.draw(4, 8, np.random.default_rng(0))
    assert obs.shape == (4, 8, 1)
    assert set(actions.ravel().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_command_shrinks_by_what_came_in_and_by_a_step(gamma: float) -> None:
    one = agent(gamma=gamma, scaling_factor=[0.1, 0.1, 0.01])
    one.train(200)
    policies = one.policies(3)
    [(returns, horizons)] = policies._commands
    actor: Any = policies.start(np.zeros((1, 1), np.int64))
    actor.observe(np.array([[[2.0, -1.0]]]))
    np.testing.assert_allclose(actor._returns[0, 0], (returns[0] - [2, -1]) / gamma)
    assert actor._horizons[0, 0] == max(horizons[0] - 1, 1)
    for _ in range(200):
        actor.observe(np.array([[[0.0, -1.0]]]))
    assert actor._horizons[0, 0] == 1
    assert np.isfinite(actor._returns).all()


def test_commands_go_beyond_what_is_known_but_not_beyond_the_most() -> None:
    one = agent(max_return=[30.0, -1.0])
    one.train(300)
    returns, horizons = one._commands(0)
    data = one._datasets[0]
    known = data.returns[data.front]
    assert returns.shape == (4, 2)
    assert (returns[:, 0] <= 30.0).all() and (returns[:, 1] <= -1.0).all()
    nearest = [known[np.abs(known - r).sum(axis=1).argmin()] for r in returns]
    assert all(((r >= k - 1e-9) | (r >= -1.0)).all() for r, k in zip(returns, nearest, strict=True))
    assert (horizons >= 1).all()


def test_the_same_seed_gives_the_same_front_bit_for_bit() -> None:
    fronts = []
    for _ in range(2):
        trained = agent((4,))
        trained.train(1000)
        fronts.append(front(trained, (4,))[0])
    assert np.array_equal(fronts[0], fronts[1])


def test_a_learner_does_not_depend_on_who_shares_the_batch() -> None:
    alone, together = agent((7,), steps=400), agent((3, 7, 9), steps=400)
    alone.train(400)
    together.train(400)
    mine, shared = alone.model.network.flat[0], together.model.network.flat[1]
    torch.testing.assert_close(shared, mine, rtol=1e-3, atol=1e-4)
    assert np.array_equal(together._datasets[1].returns, alone._datasets[0].returns)
    assert together.steps[1] == alone.steps[0]


DIFFERENT: list[dict[str, Any]] = [
    {"learning_rate": 1e-2},
    {"gamma": 0.8},
    {"scaling_factor": [0.1, 0.1, 0.01]},
    {"max_return": [1.0, -8.0]},
    {"num_er_episodes": 4},
    {"max_buffer_size": 6},
    {"gamma": 0.9, "max_buffer_size": 12, "num_er_episodes": 15, "learning_rate": 1e-3},
]


def assert_learned_alike(together: PCN, s: int, alone: PCN, what: Any) -> None:
    """Learner s has what one has that trained alone."""
    model, own = together.model, alone.model
    for shared, mine in [
        (model.network.flat[s], own.network.flat[0]),
        (model.scale[s], own.scale[0]),
    ]:
        assert torch.allclose(shared, mine, rtol=1e-3, atol=1e-4), what
    data, own_data = together._datasets[s], alone._datasets[0]
    assert together.steps[s] == alone.steps[0], what
    np.testing.assert_allclose(data.returns, own_data.returns, rtol=1e-9)
    assert np.array_equal(data.lengths, own_data.lengths), what
    np.testing.assert_allclose(data._actions, own_data._actions, rtol=1e-3, atol=1e-4)


def test_learners_with_configurations_of_their_own_learn_what_they_would_alone() -> None:
    """One batch in which each differs from the first, whose seed all of them have."""
    steps, configs = 400, [{}, *DIFFERENT]
    together = agents(configs, [7] * len(configs), steps)
    together.train(steps)
    plain: torch.Tensor | None = None
    for s, config in enumerate(configs):
        alone = agent((7,), steps=steps, **config)
        alone.train(steps)
        assert_learned_alike(together, s, alone, config)
        mine = alone.model.network.flat[0]
        if plain is None:
            plain = mine
        else:
            # or what it differs in would not matter
            assert (mine - plain).abs().max() > 1e-2, config
    assert [len(data.lengths) for data in together._datasets][-2:] == [6, 12]


def test_each_learner_has_noise_of_its_own() -> None:
    short = {"num_er_episodes": 1, "num_step_episodes": 2}
    configs = [{"noise": 0.0}, {"noise": 0.5}]
    together = agents(configs, [1, 1], 1500, CONTINUOUS, **short)
    together.train(1500)
    for s, config in enumerate(configs):
        alone = agents([config], [1], 1500, CONTINUOUS, **short)
        alone.train(1500)
        assert_learned_alike(together, s, alone, config)
    quiet, loud = (data._actions for data in together._datasets)
    assert not np.array_equal(quiet, loud)


def test_policies_shrink_their_commands_by_each_learners_gamma() -> None:
    one = agents([{"gamma": 1.0}, {"gamma": 0.5}], [1, 2], 300)
    one.train(300)
    policies = one.policies(3)
    actor: Any = policies.start(np.zeros((2, 1), np.int64))
    before = actor._returns.copy()
    actor.observe(np.full((2, 1, 2), 2.0))
    np.testing.assert_allclose(actor._returns[0], before[0] - 2.0)
    np.testing.assert_allclose(actor._returns[1], (before[1] - 2.0) / 0.5)


def test_what_learners_must_share_is_checked() -> None:
    with pytest.raises(UsageError, match="must agree in batch_size, hidden_dim"):
        agents([{}, {"hidden_dim": 8}], [1, 2], 100)
    with pytest.raises(UsageError, match="2 configurations for 1 learners"):
        agents([{}, {}], [1], 100)
    with pytest.raises(EnvironmentSpecError, match=r"max_return = .* has 1 numbers"):
        agents([{}, {"max_return": [1.0]}], [1, 2], 100)


def test_scaling_factors_are_those_given_or_chosen_for_each_learner() -> None:
    one = agents([{"scaling_factor": [0.1, 0.2, 0.01]}, {}], [1, 2], 500)
    one.train(500)
    given, chosen = one.model.scale[:, 0].numpy()
    np.testing.assert_allclose(given, [0.1, 0.2, 0.01], rtol=1e-6)
    assert not np.isclose(chosen, given).any()


@pytest.mark.parametrize("env_id", [ENV_ID, CONTINUOUS])
def test_the_gradient_is_that_of_autograd(env_id: str) -> None:
    """Embeddings of the state and of the scaled command, multiplied, and two more layers."""
    one = agents([{"learning_rate": 0.01}, {"learning_rate": 0.1}], [1, 2], 100, env_id)
    rng = np.random.default_rng(0)
    k, dim = one._num_objectives, one._envs.obs_dim
    for s in range(2):
        one.model.set_scale(s, rng.uniform(0.1, 1.0, k + 1))
    obs = torch.from_numpy(rng.normal(size=(2, 5, dim)).astype(np.float32))
    commands = torch.from_numpy(rng.normal(size=(2, 5, k + 1)).astype(np.float32))
    drawn = [one.head.random(rng) for _ in range(10)]
    actions = torch.from_numpy(np.array(drawn).reshape(2, 5, *one.head.action_shape))

    before = one.model.network.flat.clone()
    leaf = before.clone().requires_grad_()
    layers, start = [], 0
    for n_in, n_out in one.model.network.shapes:
        middle, end = start + n_in * n_out, start + (n_in + 1) * n_out
        layers.append((leaf[:, start:middle].view(2, n_in, n_out), leaf[:, None, middle:end]))
        start = end

    def linear(layer: int, x: torch.Tensor) -> torch.Tensor:
        weight, bias = layers[layer]
        return x @ weight + bias

    both = linear(0, obs).sigmoid() * linear(1, commands * one.model.scale).sigmoid()
    out = linear(3, linear(2, both).relu())
    with torch.no_grad():
        torch.testing.assert_close(one.model(obs, commands), out)
    if env_id == ENV_ID:
        losses = [torch.nn.functional.cross_entropy(out[s], actions[s]) for s in range(2)]
    else:  # actions from -1 to 1
        losses = [(out[s].tanh() - actions[s]).square().mean() for s in range(2)]
    torch.stack(losses).sum().backward()

    one.model.learn(obs, commands, actions, one.head)
    assert leaf.grad is not None
    torch.testing.assert_close(one.model.network.grad, leaf.grad, rtol=1e-4, atol=1e-7)
    # the first step of Adam is as long as the learning rate
    moved = (one.model.network.flat - before).abs().amax(dim=1)
    torch.testing.assert_close(moved, torch.tensor([0.01, 0.1]), rtol=1e-2, atol=0)


def test_training_in_pieces_is_training_at_once() -> None:
    whole, pieces = agent(), agent()
    whole.train(900)
    for until in (1, 150, 151, 600, 900):
        pieces.train(until)
    assert list(pieces.steps) == list(whole.steps)
    assert torch.equal(pieces.model.network.flat, whole.model.network.flat)


@pytest.mark.parametrize("num", [1, 3, 50])
def test_policies_are_no_more_than_asked_for(num: int) -> None:
    one = agent((1, 2))
    one.train(1000)
    policies = one.policies(num)
    assert all(1 <= count <= num for count in policies.counts)
    for points in front(one, (1, 2), num):
        assert points.shape[1] == 2
        assert np.isfinite(points).all()


def test_policies_before_the_first_episode() -> None:
    assert list(agent((1, 2)).policies(5).counts) == [1, 1]


def test_continuous_actions_stay_within_bounds() -> None:
    values = PCNConfig.from_mapping({**SMALL, "num_er_episodes": 2, "noise": 3.0})
    one = PCN(values, CONTINUOUS, (1,), total_timesteps=2500)
    one.train(2500)
    actions = one._datasets[0]._actions
    assert actions.dtype == np.float32
    assert (np.abs(actions) <= 1).all()
    assert actions.std() > 0.1
    assert torch.isfinite(one.model.network.flat).all()
    [points] = Evaluator(CONTINUOUS, (1,), gamma=1.0, num_episodes=1).fronts(one.policies(3))
    assert points.shape[1] == one._num_objectives
    assert np.isfinite(points).all()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scaling_factor": [0.1, 0.1]}, "has 2 numbers; it takes 3, for 2 objectives and the"),
        ({"max_return": [1.0, 2.0, 3.0]}, "has 3 numbers; it takes 2, for 2 objectives"),
    ],
)
def test_vectors_of_the_wrong_width(values: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=words):
        agent(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scaling_factor": [0.1, 0]}, "scaling_factor = .* > 0"),
        ({"learning_rate": -1}, "learning_rate = -1.0 .* > 0"),
        ({"gamma": 0}, r"gamma = 0.0 .* \(0, 1\]"),
        ({"hidden_dim": 0}, "hidden_dim = 0 .* ≥ 1"),
        ({"num_model_updates": 1.5}, "num_model_updates = 1.5 .* int"),
        ({"noise": -0.1}, "noise = -0.1 .* ≥ 0"),
        ({"max_buffer": 3}, "Did you mean 'max_buffer_size'"),
    ],
)
def test_mistakes_in_a_configuration(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PCNConfig.from_mapping(values)


def test_all_names_of_the_ancestor_are_taken() -> None:
    config = PCNConfig.from_mapping(
        {
            "scaling_factor": [0.1, 0.1, 0.01], "learning_rate": 1e-2, "gamma": 1.0,
            "batch_size": 256, "hidden_dim": 64, "noise": 0.1, "num_er_episodes": 50,
            "num_step_episodes": 10, "num_model_updates": 10, "max_return": [124.0, -1.0],
            "max_buffer_size": 200,
        }
    )  # fmt: skip
    assert config.scaling_factor == (0.1, 0.1, 0.01)
    assert config.max_return == (124.0, -1.0)


def test_the_built_in_space_gives_valid_configurations() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(10):
        PCNConfig.from_mapping(search_space(study.ask()))


def test_without_scaling_factors_commands_become_numbers_near_ten() -> None:
    one = agent()
    one.train(500)
    scale = one.model.scale[0, 0].numpy()
    assert np.isfinite(scale).all() and (scale > 0).all() and not np.allclose(scale, 1.0)


def test_minecart_runs() -> None:
    values = PCNConfig.from_mapping(SMALL)
    one = PCN(values, "minecart-deterministic-v0", (1, 2), total_timesteps=2000)
    one.train(2000)
    assert min(one.steps) >= 2000
    assert torch.isfinite(one.model.network.flat).all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_pays() -> None:
    config = {
        "learning_rate": 1e-2, "batch_size": 256, "hidden_dim": 64, "num_er_episodes": 50,
        "num_step_episodes": 10, "num_model_updates": 10, "max_buffer_size": 200,
        "scaling_factor": [0.1, 0.1, 0.01],
    }  # fmt: skip
    seeds = (1, 2)
    one = agent(seeds, steps=8000, **config)
    one.train(1)
    beginning = np.mean([hypervolume(f, (0, -50)) for f in front(one, seeds)])
    one.train(8000)
    end = np.mean([hypervolume(f, (0, -50)) for f in front(one, seeds, 50)])
    assert end > 800 > beginning
