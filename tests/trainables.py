"""Small trainables for tests; a module of its own, so that worker processes can import them.

Each start of a seed leaves a line in the file `config["log"]`: trial, seed, start, end, process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from dask_mohpo import SeedContext

ENV_ID = "deep-sea-treasure-v0"


def log(config: dict[str, Any], context: SeedContext, event: str) -> None:
    trial = int(context.checkpoint.name.split("-")[0].removeprefix("trial"))
    line = {
        "event": event,
        "trial": trial,
        "seed": context.seed,
        "time": time.time(),
        "pid": os.getpid(),
    }
    with Path(config["log"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_log(path: Path, event: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def front_of(x: float, seed: int) -> list[list[float]]:
    """One point, whose hypervolume from (0, -50) is 50 · (x + seed)."""
    return [[x + seed, 0.0]]


def quick(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    log(config, context, "start")
    return front_of(config["x"], context.seed)


def slow(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    """Sleeps `config["seconds"]`, with a milestone at every tenth of it."""
    log(config, context, "start")
    for tenth in range(1, 11):
        time.sleep(config["seconds"] / 10)
        context.report(context.total_timesteps * tenth // 10, front_of(config["x"], context.seed))
    log(config, context, "end")
    return front_of(config["x"], context.seed)


def sleeper(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    """Sleeps without milestones."""
    log(config, context, "start")
    time.sleep(config["seconds"])
    log(config, context, "end")
    return front_of(config["x"], context.seed)


def fails_once(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    """The first try of each seed raises."""
    log(config, context, "start")
    starts = read_log(Path(config["log"]), "start")
    trial = int(context.checkpoint.name.split("-")[0].removeprefix("trial"))
    mine = [s for s in starts if (s["trial"], s["seed"]) == (trial, context.seed)]
    if len(mine) == 1:
        raise RuntimeError("the first try fails")
    return front_of(config["x"], context.seed)


def odd_seeds_fail(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    log(config, context, "start")
    if context.seed % 2:
        raise RuntimeError(f"seed {context.seed} is odd")
    return front_of(config["x"], context.seed)


def always_fails(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    raise RuntimeError("this set-up cannot work")


def kills_its_worker(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    """The first try of seed 1 of trial 1 ends its process without a word."""
    log(config, context, "start")
    starts = read_log(Path(config["log"]), "start")
    mine = [s for s in starts if (s["trial"], s["seed"]) == (1, 1)]
    trial = int(context.checkpoint.name.split("-")[0].removeprefix("trial"))
    if (trial, context.seed) == (1, 1) and len(mine) == 1:
        os._exit(1)
    time.sleep(0.1)
    return front_of(config["x"], context.seed)


def look_around(seconds: float) -> dict[str, Any]:
    """The environment of a worker, after a while."""
    time.sleep(seconds)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    found: dict[str, Any] = {name: os.environ.get(name) for name in names}
    return {**found, "daemon": multiprocessing.current_process().daemon}
