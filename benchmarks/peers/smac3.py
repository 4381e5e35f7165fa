"""SMAC3 on Dask workers; the target function runs the seeds of a trial one after the other.

(SMAC's own way with seeds is to race them: a configuration gets its further seeds only while it may
beat the best one. That is another workload, not all trials with all seeds.)
"""

from __future__ import annotations

import fcntl
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Job, hold, read_job, report, run_trial
from ConfigSpace import ConfigurationSpace
from distributed import Client, LocalCluster
from smac import HyperparameterOptimizationFacade, Scenario


class Target:
    def __init__(self, job: Job, counter: Path) -> None:
        self.job = job
        self.counter = counter

    def run(self, config: Any, seed: int = 0) -> float:
        return -run_trial(self.job, self.next_trial(), float(config["x"]))

    def next_trial(self) -> int:
        """Count up in a file that the workers share: SMAC does not number its configurations."""
        with self.counter.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = int(file.read() or "0")
            file.seek(0)
            file.write(str(number + 1))
            file.flush()
        return number


def import_smac() -> str:
    import smac

    return str(smac.version)


def main() -> None:
    job = read_job()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=job.workers,
            threads_per_worker=1,
            processes=job.processes,
            memory_limit=0,
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        for task in (import_smac, hold):
            client.gather([client.submit(task, workers=[w], pure=False) for w in workers])
        counter = Path(folder) / "counter"
        counter.touch()
        scenario = Scenario(
            ConfigurationSpace({"x": (0.0, 1.0)}, seed=0),
            deterministic=True,
            n_trials=job.trials,
            seed=0,
            output_directory=Path(folder),
        )
        smac = HyperparameterOptimizationFacade(
            scenario,
            Target(job, counter).run,
            intensifier=HyperparameterOptimizationFacade.get_intensifier(
                scenario, max_config_calls=1
            ),
            dask_client=client,
            logging_level=logging.ERROR,
            overwrite=True,
        )
        start = time.perf_counter()
        smac.optimize()
        makespan = time.perf_counter() - start
        assert len(smac.runhistory) == job.trials
        report(makespan)


if __name__ == "__main__":
    main()
