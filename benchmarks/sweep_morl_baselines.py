"""The side of morl-baselines in `sweep.py`: its launch_sweep.py without W&B; prints a line of JSON.

    benchmarks/.venvs/morl-baselines/bin/python benchmarks/sweep_morl_baselines.py SETTINGS

Trial by trial, a process pool trains the seeds, and the next trial waits for all of them. A front
is evaluated once, at the end of a seed, one episode for each weight. What the agents print goes
nowhere, to their advantage.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import mo_gymnasium
import numpy as np
import torch
from morl_baselines.common.evaluation import (  # type: ignore[import-not-found]
    policy_evaluation_mo,
    seed_everything,
)
from morl_baselines.common.pareto import (  # type: ignore[import-not-found]
    filter_pareto_dominated,
)
from morl_baselines.common.performance_indicators import (  # type: ignore[import-not-found]
    hypervolume,
)
from morl_baselines.common.weights import (  # type: ignore[import-not-found]
    equally_spaced_weights,
)
from morl_baselines.multi_policy.envelope.envelope import (  # type: ignore[import-not-found]
    Envelope,
)

Settings = dict[str, Any]


def train(settings: Settings, config: Settings, seed: int) -> float:
    """Hypervolume that one seed reaches."""
    torch.set_num_threads(1)
    seed_everything(seed)
    env, eval_env = (mo_gymnasium.make(settings["env_id"]) for _ in range(2))
    agent = Envelope(env, **config, log=False, seed=seed, device="cpu")
    num_weights = settings["num_eval_weights"]
    # It makes the weights at its start in any case; with this number they are those used below.
    agent.train(settings["steps"], num_eval_weights_for_front=num_weights)
    assert agent.global_step == settings["steps"]
    agent.gamma = settings["eval_gamma"]  # fronts are measured with the same discount
    weights = equally_spaced_weights(agent.reward_dim, n=num_weights)
    returns = [policy_evaluation_mo(agent, eval_env, w=w, rep=1)[3] for w in weights]
    front = list(filter_pareto_dominated(returns))
    return float(hypervolume(np.array(settings["ref_point"]), front))


def sweep(settings: Settings) -> dict[str, float]:
    """Mean hypervolume over all trials and seeds."""
    seeds = settings["seeds"]
    volumes = []
    for config in settings["configs"]:
        with ProcessPoolExecutor(settings["workers"], mp_context=get_context("fork")) as pool:
            trained = [pool.submit(train, settings, config, seed) for seed in seeds]
            volumes.append(np.mean([future.result() for future in trained]))
    return {"hypervolume": float(np.mean(volumes))}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        figures = sweep(json.loads(sys.argv[1]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
