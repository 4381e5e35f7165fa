"""Hyperparameter search for multi-objective reinforcement learning on Dask clusters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_mohpo.clusters import open_cluster
    from dask_mohpo.errors import MohpoError
    from dask_mohpo.indicators import hypervolume
    from dask_mohpo.ledger import seed_results
    from dask_mohpo.space import SearchSpace
    from dask_mohpo.study import run_study
    from dask_mohpo.training import SeedContext

__version__ = "0.1.0"

__all__ = [
    "MohpoError",
    "SearchSpace",
    "SeedContext",
    "hypervolume",
    "open_cluster",
    "run_study",
    "seed_results",
]

_HOMES = {
    "MohpoError": "errors",
    "SearchSpace": "space",
    "SeedContext": "training",
    "hypervolume": "indicators",
    "open_cluster": "clusters",
    "run_study": "study",
    "seed_results": "ledger",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import dask_mohpo` alone stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
