"""What the scripts in this folder share: the job, its seeds that sleep, and the log of them.

    PYTHON benchmarks/peers/SCRIPT JOB.json

A job is a file of JSON: `durations`, seconds of sleep (trials, seeds); `workers`; `processes`,
whether Dask's workers are processes; `log`, a file that gets a line for each seed that ran. A
script prints a line of JSON in the end: `makespan`, seconds from ready workers to the last trial
told.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    durations: list[list[float]]
    workers: int
    processes: bool
    log: str

    @property
    def trials(self) -> int:
        return len(self.durations)

    @property
    def seeds(self) -> int:
        return len(self.durations[0])


def read_job(path: str | None = None) -> Job:
    """The job in a file; None: in the one that the command line names."""
    with open(path or sys.argv[1]) as file:
        return Job(**json.load(file))


def run_seed(job: Job, trial: int, seed: int, x: float) -> float:
    """Sleep for as long as the job says, and log it."""
    start = time.time()
    time.sleep(job.durations[trial][seed])
    row = {"trial": trial, "seed": seed, "start": start, "end": time.time()}
    log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(log, (json.dumps(row) + "\n").encode())  # a short append is atomic
    finally:
        os.close(log)
    return x


def run_trial(job: Job, trial: int, x: float) -> float:
    """All seeds of a trial, one after the other."""
    return sum(run_seed(job, trial, seed, x) for seed in range(job.seeds)) / job.seeds


def hold(seconds: float = 0.2) -> int:
    """A task for a worker to warm up with, long enough for the others to get one too."""
    time.sleep(seconds)
    return os.getpid()


def report(makespan: float) -> None:
    print(json.dumps({"makespan": makespan}), flush=True)
