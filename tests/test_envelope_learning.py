"""One step of learning of Envelope Q-learning against the paper, in plain NumPy and autograd."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from dask_mohpo.agents._draws import generators
from dask_mohpo.agents._envelope_learning import EnvelopeLearning, LearningShape

OBS, OBJECTIVES, ACTIONS = 4, 3, 5
BATCH, NUM_W = 6, 3
ROW = np.cumsum([OBS, OBS, OBJECTIVES, 1, 1])


def learning(
    num: int = 2,
    *,
    rates: list[float] | None = None,
    norms: list[float | None] | None = None,
    device: str = "cpu",
    **shape: Any,
) -> EnvelopeLearning:
    """Learners whose online and target networks differ from each other."""
    common = {"net_arch": (16, 12), "envelope": True, "half": False, **shape}
    one = EnvelopeLearning(
        LearningShape(
            obs_dim=OBS,
            num_objectives=OBJECTIVES,
            num_actions=ACTIONS,
            batch_size=BATCH,
            num_sample_w=NUM_W,
            **common,
        ),
        learning_rates=rates or [1e-3] * num,
        max_grad_norms=norms or [None] * num,
        generators=generators(range(num), 0),
        row=ROW,
        device=torch.device(device),
    )
    rng = np.random.default_rng(5)
    for network in (one.online, one.target):
        network.flat.copy_(torch.from_numpy(rng.normal(0, 0.6, network.flat.shape)))
    one.follow(np.zeros(num))
    return one


def fill(one: EnvelopeLearning, seed: int = 0) -> None:
    """Transitions with discounts of their own, some of which end their episodes."""
    rng = np.random.default_rng(seed)
    one.batch[:] = rng.normal(size=one.batch.shape)
    one.batch[..., ROW[2]] = rng.choice([0.0, 0.5, 0.9, 0.99], one.batch.shape[:2])
    one.batch[..., ROW[3]] = rng.integers(ACTIONS, size=one.batch.shape[:2])
    one.weights[:] = rng.dirichlet(np.ones(OBJECTIVES), one.weights.shape[:2])


def copied(one: EnvelopeLearning) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters of now, in double precision: of the online networks, of the target ones."""
    return one.online.flat.double(), one.target.flat.double()


def q_values(one: EnvelopeLearning, flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A learner's network from its parameters: (N, ·) → (N, actions, objectives)."""
    start = 0
    for layer, (n_in, n_out) in enumerate(one.online.shapes):
        middle, end = start + n_in * n_out, start + (n_in + 1) * n_out
        x = x @ flat[start:middle].view(n_in, n_out) + flat[middle:end]
        start = end
        if layer < len(one.online.shapes) - 1:
            x = x.relu()
    assert start == len(flat)
    return x.view(-1, ACTIONS, OBJECTIVES)


def q_numpy(one: EnvelopeLearning, flat: torch.Tensor, obs: Any, weight: Any) -> np.ndarray:
    x = torch.from_numpy(np.concatenate([obs, weight]).astype(float))[None]
    return q_values(one, flat, x)[0].numpy()


def paper_targets(
    one: EnvelopeLearning, s: int, online: torch.Tensor, target: torch.Tensor, *, envelope: bool
) -> np.ndarray:
    """Equation 6 with double Q-learning, one transition and preference after the other."""
    result = np.zeros((BATCH, NUM_W, OBJECTIVES))
    for b, i in np.ndindex(BATCH, NUM_W):
        _, next_obs, reward, discount, _ = np.split(one.batch[s, b].astype(float), ROW[:-1])
        best, chosen = -np.inf, np.zeros(OBJECTIVES)
        for other in one.weights[s] if envelope else one.weights[s, i : i + 1]:
            choice = q_numpy(one, online[s], next_obs, other)
            value = q_numpy(one, target[s], next_obs, other)
            for action in range(ACTIONS):
                score = float(choice[action] @ one.weights[s, i].astype(float))
                if score > best:
                    best, chosen = score, value[action]
        result[b, i] = reward + discount * chosen
    return result


def paper_loss(
    one: EnvelopeLearning, s: int, flat: torch.Tensor, targets: np.ndarray, homotopy: float
) -> tuple[torch.Tensor, np.ndarray]:
    """(1 − λ)·L_A + λ·L_B of learner s, and its errors under the preferences."""
    loss, surprise = torch.zeros((), dtype=torch.double), np.zeros(BATCH)
    for b, i in np.ndindex(BATCH, NUM_W):
        obs, action = one.batch[s, b, :OBS], int(one.batch[s, b, -1])
        weight = torch.from_numpy(one.weights[s, i].astype(float))
        x = torch.cat([torch.from_numpy(obs.astype(float)), weight])[None]
        error = q_values(one, flat, x)[0, action] - torch.from_numpy(targets[b, i])
        scalar = torch.dot(weight, error)
        loss = loss + (1 - homotopy) * error.square().mean() / (BATCH * NUM_W)
        loss = loss + homotopy * scalar.square() / (BATCH * NUM_W)
        surprise[b] += abs(float(scalar.detach())) / NUM_W
    return loss, surprise


@pytest.mark.parametrize("envelope", [True, False])
@pytest.mark.parametrize("homotopy", [(0.0, 0.0), (1.0, 1.0), (0.3, 0.8)])
def test_an_update_is_that_of_the_paper(envelope: bool, homotopy: tuple[float, float]) -> None:
    one = learning(envelope=envelope)
    fill(one)
    online, target = copied(one)
    one.update(np.array(homotopy))
    for s in range(2):
        targets = paper_targets(one, s, online, target, envelope=envelope)
        flat = online[s].clone().requires_grad_()
        loss, surprise = paper_loss(one, s, flat, targets, homotopy[s])
        loss.backward()
        assert flat.grad is not None
        torch.testing.assert_close(one.online.grad[s], flat.grad.float(), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(one.surprise()[s], surprise, rtol=1e-4, atol=1e-5)
    assert torch.equal(one.target.flat.double(), target)


@pytest.mark.parametrize("envelope", [True, False])
def test_each_target_is_that_of_the_paper(envelope: bool) -> None:
    """With λ = 0 the last biases' gradient tells the errors of a transition that alone took its
    action: their sum over the preferences."""
    one = learning(1, envelope=envelope)
    fill(one)
    one.batch[0, :, -1] = [0, 1, 2, 3, 4, 4]
    online, target = copied(one)
    targets = paper_targets(one, 0, online, target, envelope=envelope)
    one.update(np.zeros(1))
    found = one.online.grads[-1][1].view(ACTIONS, OBJECTIVES)
    for b in range(4):
        obs, action = one.batch[0, b, :OBS], int(one.batch[0, b, -1])
        taken = [q_numpy(one, online[0], obs, weight)[action] for weight in one.weights[0]]
        mean = OBJECTIVES * BATCH * NUM_W * found[action].double().numpy() / 2
        np.testing.assert_allclose(
            np.sum(taken, axis=0) - mean, targets[b].sum(axis=0), rtol=1e-4, atol=1e-4
        )


def test_other_preferences_matter_to_an_envelope_target() -> None:
    """Or the tests above could not tell the two kinds of targets apart."""
    one = learning()
    fill(one)
    online, target = copied(one)
    for s in range(2):
        both = [paper_targets(one, s, online, target, envelope=e) for e in (True, False)]
        assert np.abs(both[0] - both[1]).max() > 0.1


def test_nothing_is_left_of_the_update_before() -> None:
    one, fresh = learning(), learning()
    fill(one, seed=1)
    one.update(np.full(2, 0.5))
    first = one.surprise().copy()
    fresh.online.flat.copy_(one.online.flat)
    for each in (one, fresh):
        fill(each, seed=2)
        each.update(np.array([0.2, 0.9]))
    torch.testing.assert_close(one.online.grad, fresh.online.grad)
    np.testing.assert_allclose(one.surprise(), fresh.surprise(), rtol=1e-6)
    assert not np.allclose(one.surprise(), first)


def test_a_learner_learns_what_it_would_learn_alone() -> None:
    together = learning(3, rates=[1e-3, 1e-2, 3e-3], norms=[0.5, None, 0.01])
    for step in range(5):
        fill(together, step)
        together.update(np.array([0.1, 0.5, 1.0]))
        together.follow(np.array([0.5, 0.0, 1.0]))
    for s, (rate, norm, homotopy, share) in enumerate(
        [(1e-3, 0.5, 0.1, 0.5), (1e-2, None, 0.5, 0.0), (3e-3, 0.01, 1.0, 1.0)]
    ):
        alone, source = learning(1, rates=[rate], norms=[norm]), learning(3)
        alone.online.flat.copy_(source.online.flat[s : s + 1])
        alone.target.flat.copy_(source.target.flat[s : s + 1])
        for step in range(5):
            fill(source, step)
            alone.batch[:], alone.weights[:] = source.batch[s], source.weights[s]
            alone.update(np.array([homotopy]))
            alone.follow(np.array([share]))
        for mine, shared in [(alone.online, together.online), (alone.target, together.target)]:
            torch.testing.assert_close(shared.flat[s], mine.flat[0], rtol=1e-4, atol=1e-5)


def test_the_first_step_of_adam_is_as_long_as_each_learners_rate() -> None:
    """Whatever the gradient: it is divided by its own size."""
    one = learning(2, rates=[1e-3, 2e-2])
    fill(one)
    before = one.online.flat.clone()
    one.update(np.full(2, 0.5))
    moved = before - one.online.flat
    large = one.online.grad.abs() > 1e-3
    for s, rate in enumerate([1e-3, 2e-2]):
        expected = rate * one.online.grad[s].sign()
        torch.testing.assert_close(moved[s][large[s]], expected[large[s]], rtol=1e-2, atol=1e-6)
    assert large.any(dim=1).all()


def test_gradients_are_cut_to_each_learners_norm() -> None:
    norms = {}
    for limits in [(None, None, None), (None, 1e-3, 1e9)]:
        one = learning(3, norms=list(limits))
        fill(one)
        one.update(np.full(3, 0.5))
        norms[limits] = torch.linalg.vector_norm(one.online.grad, dim=1)
    free, cut = norms.values()
    assert free.min() > 0.1
    torch.testing.assert_close(cut[[0, 2]], free[[0, 2]])
    assert cut[1].item() == pytest.approx(1e-3, rel=2e-3)


# --- the target network ---------------------------------------------------------------------------


def test_each_target_network_follows_by_a_share_of_its_own() -> None:
    one = learning(4)
    online, target = one.online.flat.clone(), one.target.flat.clone()
    one.follow(np.array([0.25, 0.0, 1.0, 0.9]))
    assert torch.equal(one.online.flat, online)
    assert torch.equal(one.target.flat[1], target[1])
    assert torch.equal(one.target.flat[2], online[2])
    for s, share in [(0, 0.25), (3, 0.9)]:
        expected = (1 - share) * target[s] + share * online[s]
        torch.testing.assert_close(one.target.flat[s], expected)


def test_all_target_networks_become_copies_of_their_own() -> None:
    one = learning()
    one.follow(np.ones(2))
    assert torch.equal(one.target.flat, one.online.flat)
    fill(one)
    one.update(np.zeros(2))
    assert not torch.equal(one.target.flat, one.online.flat)


# --- actions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7])
def test_greedy_actions_are_those_that_the_weights_value_most(rows: int) -> None:
    one = learning()
    rng = np.random.default_rng(2)
    obs = rng.normal(size=(2, rows, OBS)).astype(np.float32)
    weights = rng.dirichlet(np.ones(OBJECTIVES), (2, rows))
    found = one.greedy(obs, weights)
    online, _ = copied(one)
    expected = [
        [
            int((q_numpy(one, online[s], obs[s, n], weights[s, n]) @ weights[s, n]).argmax())
            for n in range(rows)
        ]
        for s in range(2)
    ]
    assert found.tolist() == expected


# --- precision ------------------------------------------------------------------------------------


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_bfloat16_learns_nearly_the_same() -> None:
    exact, near = learning(net_arch=(32, 32, 32)), learning(net_arch=(32, 32, 32), half=True)
    before = exact.online.flat.clone()
    for one in (exact, near):
        fill(one)
        one.update(np.full(2, 0.5))
    rounds = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (1e-5 if rounds else -1) < distance(near.online.grad, exact.online.grad) < 0.1
    torch.testing.assert_close(near.online.flat, exact.online.flat, rtol=0, atol=2.1e-3)
    agree = (near.online.flat - before).sign() == (exact.online.flat - before).sign()
    assert agree.float().mean() > 0.95
    assert near.online.flat.dtype == near.online.grad.dtype == torch.float32


# --- CUDA -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("half", [False, True])
def test_a_recorded_update_is_that_of_the_cpu(half: bool) -> None:
    cpu, gpu = learning(half=half), learning(half=half, device="cuda")
    for step, copies in itertools.product(range(5), (0.0, 0.3)):
        for one in (cpu, gpu):
            fill(one, step)
            one.update(np.full(2, step / 10))
            one.follow(np.full(2, copies))
        atol = 0.05 if half else 1e-3
        np.testing.assert_allclose(gpu.surprise(), cpu.surprise(), rtol=atol, atol=atol)
    assert gpu._graph is not None
    torch.testing.assert_close(gpu.online.flat.cpu(), cpu.online.flat, rtol=0, atol=1e-2)
