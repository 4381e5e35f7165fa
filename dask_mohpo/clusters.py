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

__all__ = ["Target", "connect", "open_cluster", "read_target"]

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


Target = LocalSpec | Cluster | Client | str
"""What `connect` takes; text is a scheduler's address."""


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
    return _open_local(_read_spec(spec or {}))


def _read_spec(spec: Mapping[str, Any]) -> LocalSpec:
    values = dict(spec)
    kind = values.pop("kind", "local")
    if kind != "local":
        raise UnknownNameError("kind of cluster", str(kind), ["local"])
    for name in values:
        if name not in ("num_workers", "devices"):
            raise UnknownNameError("key of a local cluster", name, ["num_workers", "devices"])
    return LocalSpec.of(**values)


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


def read_target(
    cluster: Mapping[str, Any] | Target | None,
    *,
    num_workers: int | None = None,
    devices: Sequence[str] | None = None,
) -> Target:
    """What to run on, checked before anything is started.

    Parameters
    ----------
    cluster : None for this machine; a spec for `open_cluster`; a Dask cluster or client; or a
        scheduler's address such as ``"tcp://node1:8786"``.
    num_workers, devices : of the cluster on this machine.

    Raises
    ------
    UsageError
        Anything else, or arguments that exclude each other.
    """
    if cluster is None:
        return LocalSpec.of(num_workers, devices)
    if num_workers is not None or devices is not None:
        raise UsageError(
            "num_workers and devices belong to the local default; with cluster= leave them out "
            "(in a spec they are keys)."
        )
    if isinstance(cluster, Mapping):
        return _read_spec(cluster)
    if isinstance(cluster, Client) and cluster.asynchronous:
        raise UsageError("cluster: the client is asynchronous; give a synchronous one.")
    if isinstance(cluster, LocalSpec | Cluster | Client):
        return cluster
    if isinstance(cluster, str) and "://" in cluster:
        return cluster
    raise UsageError(
        f"cluster = {cluster!r} is not valid; give None, a mapping such as "
        "{'kind': 'local', 'num_workers': 4}, a Dask cluster or client, or a scheduler's "
        "address such as 'tcp://node1:8786'."
    )


@contextlib.contextmanager
def connect(target: Target) -> Iterator[Client]:
    """A client of the cluster to run on.

    A cluster that is opened here is closed at the end; one that was handed in is left as it is.
    """
    if isinstance(target, Client):
        yield target
    elif isinstance(target, Cluster):
        with Client(target, set_as_default=False) as client:
            yield client
    elif isinstance(target, LocalSpec):
        with _open_local(target) as opened, Client(opened, set_as_default=False) as client:
            yield client
    else:
        with _client_of_address(target) as client:
            yield client


def _client_of_address(address: str) -> Client:
    try:
        return Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ClusterError(f"no Dask scheduler answers at {address!r}: {error}") from error
