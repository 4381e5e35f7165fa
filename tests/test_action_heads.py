"""From a network's outputs to actions, and the gradient of the loss of imitating actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dask_mohpo.agents._action_heads import BoxHead, DiscreteHead, make_head
from dask_mohpo.agents._envs import FlatEnvs
from dask_mohpo.errors import EnvironmentSpecError

LOW = np.array([-2.0, 0.0, -np.inf, 1.0, -np.inf])
HIGH = np.array([4.0, 1.0, np.inf, np.inf, 3.0])
"""Two bounded numbers, one without bounds, one with each single bound."""


def box_head() -> BoxHead:
    return BoxHead(gym.spaces.Box(LOW, HIGH, dtype=np.float64))


def discrete_head(num: int = 4) -> DiscreteHead:
    return DiscreteHead(gym.spaces.Discrete(num))


def outputs_for(head: Any, shape: tuple[int, ...] = (3, 6)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, head.num_outputs, generator=generator)


# --- the loss -------------------------------------------------------------------------------------


def test_the_gradient_of_discrete_actions_is_that_of_the_cross_entropy() -> None:
    head = discrete_head()
    outputs = outputs_for(head)
    actions = torch.from_numpy(np.random.default_rng(1).integers(4, size=(3, 6)))
    leaf = outputs.clone().requires_grad_()
    losses = [torch.nn.functional.cross_entropy(leaf[s], actions[s]) for s in range(3)]
    torch.stack(losses).sum().backward()
    assert leaf.grad is not None
    before = outputs.clone()
    torch.testing.assert_close(head.loss_grad(outputs, actions), leaf.grad)
    assert torch.equal(outputs, before)


def test_the_gradient_of_a_certain_action_is_finite() -> None:
    outputs = torch.tensor([[[1e4, -1e4, 0.0, 0.0], [1e4, -1e4, 0.0, 0.0]]])
    gradient = discrete_head().loss_grad(outputs, torch.tensor([[0, 1]]))
    torch.testing.assert_close(gradient[0], torch.tensor([[0.0, 0, 0, 0], [0.5, -0.5, 0, 0]]))


def test_the_gradient_of_continuous_actions_is_that_of_the_mean_square() -> None:
    """In units of half the range, after tanh, where an action is bounded; as it is elsewhere."""
    head = box_head()
    outputs = outputs_for(head)
    rng = np.random.default_rng(2)
    actions = np.stack([head.random(rng) for _ in range(18)]).reshape(3, 6, 5)
    leaf = outputs.double().requires_grad_()
    unit = torch.from_numpy(actions.astype(float))
    target = torch.stack(
        [(unit[..., 0] - 1) / 3, (unit[..., 1] - 0.5) / 0.5, *unit[..., 2:].unbind(-1)], dim=-1
    )
    mean = torch.cat([leaf[..., :2].tanh(), leaf[..., 2:]], dim=-1)
    (mean - target).square().mean(dim=(1, 2)).sum().backward()
    assert leaf.grad is not None
    before = outputs.clone()
    gradient = head.loss_grad(outputs, torch.from_numpy(actions))
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, leaf.grad.float())
    assert torch.equal(outputs, before)


# --- the best actions -----------------------------------------------------------------------------


def test_greedy_discrete_actions_are_the_most_likely() -> None:
    outputs = np.array([[[0.0, 3.0, 1.0, 2.0], [5.0, 3.0, 1.0, 2.0]]])
    assert discrete_head().greedy(outputs).tolist() == [[1, 0]]


def test_a_box_head_maps_to_the_range_and_beyond_an_open_one() -> None:
    head = box_head()
    np.testing.assert_allclose(head.greedy(np.zeros(5)), [1, 0.5, 0, 1, 0])
    np.testing.assert_allclose(head.greedy(np.full(5, 50.0)), [4, 1, 50, 50, 3])
    np.testing.assert_allclose(head.greedy(np.full(5, -50.0)), [-2, 0, -50, 1, -50])
    half = np.arctanh(0.5)
    np.testing.assert_allclose(head.greedy(np.full(5, half))[:2], [2.5, 0.75], rtol=1e-6)
    assert head.greedy(np.zeros(5)).dtype == np.float32


# --- exploration ----------------------------------------------------------------------------------


def test_random_discrete_actions_are_uniform() -> None:
    head, rng = discrete_head(), np.random.default_rng(0)
    counts = np.bincount([head.random(rng) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, 0.25, atol=0.04)


def test_random_continuous_actions_fill_what_the_bounds_leave() -> None:
    head, rng = box_head(), np.random.default_rng(0)
    actions = np.stack([head.random(rng) for _ in range(4000)])
    assert actions.dtype == np.float32
    assert (actions >= LOW).all()
    assert (actions <= HIGH).all()
    # uniform, uniform, normal, exponential from below, exponential from above
    np.testing.assert_allclose(actions.mean(axis=0), [1, 0.5, 0, 2, 2], atol=0.15)
    deviations = [3 / np.sqrt(3), 0.5 / np.sqrt(3), 1, 1, 1]
    np.testing.assert_allclose(actions.std(axis=0), deviations, rtol=0.1)


def test_a_discrete_head_explores_as_often_as_told_for_each_row() -> None:
    head = discrete_head()
    num = 40_000
    outputs = np.tile([0.0, 50.0, 0.0, 0.0], (2, num, 1))
    draws = head.draws(np.random.default_rng(0), (2, num))
    share = np.broadcast_to([[0.4], [0.0]], (2, num))
    actions = head.explore(outputs, draws, noise=np.zeros(2), random_share=share)
    counts = np.bincount(actions[0], minlength=4)
    np.testing.assert_allclose(counts / num, [0.1, 0.7, 0.1, 0.1], atol=0.01)
    assert (actions[1] == 1).all()


def test_a_discrete_head_explores_by_the_networks_own_distribution() -> None:
    head = discrete_head()
    draws = ((np.arange(1000) + 0.5) / 1000)[None]
    outputs = np.broadcast_to(np.log([0.5, 0.125, 0.25, 0.125]) + 700.0, (1, 1000, 4))
    actions = head.explore(outputs, draws, noise=np.zeros(1), random_share=np.zeros((1, 1000)))
    assert np.bincount(actions[0]).tolist() == [500, 125, 250, 125]


def test_draws_next_to_one_are_actions_as_well() -> None:
    head = discrete_head()
    draws = np.full((1, 2), np.nextafter(1.0, 0.0))
    outputs = np.full((1, 2, 4), 0.1, np.float32)
    share = np.array([[0.0, 0.3]])
    assert head.explore(outputs, draws, noise=np.zeros(1), random_share=share).max() <= 3


def test_each_learners_continuous_actions_have_its_own_noise() -> None:
    head = box_head()
    outputs = np.zeros((3, 4000, 5))
    draws = head.draws(np.random.default_rng(0), (3, 4000))
    assert draws.shape == (3, 4000, 5)
    share = np.zeros((3, 4000))
    noise = np.array([0.0, 0.1, 0.2])
    actions = head.explore(outputs, draws, noise=noise, random_share=share)
    assert actions.dtype == np.float32
    assert (actions[0] == head.greedy(outputs[0])).all()
    for s in (1, 2):
        expected = noise[s] * np.array([3, 0.5, 1])
        np.testing.assert_allclose(actions[s, :, :3].std(axis=0), expected, rtol=0.1)
    wild = head.explore(outputs, draws, noise=np.full(3, 50.0), random_share=share)
    assert (wild >= LOW).all()
    assert (wild <= HIGH).all()


@pytest.mark.parametrize("head", [discrete_head(), box_head()])
def test_draws_are_one_for_each_action(head: Any) -> None:
    draws = head.draws(np.random.default_rng(0), (7, 2))
    assert draws.shape == (7, 2, *head.draw_shape)
    assert np.array_equal(draws, head.draws(np.random.default_rng(0), (7, 2)))
    action = head.random(np.random.default_rng(0))
    assert np.shape(action) == head.action_shape
    assert np.asarray(action).dtype == head.action_dtype


# --- which head -----------------------------------------------------------------------------------


def test_the_head_fits_the_environment() -> None:
    head = make_head(FlatEnvs("deep-sea-treasure-v0", 1))
    assert isinstance(head, DiscreteHead)
    assert head.num_outputs == 4
    other = make_head(FlatEnvs("mo-mountaincarcontinuous-v0", 1))
    assert isinstance(other, BoxHead)
    assert other.num_outputs == 1


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.MultiDiscrete([2, 3]),
        gym.spaces.Discrete(3, start=1),
        gym.spaces.Box(0.0, 1.0, (2, 2)),
    ],
)
def test_actions_of_another_kind_are_refused(space: gym.Space[Any]) -> None:
    envs = FlatEnvs("deep-sea-treasure-v0", 1)
    envs.action_space = space
    with pytest.raises(EnvironmentSpecError, match=r"discrete actions .* not "):
        make_head(envs)
