"""Random numbers step by step: each learner's are its own."""

from __future__ import annotations

import numpy as np
import pytest

from dask_mohpo.agents._draws import BLOCK, Blocks, generators


def pairs(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.random((num, 2))


def some(blocks: Blocks, num: int) -> np.ndarray:
    return np.stack([blocks.next() for _ in range(num)])


def test_generators_depend_on_the_seed_and_the_stream_alone() -> None:
    def draws(seeds: list[int], stream: int) -> list[tuple[float, ...]]:
        return [tuple(g.random(3)) for g in generators(seeds, stream)]

    first = draws([4, 5], 0)
    assert first == draws([4, 5], 0)
    assert draws([5], 0) == first[1:]
    assert len({*first, *draws([4, 5], 1), *draws([4, 5], 2)}) == 6


@pytest.mark.parametrize("num", [1, BLOCK, 2 * BLOCK + 3])
def test_a_learner_draws_what_it_would_draw_alone(num: int) -> None:
    together = some(Blocks(generators([7, 8, 9], 1), pairs), num)
    assert together.shape == (num, 3, 2)
    for s, seed in enumerate([7, 8, 9]):
        alone = some(Blocks(generators([seed], 1), pairs), num)
        assert np.array_equal(together[:, s], alone[:, 0])
    assert len(np.unique(together)) == together.size


def test_numbers_come_in_the_order_in_which_they_are_drawn() -> None:
    found = some(Blocks(generators([3], 0), pairs), 3 * BLOCK)[:, 0]
    [rng] = generators([3], 0)
    assert np.array_equal(found, np.concatenate([pairs(rng, BLOCK) for _ in range(3)]))


def test_a_block_is_drawn_when_the_last_one_is_used_up() -> None:
    asked: list[int] = []

    def draw(rng: np.random.Generator, num: int) -> np.ndarray:
        asked.append(num)
        return rng.random((num, 1))

    blocks = Blocks(generators([0, 1], 0), draw)
    assert asked == []
    blocks.next()
    assert asked == [BLOCK] * 2
    for _ in range(BLOCK - 1):
        blocks.next()
    assert asked == [BLOCK] * 2
    blocks.next()
    assert asked == [BLOCK] * 4


def test_a_generator_may_serve_others_in_between() -> None:
    """Episodes draw their weights from the generator of the actions: that is a matter of when."""
    together, alone = generators([5, 6], 0), generators([6], 0)
    both, one = Blocks(together, pairs), Blocks(alone, pairs)
    for step in range(2 * BLOCK):
        assert np.array_equal(both.next()[1], one.next()[0])
        if step % 5 == 0:
            assert together[1].random() == alone[0].random()
        if step % 3 == 0:
            together[0].random()  # what another learner does is no matter
