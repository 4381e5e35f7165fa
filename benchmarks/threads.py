"""What the right number of torch threads is worth: four workers on the CPUs of this machine.

    python benchmarks/threads.py [--steps 1500] [--rounds 3] [--workers 4]

Envelope Q-learning on minecart-v0, net 256 × 256, batch 64. The same seeds, trained

- one after the other in one process that has all the CPUs,
- in four processes at a time, each with as many torch threads as torch takes by itself (all CPUs),
- in four processes at a time, each with its share of the CPUs, at least one thread: what a worker
  of this library does.

Printed: seeds per minute, median of the rounds. The way of a worker is also taken through
`run_study`, which adds its own overhead and the evaluation of one policy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from dask_mohpo import open_cluster, run_study
from dask_mohpo.agents import load_algorithm

ENV_ID = "minecart-v0"
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


def through_run_study(workers: int, steps: int, seeds: int) -> float:
    """Seconds of a study with one trial on a warm local cluster."""
    spec = {"kind": "local", "num_workers": workers, "devices": ["cpu"]}

    def study(folder: str, timesteps: int) -> float:
        start = time.perf_counter()
        run_study(
            "envelope",
            ENV_ID,
            search_space={"learning_rate": {"low": 1e-4, "high": 1e-3}},
            train_hyperparams=CONFIG,
            total_timesteps=timesteps,
            n_trials=1,
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

    with tempfile.TemporaryDirectory() as folder, open_cluster(spec) as cluster:
        study(folder, 60)
        return study(folder, steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    share = max(1, cpus // args.workers)
    ways: dict[str, Callable[[], float]] = {
        f"one process, {cpus} threads": lambda: pool(1, args.steps, cpus, args.workers),
        f"{args.workers} processes, {cpus} threads each": lambda: pool(
            args.workers, args.steps, cpus, args.workers
        ),
        f"{args.workers} processes, {share} thread each": lambda: pool(
            args.workers, args.steps, share, args.workers
        ),
        f"run_study, {args.workers} workers": lambda: through_run_study(
            args.workers, args.steps, args.workers
        ),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, measure in ways.items():
            seconds[way].append(measure())
    print(f"{args.workers} seeds of {args.steps} steps on {cpus} CPUs; seeds per minute:")
    for way, values in seconds.items():
        print(f"  {60 * args.workers / statistics.median(values):6.2f}  {way}")


if __name__ == "__main__":
    main()
