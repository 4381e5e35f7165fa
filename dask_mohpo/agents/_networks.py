"""Networks for a batch of S independent learners.

All parameters of a network lie in one tensor (S, P): row s belongs to learner s alone. Gradient
clipping, the optimiser and copies into a target network are then one operation each, and every
matrix product is one batched product over the learners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["StackedLinear", "clip_grad_norm", "soft_update"]


class StackedLinear:
    """Linear layers of S learners over one flat parameter tensor.

    Parameters
    ----------
    shapes : (n_inputs, n_outputs) of each layer.
    generators : one NumPy generator per learner; initial values come from these alone.
    device : torch device.

    Attributes
    ----------
    flat : (S, P) leaf tensor with its gradient preallocated.
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
        self.flat = flat.requires_grad_(True)
        self.flat.grad = torch.zeros_like(flat)
        self._layers = [
            (weight.requires_grad_(True), bias.requires_grad_(True))
            for weight, bias in self._views(flat.detach())
        ]
        self._leaves = [tensor for layer in self._layers for tensor in layer]
        self._grads = [tensor for layer in self._views(self.flat.grad) for tensor in layer]

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

    def __call__(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """(S, N, n_inputs) → (S, N, n_outputs)."""
        weight, bias = self._layers[layer]
        return torch.baddbmm(bias, x, weight)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """All layers in turn, with ReLU between them."""
        last = len(self.shapes) - 1
        for layer in range(last):
            x = torch.relu_(self(layer, x))
        return self(last, x)

    def backward(self, loss: torch.Tensor) -> None:
        """Set the gradient to that of this loss: a sum over learners, so that none mix."""
        torch._foreach_copy_(self._grads, torch.autograd.grad(loss, self._leaves))

    def copy(self) -> StackedLinear:
        """The same parameters in memory of their own."""
        other = object.__new__(StackedLinear)
        other.shapes = self.shapes
        other._adopt(self.flat.detach().clone())
        return other

    def keep(self, learners: Sequence[int]) -> None:
        """Drop all learners but these."""
        index = torch.as_tensor(learners, device=self.flat.device)
        self._adopt(self.flat.detach()[index].clone())


def clip_grad_norm(network: StackedLinear, max_norm: float) -> None:
    """Scale each learner's gradient to a norm of at most `max_norm`, independent of the others."""
    grad = network.flat.grad
    assert grad is not None
    norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    grad.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))


def soft_update(target: StackedLinear, online: StackedLinear, tau: float) -> None:
    """target ← (1 − tau)·target + tau·online; tau = 1 is a copy."""
    with torch.no_grad():
        if tau == 1.0:
            target.flat.copy_(online.flat)
        else:
            target.flat.lerp_(online.flat, tau)
