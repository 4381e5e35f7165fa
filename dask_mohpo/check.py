"""What a cluster spec would submit, and, where asked for, whether its workers are what they should.

Nothing is submitted without `submit`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed import Client

from dask_mohpo import _queues
from dask_mohpo.clusters import connect, keeper_of
from dask_mohpo.devices import current_slot
from dask_mohpo.errors import ClusterError
from dask_mohpo.slots import workers_of
from dask_mohpo.specs import ExistingSpec, LocalSpec, QueueSpec, Spec

__all__ = ["describe_spec", "probe"]

PROBE_SECONDS = 1.0


def describe_spec(spec: Spec) -> str:
    """The slots of a spec, its warnings and, for a job queue, the job script."""
    if isinstance(spec, ExistingSpec):
        return f"an existing scheduler: {spec.address or spec.scheduler_file}"
    if isinstance(spec, LocalSpec):
        devices = ", ".join(
            spec.devices[place % len(spec.devices)] for place in range(spec.num_workers)
        )
        return (
            f"this machine: {_count(spec.num_workers, 'worker')}, "
            f"{_count(spec.threads, 'thread')} each\n"
            f"devices: {devices}"
        )
    lines = [
        f"{spec.kind}: {_jobs_text(spec)}, {_count(spec.processes, 'slot')} in each",
        *_slot_lines(spec),
        f"TLS: {'on' if spec.security else 'off'}",
        *(f"note: {note}" for note in spec.notes),
        "",
        job_script(spec),
    ]
    return "\n".join(lines)


def _jobs_text(spec: QueueSpec) -> str:
    if spec.adapt is not None:
        return "{} to {} jobs, as the work asks for".format(*spec.adapt)
    return _count(spec.jobs, "job")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _slot_lines(spec: QueueSpec) -> list[str]:
    lines = []
    for place in range(spec.processes):
        if spec.devices is not None:
            device = spec.devices[place % len(spec.devices)]
        else:
            device = f"GPU {place % spec.gpus} of the job" if spec.gpus else "cpu"
        lines.append(f"  slot {place}: {device}, {_count(spec.threads, 'thread')}")
    return lines


def job_script(spec: QueueSpec) -> str:
    """The job script as it would be submitted, but for the scheduler's address and certificates."""
    options = {
        key: value
        for key, value in spec.options.items()
        if key not in ("scheduler_options", "shared_temp_directory", "silence_logs")
    }
    folder = Path(options["log_directory"])
    existed = folder.exists()
    job = _queues.cluster_class(spec.kind).job_cls(
        "SCHEDULER", name="WORKER", protocol="tls://" if spec.security else None, **options
    )
    if not existed:
        folder.rmdir()  # made by dask-jobqueue; nothing is submitted yet
    return str(job.job_script())


def probe(spec: Spec, timeout: float) -> tuple[str, list[str]]:
    """Start the workers (of a job queue: one job's), and look what each slot is.

    Parameters
    ----------
    spec : what to start.
    timeout : seconds until the workers must be there.

    Returns
    -------
    A table with a line per slot, and what is wrong, one text each.

    Raises
    ------
    ClusterError
        The workers do not come.
    """
    if isinstance(spec, QueueSpec):
        spec = spec.with_jobs(1)
    with connect(spec) as client:
        expected = spec.processes if isinstance(spec, QueueSpec) else None
        names = _wait_for_workers(client, expected, timeout)
        futures = {
            name: client.submit(_look, workers=[address], pure=False, key=f"probe-{name}")
            for address, name in names.items()
        }
        found = {name: future.result(timeout=timeout) for name, future in futures.items()}
    ordered = dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))
    return _table(ordered), _faults(ordered)


def _wait_for_workers(client: Client, expected: int | None, timeout: float) -> dict[str, str]:
    """Address → name of the workers."""
    keeper = keeper_of(client)
    deadline = time.monotonic() + timeout
    while True:
        workers = workers_of(client)
        if len(workers) >= (expected or 1):
            return {address: str(worker["name"]) for address, worker in workers.items()}
        if keeper is not None:
            keeper.check()
        if time.monotonic() > deadline:
            waiting = keeper.waiting_text() if keeper is not None else ""
            raise ClusterError(
                f"after {timeout:.0f} s there are {len(workers)} workers of {expected or 1}. "
                f"{waiting}".rstrip()
            )
        time.sleep(0.2)


def _look() -> dict[str, Any]:
    """What this slot is; keeps it for a second, so that no two probes share one."""
    import os

    import torch

    slot = current_slot()
    time.sleep(PROBE_SECONDS)
    return {
        "host": slot.host,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "-"),
        "device": slot.device,
        "threads": slot.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _table(found: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(next(iter(found.values())))
    rows = [["worker", *columns]]
    rows += [[name, *(str(slot[column]) for column in columns)] for name, slot in found.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _faults(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    import torch

    here = {"torch": torch.__version__, "python": platform.python_version()}
    return [
        f"worker {name} has {program} {slot[program]}, this driver has {version}"
        for name, slot in found.items()
        for program, version in here.items()
        if slot[program] != version
    ]
