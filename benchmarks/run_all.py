"""Run all benchmarks, one after the other; what they measure is stored in `results.json`.

    python benchmarks/run_all.py [--only NAME,...] [--skip NAME,...] [--quick]

A name is that of a script, without `.py`. A benchmark that fails does not keep the others from
running; the exit status then is 1. With --quick each figure is measured once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = [
    ["speed.py"],
    ["utilisation.py", "--peers"],
    ["threads.py"],
    ["sweep.py"],
    ["driver_scale.py", "--simulated"],
    ["start_up.py"],
    ["agent_quality.py", "--save"],
    ["gpu_check.py"],
]
WITHOUT_ROUNDS = ("agent_quality", "gpu_check")


def name_of(command: list[str]) -> str:
    return command[0].removesuffix(".py")


def main() -> None:
    known = [name_of(command) for command in COMMANDS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"of {', '.join(known)}")
    parser.add_argument("--skip", default="")
    parser.add_argument("--quick", action="store_true", help="one round of each")
    args = parser.parse_args()
    only, skip = (set(filter(None, names.split(","))) for names in (args.only, args.skip))
    if unknown := (only | skip) - set(known):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = []
    for command in COMMANDS:
        name = name_of(command)
        if name in skip or (only and name not in only):
            continue
        quick = ["--rounds", "1"] if args.quick and name not in WITHOUT_ROUNDS else []
        print(f"==> {' '.join([*command, *quick])}", flush=True)
        start = time.perf_counter()
        done = subprocess.run([sys.executable, str(HERE / command[0]), *command[1:], *quick])
        minutes = (time.perf_counter() - start) / 60
        end = "done" if done.returncode == 0 else f"failed (status {done.returncode})"
        print(f"==> {name} {end} after {minutes:.1f} min\n", flush=True)
        if done.returncode != 0:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
