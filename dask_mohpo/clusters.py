"""Open the cluster that a study runs on, or use the one that the user hands in."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Client, LocalCluster
from distributed.deploy import Cluster

from dask_mohpo.devices import SlotPlugin, check_devices, cpu_count
from dask_mohpo.errors import ClusterError, UnknownNameError, UsageError

__all__ = ["connect", "open_cluster"]

logger = logging.getLogger(__name__)

DASHBOARD_PORT = 8787


@dataclass(frozen=True, kw_only=True)
class LocalSpec:
    """A cluster on this machine."""

    num_workers: int
    """Worker processes, one thread each."""
    devices: tuple[str, ...]
    """Assigned to the workers round robin."""

    @classmethod
    def of(cls, num_workers: int | None = None, devices: Sequence[str] | None = None) -> LocalSpec:
        """Fill in what is not given.

        Without `devices`: every GPU that torch sees, else the CPU. Without `num_workers`: one
        per GPU, else one per CPU.
        """
        if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
            raise UsageError(f"num_workers = {num_workers!r} is not valid; give an integer ≥ 1.")
        chosen = check_devices(devices) if devices is not None else _visible_devices()
        gpus = [device for device in chosen if device != "cpu"]
        return cls(
            num_workers=num_workers or (len(gpus) if gpus else cpu_count()),
            devices=tuple(chosen),
        )

    @property
    def threads(self) -> int:
        """torch threads of each worker."""
        return max(1, cpu_count() // self.num_workers)


def _visible_devices() -> list[str]:
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def open_cluster(spec: Mapping[str, Any] | None = None) -> Cluster:
    """Start a Dask cluster whose workers are slots: one process, one thread, one device.

    Parameters
    ----------
    spec : None for this machine with all its GPUs, or else one worker per CPU. A mapping:
        ``{"kind": "local", "num_workers": 4, "devices": ["cuda:0", "cuda:1"]}``.

    Returns
    -------
    A started cluster; close it, or use it in a ``with`` block.

    Raises
    ------
    UsageError
        The spec is not valid.
    """
    values = dict(spec or {})
    kind = values.pop("kind", "local")
    if kind != "local":
        raise UnknownNameError("kind of cluster", str(kind), ["local"])
    for name in values:
        if name not in ("num_workers", "devices"):
            raise UnknownNameError("key of a local cluster", name, ["num_workers", "devices"])
    return _open_local(LocalSpec.of(**values))


def _open_local(spec: LocalSpec) -> LocalCluster:
    gpus = any(device != "cpu" for device in spec.devices)
    config = {
        # training code may start processes of its own
        "distributed.worker.daemon": False,
        # the driver charges a worker's death to the seed that ran; Dask shall not count as well
        "distributed.scheduler.allowed-failures": 1000,
    }
    with dask.config.set(config):
        cluster = LocalCluster(
            n_workers=spec.num_workers,
            threads_per_worker=1,
            resources={"GPU": 1} if gpus else None,
            # what fills a worker's memory is the training, which cannot be spilled or paused
            memory_limit=0,
            dashboard_address=f"127.0.0.1:{_free_dashboard_port()}",
        )
    with Client(cluster, set_as_default=False) as client:
        client.register_plugin(SlotPlugin(spec.devices, spec.threads))
    return cluster


def _free_dashboard_port() -> int:
    """The usual port of the dashboard, or 0 (any) where it is taken."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DASHBOARD_PORT))
        except OSError:
            return 0
    return DASHBOARD_PORT


@contextlib.contextmanager
def connect(
    cluster: Mapping[str, Any] | Cluster | Client | str | None,
    *,
    num_workers: int | None = None,
    devices: Sequence[str] | None = None,
) -> Iterator[Client]:
    """A client of the cluster to run on.

    Parameters
    ----------
    cluster : None for one on this machine; a spec for `open_cluster`; a Dask cluster or client;
        or a scheduler's address such as ``"tcp://node1:8786"``.
    num_workers, devices : of the cluster on this machine.

    A cluster that is opened here is closed at the end; one that was handed in is left as it is.
    """
    if cluster is not None and (num_workers is not None or devices is not None):
        raise UsageError(
            "num_workers and devices belong to the local default; with cluster= leave them out "
            "(in a spec they are keys)."
        )
    if cluster is None or isinstance(cluster, Mapping):
        spec = LocalSpec.of(num_workers, devices) if cluster is None else None
        opened = open_cluster(cluster) if spec is None else _open_local(spec)
        with opened, Client(opened, set_as_default=False) as client:
            yield client
    elif isinstance(cluster, Client):
        if cluster.asynchronous:
            raise UsageError("cluster: the client is asynchronous; give a synchronous one.")
        yield cluster
    elif isinstance(cluster, Cluster):
        with Client(cluster, set_as_default=False) as client:
            yield client
    elif isinstance(cluster, str) and "://" in cluster:
        with _client_of_address(cluster) as client:
            yield client
    else:
        raise UsageError(
            f"cluster = {cluster!r} is not valid; give None, a mapping such as "
            "{'kind': 'local', 'num_workers': 4}, a Dask cluster or client, or a scheduler's "
            "address such as 'tcp://node1:8786'."
        )


def _client_of_address(address: str) -> Client:
    try:
        return Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ClusterError(f"no Dask scheduler answers at {address!r}: {error}") from error
