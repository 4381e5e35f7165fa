"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from distributed import Client, LocalCluster


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """Two worker processes of one thread; a cluster that the user hands in."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Torch's threads wait for each other by spinning: on a busy machine tests would crawl."""
    torch.set_num_threads(1)
