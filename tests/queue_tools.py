"""What tests ask of a running Slurm."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def sinfo() -> str:
    answer = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%N %T"], capture_output=True, text=True
    )
    return answer.stdout


def squeue() -> list[str]:
    """Ids of the jobs that are not over."""
    answer = subprocess.run(
        ["squeue", "--noheader", "--format=%i"], capture_output=True, text=True, check=True
    )
    return answer.stdout.split()


def wait_for(
    condition: Callable[[], bool], what: str, folder: Path | None = None, timeout: float = 30
) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            logs = sorted(folder.glob("*.log")) if folder is not None else []
            tails = [
                f"{log.name}:\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs
            ]
            raise TimeoutError(
                "\n".join([f"no {what} after {timeout} s; sinfo: {sinfo()}", *tails])
            )
        time.sleep(0.1)
