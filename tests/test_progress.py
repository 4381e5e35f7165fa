"""The progress line: its text, and where it goes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

from dask_mohpo import progress as progress_module
from dask_mohpo.progress import Progress, describe
from dask_mohpo.tally import Snapshot


def snapshot(**changes: object) -> Snapshot:
    values: dict[str, object] = {
        "n_trials": 100,
        "done": 4,
        "running": 2,
        "failed": 0,
        "seeds_done": 15,
        "seeds_total": 300,
        "best": 662.6728,
        "busy": 3,
        "slots": 4,
        "seconds_left": 75.4,
    }
    return Snapshot(**{**values, **changes})  # type: ignore[arg-type]


class Terminal:
    """A pseudo-terminal, to be standard error."""

    def __init__(self, columns: int) -> None:
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(writer, "w")

    def written(self) -> str:
        """Everything so far; nothing can be written after."""
        self.stream.close()
        text = b""
        with contextlib.suppress(OSError):  # how Linux tells the end
            while chunk := os.read(self._reader, 65536):
                text += chunk
        os.close(self._reader)
        return text.decode().replace("\r\n", "\n")


def use_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Terminal:
    """From here on standard error is a terminal. (pytest resets it after fixtures have run.)"""
    terminal = Terminal(columns)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    return terminal


@pytest.fixture(autouse=True)
def no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have imported."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


def test_describe() -> None:
    assert describe(snapshot()) == (
        "trials 4/100, 2 running; best 662.67; 1 min 15 s left; slots 3/4 busy; seeds 15/300"
    )


def test_describe_without_what_is_not_known_yet() -> None:
    text = describe(snapshot(best=None, seconds_left=None, done=0, seeds_done=0))

    assert text == "trials 0/100, 2 running; slots 3/4 busy; seeds 0/300"


def test_describe_tells_no_time_left_at_the_end() -> None:
    assert "left" not in describe(snapshot(seconds_left=0.0))


def test_describe_tells_failures() -> None:
    assert describe(snapshot(failed=3)).startswith("trials 4/100, 2 running, 3 failed; ")


@pytest.mark.parametrize(
    ("best", "expected"),
    [(0.0, "best 0;"), (0.00123, "best 0.00123;"), (12345.678, "best 12346;")],
)
def test_describe_shows_values_of_any_size(best: float, expected: str) -> None:
    assert expected in describe(snapshot(best=best))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.0, "59 min 59 s"),
        (3600.0, "1 h 00 min"),
        (100_000.0, "27 h 46 min"),
    ],
)
def test_describe_tells_the_time_left(seconds: float, expected: str) -> None:
    assert f"; {expected} left; " in describe(snapshot(seconds_left=seconds))


def test_disabled_is_silent(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress("study", enabled=False) as line:
        line.say("hello")
        line.update(snapshot())
        terminal = use_terminal(monkeypatch)
        line.update(snapshot(done=5))

    assert terminal.written() == ""
    assert capfd.readouterr() == ("", "")


def test_plain_lines_where_standard_error_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress("study", enabled=True) as line:
        line.say("hello")
        line.update(snapshot())
        line.update(snapshot(seeds_done=16))  # no trial more, and too soon for another line
        line.update(snapshot(done=5))
        line.update(snapshot(done=5, failed=1))
    out, err = capsys.readouterr()

    assert out == ""
    assert err.splitlines() == [
        "hello",
        f"study: {describe(snapshot())}",
        f"study: {describe(snapshot(done=5))}",
        f"study: {describe(snapshot(done=5, failed=1))}",
    ]


def test_plain_lines_now_and_then_during_long_trials(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_SECONDS", 0.0)
    with Progress("study", enabled=True) as line:
        for seeds_done in (15, 16, 17):
            line.update(snapshot(seeds_done=seeds_done))

    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_bar_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal = use_terminal(monkeypatch)
    with Progress("study", enabled=True) as line:
        line.update(snapshot())
        line.say("a line above the bar")
        line.update(snapshot(seeds_done=150, seeds_total=300))
        line.update(snapshot(seeds_done=303, seeds_total=303))  # a resumed study may grow
    written = terminal.written()
    frames = [frame for frame in re.split(r"[\r\n]", written) if "trials" in frame]

    assert written.endswith("\n")
    assert "\ra line above the bar\n" in re.sub(r"\r +\r", "\r", written)
    assert frames[0].lstrip().startswith("5%|")
    assert any(frame.lstrip().startswith("50%|") for frame in frames)
    assert frames[-1].startswith("100%|")
    assert frames[-1].rstrip().endswith("seeds 303/303")
    assert all("| trials" in frame and len(frame) <= 100 for frame in frames)
    assert capfd.readouterr() == ("", "")


def test_80_columns_show_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch, columns=80)
    with Progress("envelope-deep-sea-treasure-v0", enabled=True) as line:
        line.update(snapshot(done=54, running=12, seconds_left=4500.0, busy=12, slots=12))

    shown = "trials 54/100, 12 running; best 662.67; 1 h 15 min left; slots 12/12"
    assert shown in terminal.written()


def test_an_error_leaves_the_last_bar_standing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with pytest.raises(ValueError), Progress("study", enabled=True) as line:
        line.update(snapshot())
        raise ValueError

    assert terminal.written().endswith("\n")


def test_closing_without_an_update_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with Progress("study", enabled=True):
        pass

    assert terminal.written() == ""
