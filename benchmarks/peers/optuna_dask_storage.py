"""Optuna's DaskStorage, as in its example: a Dask task for each trial runs `study.optimize` for it.

The seeds of a trial run one after the other.
"""

from __future__ import annotations

import time

import optuna
from common import Job, hold, read_job, report, run_trial
from distributed import Client, LocalCluster, wait
from optuna_integration import DaskStorage


class Objective:
    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, trial: optuna.Trial) -> float:
        return run_trial(self.job, trial.number, trial.suggest_float("x", 0.0, 1.0))


def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def main() -> None:
    job = read_job()
    quiet()
    with (
        LocalCluster(
            n_workers=job.workers,
            threads_per_worker=1,
            processes=job.processes,
            memory_limit=0,
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.run(quiet)
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        client.gather([client.submit(hold, workers=[w], pure=False) for w in workers])
        study = optuna.create_study(
            direction="maximize", storage=DaskStorage(), sampler=optuna.samplers.TPESampler(seed=0)
        )
        start = time.perf_counter()
        futures = [
            client.submit(study.optimize, Objective(job), n_trials=1, pure=False)
            for _ in range(job.trials)
        ]
        wait(futures)
        makespan = time.perf_counter() - start
        client.gather(futures)  # raises what failed
        assert sum(trial.state.is_finished() for trial in study.trials) == job.trials
        report(makespan)


if __name__ == "__main__":
    main()
