"""Stacked networks against one plain torch network per learner."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dask_mohpo.agents._networks import StackedLinear, clip_grad_norm, soft_update

SHAPES = [(3, 5), (5, 4), (4, 2)]
SEEDS = (7, 8, 9)
NUM_LEARNERS = len(SEEDS)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stacked(seeds=SEEDS, shapes=SHAPES):
    return StackedLinear(shapes, [np.random.default_rng(seed) for seed in seeds])


def separate(network):
    """One torch network per learner, with the stacked network's values."""
    models = []
    for row in network.flat.detach():
        layers: list[torch.nn.Module] = []
        start = 0
        for n_in, n_out in network.shapes:
            linear = torch.nn.Linear(n_in, n_out)
            middle, end = start + n_in * n_out, start + (n_in + 1) * n_out
            with torch.no_grad():
                linear.weight.copy_(row[start:middle].view(n_in, n_out).T)
                linear.bias.copy_(row[middle:end])
            layers += [linear, torch.nn.ReLU()]
            start = end
        assert start == len(row)
        models.append(torch.nn.Sequential(*layers[:-1]))
    return models


def flat_values(model, gradient=False):
    """A torch network's parameters, or their gradients, in the order of a row of `flat`."""
    parts = []
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            for tensor in (layer.weight, layer.bias):
                value = tensor.grad if gradient else tensor.detach()
                assert value is not None
                parts.append((value.T if value.ndim == 2 else value).reshape(-1))
    return torch.cat(parts)


def inputs(num_learners=NUM_LEARNERS, rows=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_learners, rows, SHAPES[0][0], generator=generator)


def losses(out):
    """One number per learner, of very different sizes."""
    scale = torch.tensor([1.0, 100.0, 0.01])[: len(out)]
    return scale * (out - 0.5).square().mean(dim=(1, 2))


def test_outputs_are_those_of_separate_networks():
    network, x = stacked(), inputs()
    expected = torch.stack([model(row) for model, row in zip(separate(network), x, strict=True)])
    torch.testing.assert_close(network.mlp(x), expected)
    first = [model[0](row) for model, row in zip(separate(network), x, strict=True)]
    torch.testing.assert_close(network(0, x), torch.stack(first))
    assert network.num_learners == len(SEEDS)


def test_mlp_leaves_its_input_alone():
    network, x = stacked(shapes=SHAPES[:1]), inputs()
    before = x.clone()
    network.mlp(x)
    assert torch.equal(x, before)


def test_gradients_are_those_of_separate_networks():
    network, x = stacked(), inputs()
    models = separate(network)
    network.backward(losses(network.mlp(x)).sum())
    for s, model in enumerate(models):
        losses(torch.stack([model(x[s])] * 3))[s].backward()
        torch.testing.assert_close(network.flat.grad[s], flat_values(model, gradient=True))


def test_learners_do_not_mix():
    network, x = stacked(), inputs()
    network.backward(losses(network.mlp(x))[1])
    norms = torch.linalg.vector_norm(network.flat.grad, dim=1)
    assert norms[1] > 0
    assert norms[0] == norms[2] == 0


def test_backward_sets_the_gradient_and_does_not_add_to_it():
    network, x = stacked(), inputs()
    grad = network.flat.grad
    network.backward(losses(network.mlp(x)).sum())
    once = grad.clone()
    network.backward(losses(network.mlp(x)).sum())
    assert network.flat.grad is grad
    assert torch.equal(grad, once)


def test_optimising_is_that_of_separate_networks():
    network, x = stacked(), inputs()
    models = separate(network)
    optimizer = torch.optim.Adam([network.flat], lr=0.01)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for _ in range(10):
        network.backward(losses(network.mlp(x)).sum())
        clip_grad_norm(network, 0.5)
        optimizer.step()
        for s, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            own.zero_grad()
            losses(torch.stack([model(x[s])] * 3))[s].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            own.step()
    expected = torch.stack([flat_values(model) for model in models])
    torch.testing.assert_close(network.flat.detach(), expected, rtol=1e-4, atol=1e-5)
    # the layers see what the optimiser changed in the flat memory
    out = torch.stack([model(row) for model, row in zip(models, x, strict=True)])
    torch.testing.assert_close(network.mlp(x), out, rtol=1e-4, atol=1e-4)


# --- clipping -------------------------------------------------------------------------------------


def test_each_learner_is_clipped_by_its_own_norm():
    network = stacked()
    num = network.flat.shape[1]
    directions = torch.nn.functional.normalize(torch.arange(1.0, 3 * num + 1).view(3, num), dim=1)
    network.flat.grad.copy_(directions * torch.tensor([[0.5], [4.0], [0.0]]))
    clip_grad_norm(network, 2.0)
    expected = directions * torch.tensor([[0.5], [2.0], [0.0]])
    torch.testing.assert_close(network.flat.grad, expected, rtol=1e-5, atol=0.0)


def test_a_small_gradient_is_untouched():
    network, x = stacked(), inputs()
    network.backward(losses(network.mlp(x)).sum())
    before = network.flat.grad.clone()
    clip_grad_norm(network, 1e9)
    assert torch.equal(network.flat.grad, before)


# --- copies ---------------------------------------------------------------------------------------


def test_soft_update_moves_a_fraction_of_the_way():
    online, target, x = stacked(), stacked((1, 2, 3)), inputs()
    start, goal = target.flat.detach().clone(), online.flat.detach().clone()
    soft_update(target, online, 0.25)
    torch.testing.assert_close(target.flat.detach(), 0.75 * start + 0.25 * goal)
    assert torch.equal(online.flat, goal)
    expected = torch.stack([model(row) for model, row in zip(separate(target), x, strict=True)])
    torch.testing.assert_close(target.mlp(x), expected)


def test_soft_update_with_one_is_a_copy():
    online, target, x = stacked(), stacked((1, 2, 3)), inputs()
    soft_update(target, online, 1.0)
    assert torch.equal(target.flat, online.flat)
    assert torch.equal(target.mlp(x), online.mlp(x))
    assert target.flat.data_ptr() != online.flat.data_ptr()


def test_copy_is_independent():
    network, x = stacked(), inputs()
    other = network.copy()
    assert torch.equal(network.mlp(x), other.mlp(x))
    before = network.mlp(x).detach()
    other.backward(losses(other.mlp(x)).sum())
    torch.optim.SGD([other.flat], lr=0.1).step()
    assert torch.equal(network.mlp(x), before)
    assert not torch.equal(other.mlp(x), before)
    assert not network.flat.grad.any()


def test_keep_drops_the_other_learners():
    network, x = stacked(), inputs()
    out, rows = network.mlp(x).detach(), network.flat.detach().clone()
    network.keep([2, 0])
    assert network.num_learners == 2
    assert torch.equal(network.flat, rows[[2, 0]])
    torch.testing.assert_close(network.mlp(x[[2, 0]]), out[[2, 0]])
    network.backward(losses(network.mlp(x[[2, 0]])).sum())
    assert network.flat.grad.shape == network.flat.shape
    assert torch.linalg.vector_norm(network.flat.grad, dim=1).min() > 0


# --- initial values -------------------------------------------------------------------------------


def test_initial_values_come_from_the_learners_own_generator():
    together = stacked()
    for s, seed in enumerate(SEEDS):
        assert torch.equal(together.flat[s], stacked((seed,)).flat[0])
    assert len(np.unique(together.flat.detach().numpy(), axis=0)) == len(SEEDS)


def test_initial_values_neither_read_nor_move_global_generators():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    first = stacked().flat.detach()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]
    assert torch.equal(stacked().flat, first)


def test_initial_values_fill_their_range():
    network = stacked(shapes=[(100, 50)])
    values = network.flat.detach() * math.sqrt(100)
    assert values.abs().max() <= 1.0
    assert values.abs().max() > 0.99
    assert abs(values.mean()) < 0.02
    assert network.flat.dtype == torch.float32
