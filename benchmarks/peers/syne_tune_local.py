"""Syne Tune's LocalBackend: every trial is a new process that runs the seeds one after the other.

Syne Tune has no warm workers. It polls its trials, here ten times a second (by default every 5 s).
Its files go to the current folder.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["SYNETUNE_FOLDER"] = os.getcwd()  # is read at the import

from common import read_job, report
from syne_tune import StoppingCriterion, Tuner
from syne_tune.backend import LocalBackend
from syne_tune.config_space import uniform
from syne_tune.optimizer.baselines import RandomSearch
from syne_tune.tuner_callback import TunerCallback


class Told(TunerCallback):
    """When the last trial was told; Syne Tune may start more of them, which run no seed."""

    def __init__(self, trials: int) -> None:
        self.trials = trials
        self.count = 0
        self.last = 0.0

    def on_trial_complete(self, trial: Any, result: dict[str, Any]) -> None:
        if trial.trial_id < self.trials:
            self.count += 1
            self.last = time.perf_counter()


def main() -> None:
    job = read_job()
    os.environ["BENCHMARK_JOB"] = os.path.abspath(sys.argv[1])
    logging.getLogger().setLevel(logging.ERROR)
    told = Told(job.trials)
    tuner = Tuner(
        trial_backend=LocalBackend(str(Path(__file__).with_name("syne_tune_trial.py"))),
        scheduler=RandomSearch(
            {"x": uniform(0.0, 1.0)}, metrics=["score"], do_minimize=False, random_seed=0
        ),
        stop_criterion=StoppingCriterion(max_num_trials_started=job.trials),
        n_workers=job.workers,
        sleep_time=0.1,
        wait_trial_completion_when_stopping=True,
        callbacks=[told],
        save_tuner=False,
        tuner_name="benchmark",
    )
    start = time.perf_counter()
    tuner.run()
    assert told.count == job.trials, told.count
    report(told.last - start)


if __name__ == "__main__":
    main()
