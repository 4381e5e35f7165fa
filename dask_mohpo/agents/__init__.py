"""The built-in algorithms, by name. Nothing heavy is imported before one is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dask_mohpo.errors import UnknownNameError

__all__ = ["ALGORITHMS", "Algorithm", "load_algorithm"]

ALGORITHMS = {
    "envelope": "dask_mohpo.agents.envelope",
    "pcn": "dask_mohpo.agents.pcn",
}


@dataclass(frozen=True)
class Algorithm:
    """What a module of an algorithm offers."""

    name: str
    config: Any
    """Its hyperparameters: a subclass of `Config`."""
    agent: Any
    """Class of the agent: (config, env_id, seeds, *, total_timesteps, device)."""
    search_space: Callable[[Any], dict[str, Any]]
    """The built-in search space: Optuna trial → configuration."""


def load_algorithm(name: str) -> Algorithm:
    """The built-in algorithm of this name.

    Raises
    ------
    UnknownNameError
        There is none.
    """
    if name not in ALGORITHMS:
        raise UnknownNameError(
            "algorithm",
            name,
            ALGORITHMS,
            "Your own is given as a function or as 'package.module:function'.",
        )
    module = importlib.import_module(ALGORITHMS[name])
    return Algorithm(name, module.CONFIG, module.AGENT, module.search_space)
