"""The seeds that wait for a slot, and which of them go into one seed task."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

__all__ = ["AUTO", "Waiting", "WaitingSeeds"]

AUTO = "auto"
"""Of `seeds_per_task`: a trial's seeds in one batch as long as every slot has tasks to come."""
TASKS_PER_SLOT = 2
"""How many tasks a slot should have to come, before seeds are put together."""


@dataclass(order=True, frozen=True)
class Waiting:
    """Seeds of a trial that train together; ordered by the age of the trial."""

    trial: int
    seeds: tuple[int, ...]
    attempt: int
    batch_key: Hashable = field(compare=False)
    """Trials with equal keys can train in one batch; None: with no other."""


class WaitingSeeds:
    """A queue, oldest trial first.

    Parameters
    ----------
    seeds_per_task : seeds of a trial that make up one task; ``"auto"``: see `AUTO`.
    trials_per_task : trials that may share a task.
    """

    def __init__(self, seeds_per_task: int | str, trials_per_task: int) -> None:
        self._seeds_per_task = seeds_per_task
        self._trials_per_task = trials_per_task
        self._heap: list[Waiting] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def task_size(self, seeds_left: int, seeds_per_trial: int, slots: int) -> int:
        """How many seeds of a trial make up one task, with so many seeds left to place."""
        if isinstance(self._seeds_per_task, int):
            return self._seeds_per_task
        fair = seeds_left // (TASKS_PER_SLOT * max(1, slots))
        return max(1, min(seeds_per_trial, fair))

    def num_tasks(self, trials_to_ask: int, seeds_per_trial: int, slots: int) -> int:
        """About how many tasks are still to be placed."""
        to_come = trials_to_ask * seeds_per_trial
        left = to_come + sum(len(entry.seeds) for entry in self._heap)
        tasks = len(self._heap) - (-to_come // self.task_size(left, seeds_per_trial, slots))
        return -(-tasks // self._trials_per_task)

    def add_trial(
        self, trial: int, seeds: Sequence[int], batch_key: Hashable, trials_to_ask: int, slots: int
    ) -> None:
        """Queue the seeds of a new trial, in tasks of the right size."""
        left = len(seeds) * (1 + trials_to_ask) + sum(len(entry.seeds) for entry in self._heap)
        size = self.task_size(left, len(seeds), slots)
        for start in range(0, len(seeds), size):
            self.add(trial, tuple(seeds[start : start + size]), 0, batch_key)

    def add(self, trial: int, seeds: tuple[int, ...], attempt: int, batch_key: Hashable) -> None:
        """Queue seeds that go into one task."""
        heapq.heappush(self._heap, Waiting(trial, seeds, attempt, batch_key))

    def wants_more(self, is_open: Callable[[int], bool]) -> bool:
        """Whether a task could take more trials than there are."""
        if self._trials_per_task == 1:
            return not any(is_open(entry.trial) for entry in self._heap)
        waiting = {entry.trial for entry in self._heap if is_open(entry.trial)}
        return len(waiting) < self._trials_per_task

    def pop(self, is_open: Callable[[int], bool]) -> list[Waiting]:
        """What makes up the next task, of distinct trials; empty where nothing waits.

        Seeds of trials that are no longer open are dropped. A seed that is tried again trains
        alone: it may be what made its batch fail.
        """
        while self._heap:
            first = heapq.heappop(self._heap)
            if is_open(first.trial):
                break
        else:
            return []
        task = [first]
        if self._trials_per_task > 1 and first.attempt == 0 and first.batch_key is not None:
            for entry in sorted(self._heap):
                if len(task) == self._trials_per_task:
                    break
                fits = entry.attempt == 0 and entry.batch_key == first.batch_key
                if fits and is_open(entry.trial) and entry.trial not in {e.trial for e in task}:
                    task.append(entry)
                    self._heap.remove(entry)
            heapq.heapify(self._heap)
        return task
