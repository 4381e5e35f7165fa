"""Our side of `speed.py`, one measurement per process; prints one line of JSON.

python benchmarks/speed_ours.py MEASUREMENT JSON-SETTINGS
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dask_mohpo.agents import load_algorithm
from dask_mohpo.environments import describe, make_env
from dask_mohpo.evaluation import Evaluator

Settings = dict[str, Any]


def make_agent(algo: str, settings: Settings, total: int) -> Any:
    algorithm = load_algorithm(algo)
    config = algorithm.config.from_mapping(settings["config"])
    seeds = [settings["seed"] + i for i in range(settings.get("learners", 1))]
    return algorithm.agent(config, settings["env_id"], seeds, total_timesteps=total, device="cpu")


def envelope(settings: Settings) -> Settings:
    """Steps per second of all learners together, after a warm-up."""
    agent = make_agent("envelope", settings, settings["config"]["buffer_size"])
    agent.train(settings["warm_up"])
    before = sum(agent.steps)
    start = time.perf_counter()
    agent.train(settings["warm_up"] + settings["steps"])
    seconds = time.perf_counter() - start
    return {"steps_per_second": (sum(agent.steps) - before) / seconds}


def envelope_update(settings: Settings) -> Settings:
    """Milliseconds of an update and of its matrix products, in turns, and their median ratio."""
    config = settings["config"]
    agent = make_agent("envelope", settings, config["buffer_size"])
    agent.train(settings["warm_up"])
    env = make_env(settings["env_id"])
    obs_dim = env.observation_space.shape[0]  # type: ignore[index]
    actions = env.action_space.n  # type: ignore[attr-defined]
    objectives = env.unwrapped.reward_space.shape[0]  # type: ignore[attr-defined]
    widths = [obs_dim + objectives, *config["net_arch"], actions * objectives]
    products = bare_products(widths, config["batch_size"] * config["num_sample_w"])
    times: dict[str, list[float]] = {"update": [], "products": []}
    for _ in range(settings["blocks"]):
        for name, function in (("update", agent._update), ("products", products)):
            start = time.perf_counter()
            for _ in range(settings["updates"]):
                function()
            times[name].append((time.perf_counter() - start) / settings["updates"])
    ratios = [a / b for a, b in zip(times["update"], times["products"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "update_ms": 1e3 * statistics.median(times["update"]),
        "products_ms": 1e3 * statistics.median(times["products"]),
    }


def bare_products(widths: list[int], rows: int) -> Callable[[], None]:
    """The matrix products of one update and nothing else, into memory that is there already.

    Three forward passes, and for each layer the gradient of its weights and, but for the first,
    of its inputs.
    """
    shapes = list(itertools.pairwise(widths))
    inputs = [torch.randn(rows, n) for n in widths[:-1]]
    outputs = [torch.empty(rows, n) for n in widths[1:]]
    weights = [torch.randn(shape) / shape[0] ** 0.5 for shape in shapes]
    weight_grads = [torch.empty(shape) for shape in shapes]
    output_grads = [torch.randn(rows, n) for n in widths[1:]]
    input_grads = [torch.empty(rows, n) for n in widths[:-1]]

    def run() -> None:
        for _ in range(3):
            for x, weight, y in zip(inputs, weights, outputs, strict=True):
                torch.mm(x, weight, out=y)
        for layer in reversed(range(len(shapes))):
            torch.mm(inputs[layer].t(), output_grads[layer], out=weight_grads[layer])
            if layer > 0:
                torch.mm(output_grads[layer], weights[layer].t(), out=input_grads[layer])

    return run


def pcn(settings: Settings) -> Settings:
    """Steps per second of all learners together, from the start, without any evaluation."""
    agent = make_agent("pcn", settings, settings["steps"])
    start = time.perf_counter()
    agent.train(settings["steps"])
    seconds = time.perf_counter() - start
    return {"steps_per_second": sum(agent.steps) / seconds, "steps": sum(agent.steps)}


def pcn_evaluated(settings: Settings) -> Settings:
    """The same as a study trains it: with the evaluations at its milestones."""
    total, milestones = settings["steps"], settings["milestones"]
    agent = make_agent("pcn", settings, total)
    info = describe(settings["env_id"])
    evaluator = Evaluator(
        settings["env_id"], [settings["seed"]], gamma=info.eval_gamma, num_episodes=1
    )
    start = time.perf_counter()
    for k in range(1, milestones + 1):
        agent.train(round(total * k / milestones))
        weights = settings["num_eval_weights"] // (1 if k == milestones else 5)
        evaluator.fronts(agent.policies(weights))
    seconds = time.perf_counter() - start
    return {"steps_per_second": sum(agent.steps) / seconds, "steps": sum(agent.steps)}


def evaluation(settings: Settings) -> Settings:
    """Env steps per second while a front is evaluated, and of the envs alone.

    Stores the network in `settings["network"]`, for the other side to evaluate the same policies.
    """
    env_id = settings["env_id"]
    agent = make_agent("envelope", settings, settings["train_steps"])
    agent.train(settings["train_steps"])
    save_network(agent, settings["network"])
    evaluator = Evaluator(env_id, [settings["seed"]], gamma=0.99, num_episodes=settings["episodes"])
    policies = agent.policies(settings["num_weights"])
    repeats = settings["repeats"]
    start = time.perf_counter()
    log = record(env_id, lambda: evaluator.fronts(policies))  # makes its env copies, too
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(repeats):
        evaluator.fronts(policies)
    seconds = (time.perf_counter() - start) / repeats
    steps = sum(is_step for _, is_step, _ in log)
    bare = replay(env_id, log, repeats) / repeats
    return {
        "steps_per_second": steps / seconds,
        "bare_steps_per_second": steps / bare,
        "steps": steps,
        "seconds": seconds,
        "first_seconds": first,
    }


def save_network(agent: Any, path: str) -> None:
    """The online network of the first learner: w0, b0, w1, b1, …"""
    layers = {}
    for i, (weight, bias) in enumerate(agent.learning.online.layers):
        layers[f"w{i}"], layers[f"b{i}"] = weight[0].numpy(), bias[0, 0].numpy()
    np.savez(path, **layers)


def record(env_id: str, function: Callable[[], object]) -> list[tuple[int, bool, Any]]:
    """What a function does to envs: (env, whether it is a step, action or reset seed)."""
    env = make_env(env_id)
    kind: Any = type(env.unwrapped)
    env.close()
    step, reset = kind.step, kind.reset
    log: list[tuple[int, bool, Any]] = []
    numbers: dict[int, int] = {}

    def recorded_step(self: Any, action: Any) -> Any:
        log.append((numbers[id(self)], True, action))
        return step(self, action)

    def recorded_reset(self: Any, *, seed: int | None = None, **kwargs: Any) -> Any:
        log.append((numbers.setdefault(id(self), len(numbers)), False, seed))
        return reset(self, seed=seed, **kwargs)

    kind.step, kind.reset = recorded_step, recorded_reset
    try:
        function()
    finally:
        kind.step, kind.reset = step, reset
    return log


def replay(env_id: str, log: list[tuple[int, bool, Any]], repeats: int) -> float:
    """Seconds that the same steps take, so many times, in copies of the env without an agent."""
    envs = [make_env(env_id) for _ in range(1 + max(number for number, _, _ in log))]
    start = time.perf_counter()
    for number, is_step, value in log * repeats:
        if is_step:
            envs[number].step(value)
        else:
            envs[number].reset(seed=value)
    return time.perf_counter() - start


MEASUREMENTS: dict[str, Callable[[Settings], Settings]] = {
    "envelope": envelope,
    "envelope-update": envelope_update,
    "pcn": pcn,
    "pcn-evaluated": pcn_evaluated,
    "evaluation": evaluation,
}


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(MEASUREMENTS[sys.argv[1]](json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
