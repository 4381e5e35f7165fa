"""Whether seeds really train on the GPU, and what sharing it brings. Under five minutes.

    python benchmarks/gpu_check.py [--steps 4000] [--learners 1,4,16,64] [--device cuda:0]

First, learners in one batch: Envelope Q-learning with 1, 4, 16 and 64 learners, learner-steps per
second on warm networks, and the GPU's utilisation meanwhile (NVML, twice a second).

Then a study on one CUDA device with 1, 2 and 4 workers per GPU. For each: seeds per minute, the
GPU's utilisation and memory while it ran, and, from inside a seed, where the parameters lie and how
much memory torch has allocated. Without a CUDA device it says so and ends with 0; `--device cpu`
tries the first part on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import results
import torch
from results import Figure

from dask_mohpo import SeedContext, open_cluster, run_study, seed_results
from dask_mohpo.agents import load_algorithm

ENV_ID = "minecart-v0"
CONFIG: dict[str, Any] = {
    "net_arch": [256, 256, 256, 256],
    "batch_size": 256,
    "learning_starts": 256,
}
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
        "parameters": str(agent.learning.online.flat.device),
        "allocated_mb": torch.cuda.max_memory_allocated() / 1e6,
        "visible": torch.cuda.device_count(),
    }
    with Path(config["log"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return [[0.0, 0.0, 0.0]]


def batch_speed(env_id: str, num_learners: int, device: str, seconds: float) -> float:
    """Learner-steps per second of one agent whose learners train as one batch."""
    algorithm = load_algorithm("envelope")
    agent = algorithm.agent(
        algorithm.config.from_mapping({**CONFIG, "initial_epsilon": 0.1, "final_epsilon": 0.1}),
        env_id,
        list(range(num_learners)),
        total_timesteps=1_000_000,
        device=device,
    )
    done = CONFIG["learning_starts"] + 50
    agent.train(done)
    start, first = time.perf_counter(), done
    while time.perf_counter() - start < seconds:
        done += 20
        agent.train(done)
    return num_learners * (done - first) / (time.perf_counter() - start)


def batches(learners: list[int], device: str, seconds: float) -> list[Figure]:
    """The learners of one batch, more and more of them."""
    figures = []
    for env_id in ("deep-sea-treasure-v0", "minecart-v0"):
        speeds: dict[int, float] = {}
        for num in learners:
            sampler = Sampler()
            if device != "cpu":
                sampler.start()
            speeds[num] = batch_speed(env_id, num, device, seconds)
            sampler.over.set()
            busy = statistics.mean(sampler.utilisation) if sampler.utilisation else math.nan
            print(f"{env_id}, {num} learners: {speeds[num]:,.0f} steps/s, GPU busy {busy:.0f} %")
            figures.append(
                Figure(
                    what=f"Envelope, {env_id}, {num} learners in a batch",
                    value=f"{speeds[num]:,.0f} learner-steps/s",
                    detail=f"GPU busy {busy:.0f} %",
                )
            )
        if {1, 16} <= speeds.keys():
            ratio = speeds[16] / speeds[1]
            figures.append(
                Figure(
                    what=f"Envelope, {env_id}, 16 learners against 1",
                    value=f"{ratio:.1f} ×",
                    bar="≥ 8",
                    met=ratio >= 8,
                )
            )
    return figures


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


def measure(workers_per_gpu: int, steps: int, folder: Path) -> Figure:
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
    figure = Figure(
        what=f"run_study, {workers_per_gpu} workers per GPU",
        value=f"{60 * SEEDS / seconds:.1f} seeds of {steps} steps a minute",
        detail=(
            f"GPU busy {statistics.mean(sampler.utilisation):.0f} %, "
            f"{max(sampler.memory):.0f} MB in all, "
            f"{max(line['allocated_mb'] for line in lines):.0f} MB by torch in a seed"
        ),
    )
    print(f"{figure.what}: {figure.value}; {figure.detail}", flush=True)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--learners", default="1,4,16,64")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each batch")
    args = parser.parse_args()
    learners = [int(number) for number in args.learners.split(",")]
    if args.device == "cpu":
        torch.set_num_threads(1)
        batches(learners, args.device, args.seconds)
        return
    if not torch.cuda.is_available():
        print("no CUDA device")
        return
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    figures = batches(learners, args.device, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        figures += [measure(n, args.steps, Path(folder)) for n in (1, 2, 4)]
    results.save(
        "gpu",
        f"One GPU ({torch.cuda.get_device_name(0)})",
        "python benchmarks/gpu_check.py",
        1,
        figures,
        note="Net 4 × 256, batch 256, 4 weights.",
    )


if __name__ == "__main__":
    main()
