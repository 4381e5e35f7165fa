"""Networks for a batch of S independent learners, with their gradients and their optimiser.

All parameters of a network lie in one tensor (S, P): row s belongs to learner s alone. Every matrix
product is one batched product over the learners. Gradients are written out by hand, into memory
that is allocated once: autograd's bookkeeping costs as much as the arithmetic of a small network.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.optim.adam import adam

__all__ = [
    "MLP",
    "StackedAdam",
    "StackedLinear",
    "clip_grad_norm",
    "half_products",
    "no_denormals",
    "relu_backward_",
]


class StackedLinear:
    """Linear layers of S learners over one flat parameter tensor.

    Parameters
    ----------
    shapes : (n_inputs, n_outputs) of each layer.
    generators : one NumPy generator per learner; initial values come from these alone.
    device : torch device.

    Attributes
    ----------
    flat, grad : (S, P) parameters, and their gradient.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        generators: Sequence[np.random.Generator],
        device: torch.device | str = "cpu",
    ) -> None:
        self.shapes = list(shapes)
        rows = [self._initial(generator) for generator in generators]
        self._adopt(torch.from_numpy(np.stack(rows)).to(device))

    def _initial(self, generator: np.random.Generator) -> np.ndarray:
        """Weights and biases of one learner, uniform in ±1/√n_inputs (LeCun et al. 1998)."""
        parts = []
        for n_in, n_out in self.shapes:
            bound = 1.0 / math.sqrt(n_in)
            parts.append(generator.uniform(-bound, bound, (n_in + 1) * n_out))
        return np.concatenate(parts).astype(np.float32)

    def _adopt(self, flat: torch.Tensor) -> None:
        self.flat, self.grad = flat, torch.zeros_like(flat)
        self.layers, self.grads = self._views(flat), self._views(self.grad)

    def _views(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weights (S, n_inputs, n_outputs) and biases (S, 1, n_outputs) in the flat memory."""
        views, start = [], 0
        for n_in, n_out in self.shapes:
            middle, end = start + n_in * n_out, start + (n_in + 1) * n_out
            weight = flat[:, start:middle].view(-1, n_in, n_out)
            views.append((weight, flat[:, middle:end].view(-1, 1, n_out)))
            start = end
        return views

    @property
    def num_learners(self) -> int:
        return self.flat.shape[0]

    def __call__(
        self, layer: int, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(S, N, n_inputs) → (S, N, n_outputs)."""
        weight, bias = self.layers[layer]
        return torch.baddbmm(bias, x, weight, out=out)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """All layers in turn, with ReLU between them."""
        last = len(self.shapes) - 1
        for layer in range(last):
            x = torch.relu_(self(layer, x))
        return self(last, x)

    def set_grad(self, layer: int, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Set a layer's gradient, from its inputs x and the gradient of the loss by its outputs.

        The loss is a sum over learners, so their gradients do not mix.
        """
        weight, bias = self.grads[layer]
        torch.bmm(x.transpose(1, 2), delta, out=weight)
        torch.sum(delta, dim=1, keepdim=True, out=bias)

    def input_grad(
        self, layer: int, delta: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gradient of the loss by a layer's inputs, from that by its outputs."""
        return torch.bmm(delta, self.layers[layer][0].transpose(1, 2), out=out)

    def copy(self) -> StackedLinear:
        """The same parameters in memory of their own."""
        return self.rows(range(self.num_learners))

    def rows(self, learners: Sequence[int]) -> StackedLinear:
        """These learners alone, in memory of their own."""
        other = object.__new__(StackedLinear)
        other.shapes = self.shapes
        other._adopt(self.flat[list(learners)])
        return other


class MLP:
    """Passes of a fixed number of rows through all layers, with ReLU between them, and back.

    Parameters
    ----------
    network : its layers and their gradients are used in place.
    num_rows : N.
    num_grad_rows : the first so many rows have a gradient.
    half : the products between hidden layers round their factors to bfloat16 (on GPUs: to TF32)
        and sum in float32; see `half_products`.

    Attributes
    ----------
    input, output : (S, N, ·), to be filled and read.
    """

    def __init__(
        self, network: StackedLinear, num_rows: int, num_grad_rows: int = 0, *, half: bool = False
    ) -> None:
        self.network = network
        self._grad_rows = num_grad_rows
        self._half = half
        num, device = network.num_learners, network.flat.device
        widths = [n_out for _, n_out in network.shapes]
        self.input = torch.empty(num, num_rows, network.shapes[0][0], device=device)
        self.output = torch.empty(num, num_rows, widths[-1], device=device)
        self._hidden = [torch.empty(num, num_rows, w, device=device) for w in widths[:-1]]
        self._deltas = [torch.empty(num, num_grad_rows, w, device=device) for w in widths[:-1]]

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs for `input`, or for other rows (S, N, ·)."""
        x = self.input if x is None else x
        for layer, hidden in enumerate(self._hidden):
            with half_products(self._half and layer > 0):
                x = torch.relu_(self.network(layer, x, out=hidden))
        return self.network(len(self._hidden), x, out=self.output)

    def backward(self, delta: torch.Tensor) -> None:
        """Set the network's gradient, from that of the loss by the first rows of the output.

        The last `forward` must have been that of `input`.
        """
        last = len(self._hidden)
        for layer in range(last, 0, -1):
            x, into = self._hidden[layer - 1][:, : self._grad_rows], self._deltas[layer - 1]
            with half_products(self._half and layer < last):
                self.network.set_grad(layer, x, delta)
                self.network.input_grad(layer, delta, out=into)
            delta = relu_backward_(into, x)
        self.network.set_grad(0, self.input[:, : self._grad_rows], delta)


class StackedAdam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) for S learners, each with its own learning rate.

    Each learner counts its own updates. Learners are passed to the fused kernel one by one: their
    places in memory decide how it rounds, and must not depend on who else is there.

    Parameters
    ----------
    network : whose parameters follow their gradients.
    learning_rates : one per learner.
    """

    def __init__(self, network: StackedLinear, learning_rates: Sequence[float]) -> None:
        steps = torch.zeros(network.num_learners, device=network.flat.device)
        zeros = torch.zeros_like(network.flat), torch.zeros_like(network.flat)
        self._adopt(network, list(learning_rates), *zeros, steps)

    def _adopt(
        self,
        network: StackedLinear,
        rates: list[float],
        mean: torch.Tensor,
        square: torch.Tensor,
        steps: torch.Tensor,
    ) -> None:
        self._rates, self.mean, self.square, self.steps = rates, mean, square, steps
        every = [(network.flat, network.grad, mean, square, steps)]
        self._groups = []
        for rate in dict.fromkeys(rates):
            members = [s for s, other in enumerate(rates) if other == rate]
            views = [[tensor[s] for s in members] for tensor in every[0]]
            self._groups.append((rate, views))

    def step(self) -> None:
        for rate, (params, grads, means, squares, steps) in self._groups:
            adam(
                params, grads, means, squares, [], steps, fused=True, amsgrad=False, beta1=0.9,
                beta2=0.999, lr=rate, weight_decay=0.0, eps=1e-8, maximize=False,
            )  # fmt: skip

    def rows(self, network: StackedLinear, learners: Sequence[int]) -> StackedAdam:
        """The states of these learners alone, in memory of their own, for a network of theirs."""
        index = list(learners)
        other = object.__new__(StackedAdam)
        rates = [self._rates[s] for s in index]
        other._adopt(network, rates, self.mean[index], self.square[index], self.steps[index])
        return other

    def put_back(self, learners: Sequence[int], other: StackedAdam) -> None:
        """Take over what `rows` has become."""
        index = list(learners)
        self.mean[index], self.square[index] = other.mean, other.square
        self.steps[index] = other.steps


def relu_backward_(delta: torch.Tensor, activations: torch.Tensor) -> torch.Tensor:
    """Turn, in place, the gradient by ReLU's outputs into that by its inputs."""
    torch.ops.aten.threshold_backward.grad_input(delta, activations, 0, grad_input=delta)
    return delta


def clip_grad_norm(network: StackedLinear, max_norms: torch.Tensor) -> None:
    """Scale each learner's gradient to a norm of at most its own of `max_norms` (S, 1)."""
    norm = torch.linalg.vector_norm(network.grad, dim=1, keepdim=True)
    network.grad.mul_((max_norms / norm.add_(1e-6)).clamp_(max=1.0))


@contextlib.contextmanager
def half_products(enabled: bool = True) -> Iterator[None]:
    """Products of float32 matrices round their factors, where the processor is faster so.

    CPUs with bfloat16 use that, GPUs TF32; others go on in float32. It holds for the process: other
    threads that multiply meanwhile round as well.
    """
    if not enabled:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def no_denormals() -> Iterator[None]:
    """In this thread, numbers too small for full precision (below 1e-38) are zero.

    Adam's averages of gradients that have become zero shrink until they get there, and processors
    then take ten times as long. CPUs alone are concerned.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
