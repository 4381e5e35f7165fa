"""What Syne Tune starts for each trial; see `syne_tune_local.py`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from common import read_job, run_trial
from syne_tune import Reporter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=float)
    parser.add_argument("--st_checkpoint_dir", type=Path, help="…/<trial>/checkpoints")
    args, _ = parser.parse_known_args()
    job = read_job(os.environ["BENCHMARK_JOB"])
    trial = int(args.st_checkpoint_dir.parent.name)
    Reporter()(score=run_trial(job, trial, args.x) if trial < job.trials else -1.0)


if __name__ == "__main__":
    main()
