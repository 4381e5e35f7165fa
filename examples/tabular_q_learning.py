"""Search the hyperparameters of an algorithm of your own: here, tabular Q-learning.

Run it with ``python examples/tabular_q_learning.py``, or, in the folder `examples` and with a
search space in a YAML file, with::

    dask-mohpo run --algo tabular_q_learning:train --env-id deep-sea-treasure-v0 \\
        --config-name space.yaml

Several preferences learn from the same steps. Each holds a table of vector Q values, one entry per
objective, and a weight per objective: its greedy action maximises the weighted sum. The returns of
the greedy policies make the front.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import gymnasium as gym
import numpy as np

from dask_mohpo import SeedContext, run_study

SEARCH_SPACE = {
    "learning_rate": {"low": 0.05, "high": 1.0, "log": True},
    "epsilon": {"low": 0.01, "high": 1.0},
    "gamma": {"low": 0.8, "high": 1.0},
    "num_weights": {"low": 2, "high": 16},
}


def train(config: dict[str, Any], context: SeedContext) -> np.ndarray:
    """Train one configuration with one seed; return the front, (num_weights, num_objectives)."""
    rng = np.random.default_rng(context.seed)
    env = context.make_env()
    num_objectives = len(context.ref_point)
    shape = (config["num_weights"], env.action_space.n, num_objectives)  # type: ignore[attr-defined]
    table: defaultdict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(shape))
    weights = rng.dirichlet(np.ones(num_objectives), size=config["num_weights"])
    everyone = np.arange(config["num_weights"])

    def greedy(state: tuple) -> np.ndarray:
        """The action of each preference, (num_weights,)."""
        return (table[state] * weights[:, None]).sum(axis=2).argmax(axis=1)

    obs, _ = env.reset(seed=context.seed)
    acting = 0
    for step in range(1, context.total_timesteps + 1):
        state = tuple(obs)
        explore = rng.random() < config["epsilon"]
        action = rng.integers(shape[1]) if explore else greedy(state)[acting]
        obs, reward, terminated, truncated, _ = env.step(action)
        future = 0.0 if terminated else table[tuple(obs)][everyone, greedy(tuple(obs))]
        error = reward + config["gamma"] * future - table[state][:, action]
        table[state][:, action] += config["learning_rate"] * error
        if terminated or truncated:
            obs, _ = env.reset()
            acting = int(rng.integers(len(weights)))  # the next episode follows another preference
        if step % max(1, context.total_timesteps // 5) == 0:
            context.report(step, evaluate(greedy, weights, context))
    return evaluate(greedy, weights, context)


def evaluate(greedy: Any, weights: np.ndarray, context: SeedContext) -> np.ndarray:
    """The return of each preference's greedy policy, discounted as the study says."""
    env: gym.Env = context.make_env()
    returns = np.zeros(weights.shape)
    for i in range(len(weights)):
        obs, _ = env.reset(seed=context.seed)
        discount, done = 1.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(greedy(tuple(obs))[i])
            returns[i] += discount * np.asarray(reward)
            discount *= context.eval_gamma
            done = terminated or truncated
    return returns


if __name__ == "__main__":
    study = run_study(
        train,
        "deep-sea-treasure-v0",
        search_space=SEARCH_SPACE,
        total_timesteps=10_000,
        n_trials=10,
        num_seeds=3,
        study_name="tabular-q-learning",
    )
    print(f"best hypervolume: {study.best_value:.1f}")
    for name, value in study.best_params.items():
        print(f"  {name}: {value:.4g}")
