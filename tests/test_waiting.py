"""Which waiting seeds go into one task."""

from __future__ import annotations

import pytest

from dask_mohpo.waiting import AUTO, WaitingSeeds


def everything(trial: int) -> bool:
    return True


def drain(waiting: WaitingSeeds) -> list[list[tuple[int, tuple[int, ...], int]]]:
    tasks = []
    while task := waiting.pop(everything):
        tasks.append([(entry.trial, entry.seeds, entry.attempt) for entry in task])
    return tasks


@pytest.mark.parametrize(
    ("seeds_per_task", "tasks"),
    [(1, [(5,), (6,), (7,)]), (2, [(5, 6), (7,)]), (3, [(5, 6, 7)]), (9, [(5, 6, 7)])],
)
def test_a_trials_seeds_in_tasks_of_a_fixed_size(
    seeds_per_task: int, tasks: list[tuple[int, ...]]
) -> None:
    waiting = WaitingSeeds(seeds_per_task, 1)
    waiting.add_trial(4, (5, 6, 7), None, trials_to_ask=10, slots=2)

    assert drain(waiting) == [[(4, seeds, 0)] for seeds in tasks]


def test_the_oldest_trial_first_also_where_its_seeds_come_last() -> None:
    waiting = WaitingSeeds(1, 1)
    waiting.add(7, (1,), 0, None)
    waiting.add(3, (2,), 1, None)
    waiting.add(7, (0,), 0, None)

    assert drain(waiting) == [[(3, (2,), 1)], [(7, (0,), 0)], [(7, (1,), 0)]]
    assert not waiting


def test_trials_with_equal_keys_share_a_task_the_oldest_ones_first() -> None:
    waiting = WaitingSeeds(2, 3)
    for trial, key in enumerate(["a", "b", "a", "a", "a"]):
        waiting.add_trial(trial, (1, 2), key, trials_to_ask=0, slots=1)

    assert drain(waiting) == [
        [(0, (1, 2), 0), (2, (1, 2), 0), (3, (1, 2), 0)],
        [(1, (1, 2), 0)],
        [(4, (1, 2), 0)],
    ]


def test_one_task_takes_from_each_trial_once() -> None:
    waiting = WaitingSeeds(1, 4)
    for trial in (0, 1):
        waiting.add_trial(trial, (1, 2), "a", trials_to_ask=0, slots=1)

    assert drain(waiting) == [[(0, (1,), 0), (1, (1,), 0)], [(0, (2,), 0), (1, (2,), 0)]]


def test_seeds_that_are_tried_again_and_trials_without_a_key_train_alone() -> None:
    waiting = WaitingSeeds(1, 4)
    waiting.add(0, (1,), 1, "a")
    waiting.add(1, (1,), 0, "a")
    waiting.add(2, (1,), 1, "a")
    waiting.add(3, (1,), 0, None)
    waiting.add(4, (1,), 0, "a")

    assert drain(waiting) == [
        [(0, (1,), 1)],
        [(1, (1,), 0), (4, (1,), 0)],
        [(2, (1,), 1)],
        [(3, (1,), 0)],
    ]


def test_trials_that_are_not_open_are_dropped() -> None:
    waiting = WaitingSeeds(1, 2)
    for trial in range(4):
        waiting.add_trial(trial, (1,), "a", trials_to_ask=0, slots=1)

    task = waiting.pop(lambda trial: trial in (1, 3))

    assert [entry.trial for entry in task] == [1, 3]
    assert waiting.pop(lambda trial: False) == []
    assert not waiting


def test_more_trials_are_wanted_until_a_task_is_full() -> None:
    waiting = WaitingSeeds(1, 2)
    assert waiting.wants_more(everything)
    waiting.add_trial(0, (1, 2), "a", trials_to_ask=0, slots=1)
    assert waiting.wants_more(everything)
    waiting.add_trial(1, (1, 2), "b", trials_to_ask=0, slots=1)
    assert not waiting.wants_more(everything)
    assert waiting.wants_more(lambda trial: trial == 1)


@pytest.mark.parametrize(
    ("trials_to_ask", "slots", "size"),
    [(99, 10, 4), (9, 5, 4), (4, 5, 2), (0, 5, 1), (0, 1, 2), (0, 0, 2)],
)
def test_auto_leaves_every_slot_two_tasks_to_come(
    trials_to_ask: int, slots: int, size: int
) -> None:
    waiting = WaitingSeeds(AUTO, 1)
    waiting.add_trial(0, (1, 2, 3, 4), None, trials_to_ask=trials_to_ask, slots=slots)

    first = waiting.pop(everything)[0]
    assert len(first.seeds) == size


@pytest.mark.parametrize(
    ("seeds_per_task", "trials_per_task", "tasks"), [(1, 1, 13), (3, 1, 5), (1, 4, 4), (3, 2, 3)]
)
def test_how_many_tasks_are_to_come(seeds_per_task: int, trials_per_task: int, tasks: int) -> None:
    waiting = WaitingSeeds(seeds_per_task, trials_per_task)
    waiting.add(0, (1,), 0, None)

    assert waiting.num_tasks(4, 3, slots=2) == tasks
