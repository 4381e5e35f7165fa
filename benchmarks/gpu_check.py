"""Whether seeds really train on the GPU, and what sharing it brings. Under five minutes.

    python benchmarks/gpu_check.py [--steps 4000]

A study on one CUDA device with 1, 2 and 4 workers per GPU. For each: seeds per minute, the GPU's
utilisation and memory while it ran (NVML, twice a second), and, from inside a seed, where the
parameters lie and how much memory torch has allocated. Without a CUDA device it says so and ends
with 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from dask_mohpo import SeedContext, open_cluster, run_study, seed_results
from dask_mohpo.agents import load_algorithm

ENV_ID = "minecart-v0"
CONFIG = {"net_arch": [256, 256, 256, 256], "batch_size": 256, "learning_starts": 256}
SEEDS = 4


def train(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    """Envelope on the slot's device; leaves a line that says where it trained."""
    algorithm = load_algorithm("envelope")
    agent = algorithm.agent(
        algorithm.config.from_mapping(CONFIG),
        context.env_id,
        [context.seed],
        total_timesteps=context.total_timesteps,
        device=context.device,
    )
    agent.train(context.total_timesteps)
    line = {
        "seed": context.seed,
        "device": context.device,
        "parameters": str(agent._online.flat.device),
        "allocated_mb": torch.cuda.max_memory_allocated() / 1e6,
        "visible": torch.cuda.device_count(),
    }
    with Path(config["log"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return [[0.0, 0.0, 0.0]]


class Sampler(threading.Thread):
    """Asks NVML, through nvidia-smi, twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.utilisation: list[float] = []
        self.memory: list[float] = []
        self.over = threading.Event()

    def run(self) -> None:
        query = "--query-gpu=utilization.gpu,memory.used"
        while not self.over.wait(0.5):
            answer = subprocess.run(
                ["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"],
                capture_output=True,
                text=True,
                check=True,
            )
            busy, memory = map(float, answer.stdout.split(","))
            self.utilisation.append(busy)
            self.memory.append(memory)


def measure(workers_per_gpu: int, steps: int, folder: Path) -> None:
    log = folder / f"log-{workers_per_gpu}"
    spec = {"kind": "local", "devices": ["cuda:0"], "workers_per_gpu": workers_per_gpu}
    with open_cluster(spec) as cluster:
        sampler = Sampler()
        sampler.start()
        start = time.perf_counter()
        study = run_study(
            train,
            ENV_ID,
            search_space={"x": {"low": 0.0, "high": 1.0}},
            train_hyperparams={"log": str(log)},
            total_timesteps=steps,
            n_trials=1,
            num_seeds=SEEDS,
            cluster=cluster,
            study_name=f"gpu-{workers_per_gpu}",
            run_dir=folder,
            progress=False,
        )
        seconds = time.perf_counter() - start
        sampler.over.set()
        sampler.join()
    results = seed_results(study)
    assert len(results) == SEEDS and all(r.state == "finished" for r in results), results
    assert {r.device for r in results} == {"cuda:0"}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["parameters"] for line in lines} == {"cuda:0"}
    assert all(line["allocated_mb"] > 0 and line["visible"] == 1 for line in lines)
    print(
        f"{workers_per_gpu} per GPU: {60 * SEEDS / seconds:5.1f} seeds of {steps} steps a minute; "
        f"GPU busy {statistics.mean(sampler.utilisation):.0f} %, "
        f"{max(sampler.memory):.0f} MB in all, "
        f"{max(line['allocated_mb'] for line in lines):.0f} MB by torch in a seed",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        for workers_per_gpu in (1, 2, 4):
            measure(workers_per_gpu, args.steps, Path(folder))


if __name__ == "__main__":
    main()
