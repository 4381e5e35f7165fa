"""A whole sweep, beside morl-baselines' way: a process pool for each trial, and a wait for its end.

    python benchmarks/sweep.py [--rounds 5] [--trials 12] [--seeds 4] [--steps 10000] [--cpus 2]

Envelope Q-learning on deep-sea-treasure-v0, the same configurations and seeds, one torch thread per
process, each way on the same CPUs:

- morl-baselines: its agent in a process pool per trial, as in its launch_sweep.py, without W&B
- run_study, one seed per task
- run_study, the seeds of a trial as one batch per task

The ways take turns within a round, each of them a command of its own. The makespan is that of the
whole command, from its start to its end: imports, start of the workers and evaluation are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import results
import venvs
from results import Figure

HERE = Path(__file__).resolve().parent
PEER = "morl-baselines"
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
BAR = 4.0

Settings = dict[str, Any]


def configurations(number: int, steps: int) -> list[Settings]:
    """Hyperparameters for both sides, the same ones each time."""
    rng = np.random.default_rng(0)

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    return [
        {
            "learning_rate": log_uniform(1e-4, 3e-3),
            "gamma": float(rng.uniform(0.95, 0.999)),
            "initial_epsilon": 1.0,
            "final_epsilon": log_uniform(0.01, 0.2),
            "epsilon_decay_steps": float(rng.uniform(0.1, 1.0)) * steps,
            "homotopy_decay_steps": float(rng.uniform(0.1, 1.0)) * steps,
            "target_net_update_freq": round(log_uniform(50, 500)),
            "per_alpha": float(rng.uniform(0.2, 0.8)),
            "max_grad_norm": log_uniform(0.1, 10.0),
            "tau": 1.0,
            "per": True,
            "num_sample_w": 4,
            "batch_size": 64,
            "net_arch": [128, 128],
            "buffer_size": 100_000,
            "learning_starts": 100,
        }
        for _ in range(number)
    ]


def run(command: list[str], settings: Settings, cpus: set[int]) -> tuple[float, float]:
    """Seconds that a command takes, and the mean hypervolume that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(
            [*command, json.dumps(settings)],
            cwd=folder,
            env={**os.environ, **THREADS, "WANDB_MODE": "disabled"},
            capture_output=True,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        seconds = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"{done.stderr}\n{command[1]} failed")
    return seconds, json.loads(done.stdout.splitlines()[-1])["hypervolume"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10_000, help="of each seed")
    parser.add_argument("--cpus", type=int, default=2, help="and as many worker processes")
    parser.add_argument("--only-ours", action="store_true", help="store no results")
    parser.add_argument("--print-only", action="store_true", help="store no results")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[: args.cpus]
    settings: Settings = {
        "env_id": "deep-sea-treasure-v0",
        "configs": configurations(args.trials, args.steps),
        "seeds": list(range(10, 10 + args.seeds)),
        "steps": args.steps,
        "workers": len(cpus),
        "ref_point": [0.0, -50.0],
        "eval_gamma": 0.99,
        "num_eval_weights": 50,
    }
    ours = [sys.executable, str(HERE / "sweep_ours.py")]
    # name → command, options of run_study
    ways: dict[str, tuple[list[str], Settings]] = {
        "one seed per task": (ours, {"seeds_per_task": 1}),
        f"{args.seeds} seeds per task": (ours, {"seeds_per_task": args.seeds}),
    }
    if not args.only_ours:
        theirs = [str(venvs.python_of(PEER)), str(HERE / "sweep_morl_baselines.py")]
        ways = {PEER: (theirs, {}), **ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    volumes: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, (command, options) in ways.items():
            took, volume = run(command, {**settings, "options": options}, set(cpus))
            seconds[way].append(took)
            volumes[way].append(volume)
            print(f"  {way}: {took:.1f} s, mean hypervolume {volume:.1f}", flush=True)
    if args.only_ours:
        return
    figures = figures_of(seconds, volumes)
    for figure in figures:
        met = {None: "", True: "met", False: "missed"}[figure.met]
        print(f"{figure.what}: {figure.value} {figure.bar} {met} ({figure.detail})")
    if not args.print_only:
        save(args, figures)


def figures_of(seconds: dict[str, list[float]], volumes: dict[str, list[float]]) -> list[Figure]:
    """Makespans of morl-baselines ÷ ours; the bar is that of the faster way of ours."""
    ratios = {
        way: [a / b for a, b in zip(seconds[PEER], values, strict=True)]
        for way, values in seconds.items()
        if way != PEER
    }
    best = max(ratios, key=lambda way: statistics.median(ratios[way]))
    median = statistics.median
    return [
        Figure(
            what=f"makespan of morl-baselines ÷ ours, {way}",
            value=f"{median(values):.2f} × ({min(values):.2f}–{max(values):.2f})",
            bar=f"≥ {BAR:g}" if way == best else "",
            met=median(values) >= BAR if way == best else None,
            detail=f"{median(seconds[PEER]):.1f} against {median(seconds[way]):.1f} s; mean "
            f"hypervolume {median(volumes[PEER]):.1f} against {median(volumes[way]):.1f}",
        )
        for way, values in ratios.items()
    ]


def save(args: argparse.Namespace, figures: list[Figure]) -> None:
    command = f"python benchmarks/sweep.py --rounds {args.rounds}"
    for name, default in (("trials", 12), ("seeds", 4), ("steps", 10_000), ("cpus", 2)):
        if getattr(args, name) != default:
            command += f" --{name} {getattr(args, name)}"
    versions = venvs.versions_of(PEER, ["morl-baselines", "torch", "mo-gymnasium"])
    results.save(
        "sweep",
        "A whole sweep, beside morl-baselines",
        command,
        args.rounds,
        figures,
        {f"theirs: {name}": version for name, version in versions.items()},
        f"Envelope on deep-sea-treasure-v0: {args.trials} configurations × {args.seeds} seeds × "
        f"{args.steps:,} steps on {args.cpus} CPUs, net 128 × 128, batch 64, 4 weights, "
        "prioritised replay; 50 weights evaluated at the end of each seed. Makespans are those of "
        "whole commands, imports and start of the workers included. Theirs: a process pool per "
        "trial and a wait for all of its seeds, as its launch_sweep.py, without W&B.",
    )


if __name__ == "__main__":
    main()
