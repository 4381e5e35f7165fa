"""Clusters on this machine; those of job queues are tested with the real Slurm."""

from __future__ import annotations

import sys

import pytest
from distributed import Client

from dask_mohpo import open_cluster


def imported(*names: str) -> list[str]:
    return [name for name in names if name in sys.modules]


@pytest.mark.slow
def test_workers_have_imported_what_training_needs() -> None:
    needed = [
        "torch",
        "mo_gymnasium",
        "dask_mohpo.training",
        "dask_mohpo.agents.envelope",
        "dask_mohpo.agents.pcn",
    ]
    with (
        open_cluster({"kind": "local", "num_workers": 1, "devices": ["cpu"]}) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        [found] = client.run(imported, *needed).values()
    assert found == needed
