"""Where a study stands, in numbers: for the progress display and for the decision to give up."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Snapshot", "Tally"]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Where a study stands, for the progress display."""

    n_trials: int
    done: int
    running: int
    failed: int
    seeds_done: int
    seeds_total: int
    best: float | None
    busy: int
    slots: int
    seconds_left: float | None
    note: str = ""
    """Why nothing goes on, where the driver knows."""


@dataclass(kw_only=True)
class Tally:
    """Counts what a study's trials came to."""

    asked: int = 0
    complete: int = 0
    failed: int = 0
    failed_here: int = 0
    """Without those of earlier drivers: the set-up may have been mended since."""
    best: float | None = None
    seeds: int = 0
    """Finished ones whose time is known."""
    seed_seconds: float = 0.0

    def count_trial(self, value: float | None, *, here: bool) -> None:
        """Count a trial with this value; None: it failed."""
        if value is None:
            self.failed += 1
            self.failed_here += here
        else:
            self.complete += 1
            self.best = value if self.best is None else max(self.best, value)

    def count_seed(self, seconds: float) -> None:
        self.seeds += 1
        self.seed_seconds += seconds

    def snapshot(
        self,
        *,
        n_trials: int,
        seeds_per_trial: int,
        running: int,
        seeds_of_running: int,
        busy: int,
        slots: int,
        note: str,
    ) -> Snapshot:
        """The state now.

        Parameters
        ----------
        n_trials : that there shall be.
        running, seeds_of_running : trials that are open, and the seeds of theirs that are done.
        """
        trials = max(n_trials, self.asked)
        total = trials * seeds_per_trial
        done = (self.complete + self.failed) * seeds_per_trial + seeds_of_running
        left = None
        if self.seeds and slots:
            left = (total - done) * self.seed_seconds / self.seeds / slots
        return Snapshot(
            n_trials=trials,
            done=self.complete,
            running=running,
            failed=self.failed,
            seeds_done=done,
            seeds_total=total,
            best=self.best,
            busy=busy,
            slots=slots,
            seconds_left=left,
            note=note,
        )
