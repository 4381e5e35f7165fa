"""Open the cluster that a study runs on, or use the one that the user hands in."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import dask
from distributed import Client, LocalCluster, Security
from distributed.deploy import Cluster

from dask_mohpo import _queues
from dask_mohpo._queue_specs import PRELOAD
from dask_mohpo.devices import SlotPlugin
from dask_mohpo.errors import ClusterError, UsageError
from dask_mohpo.jobs import JobKeeper, kept_class
from dask_mohpo.specs import ExistingSpec, LocalSpec, QueueSpec, Spec, read_spec

__all__ = ["Target", "connect", "dashboard_hint", "keeper_of", "open_cluster", "read_target"]

logger = logging.getLogger(__name__)

DASHBOARD_PORT = 8787
ACCEPT_SECONDS = 25.0
"""For the queue's answer to the first job."""

Target = Spec | Cluster | Client
"""What `connect` takes."""

CONFIG = {
    # training code may start processes of its own
    "distributed.worker.daemon": False,
    # the driver charges a worker's death to the seed that ran; Dask shall not count as well
    "distributed.scheduler.allowed-failures": 1000,
}


def open_cluster(spec: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Cluster:
    """Start a Dask cluster whose workers are slots: one process, one thread, one device.

    Parameters
    ----------
    spec : None for this machine with all its GPUs, or else one worker per CPU. A mapping:
        ``{"kind": "local", "num_workers": 4, "devices": ["cuda:0", "cuda:1"]}``. A YAML file of
        such keys, or the name of a shipped one, for instance ``"slurm-4gpu"``.

    Returns
    -------
    A started cluster; close it, or use it in a ``with`` block. Jobs of a queue may still wait.

    Raises
    ------
    UsageError
        The spec is not valid.
    ClusterError
        The job queue refuses the job.
    """
    return _open(read_spec(spec))


def read_target(
    cluster: Mapping[str, Any] | os.PathLike[str] | Target | str | None,
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
    if isinstance(cluster, Client) and cluster.asynchronous:
        raise UsageError("cluster: the client is asynchronous; give a synchronous one.")
    if isinstance(cluster, Spec | Cluster | Client):
        return cluster
    if isinstance(cluster, Mapping | str | os.PathLike):
        return read_spec(cluster)
    raise UsageError(
        f"cluster = {cluster!r} is not valid; give None, a spec (a mapping such as "
        "{'kind': 'local', 'num_workers': 4}, a YAML file, or the name of a shipped one), a Dask "
        "cluster or client, or a scheduler's address such as 'tcp://node1:8786'."
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
    elif isinstance(target, ExistingSpec):
        with _client_of(target) as client:
            yield client
    else:
        with _open(target) as opened, Client(opened, set_as_default=False) as client:
            yield client


def keeper_of(client: Client) -> JobKeeper | None:
    """What keeps the jobs of the client's cluster, where `open_cluster` made it from a queue."""
    return getattr(client.cluster, "job_keeper", None)


def dashboard_hint(client: Client) -> str:
    """Where to look, and how to get there from another machine."""
    link = client.dashboard_link
    if not link:
        return "none"
    keeper = keeper_of(client)
    if keeper is None or not keeper.dashboard_on_loopback:
        return str(link)
    # Dask's own link names the scheduler's host, where nobody answers.
    parts = urlsplit(link)
    link = urlunsplit(parts._replace(netloc=f"127.0.0.1:{parts.port}"))
    me = f"{getpass.getuser()}@{socket.gethostname()}"
    return f"{link} (from elsewhere: ssh -L {parts.port}:localhost:{parts.port} {me})"


def _open(spec: Spec) -> Cluster:
    if isinstance(spec, ExistingSpec):
        raise UsageError(
            "open_cluster starts clusters; a scheduler that runs already goes to "
            "run_study(cluster=...)."
        )
    return _open_local(spec) if isinstance(spec, LocalSpec) else _open_queue(spec)


def _open_local(spec: LocalSpec) -> LocalCluster:
    gpus = any(device != "cpu" for device in spec.devices)
    with dask.config.set(CONFIG):
        cluster = LocalCluster(
            n_workers=spec.num_workers,
            threads_per_worker=1,
            resources={"GPU": 1} if gpus else None,
            # what fills a worker's memory is the training, which cannot be spilled or paused
            memory_limit=0,
            preload=[PRELOAD],
            dashboard_address=_dashboard_address(spec.dashboard_address),
        )
    _tell_workers(cluster, SlotPlugin(spec.devices, spec.threads, spec.num_workers))
    return cluster


def _open_queue(spec: QueueSpec) -> Cluster:
    for note in spec.notes:
        logger.info("cluster: %s", note)
    options = dict(spec.options)
    scheduler_options = dict(options.pop("scheduler_options", None) or {})
    scheduler_options.setdefault("dashboard_address", _dashboard_address(spec.dashboard_address))
    folder = Path(options.setdefault("shared_temp_directory", options["log_directory"]))
    folder.expanduser().mkdir(parents=True, exist_ok=True)
    keeper = JobKeeper(spec)
    with dask.config.set(CONFIG):
        try:
            cluster = kept_class(_queues.cluster_class(spec.kind), keeper)(
                **options, scheduler_options=scheduler_options, security=_security(spec)
            )
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise ClusterError(f"the {spec.kind} cluster cannot be opened: {error}") from error
    try:
        _tell_workers(cluster, SlotPlugin(spec.devices, spec.threads, spec.processes))
        keeper.start(cluster)
        keeper.wait_until_accepted(ACCEPT_SECONDS)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _tell_workers(cluster: Cluster, plugin: SlotPlugin) -> None:
    with Client(cluster, set_as_default=False) as client:
        client.register_plugin(plugin)


def _security(spec: QueueSpec) -> Security | None:
    if isinstance(spec.security, Mapping):
        return _security_of_files(spec.security)
    return Security.temporary() if spec.security else None


def _security_of_files(files: Mapping[str, str]) -> Security:
    roles = ("client", "scheduler", "worker")
    parts = {f"tls_{role}_{part}": files[part] for role in roles for part in ("cert", "key")}
    return Security(tls_ca_file=files["ca_file"], require_encryption=True, **parts)


def _client_of(spec: ExistingSpec) -> Client:
    where = spec.address or spec.scheduler_file
    security = _security_of_files(spec.security) if spec.security else None
    try:
        return Client(
            spec.address,
            scheduler_file=spec.scheduler_file,
            security=security,
            set_as_default=False,
        )
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(f"no Dask scheduler answers at {where!r}: {error}") from error


def _dashboard_address(given: str | None) -> str:
    """The given one, or the usual port on the loopback, or any port there where that is taken."""
    if given is not None:
        return given
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DASHBOARD_PORT))
        except OSError:
            return "127.0.0.1:0"
    return f"127.0.0.1:{DASHBOARD_PORT}"
