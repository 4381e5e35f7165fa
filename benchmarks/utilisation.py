"""How busy the slots are: seeds that only sleep, so that all idle time is the scheduling's.

    python benchmarks/utilisation.py [--variants seed,trial,wide] [--rounds 3] [--mean 0.5]

Workloads, lognormal durations with a mean of 0.5 s, drawn with `default_rng(0)`:

- seed:  40 trials × 4 seeds on 4 worker processes, every seed drawn alone, sigma 0.6
- trial: the same, sigma 0.6 between trials, 0.2 between the seeds of a trial
- wide:  the first 12 trials of `trial` on 16 in-process workers

Efficiency = total sleep ÷ workers ÷ makespan; the makespan is that of the whole `run_study` call
on warm workers. Beside it, in the same run: what a greedy list schedule without any overhead
reaches, a process pool and a barrier per trial (as morl-baselines' launch_sweep.py), and Optuna's
n_jobs with a trial's seeds one after the other.

`open` is how many trials were open at each ask, on average: with fewer, the sampler knows more.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from distributed import Client, LocalCluster

from dask_mohpo import SeedContext, run_study, seed_results
from dask_mohpo.executor import Executor


@dataclass(frozen=True)
class Workload:
    name: str
    trials: int
    workers: int
    processes: bool
    alone: bool
    """Every seed is drawn alone, instead of trials that differ with seeds alike."""

    def durations(self, mean: float) -> np.ndarray:
        """Seconds of sleep (trials, 4)."""
        rng = np.random.default_rng(0)
        if self.alone:
            return rng.lognormal(np.log(mean) - 0.5 * 0.6**2, 0.6, size=(40, 4))[: self.trials]
        base = rng.lognormal(np.log(mean) - 0.5 * 0.6**2, 0.6, size=(40, 1))
        noise = rng.lognormal(-0.5 * 0.2**2, 0.2, size=(40, 4))
        return (base * noise)[: self.trials]


WORKLOADS = [
    Workload("seed", trials=40, workers=4, processes=True, alone=True),
    Workload("trial", trials=40, workers=4, processes=True, alone=False),
    Workload("wide", trials=12, workers=16, processes=False, alone=False),
]


def list_schedule(seconds: Sequence[float], workers: int) -> float:
    """Makespan where idle workers take the next job in order and nothing costs any time."""
    free = [0.0] * workers
    for job in seconds:
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def sleep_seed(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    """The trainable: sleep as long as the table says for this trial and seed."""
    trial = int(context.checkpoint.name.split("-")[0].removeprefix("trial"))
    time.sleep(config["durations"][trial][context.seed])
    return [[config["x"], 0.0]]


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return 0.0


def ours(work: Workload, durations: np.ndarray, client: Client) -> tuple[float, list[int]]:
    """Makespan of run_study on warm workers, and the open trials at each ask."""
    asked: list[list[int]] = []
    original = Executor.run

    def run(self: Executor) -> str:
        asked.append(self.open_at_ask)
        return original(self)

    Executor.run = run  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            study = run_study(
                sleep_seed,
                "deep-sea-treasure-v0",
                search_space={"x": {"low": 0.0, "high": 1.0}},
                train_hyperparams={"durations": durations.tolist()},
                n_trials=work.trials,
                num_seeds=4,
                seed=0,
                cluster=client,
                resources={"SLOT": 1},
                run_dir=folder,
                progress=False,
            )
            makespan = time.perf_counter() - start
            results = seed_results(study)
            assert len(results) == durations.size
            assert all(r.state == "finished" for r in results)
            return makespan, asked[0]
    finally:
        Executor.run = original  # type: ignore[method-assign]


def barrier(work: Workload, durations: np.ndarray) -> float:
    """A process pool per trial, and a wait for all of its seeds."""
    study = optuna.create_study(direction="maximize")
    start = time.perf_counter()
    for row in durations:
        trial = study.ask()
        x = trial.suggest_float("x", 0.0, 1.0)
        with ProcessPoolExecutor(work.workers) as pool:
            list(pool.map(sleep, row))
        study.tell(trial, x)
    return time.perf_counter() - start


def optuna_jobs(work: Workload, durations: np.ndarray) -> float:
    """Optuna's threads, each with the seeds of one trial one after the other."""
    study = optuna.create_study(direction="maximize")

    def objective(trial: optuna.Trial) -> float:
        for seconds in durations[trial.number]:
            sleep(seconds)
        return trial.suggest_float("x", 0.0, 1.0)

    start = time.perf_counter()
    study.optimize(objective, n_trials=work.trials, n_jobs=work.workers)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="seed,trial,wide")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mean", type=float, default=0.5, help="mean seconds of a seed")
    parser.add_argument("--only-ours", action="store_true")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("distributed").setLevel(logging.ERROR)
    for work in WORKLOADS:
        if work.name not in args.variants.split(","):
            continue
        durations = work.durations(args.mean)
        ideal = durations.sum() / work.workers
        bound = list_schedule(durations.ravel().tolist(), work.workers)
        rows: dict[str, list[float]] = {"dask-mohpo": []}
        opened: list[float] = []
        with (
            LocalCluster(
                n_workers=work.workers,
                threads_per_worker=1,
                processes=work.processes,
                resources={"SLOT": 1},
                memory_limit=0,
                dashboard_address="127.0.0.1:0",
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            warm = Workload("warm-up", 2 * work.workers, work.workers, work.processes, False)
            ours(warm, np.full((warm.trials, 4), 0.01), client)
            for _ in range(args.rounds):
                makespan, open_at_ask = ours(work, durations, client)
                rows["dask-mohpo"].append(ideal / makespan)
                opened.append(statistics.mean(open_at_ask))
                if not args.only_ours:
                    for name, tool in (
                        ("process pool, barrier per trial", barrier),
                        (f"Optuna n_jobs={work.workers}", optuna_jobs),
                    ):
                        rows.setdefault(name, []).append(ideal / tool(work, durations))
        print(
            f"{work.name}: {work.trials} trials x 4 seeds of {args.mean} s on {work.workers} "
            f"workers; list schedule without overhead {ideal / bound:.3f}"
        )
        for name, values in rows.items():
            median = statistics.median(values)
            extra = f"; {median / (ideal / bound):.3f} of the list schedule"
            if name == "dask-mohpo":
                extra += f"; {statistics.mean(opened):.1f} trials open at an ask"
            print(
                f"  {median:.3f} (min {min(values):.3f}, max {max(values):.3f})  {name}{extra}",
                flush=True,
            )


if __name__ == "__main__":
    main()
