"""Which device and how many CPU threads each worker process owns."""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dask.system import CPU_COUNT
from distributed import Worker, WorkerPlugin, get_worker

from dask_mohpo.errors import UsageError

__all__ = ["Slot", "SlotPlugin", "check_devices", "cpu_count", "current_slot"]

logger = logging.getLogger(__name__)

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One worker process that trains one seed task at a time, and what it owns."""

    worker: str
    host: str
    device: str
    threads: int
    lock: threading.Lock
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
    if isinstance(devices, str) or not list(devices):
        raise UsageError(
            f'devices = {devices!r} is not valid; give a list such as ["cuda:0", "cuda:1"].'
        )
    for device in devices:
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            raise UsageError(f"unknown device {device!r}; valid: 'cpu', 'cuda', 'cuda:0', …")
    return list(devices)


class SlotPlugin(WorkerPlugin):
    """Tells each worker what it owns; workers that join later are told as well.

    Parameters
    ----------
    devices : assigned round robin, by the number at the end of the worker's name.
    threads : torch threads of each worker.
    """

    name = "dask-mohpo-slot"

    def __init__(self, devices: Sequence[str], threads: int) -> None:
        self.devices = list(devices)
        self.threads = threads

    def setup(self, worker: Worker) -> None:
        if threading.current_thread() is threading.main_thread():
            # Ctrl-C in a terminal reaches its worker processes too; the driver alone decides.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        number = re.search(r"(\d+)$", str(worker.name))
        place = int(number.group(1)) if number else 0
        slot = _make_slot(str(worker.name), self.devices[place % len(self.devices)], self.threads)
        with _slots_lock:
            _slots[worker.address] = slot


def _make_slot(worker: str, device: str, threads: int) -> Slot:
    return Slot(
        worker=worker,
        host=socket.gethostname(),
        device=device,
        threads=max(1, threads),
        lock=threading.Lock(),
    )


def current_slot() -> Slot:
    """What the worker that runs this task owns.

    A worker that was told nothing (on a cluster that the user made) owns as many threads as Dask
    says it has, but no more than there are CPUs, and the first GPU where it offers the resource
    GPU and torch sees one. Outside of a Dask task: the whole machine.
    """
    try:
        worker = get_worker()
    except ValueError:
        return _make_slot("driver", "cpu", cpu_count())
    with _slots_lock:
        if worker.address not in _slots:
            threads = min(worker.state.nthreads, cpu_count())
            slot = _make_slot(str(worker.name), _default_device(worker), threads)
            _slots[worker.address] = slot
        return _slots[worker.address]


def _default_device(worker: Worker) -> str:
    if not worker.state.total_resources.get("GPU"):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda:0"
    logger.warning("worker %s offers GPU, but torch sees no CUDA device: cpu is used", worker.name)
    return "cpu"
