"""The sum tree against cumulative sums; the replay memory against a list."""

from __future__ import annotations

import numpy as np
import pytest

from dask_mohpo.agents._buffers import ReplayBuffer, SumTree

CAPACITIES = [1, 63, 64, 65, 5000]


def generators(*seeds):
    return [np.random.default_rng(seed) for seed in seeds]


def filled_tree(values):
    """A tree with these leaf values (S, capacity)."""
    tree = SumTree(*values.shape)
    tree.set(np.broadcast_to(np.arange(values.shape[1]), values.shape), values)
    return tree


def whole_numbers(num_learners, capacity, rng):
    """Leaf values whose sums are exact: small whole numbers, about a third of them zero."""
    values = rng.integers(0, 6, (num_learners, capacity)) * rng.integers(0, 2, (1, capacity))
    values[:, rng.integers(capacity)] = 3
    return values.astype(float)


# --- the sum tree ---------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_finds_the_leaves_of_a_cumulative_sum(capacity):
    values = whole_numbers(3, capacity, np.random.default_rng(capacity))
    tree = filled_tree(values)
    assert tree.total().tolist() == values.sum(axis=1).tolist()
    # the middle of every unit of the smallest total, so that rounding cannot matter
    fractions = np.stack([np.linspace(0, 1, 400, endpoint=False) + 1 / 1024] * 3)
    sums = values.cumsum(axis=1)
    expected = [
        np.searchsorted(row, f * row[-1], side="right")
        for row, f in zip(sums, fractions, strict=True)
    ]
    assert np.array_equal(tree.find(fractions), expected)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_unit_of_the_total_falls_in_its_leaf(capacity):
    values = whole_numbers(2, capacity, np.random.default_rng(1))
    tree = filled_tree(values)
    for s, row in enumerate(values):
        total = int(row.sum())
        fractions = np.stack([(np.arange(total) + 0.5) / total] * 2)
        counts = np.bincount(tree.find(fractions)[s], minlength=capacity)
        assert np.array_equal(counts, row)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_keeps_up_with_changes_that_repeat_leaves(capacity):
    rng = np.random.default_rng(2)
    tree, values = SumTree(2, capacity), np.zeros((2, capacity))
    for _ in range(20):
        leaves = rng.integers(0, max(1, capacity // 2), (2, 50))
        news = rng.integers(0, 9, (2, 50)).astype(float)
        tree.set(leaves, news)
        for s in range(2):
            for leaf, new in zip(leaves[s], news[s], strict=True):
                values[s, leaf] = new  # the last of several values for one leaf stays
    assert tree.total().tolist() == values.sum(axis=1).tolist()
    assert tree.total().min() > 0
    fractions = np.random.default_rng(3).random((2, 1000))
    expected = [
        np.searchsorted(row.cumsum(), f * row.sum(), side="right")
        for row, f in zip(values, fractions, strict=True)
    ]
    assert np.array_equal(tree.find(fractions), expected)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_never_draws_a_leaf_of_value_zero(capacity):
    rng = np.random.default_rng(4)
    # values over 16 orders of magnitude: rounding is at its worst
    values = 10.0 ** rng.uniform(-8, 8, (4, capacity)) * (rng.random((4, capacity)) < 0.5)
    values[:, capacity // 2] = 1e-8
    values[:, capacity // 2 + 1 :] *= rng.random((1, capacity - capacity // 2 - 1)) < 0.1
    tree = filled_tree(values)
    extremes = [0.0, np.nextafter(0.0, 1.0), 0.5, np.nextafter(1.0, 0.0)]
    fractions = np.concatenate([np.array([extremes] * 4), rng.random((4, 5000))], axis=1)
    found = tree.find(fractions)
    assert found.min() >= 0
    assert found.max() < capacity
    assert (np.take_along_axis(values, found, axis=1) > 0).all()


def test_the_only_positive_leaf_is_drawn_wherever_it_is():
    fractions = np.array([[0.0, 0.3, np.nextafter(1.0, 0.0)]])
    for leaf in (0, 63, 64, 4095, 4096, 4999):
        tree = SumTree(1, 5000)
        tree.set(np.array([[leaf]]), np.array([[0.1]]))
        assert tree.find(fractions).tolist() == [[leaf] * 3]


def test_draws_in_proportion_to_the_values():
    values = np.tile([0.0, 1.0, 2.0, 3.0, 0.5], 30)[None]
    found = filled_tree(values).find(np.random.default_rng(5).random((1, 200_000)))
    share = np.bincount(found[0], minlength=150) / 200_000
    expected = values[0] / values.sum()
    # five standard deviations of a share
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected / 200_000)).all()


def test_learners_have_trees_of_their_own():
    tree = SumTree(2, 100)
    tree.set(np.array([[3, 4], [90, 90]]), np.array([[1.0, 1.0], [5.0, 7.0]]))
    assert tree.total().tolist() == [2.0, 7.0]
    fractions = np.array([[0.2, 0.7], [0.2, 0.7]])
    assert tree.find(fractions).tolist() == [[3, 4], [90, 90]]


def test_rounding_errors_do_not_pile_up():
    rng = np.random.default_rng(6)
    tree = SumTree(1, 200)
    for _ in range(500):
        tree.set(rng.integers(0, 200, (1, 30)), 10.0 ** rng.uniform(-6, 6, (1, 30)))
    tree.set(np.arange(200)[None], np.full((1, 200), 0.25))
    assert tree.total().tolist() == [50.0]


# --- the replay memory ----------------------------------------------------------------------------


def transition(number, num_learners=2):
    """Transition `number` of every learner, recognisable by its values."""
    marks = number + 1000.0 * np.arange(num_learners)
    return (
        np.stack([marks, -marks, marks + 0.25], axis=1).astype(np.float32),
        np.arange(num_learners) + number,
        np.stack([marks, 2 * marks], axis=1).astype(np.float32),
        np.stack([marks + 1, -marks - 1, marks + 1.25], axis=1).astype(np.float32),
        np.full(num_learners, number % 3 == 0),
    )


def filled(num_transitions, capacity=10, *, prioritised=False, num_learners=2):
    buffer = ReplayBuffer(num_learners, capacity, 3, 2, prioritised=prioritised)
    for number in range(num_transitions):
        buffer.add(*transition(number, num_learners))
    return buffer


def drawn_numbers(buffer, batch_size, *seeds):
    """The numbers of the transitions drawn, (S, batch_size)."""
    index = buffer.draw(batch_size, generators(*seeds))
    actions = buffer.transitions(index)[1]
    return actions - np.arange(len(actions))[:, None]


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("num_transitions", [1, 7, 10, 11, 25])
def test_holds_the_last_transitions(num_transitions, prioritised):
    buffer = filled(num_transitions, prioritised=prioritised)
    kept = range(max(0, num_transitions - 10), num_transitions)
    assert buffer.size == len(kept)
    numbers = drawn_numbers(buffer, 500, 0, 1)
    assert [sorted(set(row)) for row in numbers.tolist()] == [list(kept)] * 2


@pytest.mark.parametrize("prioritised", [False, True])
def test_transitions_come_back_whole(prioritised):
    buffer = filled(13, prioritised=prioritised)
    index = buffer.draw(50, generators(0, 1))
    obs, actions, rewards, next_obs, terminated = buffer.transitions(index)
    for s in range(2):
        for n in range(50):
            expected = transition(actions[s, n] - s)
            assert np.array_equal(obs[s, n], expected[0][s])
            assert np.array_equal(rewards[s, n], expected[2][s])
            assert np.array_equal(next_obs[s, n], expected[3][s])
            assert terminated[s, n] == expected[4][s]
    kinds = [x.dtype for x in (obs, actions, rewards, next_obs, terminated)]
    assert kinds == [np.float32, np.int64, np.float32, np.float32, np.float32]


def test_added_arrays_may_be_reused():
    buffer = ReplayBuffer(1, 4, 3, 2, prioritised=False)
    given = transition(0, 1)
    buffer.add(*given)
    for array in given:
        array[...] = 0
    assert buffer.transitions(np.array([[0]]))[0].tolist() == [[[0.0, 0.0, 0.25]]]


def test_uniform_draws_are_uniform():
    numbers = drawn_numbers(filled(10), 100_000, 0, 1)
    for row in numbers:
        share = np.bincount(row, minlength=10) / 100_000
        assert np.abs(share - 0.1).max() < 0.005


def test_uniform_memory_passes_over_priorities():
    buffer = filled(10)
    buffer.set_priorities(np.array([[0], [0]]), np.array([[1e6], [1e6]]))
    assert np.bincount(drawn_numbers(buffer, 10_000, 0, 1)[0])[0] < 2000


def test_prioritised_draws_are_in_proportion():
    buffer = filled(10, prioritised=True)
    index = np.tile(np.arange(10), (2, 1))
    priorities = np.stack([np.arange(1.0, 11.0), np.arange(10.0, 0.0, -1.0)])
    buffer.set_priorities(index, priorities)
    numbers = drawn_numbers(buffer, 100_000, 0, 1)
    for row, expected in zip(numbers, priorities / 55, strict=True):
        share = np.bincount(row, minlength=10) / 100_000
        assert np.abs(share - expected).max() < 0.005


def test_before_any_priority_is_set_all_are_alike():
    share = np.bincount(drawn_numbers(filled(7, prioritised=True), 70_000, 0, 1)[1]) / 70_000
    assert np.abs(share - 1 / 7).max() < 0.006


def test_a_new_transition_gets_the_learners_largest_priority_so_far():
    buffer = filled(3, prioritised=True)
    every = np.array([[0, 1, 2], [0, 1, 2]])
    buffer.set_priorities(every, np.array([[8.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    # it counts also after no transition has it any more
    buffer.set_priorities(every, np.array([[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    buffer.add(*transition(3))
    numbers = drawn_numbers(buffer, 100_000, 0, 1)
    for row, expected in zip(numbers, np.array([[1, 1, 1, 8], [0.5, 0.5, 0.5, 1]]), strict=True):
        share = np.bincount(row, minlength=4) / 100_000
        assert np.abs(share - expected / expected.sum()).max() < 0.006


def test_an_overwritten_transition_loses_its_priority():
    buffer = filled(10, prioritised=True)
    buffer.set_priorities(np.tile(np.arange(10), (2, 1)), np.full((2, 10), 0.01))
    buffer.add(*transition(10))  # takes the place of transition 0, with priority 1
    share = np.bincount(drawn_numbers(buffer, 10_000, 0, 1)[0], minlength=11) / 10_000
    assert share[0] == 0
    assert share[10] > 0.8


@pytest.mark.parametrize("prioritised", [False, True])
def test_learners_are_independent(prioritised):
    """Learner 1 of a pair draws what it would draw alone."""

    def play(num_learners):
        buffer = filled(8, prioritised=prioritised, num_learners=num_learners)
        rngs = generators(*range(2 - num_learners, 2))
        draws = []
        for number in range(8, 20):
            buffer.add(*transition(number, num_learners))
            index = buffer.draw(4, rngs)
            numbers = np.arange(2 - num_learners, 2)[:, None]
            buffer.set_priorities(index, 0.1 + (index * 7 + 3 * numbers) % 5)
            draws.append(index[-1])
        return np.array(draws)

    assert np.array_equal(play(2), play(1))


def test_equal_generators_draw_equally():
    buffer = filled(10, prioritised=True)
    assert np.array_equal(buffer.draw(20, generators(3, 4)), buffer.draw(20, generators(3, 4)))
    same = buffer.draw(20, generators(3, 3))
    assert np.array_equal(same[0], same[1])
