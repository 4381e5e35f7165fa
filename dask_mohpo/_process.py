"""What the driver changes in its process while a study runs, and puts back."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

__all__ = ["Interrupts", "short_switch_interval"]

SWITCH_SECONDS = 5e-4


class Interrupts:
    """Ctrl-C and SIGTERM, while in the `with` block, in the main thread.

    The first only sets `requested`; the second raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False

    def _handle(self, signum: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(s, self._handle) for s in signals]
        try:
            yield
        finally:
            for s, handler in zip(signals, before, strict=True):
                signal.signal(s, handler)


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Threads of this process hand the interpreter over ten times sooner than usual.

    The driver's thread shares it with Dask's, and often with the scheduler. Each write to the
    journal lets it go and may wait for a whole interval to get it back, while slots idle.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
