"""Which device and how many CPU threads each worker process owns."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dask.system import CPU_COUNT
from distributed import Worker, WorkerPlugin, get_worker

from dask_mohpo.errors import UsageError

__all__ = ["Slot", "SlotPlugin", "check_devices", "cpu_count", "current_slot", "place_of"]

logger = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")

_DEVICE = re.compile(r"cpu|cuda(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One worker process that trains one seed task at a time, and what it owns."""

    worker: str
    host: str
    """The node's name, as Slurm gives it, or else the machine's."""
    device: str
    gpu: str
    """The entry of CUDA_VISIBLE_DEVICES that it owns: a number, a UUID or a MIG name; or empty."""
    threads: int
    own_process: bool
    """False where several workers share a process."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a seed task trains, where Dask itself would start several at a time."""


_slots: dict[str, Slot] = {}
_slots_lock = threading.Lock()


def cpu_count() -> int:
    """CPUs that this process may use: affinity and cgroup limits respected, at least 1."""
    return int(CPU_COUNT)


def check_devices(devices: Sequence[str]) -> list[str]:
    """The devices as a list.

    Raises
    ------
    UsageError
        Not a list, empty, or an entry that is no device.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise UsageError(
            f'devices = {devices!r} is not valid; give a list such as ["cuda:0", "cuda:1"].'
        )
    for device in devices:
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            raise UsageError(f"unknown device {device!r}; valid: 'cpu', 'cuda', 'cuda:0', …")
    return list(devices)


def place_of(worker_name: str) -> int:
    """A worker's place among those of its job or machine, from 0.

    Workers of a `LocalCluster` are named ``0``, ``1``, …; those of a dask-jobqueue job with several
    processes ``SLURMCluster-<job>-<place>``; the only one of a job ``SLURMCluster-<job>``.
    """
    match = re.fullmatch(r"(?:.*-\d+-)?(\d+)", worker_name)
    return int(match.group(1)) if match else 0


class SlotPlugin(WorkerPlugin):
    """Tells each worker what it owns; workers that join later are told as well.

    Parameters
    ----------
    devices : assigned round robin; None: a GPU where the worker offers the resource GPU, else the
        CPU.
    threads : torch threads of each worker; fewer where it owns fewer CPUs.
    processes : workers that share the job or machine.
    """

    name = "dask-mohpo-slot"

    def __init__(self, devices: Sequence[str] | None, threads: int, processes: int) -> None:
        self.devices = None if devices is None else list(devices)
        self.threads = threads
        self.processes = processes

    def setup(self, worker: Worker) -> None:
        if _has_own_process(worker):
            # Ctrl-C in a terminal reaches its worker processes too; the driver alone decides.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        slot = _make_slot(worker, self.devices, min(self.threads, _fair_share(self.processes)))
        with _slots_lock:
            _slots[worker.address] = slot


def current_slot() -> Slot:
    """What the worker that runs this task owns.

    A worker that was told nothing (on a cluster that the user made) owns as many threads as Dask
    says it has, but no more than there are CPUs, and a GPU where it offers the resource GPU.
    Outside of a Dask task: the whole machine.
    """
    try:
        worker = get_worker()
    except ValueError:
        return Slot(
            worker="driver",
            host=_host(),
            device="cpu",
            gpu="",
            threads=cpu_count(),
            own_process=False,
        )
    with _slots_lock:
        if worker.address not in _slots:
            threads = min(worker.state.nthreads, cpu_count())
            _slots[worker.address] = _make_slot(worker, None, threads)
        return _slots[worker.address]


def _make_slot(worker: Worker, devices: Sequence[str] | None, threads: int) -> Slot:
    own_process = _has_own_process(worker)
    place = place_of(str(worker.name))
    if devices is not None:
        device = devices[place % len(devices)]
        index = int(device.partition(":")[2] or 0)
    else:
        device = "cuda" if worker.state.total_resources.get("GPU") else "cpu"
        index = place
    gpu = ""
    if device != "cpu":
        device, gpu = _claim_gpu(index, wrap=devices is None, narrow=own_process)
        if device == "cpu":
            logger.warning(
                "worker %s: a GPU was asked for, but none is in sight: cpu is used", worker.name
            )
    return Slot(
        worker=str(worker.name),
        host=_host(),
        device=device,
        gpu=gpu,
        threads=max(1, threads),
        own_process=own_process,
    )


def _claim_gpu(index: int, *, wrap: bool, narrow: bool) -> tuple[str, str]:
    """The torch device of one of the visible GPUs, and its entry in CUDA_VISIBLE_DEVICES.

    All workers of a job see the same list. With `narrow`, this process sees the one entry alone
    from here on, as its ``cuda:0``; CUDA must not have started in it.
    """
    entries = _visible_gpus()
    if wrap and entries:
        index %= len(entries)
    entry = entries[index] if index < len(entries) else ""
    if narrow and entry:
        os.environ[VISIBLE] = entry
        index = 0
    return (f"cuda:{index}" if _torch_sees_cuda() else "cpu"), entry


def _visible_gpus() -> list[str]:
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [entry.strip() for entry in given.split(",") if entry.strip()]
    return [str(i) for i, _ in enumerate(NVIDIA_GPUS.glob("*"))]


def _torch_sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _fair_share(processes: int) -> int:
    """CPU threads for each of so many processes, of what Slurm and the machine give to them."""
    cpus = cpu_count()
    reserved = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if reserved.isdigit():
        cpus = min(cpus, int(reserved))
    return max(1, cpus // processes)


def _has_own_process(worker: Worker) -> bool:
    """Whether the worker's event loop is its process's main thread: it shares it with no other."""
    return bool(worker.thread_id == threading.main_thread().ident)


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
