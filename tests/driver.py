"""A driver in a process of its own, for tests that kill it: python driver.py FOLDER SECONDS."""

import sys
from pathlib import Path

import trainables
from dask_mohpo import run_study


def main(folder: Path, seconds: float) -> None:
    run_study(
        trainables.slow,
        trainables.ENV_ID,
        search_space={"x": {"low": 0.0, "high": 1.0}},
        train_hyperparams={"log": str(folder / "log"), "seconds": seconds},
        total_timesteps=100,
        n_trials=4,
        num_seeds=3,
        seed=0,
        num_workers=2,
        devices=["cpu"],
        run_dir=folder,
        study_name="study",
        progress=False,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
