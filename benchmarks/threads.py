"""What the right number of torch threads is worth, and what workers and CPUs bring.

    python benchmarks/threads.py [--only threads,workers-table] [--steps 1500] [--rounds 5]

Envelope Q-learning on minecart-v0, net 256 × 256, batch 64.

threads: the same four seeds (`--workers` says otherwise), trained

- one after the other in one process that has all the CPUs,
- in four processes at a time, each with as many torch threads as torch takes by itself (all CPUs),
- in four processes at a time, each with its share of the CPUs, at least one thread: what a worker
  of this library does.

Printed: seeds per minute, median of the rounds. The way of a worker is also taken through
`run_study`, which adds its own overhead and the evaluation of one policy.

workers-table: `run_study` with 4 workers on 4 CPUs, 4 workers on 1 CPU and 1 worker on 1 CPU, or as
many CPUs as there are. A sweep is a trial of four seeds; each row is measured on warm workers,
over `--trials` sweeps. CPU use is the CPU time of driver and workers ÷ makespan ÷ CPUs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import optuna
import psutil
import results
import torch
from distributed.deploy import Cluster
from results import Figure

from dask_mohpo import open_cluster, run_study
from dask_mohpo.agents import load_algorithm

ENV_ID = "minecart-v0"
SEEDS = 4
"""Of a trial, in the part workers-table."""
CONFIG = {"net_arch": [256, 256], "batch_size": 64, "learning_starts": 50}


def train(seed: int, steps: int, threads: int | None) -> int:
    """Train one seed; returns the threads that torch used."""
    if threads is not None:
        torch.set_num_threads(threads)
    algorithm = load_algorithm("envelope")
    config = algorithm.config.from_mapping(CONFIG)
    agent = algorithm.agent(config, ENV_ID, [seed], total_timesteps=steps, device="cpu")
    agent.train(steps)
    return torch.get_num_threads()


def pool(workers: int, steps: int, threads: int | None, seeds: int) -> float:
    """Seconds of training on warm processes."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        list(executor.map(train, range(workers), [60] * workers, [threads] * workers))
        start = time.perf_counter()
        list(executor.map(train, range(seeds), [steps] * seeds, [threads] * seeds))
        return time.perf_counter() - start


def study(cluster: Cluster, folder: str, timesteps: int, seeds: int, trials: int = 1) -> float:
    """Seconds that `run_study` takes."""
    start = time.perf_counter()
    run_study(
        "envelope",
        ENV_ID,
        search_space={"learning_rate": {"low": 1e-4, "high": 1e-3}},
        train_hyperparams=CONFIG,
        total_timesteps=timesteps,
        n_trials=trials,
        num_seeds=seeds,
        num_eval_weights=2,
        num_eval_episodes=1,
        milestones=1,
        cluster=cluster,
        run_dir=folder,
        study_name=f"steps-{timesteps}",
        progress=False,
    )
    return time.perf_counter() - start


def through_run_study(workers: int, steps: int, seeds: int) -> float:
    """Seconds of a study with one trial on a warm local cluster."""
    spec = {"kind": "local", "num_workers": workers, "devices": ["cpu"]}
    with tempfile.TemporaryDirectory() as folder, open_cluster(spec) as cluster:
        study(cluster, folder, 60, seeds)
        return study(cluster, folder, steps, seeds)


def cpu_seconds() -> float:
    """CPU time of this process and of those below it, so far."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def sweeps(workers: int, steps: int, trials: int) -> dict[str, float]:
    """Sweeps per hour, and the CPUs that were busy, of a study on a warm local cluster."""
    spec = {"kind": "local", "num_workers": workers, "devices": ["cpu"]}
    with tempfile.TemporaryDirectory() as folder, open_cluster(spec) as cluster:
        study(cluster, folder, 60, SEEDS)
        before = cpu_seconds()
        seconds = study(cluster, folder, steps, SEEDS, trials)
        busy = (cpu_seconds() - before) / seconds
    return {"per_hour": 3600 * trials / seconds, "busy_cpus": busy}


def in_own_process(call: dict[str, Any], cpus: list[int]) -> dict[str, float]:
    """What `sweeps` returns in a process that has these CPUs, as its workers have."""
    done = subprocess.run(
        [sys.executable, __file__, "--row", json.dumps(call)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def threads_part(args: argparse.Namespace) -> list[Figure]:
    cpus = len(os.sched_getaffinity(0))
    share = max(1, cpus // args.workers)
    own = f"{args.workers} processes, {plural(share, 'thread')} each"
    ways: dict[str, Callable[[], float]] = {
        f"one process, {cpus} threads": lambda: pool(1, args.steps, cpus, args.workers),
        f"{args.workers} processes, {cpus} threads each": lambda: pool(
            args.workers, args.steps, cpus, args.workers
        ),
        own: lambda: pool(args.workers, args.steps, share, args.workers),
        f"run_study, {args.workers} workers": lambda: through_run_study(
            args.workers, args.steps, args.workers
        ),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, measure in ways.items():
            seconds[way].append(measure())
    figures = []
    for way, values in seconds.items():
        rates = [60 * args.workers / value for value in values]
        ratio = statistics.median(a / b for a, b in zip(seconds[own], values, strict=True))
        detail = "" if way == own else f"{ratio:.2f} × the speed of {own}"
        figures.append(Figure(what=way, value=f"{spread(rates)} seeds/min", detail=detail))
    return figures


def workers_part(args: argparse.Namespace) -> list[Figure]:
    available = sorted(os.sched_getaffinity(0))
    rows = [(4, available[:4]), (4, available[:1]), (1, available[:1])]
    measured: list[list[dict[str, float]]] = [[] for _ in rows]
    for _ in range(args.rounds):
        for (workers, cpus), found in zip(rows, measured, strict=True):
            call = {"workers": workers, "steps": args.steps, "trials": args.trials}
            found.append(in_own_process(call, cpus))
    figures = []
    for (workers, cpus), found in zip(rows, measured, strict=True):
        use = [100 * row["busy_cpus"] / len(cpus) for row in found]
        figures.append(
            Figure(
                what=plural(workers, "worker") + ", " + plural(len(cpus), "CPU"),
                value=f"{spread([row['per_hour'] for row in found])} sweeps/h",
                detail=f"CPU use {statistics.median(use):.0f} % ({min(use):.0f}–{max(use):.0f})",
            )
        )
    return figures


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


PARTS: dict[str, tuple[Callable[[argparse.Namespace], list[Figure]], str]] = {
    "threads": (threads_part, "Threads per worker"),
    "workers-table": (workers_part, "Workers and CPUs"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4, help="of the part threads")
    parser.add_argument("--trials", type=int, default=2, help="of the part workers-table")
    parser.add_argument("--print-only", action="store_true", help="store no results")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("distributed").setLevel(logging.ERROR)
    if args.row is not None:
        print(json.dumps(sweeps(**args.row)))
        return
    names = args.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in names:
        function, title = PARTS[name]
        figures = function(args)
        print(f"{name}: {note_of(name, args)}")
        for figure in figures:
            print(f"  {figure.what}: {figure.value} {f'({figure.detail})' * bool(figure.detail)}")
        if not args.print_only:
            command = f"python benchmarks/threads.py --only {name} --rounds {args.rounds}"
            for option, default in (("steps", 1500), ("workers", 4), ("trials", 2)):
                if getattr(args, option) != default:
                    command += f" --{option} {getattr(args, option)}"
            results.save(name, title, command, args.rounds, figures, note=note_of(name, args))


def note_of(name: str, args: argparse.Namespace) -> str:
    common = "Envelope on minecart-v0, net 256 × 256, batch 64"
    if name == "threads":
        cpus = len(os.sched_getaffinity(0))
        return f"{common}: {args.workers} seeds of {args.steps:,} steps on {cpus} CPUs."
    return (
        f"{common}. A sweep is a trial of {SEEDS} seeds of {args.steps:,} steps, {args.trials} "
        "trials measured on warm workers. CPU use: CPU time of driver and workers ÷ makespan ÷ "
        "CPUs."
    )


if __name__ == "__main__":
    main()
