"""Optuna's journal file, with several writes put into one.

Optuna appends to the file for every hyperparameter of every trial: it takes a lock, opens, writes,
waits for the disk, and gives the lock back. Asking for a trial writes a dozen times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import (
    BaseJournalBackend,
    JournalFileBackend,
    JournalFileSymlinkLock,
)
from optuna.trial import FrozenTrial, TrialState

__all__ = ["GroupingJournalStorage"]


class GroupingJournalStorage(JournalStorage):
    """A journal storage that can write what belongs together at once.

    Parameters
    ----------
    path : of the file; made if need be.
    """

    def __init__(self, path: Path) -> None:
        self._grouping = _GroupingBackend(str(path))
        self._never_waiting: dict[int, int] = {}
        """Study → the number of the first trial that may wait; a trial never waits again."""
        super().__init__(self._grouping)

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """As its base; but each ask looks for waiting trials, and need not go through all."""
        if states != (TrialState.WAITING,):
            return super().get_all_trials(study_id, deepcopy, states)
        waiting: list[FrozenTrial] = []
        number = self._never_waiting.get(study_id, 0)
        while True:
            try:
                trial_id = self.get_trial_id_from_study_id_trial_number(study_id, number)
            except KeyError:
                return waiting
            trial = self.get_trial(trial_id)
            if trial.state == TrialState.WAITING:
                waiting.append(trial)
            elif not waiting:
                self._never_waiting[study_id] = number + 1
            number += 1

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is written in this block reaches the file at its end, in one piece.

        No trial may be created in it: other processes may write meanwhile, and the order of
        trials in the file is what numbers them.
        """
        with self._grouping.together():
            yield


class _HeldLock(JournalFileSymlinkLock):
    """A file lock that its holder may take again."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._depth = 0

    def acquire(self) -> bool:
        if self._depth == 0 and not super().acquire():
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            super().release()


class _GroupingBackend(BaseJournalBackend):
    """Holds back what is appended in a group, and shows it to readers in this process all the same.

    Entries are numbered. What is held back follows on the file's last entry. Where another process
    appends to the file meanwhile, this process sees those entries after its own ones; in the file
    they come before.
    """

    def __init__(self, path: str) -> None:
        self._lock = _HeldLock(path)
        self._file = JournalFileBackend(path, lock_obj=self._lock)
        self._held: list[dict[str, Any]] | None = None
        self._first = -1
        """Number of the first entry that is held back, once a reader has found it out."""
        self._late: list[dict[str, Any]] = []
        """What others wrote during the last group."""
        self._late_first = 0
        """Number of the first of these, for this process."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        if self._held is None:
            self._file.append_logs(logs)
        else:
            self._held += logs

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        if self._held is None:
            yield from self._read_file(log_number_from)
            return
        if self._first < 0:
            entries = list(self._read_file(log_number_from))
            self._first = log_number_from + len(entries)
            yield from entries
            log_number_from = self._first
        yield from self._held[log_number_from - self._first :]

    def _read_file(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        skipped = log_number_from - self._late_first
        if self._late and 0 <= skipped < len(self._late):
            yield from self._late[skipped:]
            log_number_from = self._late_first + len(self._late)
        yield from self._file.read_logs(log_number_from)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        if self._held is not None:
            yield  # part of a group already
            return
        self._held, self._first = [], -1
        try:
            yield
        finally:
            held, self._held = self._held, None
            if held:
                self._write(held)

    def _write(self, held: list[dict[str, Any]]) -> None:
        if self._first < 0:  # nothing was read since
            self._file.append_logs(held)
            return
        self._lock.acquire()
        try:
            late = list(self._file.read_logs(self._first))
            self._file.append_logs(held)
        finally:
            self._lock.release()
        self._late, self._late_first = late, self._first + len(held)
        # Let the file's reader learn where these lie: else it looks from the start.
        for _ in self._file.read_logs(self._first + len(late)):
            pass
