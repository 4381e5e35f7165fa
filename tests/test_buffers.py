"""The sum tree against cumulative sums; the replay memory against a list."""

from __future__ import annotations

import numpy as np
import pytest

from dask_mohpo.agents._buffers import ReplayBuffer, SumTree

CAPACITIES = [1, 63, 64, 65, 5000]


def spaced(num, num_learners=2):
    """Evenly spaced fractions: `find` then gives each leaf its exact share, up to one draw."""
    return np.stack([(np.arange(num) + 0.5) / num] * num_learners)


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
        counts = np.bincount(tree.find(spaced(int(row.sum())))[s], minlength=capacity)
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
    assert np.isfinite(tree.total()).all()


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


def test_a_single_leaf_takes_every_draw():
    tree = SumTree(3, 1)
    tree.set(np.zeros((3, 2), int), np.array([[9.0, 1.0], [9.0, 2.0], [9.0, 0.5]]))
    assert tree.total().tolist() == [1.0, 2.0, 0.5]
    fractions = np.array([[0.0, np.nextafter(1.0, 0.0)]] * 3)
    assert tree.find(fractions).tolist() == [[0, 0]] * 3


def test_the_total_is_a_copy():
    tree = filled_tree(np.ones((2, 3)))
    tree.total()[:] = 0
    assert tree.total().tolist() == [3.0, 3.0]


def test_what_is_given_stays_as_it_is():
    leaves, values = np.array([[1, 4], [2, 2]]), np.ones((2, 2))
    fractions = np.array([[0.1, 0.9], [0.5, 0.0]])
    before = leaves.copy(), values.copy(), fractions.copy()
    tree = SumTree(2, 5)
    tree.set(leaves, values)
    tree.find(fractions)
    for given, kept in zip((leaves, values, fractions), before, strict=True):
        assert np.array_equal(given, kept)


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
        np.stack([marks + 1, -marks - 1, marks + 1.25], axis=1).astype(np.float32),
        np.stack([marks, 2 * marks], axis=1).astype(np.float32),
        np.where(number % 3 == 0, 0.0, 0.5 + 0.125 * np.arange(num_learners)),
        np.arange(num_learners) + number,
    )


def memory(capacities, prioritised):
    return ReplayBuffer(capacities, 3, 2, prioritised=prioritised)


def filled(num_transitions, capacities=(10, 10), prioritised=(False, False)):
    buffer = memory(capacities, prioritised)
    for number in range(num_transitions):
        buffer.add(*transition(number, len(capacities)))
    return buffer


def taken(buffer, index):
    """obs, next_obs, rewards, discount and action of transitions, each (S, n, ·)."""
    out = np.full((*index.shape, buffer.parts[-1]), np.nan, np.float32)
    buffer.take(index, out)
    return np.split(out, buffer.parts[:-1], axis=-1)


def numbers_of(buffer, index):
    """Which transitions these are, (S, n)."""
    actions = taken(buffer, index)[-1][..., 0].astype(int)
    return actions - np.arange(len(actions))[:, None]


def shares(buffer, num=10_000):
    """How often each learner's transitions are drawn: one {number: share} for each learner."""
    numbers = numbers_of(buffer, buffer.draw(spaced(num, len(buffer.sizes))))
    counts = [np.unique(row, return_counts=True) for row in numbers]
    return [dict(zip(n.tolist(), (c / num).tolist(), strict=True)) for n, c in counts]


def in_proportion(**priorities):
    total = sum(priorities.values())
    named = {int(name.removeprefix("t")): p / total for name, p in priorities.items()}
    return pytest.approx(named, abs=2e-4)


EITHER = pytest.mark.parametrize("prioritised", [(False, False), (True, True), (True, False)])


@EITHER
@pytest.mark.parametrize("num_transitions", [1, 7, 10, 11, 25])
def test_holds_the_last_transitions(num_transitions, prioritised):
    buffer = filled(num_transitions, prioritised=prioritised)
    kept = range(max(0, num_transitions - 10), num_transitions)
    assert buffer.sizes.tolist() == [len(kept)] * 2
    assert shares(buffer) == [pytest.approx(dict.fromkeys(kept, 1 / len(kept)), abs=2e-4)] * 2


@pytest.mark.parametrize("prioritised", [(False,) * 4, (True,) * 4, (True, False, False, True)])
@pytest.mark.parametrize("num_transitions", [1, 3, 8, 23])
def test_each_learner_keeps_as_many_as_its_own_capacity(num_transitions, prioritised):
    capacities = (3, 8, 1, 5)
    buffer = filled(num_transitions, capacities, prioritised)
    kept = [range(max(0, num_transitions - c), num_transitions) for c in capacities]
    assert buffer.sizes.tolist() == [len(numbers) for numbers in kept]
    for found, numbers in zip(shares(buffer), kept, strict=True):
        assert found == pytest.approx(dict.fromkeys(numbers, 1 / len(numbers)), abs=2e-4)


def test_wraps_between_draws_as_well_as_before_the_first():
    """More transitions than a capacity come between two draws, and fewer."""
    buffer = filled(0, (3, 7), (True, False))
    numbers = iter(range(100))
    for pause in (1, 2, 3, 1, 9, 2, 20, 1):
        for _ in range(pause):
            buffer.add(*transition(last := next(numbers)))
        for found, capacity in zip(shares(buffer), (3, 7), strict=True):
            assert sorted(found) == list(range(max(0, last + 1 - capacity), last + 1))


@EITHER
def test_transitions_come_back_whole(prioritised):
    buffer = filled(13, (10, 4), prioritised)
    index = buffer.draw(spaced(50))
    found = taken(buffer, index)
    for s in range(2):
        for n, number in enumerate(numbers_of(buffer, index)[s]):
            for part, expected in zip(found, transition(number), strict=True):
                assert part[s, n].ravel().tolist() == np.ravel(expected[s]).tolist()


def test_take_fills_the_given_array_and_nothing_else():
    buffer = filled(5, (3, 5))
    memory = np.zeros((2, 2, 2, buffer.parts[-1]), np.float32)
    before = buffer.rows.copy()
    buffer.take(np.array([[2, 0], [4, 4]]), out=memory[1])
    assert not memory[0].any()
    assert memory[1, ..., -1].tolist() == [[2.0, 3.0], [5.0, 5.0]]
    assert np.array_equal(buffer.rows, before)


def test_added_arrays_may_be_reused():
    buffer = memory((4,), (False,))
    given = transition(0, 1)
    buffer.add(*given)
    for array in given:
        array[...] = 0
    assert taken(buffer, np.array([[0]]))[0].tolist() == [[[0.0, 0.0, 0.25]]]


def test_prioritised_draws_are_in_proportion_for_each_learner():
    buffer = filled(4, (4, 4), (True, True))
    buffer.draw(spaced(4))
    priorities = np.array([[1.0, 2.0, 3.0, 4.0], [0.5, 0.01, 8.0, 0.5]])
    buffer.set_priorities(np.array([[0, 1, 2, 3], [3, 2, 1, 0]]), priorities)
    first, second = shares(buffer)
    assert first == in_proportion(t0=1.0, t1=2.0, t2=3.0, t3=4.0)
    assert second == in_proportion(t0=0.5, t1=8.0, t2=0.01, t3=0.5)


def test_priorities_count_once_and_for_all():
    buffer = filled(3, (3,), (True,))
    buffer.draw(spaced(4, 1))
    buffer.set_priorities(np.array([[1]]), np.array([[6.0]]))
    for _ in range(2):
        assert shares(buffer) == [in_proportion(t0=1.0, t1=6.0, t2=1.0)]
    buffer.set_priorities(np.array([[0]]), np.array([[3.0]]))
    assert shares(buffer) == [in_proportion(t0=3.0, t1=6.0, t2=1.0)]


def test_of_a_transition_drawn_twice_the_last_priority_counts():
    buffer = filled(2, (2,), (True,))
    buffer.draw(spaced(4, 1))
    buffer.set_priorities(np.array([[0, 1, 0]]), np.array([[7.0, 1.0, 3.0]]))
    assert shares(buffer) == [in_proportion(t0=3.0, t1=1.0)]


def test_a_new_transition_gets_the_learners_largest_priority_so_far():
    buffer = filled(3, (9, 9), (True, True))
    every = np.array([[0, 1, 2], [0, 1, 2]])
    buffer.draw(spaced(4))
    buffer.set_priorities(every, np.array([[8.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    buffer.draw(spaced(4))
    # it counts also after no transition has it any more
    buffer.set_priorities(every, np.array([[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    buffer.add(*transition(3))
    first, second = shares(buffer)
    assert first == in_proportion(t0=1.0, t1=1.0, t2=1.0, t3=8.0)
    assert second == in_proportion(t0=0.5, t1=0.5, t2=0.5, t3=1.0)
    # those that came before the priorities changed get it as well: they count from the next draw on
    buffer.add(*transition(4))
    buffer.set_priorities(np.array([[0], [0]]), np.array([[20.0], [0.5]]))
    first, second = shares(buffer)
    assert first == in_proportion(t0=20.0, t1=1.0, t2=1.0, t3=8.0, t4=20.0)
    assert second == in_proportion(t0=0.5, t1=0.5, t2=0.5, t3=1.0, t4=1.0)


@pytest.mark.parametrize("added_first", [True, False])
def test_a_new_transition_does_not_inherit_the_priority_of_the_one_it_replaces(added_first):
    """Whether it came before or after the priorities of the last draw were known."""
    buffer = filled(3, (3, 2), (True, True))
    buffer.draw(spaced(4))
    if added_first:
        buffer.add(*transition(3))
    # transition 0 of learner 0 and transition 1 of learner 1 are about to be replaced
    buffer.set_priorities(np.array([[0, 1, 2], [0, 1, 0]]), np.full((2, 3), 0.25))
    if not added_first:
        buffer.add(*transition(3))
    first, second = shares(buffer)
    assert first == in_proportion(t1=0.25, t2=0.25, t3=1.0)
    assert second == in_proportion(t2=0.25, t3=1.0)


def test_uniform_memory_passes_over_priorities():
    buffer = filled(4, (4, 4))
    buffer.draw(spaced(4))
    buffer.set_priorities(np.array([[0], [0]]), np.array([[1e6], [1e6]]))
    assert shares(buffer) == [in_proportion(t0=1.0, t1=1.0, t2=1.0, t3=1.0)] * 2


def play(capacities, prioritised, learners, num_steps=60):
    """What learners of a larger batch draw over a training, alone or together, (steps, S, n)."""
    rngs = [np.random.default_rng(learner) for learner in learners]
    buffer = memory(capacities, prioritised)
    draws = []
    for number in range(num_steps):
        buffer.add(*transition(number, len(capacities)))
        if number < 5 or number % 4 == 0:
            continue
        index = buffer.draw(np.stack([rng.random(6) for rng in rngs]))
        draws.append(index)
        marks = np.array(learners)[:, None]
        buffer.set_priorities(index, 0.1 + (index * 7 + 3 * marks + number) % 5)
    return np.array(draws)


@pytest.mark.parametrize("capacities", [(20, 20, 20), (7, 20, 1), (13, 7, 64)])
@pytest.mark.parametrize(
    "prioritised", [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_learner_draws_what_it_would_draw_alone(capacities, prioritised):
    """A uniform one among prioritised ones as well: alone it has no priorities at all."""
    together = play(capacities, prioritised, (0, 1, 2))
    for s in range(3):
        alone = play(capacities[s : s + 1], prioritised[s : s + 1], (s,))
        assert np.array_equal(together[:, s], alone[:, 0])


def test_a_uniform_learner_among_prioritised_ones_draws_uniformly_at_the_edges():
    """Fractions on the border between two transitions, and next to 1."""
    edges = np.concatenate([np.arange(100) / 100, [np.nextafter(1.0, 0.0), 1 - 1e-9]])
    for size in (1, 2, 3, 7, 64, 100):
        both = filled(size, (100, 100), (True, False)).draw(np.stack([edges] * 2))
        alone = filled(size, (100,), (False,)).draw(edges[None])
        assert np.array_equal(both[1], alone[0])
        assert alone.max() == size - 1


def test_equal_fractions_draw_equally():
    same = filled(10, prioritised=(True, True)).draw(
        np.random.default_rng(3).random((1, 20))[[0, 0]]
    )
    assert np.array_equal(same[0], same[1])
