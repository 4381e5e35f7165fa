"""Hypervolume that the built-in agents reach on deep-sea-treasure-v0 with fixed hyperparameters.

    python benchmarks/agent_quality.py [--agents envelope,envelope-bf16,pcn] [--seeds 1-10]

Undiscounted evaluation with 50 weights (Envelope) or up to 50 commands (PCN), reference point
(0, -50); the known front's hypervolume is 994.3. The seeds train as one batch, on one thread.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import results
import torch
from results import Figure

from dask_mohpo import hypervolume
from dask_mohpo.agents import load_algorithm
from dask_mohpo.evaluation import Evaluator

ENV_ID = "deep-sea-treasure-v0"
REF_POINT = (0.0, -50.0)
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "envelope": (
        20_000,
        {
            "gamma": 0.99,
            "learning_rate": 5e-4,
            "batch_size": 64,
            "net_arch": [128, 128],
            "initial_epsilon": 1.0,
            "final_epsilon": 0.05,
            "epsilon_decay_steps": 0.5,
            "tau": 1.0,
            "target_net_update_freq": 500,
            "num_sample_w": 4,
            "per": True,
            "initial_homotopy_lambda": 0.0,
            "final_homotopy_lambda": 1.0,
            "homotopy_decay_steps": 0.5,
        },
    ),
    "pcn": (
        50_000,
        {
            "learning_rate": 1e-2,
            "batch_size": 256,
            "hidden_dim": 64,
            "num_er_episodes": 50,
            "max_buffer_size": 200,
            "num_model_updates": 10,
            "scaling_factor": [0.1, 0.1, 0.01],
            "max_return": [124.0, -1.0],
        },
    ),
}


SETTINGS["envelope-bf16"] = (20_000, {**SETTINGS["envelope"][1], "precision": "bf16"})
BARS = {"envelope": 840, "envelope-bf16": 840, "pcn": 810}


def measure(name: str, seeds: list[int]) -> tuple[np.ndarray, float]:
    """Final hypervolume of each seed, and seconds of training."""
    steps, values = SETTINGS[name]
    algorithm = load_algorithm(name.partition("-")[0])
    config = algorithm.config.from_mapping(values)
    agent = algorithm.agent(config, ENV_ID, seeds, total_timesteps=steps, device="cpu")
    start = time.perf_counter()
    agent.train(steps)
    seconds = time.perf_counter() - start
    evaluator = Evaluator(ENV_ID, seeds, gamma=1.0, num_episodes=1)
    fronts = evaluator.fronts(agent.policies(50))
    return np.array([hypervolume(front, REF_POINT) for front in fronts]), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", default="envelope,envelope-bf16,pcn")
    parser.add_argument("--seeds", default="1-10", help="first-last")
    parser.add_argument("--save", action="store_true", help="into results.md")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split("-"))
    seeds = list(range(first, last + 1))
    torch.set_num_threads(1)
    figures = []
    for name in args.agents.split(","):
        values, seconds = measure(name, seeds)
        each = ", ".join(f"{s}: {v:.1f}" for s, v in zip(seeds, values, strict=True))
        print(
            f"{name}: mean hypervolume {values.mean():.1f} (sd {values.std(ddof=1):.1f}), "
            f"{seconds:.0f} s for {len(seeds)} seeds\n  {each}"
        )
        figures.append(
            Figure(
                what=f"{name}, {SETTINGS[name][0]:,} steps",
                value=f"{values.mean():.1f} (sd {values.std(ddof=1):.1f})",
                bar=f"≥ {BARS[name]}",
                met=bool(values.mean() >= BARS[name]),
                detail=f"seeds {each}",
            )
        )
    if args.save:
        results.save(
            "agent-quality",
            "Hypervolume that the built-in agents reach on deep-sea-treasure-v0",
            "python benchmarks/agent_quality.py --save",
            1,
            figures,
            note="From (0, -50), undiscounted; the known front has 994.3. All seeds as one batch.",
        )


if __name__ == "__main__":
    main()
