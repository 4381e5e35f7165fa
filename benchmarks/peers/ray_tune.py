"""Ray Tune with OptunaSearch in a Repeater, so that every seed is a Tune trial of its own.

Actors are used again for the next seed (by default each seed would start a process). They cannot
be warm: Ray starts new processes for them, whatever workers it has.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import optuna
import ray
from common import hold, read_job, report, run_seed
from ray import tune
from ray.tune.search import Repeater
from ray.tune.search.optuna import OptunaSearch


class CountingRepeater(Repeater):
    """Numbers the seeds in the order they are asked for: Tune's trial ids are random."""

    asked = 0
    told = 0
    last_told = 0.0

    def suggest(self, trial_id: str) -> Any:
        config = super().suggest(trial_id)
        if isinstance(config, dict):
            config["number"] = self.asked
            self.asked += 1
        return config

    def on_trial_complete(self, trial_id: str, result: Any = None, **kwargs: Any) -> None:
        super().on_trial_complete(trial_id, result=result, **kwargs)
        self.told += 1
        self.last_told = time.perf_counter()


def main() -> None:
    job = read_job()
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def train(config: dict[str, Any]) -> None:
        trial, seed = divmod(config["number"], job.seeds)
        tune.report({"score": run_seed(job, trial, seed, config["x"])})

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=job.workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=folder,
        )
        ray.get([ray.remote(hold).remote(1.0) for _ in range(job.workers)])
        search = CountingRepeater(
            OptunaSearch(metric="score", mode="max", seed=0), repeat=job.seeds
        )
        tuner = tune.Tuner(
            train,
            param_space={"x": tune.uniform(0.0, 1.0)},
            tune_config=tune.TuneConfig(
                search_alg=search,
                metric="score",
                mode="max",
                num_samples=job.trials * job.seeds,
                max_concurrent_trials=job.workers,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=folder, name="benchmark", verbose=0),
        )
        start = time.perf_counter()
        results = tuner.fit()
        assert not results.errors, results.errors
        assert search.told == job.trials * job.seeds
        report(search.last_told - start)
        ray.shutdown()


if __name__ == "__main__":
    main()
