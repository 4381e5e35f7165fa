"""How long it takes until something happens: imports, the command, the first seed of a study.

    python benchmarks/start_up.py [--rounds 5]

Each round in fresh interpreters. Imports, the wall seconds of the statement itself;
`dask-mohpo --help`, the whole process; and, with the workers of a local cluster of two up, the time
until the first seed of Envelope Q-learning starts to train there, from the call of `run_study` and
from the moment when both workers had registered. The driver has run a study before, in threads, so
that its own imports are not in the figure: `run_study` makes them before it opens a cluster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results
from results import Figure

WORKERS = 2
LIGHT, WHOLE = "import dask_mohpo", "from dask_mohpo import run_study"
STUDY: dict[str, Any] = {
    "algo": "envelope",
    "env_id": "deep-sea-treasure-v0",
    "total_timesteps": 100,
    "n_trials": 1,
    "num_seeds": WORKERS,
    "num_eval_weights": 2,
    "milestones": 1,
    "progress": False,
}


def seconds_of_import(statement: str) -> float:
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return float(done.stdout)


def seconds_of_help() -> float:
    command = Path(sys.executable).with_name("dask-mohpo")
    start = time.perf_counter()
    subprocess.run([str(command), "--help"], check=True, capture_output=True)
    return time.perf_counter() - start


def first_seed() -> dict[str, float]:
    """Seconds until the first seed started, measured in a process of its own."""
    command = [sys.executable, __file__, "--once"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def once() -> None:
    """Measure one first seed, and print it."""
    from distributed import Client, LocalCluster

    from dask_mohpo import open_cluster, run_study, seed_results

    with tempfile.TemporaryDirectory() as folder:
        with LocalCluster(
            processes=False, n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        ) as cluster:
            run_study(**STUDY, cluster=cluster, run_dir=folder, study_name="warm-up")
        opening = time.time()
        with (
            open_cluster({"kind": "local", "num_workers": WORKERS}) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            client.wait_for_workers(WORKERS)
            ready = time.time()
            study = run_study(**STUDY, cluster=client, run_dir=folder, study_name="measured")
            first = min(result.started for result in seed_results(study))
    print(json.dumps({"ready": ready - opening, "first": first - ready}))


def figure(what: str, seconds: list[float], bar: float | None = None) -> Figure:
    middle = statistics.median(seconds)
    return Figure(
        what=what,
        value=f"{middle:.2f} s ({min(seconds):.2f}–{max(seconds):.2f})",
        bar="" if bar is None else f"≤ {bar:g} s",
        met=None if bar is None else middle <= bar,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        once()
        return
    imports, wholes, helps, firsts = [], [], [], []
    for _ in range(args.rounds):
        imports.append(seconds_of_import(LIGHT))
        wholes.append(seconds_of_import(WHOLE))
        helps.append(seconds_of_help())
        firsts.append(first_seed())
    rows = [
        figure(f"`{LIGHT}`", imports, 0.5),
        figure(f"`{WHOLE}`", wholes),
        figure("`dask-mohpo --help`", helps, 0.6),
        figure(
            "workers up and run_study called, until the first seed trains",
            [round_["first"] for round_ in firsts],
            0.3,
        ),
        figure(
            f"opening a local cluster, until {WORKERS} workers are up",
            [round_["ready"] for round_ in firsts],
        ),
    ]
    for row in rows:
        print(f"{row.what}: {row.value}{f' (bar {row.bar})' if row.bar else ''}")
    results.save(
        "start-up",
        "Start-up",
        f"python benchmarks/start_up.py --rounds {args.rounds}",
        args.rounds,
        rows,
        note="The call of run_study follows at once upon the workers' registration.",
    )


if __name__ == "__main__":
    main()
