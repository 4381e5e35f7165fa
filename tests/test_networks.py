"""Stacked networks against one plain torch network per learner."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dask_mohpo.agents._networks import (
    MLP,
    StackedAdam,
    StackedLinear,
    clip_grad_norm,
    half_products,
    no_denormals,
    relu_backward_,
)

SHAPES = [(3, 5), (5, 4), (4, 1)]  # 49 parameters: no learner but the first begins at a round place
ROUNDS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
WIDE = [(3, 32), (32, 32), (32, 32), (32, 2)]
SEEDS = (7, 8, 9)
RATES = [0.01, 0.1, 0.003]


def stacked(seeds=SEEDS, shapes=SHAPES):
    return StackedLinear(shapes, [np.random.default_rng(seed) for seed in seeds])


def separate(network):
    """One torch network per learner, with the stacked network's values."""
    models = []
    for row in network.flat:
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


def inputs(num_learners=3, rows=6, width=SHAPES[0][0]):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_learners, rows, width, generator=generator)


def random_gradients(network, num):
    """Gradients of very different sizes for each learner."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([1.0, 100.0, 0.01])[: network.num_learners, None]
    return [sizes * torch.randn(network.flat.shape, generator=generator) for _ in range(num)]


def loss_of(out):
    """One number per learner, of very different sizes."""
    scale = torch.tensor([1.0, 100.0, 0.01])[: len(out)]
    return scale * (out - 0.5).square().mean(dim=(1, 2))


def expected_gradient(network, x, num_grad_rows):
    """By autograd, learner by learner: parameters' gradients of `loss_of` the first rows."""
    models = separate(network)
    out = torch.stack([model(rows) for model, rows in zip(models, x, strict=True)])
    loss_of(out[:, :num_grad_rows]).sum().backward()
    return torch.stack([flat_values(model, gradient=True) for model in models])


def delta_of(out, num_grad_rows):
    """Gradient of `loss_of` the first rows, by these rows."""
    leaf = out[:, :num_grad_rows].clone().requires_grad_()
    loss_of(leaf).sum().backward()
    return leaf.grad


def passed(network, x, num_grad_rows, *, half=False):
    """The MLP after one pass there and back."""
    mlp = MLP(network, x.shape[1], num_grad_rows, half=half)
    mlp.input.copy_(x)
    mlp.backward(delta_of(mlp.forward(), num_grad_rows))
    return mlp


# --- layers ---------------------------------------------------------------------------------------


def test_outputs_are_those_of_separate_networks():
    network, x = stacked(), inputs()
    with torch.no_grad():
        models = separate(network)
        expected = torch.stack([model(row) for model, row in zip(models, x, strict=True)])
        first = torch.stack([model[0](row) for model, row in zip(models, x, strict=True)])
    torch.testing.assert_close(network.mlp(x), expected)
    torch.testing.assert_close(network(0, x), first)
    into = torch.empty_like(first)
    assert network(0, x, out=into) is into
    torch.testing.assert_close(into, first)
    assert network.num_learners == len(SEEDS)


def test_mlp_leaves_its_input_alone():
    network, x = stacked(shapes=SHAPES[:1]), inputs()
    before = x.clone()
    network.mlp(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("seeds", [SEEDS[:1], SEEDS])
def test_a_layers_gradients_are_those_of_autograd(seeds):
    network, x = stacked(seeds), inputs(len(seeds), width=5)
    weight, bias = (part.clone().requires_grad_() for part in network.layers[1])
    leaf = x.clone().requires_grad_()
    out = leaf @ weight + bias
    loss_of(out).sum().backward()
    delta = delta_of(out.detach(), 6)
    network.grad.fill_(7.0)
    network.set_grad(1, x, delta)
    torch.testing.assert_close(network.grads[1], (weight.grad, bias.grad))
    torch.testing.assert_close(network.input_grad(1, delta), leaf.grad)
    into = torch.empty_like(x)
    assert network.input_grad(1, delta, out=into) is into
    torch.testing.assert_close(into, leaf.grad)
    # the gradients of the other layers are not touched
    assert (network.grad == 7.0).sum() == len(seeds) * (4 * 5 + 5 * 1)


def test_relu_passes_gradients_where_it_was_active_and_works_in_place():
    delta = torch.tensor([1.0, -2.0, 3.0, 4.0])
    assert relu_backward_(delta, torch.tensor([0.0, 1.0, 1e-9, 0.0])) is delta
    assert delta.tolist() == [0.0, -2.0, 3.0, 0.0]


def test_copy_is_independent():
    network, x = stacked(), inputs()
    other = network.copy()
    before = network.mlp(x)
    assert torch.equal(other.mlp(x), before)
    passed(other, x, 6)
    other.flat.sub_(other.grad)
    assert torch.equal(network.mlp(x), before)
    assert not torch.equal(other.mlp(x), before)
    assert not network.grad.any()


def test_rows_are_these_learners_alone():
    network, x = stacked(), inputs()
    out, flat = network.mlp(x), network.flat.clone()
    some = network.rows([2, 0])
    assert some.num_learners == 2
    assert torch.equal(some.flat, flat[[2, 0]])
    torch.testing.assert_close(some.mlp(x[[2, 0]]), out[[2, 0]])
    passed(some, x[[2, 0]], 6)
    assert torch.linalg.vector_norm(some.grad, dim=1).min() > 0
    some.flat.zero_()
    assert torch.equal(network.flat, flat)
    assert not network.grad.any()


# --- passes there and back ------------------------------------------------------------------------


@pytest.mark.parametrize("num_grad_rows", [6, 4, 1])
@pytest.mark.parametrize("seeds", [SEEDS[:1], SEEDS])
@pytest.mark.parametrize("shapes", [SHAPES[:1], SHAPES[:2], SHAPES])
def test_gradients_of_a_pass_are_those_of_separate_networks(shapes, seeds, num_grad_rows):
    network, x = stacked(seeds, shapes), inputs(len(seeds))
    mlp = passed(network, x, num_grad_rows)
    with torch.no_grad():
        models = separate(network)
        out = torch.stack([model(row) for model, row in zip(models, x, strict=True)])
    torch.testing.assert_close(mlp.output, out)
    torch.testing.assert_close(network.grad, expected_gradient(network, x, num_grad_rows))


def test_learners_do_not_mix():
    network = stacked()
    mlp = MLP(network, 6, 6)
    mlp.input.copy_(inputs())
    delta = torch.zeros_like(mlp.forward())
    delta[1] = 1.0
    mlp.backward(delta)
    norms = torch.linalg.vector_norm(network.grad, dim=1)
    assert norms[1] > 0
    assert norms[0] == norms[2] == 0


def test_a_pass_sets_the_gradient_and_does_not_add_to_it():
    network = stacked()
    memory = network.grad.data_ptr()
    mlp = passed(network, inputs(), 4)
    once = network.grad.clone()
    mlp.backward(delta_of(mlp.forward(), 4))
    assert torch.equal(network.grad, once)
    assert network.grad.data_ptr() == memory


def test_a_pass_takes_other_rows_and_sees_new_parameters():
    network, x = stacked(), inputs()
    mlp = MLP(network, 6)
    torch.testing.assert_close(mlp.forward(x), network.mlp(x))
    network.flat.mul_(-0.5)
    torch.testing.assert_close(mlp.forward(x), network.mlp(x))


# --- bfloat16 -------------------------------------------------------------------------------------


def distance(found, wanted):
    """Relative distance of each learner's numbers."""
    found, wanted = found.flatten(1), wanted.flatten(1)
    return ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).tolist()


def test_half_is_close_to_float32_but_not_the_same():
    """bfloat16 has 8 significant bits: it rounds by up to 1 in 256."""
    x = inputs(rows=40)
    whole, rounded = stacked(shapes=WIDE), stacked(shapes=WIDE)
    exact, near = passed(whole, x, 30), passed(rounded, x, 30, half=True)
    for found, wanted in [(near.output, exact.output), (rounded.grad, whole.grad)]:
        assert found.dtype == torch.float32
        assert min(distance(found, wanted)) > (1e-5 if ROUNDS else -1)
        assert max(distance(found, wanted)) < 1 / 64
    assert rounded.flat.dtype == torch.float32
    assert torch.equal(rounded.flat, whole.flat)


def test_half_concerns_products_between_hidden_layers_alone():
    x = inputs()
    whole, rounded = stacked(shapes=WIDE[:1] + WIDE[-1:]), stacked(shapes=WIDE[:1] + WIDE[-1:])
    exact, near = passed(whole, x, 4), passed(rounded, x, 4, half=True)
    assert torch.equal(near.output, exact.output)
    assert torch.equal(rounded.grad, whole.grad)


@pytest.mark.skipif(not ROUNDS, reason="this CPU has no fast products of bfloat16")
def test_half_rounds_what_goes_into_a_product_and_sums_in_float32():
    network, x = stacked(shapes=WIDE), inputs(rows=40)
    hidden = torch.relu(network(0, x))
    for layer in (1, 2):
        weight, bias = network.layers[layer]
        product = hidden.bfloat16().double() @ weight.bfloat16().double() + bias
        hidden = torch.relu(product.float())
    found = MLP(network, 40, half=True).forward(x)
    assert max(distance(found, network(3, hidden))) < 0.1 * min(distance(found, network.mlp(x)))


def test_half_products_leave_torch_as_it_was():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError), half_products():
        assert torch.get_float32_matmul_precision() == "medium"
        raise RuntimeError
    with half_products(False):
        assert torch.get_float32_matmul_precision() == before
    assert torch.get_float32_matmul_precision() == before


# --- Adam -----------------------------------------------------------------------------------------


def test_adam_is_that_of_torch_for_each_learner():
    network = stacked()
    plain = [row.clone().requires_grad_() for row in network.flat]
    adam = StackedAdam(network, RATES)
    optimizers = [torch.optim.Adam([p], lr=rate) for p, rate in zip(plain, RATES, strict=True)]
    for gradient in random_gradients(network, 20):
        network.grad.copy_(gradient)
        adam.step()
        for p, optimizer, own in zip(plain, optimizers, gradient, strict=True):
            p.grad = own.clone()
            optimizer.step()
    expected = torch.stack([p.detach() for p in plain])
    torch.testing.assert_close(network.flat, expected, rtol=1e-4, atol=1e-6)
    moved = (network.flat - stacked().flat).abs().amax(dim=1)
    assert moved[1] > moved[0] > moved[2]


@pytest.mark.parametrize("rates", [RATES, [0.01] * 3, [0.01, 0.1, 0.01]])
def test_a_learners_steps_are_bit_identical_alone_and_among_others(rates):
    together = stacked()
    alone = [stacked((seed,)) for seed in SEEDS]
    gradients = random_gradients(together, 10)
    adam = StackedAdam(together, rates)
    for gradient in gradients:
        together.grad.copy_(gradient)
        adam.step()
    for s, (network, rate) in enumerate(zip(alone, rates, strict=True)):
        own = StackedAdam(network, [rate])
        for gradient in gradients:
            network.grad.copy_(gradient[s : s + 1])
            own.step()
        assert torch.equal(network.flat[0], together.flat[s])
        assert torch.equal(own.mean[0], adam.mean[s])
        assert torch.equal(own.square[0], adam.square[s])


def test_rows_of_adam_go_on_where_they_were_and_come_back():
    """Learners that rest in between end where they would alone; each counts its own updates."""
    network = stacked()
    adam = StackedAdam(network, RATES)
    gradients = random_gradients(network, 9)

    def steps(net, optimiser, learners, some):
        for gradient in some:
            net.grad.copy_(gradient[learners])
            optimiser.step()

    steps(network, adam, [0, 1, 2], gradients[:3])
    some = network.rows([2, 0])
    part = adam.rows(some, [2, 0])
    resting = network.flat.clone()
    steps(some, part, [2, 0], gradients[3:6])
    assert torch.equal(network.flat, resting)  # in memory of their own
    assert adam.steps.tolist() == [3, 3, 3]
    network.flat[[2, 0]] = some.flat
    adam.put_back([2, 0], part)
    assert adam.steps.tolist() == [6, 3, 6]
    steps(network, adam, [0, 1, 2], gradients[6:])
    for s, mine in enumerate([gradients, gradients[:3] + gradients[6:], gradients]):
        alone = stacked((SEEDS[s],))
        steps(alone, StackedAdam(alone, [RATES[s]]), [s], mine)
        assert torch.equal(network.flat[s], alone.flat[0])


def test_optimising_is_that_of_separate_networks():
    network, x = stacked(), inputs()
    models = separate(network)
    adam, mlp = StackedAdam(network, RATES), MLP(network, 6, 6)
    mlp.input.copy_(x)
    pairs = zip(models, RATES, strict=True)
    optimizers = [torch.optim.Adam(model.parameters(), lr=rate) for model, rate in pairs]
    for _ in range(10):
        mlp.backward(delta_of(mlp.forward(), 6))
        clip_grad_norm(network, torch.tensor([[0.5], [math.inf], [1e-3]]))
        adam.step()
        out = torch.stack([model(row) for model, row in zip(models, x, strict=True)])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(out).sum().backward()
        for model, limit, optimizer in zip(models, [0.5, math.inf, 1e-3], optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
    expected = torch.stack([flat_values(model) for model in models])
    torch.testing.assert_close(network.flat, expected, rtol=1e-4, atol=1e-5)
    # the layers see what the optimiser changed in the flat memory
    with torch.no_grad():
        out = torch.stack([model(row) for model, row in zip(models, x, strict=True)])
    torch.testing.assert_close(mlp.forward(), out, rtol=1e-4, atol=1e-4)


# --- clipping -------------------------------------------------------------------------------------


def test_each_learner_is_clipped_to_its_own_norm():
    network = stacked((1, 2, 3, 4))
    num = network.flat.shape[1]
    directions = torch.nn.functional.normalize(torch.arange(1.0, 4 * num + 1).view(4, num), dim=1)
    network.grad.copy_(directions * torch.tensor([[0.5], [4.0], [4.0], [0.0]]))
    clip_grad_norm(network, torch.tensor([[2.0], [2.0], [0.25], [1.0]]))
    expected = directions * torch.tensor([[0.5], [2.0], [0.25], [0.0]])
    torch.testing.assert_close(network.grad, expected, rtol=1e-5, atol=0.0)


def test_infinity_is_no_limit_and_a_small_gradient_is_untouched():
    network = stacked()
    [gradient] = random_gradients(network, 1)
    network.grad.copy_(gradient)
    clip_grad_norm(network, torch.tensor([[1e3], [math.inf], [1e-3]]))
    assert torch.equal(network.grad[:2], gradient[:2])
    assert network.grad[2].norm().item() == pytest.approx(1e-3, rel=2e-3)


# --- denormals ------------------------------------------------------------------------------------

flushes = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this processor cannot flush denormals"
)


def tiny_products():
    """A product that is too small for full precision, and a product of a number that is."""
    small, denormal = torch.full((16,), 1e-30), torch.full((16,), 1e-40)
    return (small * 1e-10).max().item(), (denormal * 2.0).max().item()


@flushes
def test_denormals_are_zero_inside_and_not_outside():
    exact = pytest.approx(1e-40, rel=1e-3), pytest.approx(2e-40, rel=1e-3)
    assert tiny_products() == exact
    with no_denormals():
        assert tiny_products() == (0.0, 0.0)
    assert tiny_products() == exact


@flushes
def test_denormals_return_after_an_error_and_for_every_call():
    @no_denormals()
    def fail():
        raise ValueError(tiny_products())

    for _ in range(2):
        with pytest.raises(ValueError) as raised:
            fail()
        assert raised.value.args == ((0.0, 0.0),)
        assert tiny_products()[0] > 0


# --- initial values -------------------------------------------------------------------------------


def test_initial_values_come_from_the_learners_own_generator():
    together = stacked()
    for s, seed in enumerate(SEEDS):
        assert torch.equal(together.flat[s], stacked((seed,)).flat[0])
    assert len(np.unique(together.flat.numpy(), axis=0)) == len(SEEDS)


def test_initial_values_neither_read_nor_move_global_generators():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    first = stacked().flat
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]
    assert torch.equal(stacked().flat, first)


def test_initial_values_fill_their_range():
    network = stacked(shapes=[(100, 50)])
    values = network.flat * math.sqrt(100)
    assert values.abs().max() <= 1.0
    assert values.abs().max() > 0.99
    assert abs(values.mean()) < 0.02
    assert network.flat.dtype == torch.float32
