"""The progress line: a bar in a terminal, a widget in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from dask_mohpo.tally import Snapshot

__all__ = ["Progress"]

PLAIN_SECONDS = 10.0


class Progress:
    """Shows snapshots of a study on standard error.

    Parameters
    ----------
    study_name : shown in front.
    enabled : False shows nothing.
    """

    def __init__(self, study_name: str, *, enabled: bool) -> None:
        self._name = study_name
        self._enabled = enabled
        self._bar: Any = None
        self._told = -1
        self._shown = 0.0
        self._in_notebook = "ipykernel" in sys.modules

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """A line above the progress."""
        if self._enabled:
            tqdm.write(text, file=sys.stderr)

    def update(self, now: Snapshot) -> None:
        """Show where the study stands."""
        if not self._enabled:
            return
        if self._in_notebook or sys.stderr.isatty():
            self._draw(now)
            return
        told = now.done + now.failed
        due = time.monotonic() - self._shown >= PLAIN_SECONDS
        if told != self._told or due:
            self._told, self._shown = told, time.monotonic()
            print(f"{self._name}: {describe(now)}", file=sys.stderr, flush=True)

    def _draw(self, now: Snapshot) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=now.seeds_total,
                bar_format="{percentage:3.0f}%|{bar}| {desc}",
                dynamic_ncols=True,
                leave=True,
            )
        self._bar.total = now.seeds_total
        self._bar.n = now.seeds_done
        self._bar.set_description_str(describe(now), refresh=True)


def describe(now: Snapshot) -> str:
    """One line; what matters most comes first, as a narrow terminal cuts it off."""
    parts = [f"trials {now.done}/{now.n_trials}, {now.running} running"]
    if now.failed:
        parts[0] += f", {now.failed} failed"
    if now.best is not None:
        parts.append(f"best {now.best:.5g}")
    if now.seconds_left:
        parts.append(f"{_duration(now.seconds_left)} left")
    if now.note:
        parts.append(now.note)
    parts += [f"slots {now.busy}/{now.slots} busy", f"seeds {now.seeds_done}/{now.seeds_total}"]
    return "; ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
