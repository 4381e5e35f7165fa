"""Our side of `sweep.py`: a whole study in one process; prints a line of JSON.

python benchmarks/sweep_ours.py SETTINGS
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import numpy as np
import optuna

from dask_mohpo import hypervolume, run_study, seed_results


def sweep(settings: dict[str, Any]) -> dict[str, float]:
    """Mean hypervolume over all trials and seeds."""
    configs = settings["configs"]

    def space(trial: optuna.Trial) -> dict[str, Any]:
        # run_study asks for the default configuration with a trial that has no number
        return dict(configs[getattr(trial, "number", 0)])

    with tempfile.TemporaryDirectory() as folder:
        study = run_study(
            "envelope",
            settings["env_id"],
            search_space=space,
            ref_point=settings["ref_point"],
            total_timesteps=settings["steps"],
            n_trials=len(configs),
            num_seeds=len(settings["seeds"]),
            seed=settings["seeds"][0],
            eval_gamma=settings["eval_gamma"],
            num_eval_weights=settings["num_eval_weights"],
            num_eval_episodes=1,
            milestones=1,
            num_workers=settings["workers"],
            devices=["cpu"],
            run_dir=folder,
            progress=False,
            **settings["options"],
        )
        fronts = [result.front for result in seed_results(study) if result.front is not None]
    assert len(fronts) == len(configs) * len(settings["seeds"])
    volumes = [hypervolume(front, ref_point=settings["ref_point"]) for front in fronts]
    return {"hypervolume": float(np.mean(volumes))}


if __name__ == "__main__":  # worker processes import this file
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(json.dumps(sweep(json.loads(sys.argv[1]))))
