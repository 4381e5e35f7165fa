"""The side of morl-baselines in `speed.py`, one measurement per process; prints a line of JSON.

    benchmarks/.venvs/morl-baselines/bin/python benchmarks/speed_morl_baselines.py NAME SETTINGS

Nothing is logged to W&B. What the agents print goes nowhere, to their advantage.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import mo_gymnasium
import numpy as np
import torch

Settings = dict[str, Any]


def make_envelope(settings: Settings, env: Any) -> Any:
    from morl_baselines.multi_policy.envelope.envelope import (  # type: ignore[import-not-found]
        Envelope,
    )

    return Envelope(env, **settings["config"], log=False, seed=settings["seed"], device="cpu")


def envelope(settings: Settings) -> Settings:
    """Steps per second after a warm-up; without W&B, `train` never evaluates."""
    agent = make_envelope(settings, mo_gymnasium.make(settings["env_id"]))
    agent.train(total_timesteps=settings["warm_up"])
    start = time.perf_counter()
    agent.train(total_timesteps=settings["steps"], reset_num_timesteps=False)
    seconds = time.perf_counter() - start
    assert agent.global_step == settings["warm_up"] + settings["steps"]
    return {"steps_per_second": settings["steps"] / seconds}


def pcn(settings: Settings) -> Settings:
    """Steps per second from the start, without evaluations nor the files saved with them."""
    return train_pcn(settings, evaluate=False)


def pcn_evaluated(settings: Settings) -> Settings:
    """The same as it is, with an evaluation and a file a thousand times in a run at most."""
    return train_pcn(settings, evaluate=True)


def train_pcn(settings: Settings, *, evaluate: bool) -> Settings:
    from morl_baselines.multi_policy.pcn.pcn import PCN  # type: ignore[import-not-found]

    env, eval_env = (mo_gymnasium.make(settings["env_id"]) for _ in range(2))
    config = dict(settings["config"])
    in_train = {
        name: config.pop(name)
        for name in ("num_er_episodes", "num_step_episodes", "num_model_updates", "max_buffer_size")
    }
    max_return = np.array(config.pop("max_return"), np.float32)
    scaling = np.array(config.pop("scaling_factor"))
    agent = PCN(env, scaling, **config, log=False, seed=settings["seed"], device="cpu")
    if not evaluate:
        agent.evaluate = lambda *args, **kwargs: ([], [], [])
        agent.save = lambda *args, **kwargs: None
    start = time.perf_counter()
    agent.train(
        total_timesteps=settings["steps"],
        eval_env=eval_env,
        ref_point=np.array(settings["ref_point"]),
        max_return=max_return,
        **in_train,
    )
    seconds = time.perf_counter() - start
    return {"steps_per_second": agent.global_step / seconds, "steps": agent.global_step}


def evaluation(settings: Settings) -> Settings:
    """Env steps per second while a front is evaluated, weight by weight, episode by episode."""
    from morl_baselines.common.evaluation import (  # type: ignore[import-not-found]
        policy_evaluation_mo,
    )
    from morl_baselines.common.weights import (  # type: ignore[import-not-found]
        equally_spaced_weights,
    )

    env = CountingEnv(mo_gymnasium.make(settings["env_id"]))
    env.reset(seed=settings["seed"])
    agent = make_envelope(settings, env)
    load_network(agent, settings["network"])
    weights = equally_spaced_weights(agent.reward_dim, n=settings["num_weights"])
    repeats = settings["repeats"]
    start = time.perf_counter()
    for _ in range(repeats):
        for w in weights:
            policy_evaluation_mo(agent, env, w=w, rep=settings["episodes"])
    seconds = (time.perf_counter() - start) / repeats
    steps = env.steps / repeats
    return {"steps_per_second": steps / seconds, "steps": steps, "seconds": seconds}


class CountingEnv(gym.Wrapper):
    """Counts its steps."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.env.step(action)


def load_network(agent: Any, path: str) -> None:
    """Put the network that our side stored into the agent: the same policies on both sides."""
    stored = np.load(path)
    linear = [m for m in agent.q_net.modules() if isinstance(m, torch.nn.Linear)]
    assert len(stored) == 2 * len(linear)
    with torch.no_grad():
        for i, layer in enumerate(linear):
            layer.weight.copy_(torch.from_numpy(stored[f"w{i}"].T))
            layer.bias.copy_(torch.from_numpy(stored[f"b{i}"]))


MEASUREMENTS: dict[str, Callable[[Settings], Settings]] = {
    "envelope": envelope,
    "pcn": pcn,
    "pcn-evaluated": pcn_evaluated,
    "evaluation": evaluation,
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        figures = MEASUREMENTS[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
