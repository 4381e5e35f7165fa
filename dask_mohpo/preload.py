"""Workers preload this module: what training imports is there before a worker says that it is up.

Workers of clusters that the user made load it where they are started with
``--preload dask_mohpo.preload``.
"""

from __future__ import annotations

from dask_mohpo.agents import ALGORITHMS, load_algorithm
from dask_mohpo.environments import make_env
from dask_mohpo.training import train_seeds

__all__ = ["train_seeds"]

for _name in ALGORITHMS:
    load_algorithm(_name)
make_env("deep-sea-treasure-v0").close()
