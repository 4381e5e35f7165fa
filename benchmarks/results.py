"""What the benchmarks measured: `results.json`, and `results.md` written from it.

    python benchmarks/results.py

writes `results.md` again. Benchmarks call `save`, which replaces what the same benchmark measured
before and leaves the rest as it is.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
STORE, TABLE = HERE / "results.json", HERE / "results.md"
OUR_PACKAGES = ("torch", "numpy", "distributed", "optuna", "mo-gymnasium", "gymnasium", "pymoo")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a benchmark."""

    what: str
    """What was measured, in the words of the table."""
    value: str
    """With its unit; medians with their range, for instance ``"3.1 × (2.9–3.3)"``."""
    bar: str = ""
    """What it should be, for instance ``"≥ 2.5"``; empty where there is no bar."""
    met: bool | None = None
    """Whether the bar is met; None where there is none."""
    detail: str = ""
    """The figures behind it, for instance ``"1,240 against 400 steps/s"``."""


def save(
    key: str,
    title: str,
    command: str,
    rounds: int,
    figures: Sequence[Figure],
    peers: Mapping[str, str] | None = None,
    note: str = "",
) -> None:
    """Store what a benchmark measured, and write the table again.

    Parameters
    ----------
    key : names the benchmark; what it measured before is replaced.
    title : heading of its part of the table.
    command : what to type, from the project's folder, to measure it again.
    rounds : how often each figure was measured; the figures are medians.
    figures : the rows.
    peers : package → version, of other libraries that were measured beside.
    note : what else to know.
    """
    store = json.loads(STORE.read_text()) if STORE.exists() else {}
    ours = {"python": platform.python_version()}
    ours.update({name: importlib.metadata.version(name) for name in OUR_PACKAGES})
    store[key] = {
        "title": title,
        "command": command,
        "rounds": rounds,
        "figures": [asdict(figure) for figure in figures],
        "versions": ours,
        "peers": dict(peers or {}),
        "note": note,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
    }
    STORE.write_text(json.dumps(store, indent=1, ensure_ascii=False) + "\n")
    TABLE.write_text(render(store))


def machine() -> str:
    """CPU model, CPUs that this process may use, memory, system."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpus = len(os.sched_getaffinity(0))
    return f"{model}, {cpus} CPUs, {memory:.0f} GiB, {platform.system()}"


def render(store: Mapping[str, Mapping]) -> str:
    """The table as Markdown."""
    lines = [
        "# What was measured",
        "",
        "Written by the benchmarks; `make bench` runs them all, the command of a part runs that",
        "part alone. Ratios are measured side by side in one run, medians of the rounds, one torch",
        "thread per process.",
    ]
    for part in store.values():
        lines += ["", f"## {part['title']}", "", f"    {part['command']}", ""]
        lines += ["| what | figure | bar | | details |", "|---|---|---|---|---|"]
        for figure in part["figures"]:
            met = {None: "", True: "met", False: "**missed**"}[figure["met"]]
            lines.append(
                f"| {figure['what']} | {figure['value']} | {figure['bar']} | {met} "
                f"| {figure['detail']} |"
            )
        if part["note"]:
            lines += ["", part["note"]]
        versions = ", ".join(f"{k} {v}" for k, v in {**part["versions"], **part["peers"]}.items())
        rounds = f"{part['rounds']} rounds" if part["rounds"] > 1 else "one round"
        lines += ["", f"{part['date']}, {rounds}; {part['machine']}; {versions}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    TABLE.write_text(render(json.loads(STORE.read_text())))


if __name__ == "__main__":
    main()
