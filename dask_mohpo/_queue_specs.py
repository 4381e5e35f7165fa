"""A cluster of jobs: what users often get wrong is derived, contradictions are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dask_mohpo import _queues
from dask_mohpo.devices import check_devices
from dask_mohpo.errors import UnknownNameError, UsageError

__all__ = ["KEYS", "QueueSpec", "check_count", "read_certificates", "read_queue"]

SECURITY_KEYS = ("ca_file", "cert", "key")
SCALE_KEYS = ("jobs", "workers", "gpus")
ADAPT_KEYS = ("minimum_jobs", "maximum_jobs")
PRELOAD = "dask_mohpo.preload"
LOG_DIRECTORY = "dask-mohpo-logs"
WORKER_ARGS = ("--nthreads", "1", "--memory-limit", "0", "--no-dashboard")
"""A slot is one thread; what fills its memory is training, which cannot be spilled or paused."""

KEYS = (
    "gpus",
    "workers_per_gpu",
    "threads_per_worker",
    "scale",
    "adapt",
    "security",
    "devices",
    "dashboard_address",
)
"""Keys of a spec that are ours, beside those of dask-jobqueue."""


@dataclass(frozen=True, kw_only=True)
class QueueSpec:
    """Jobs of a job queue, each with the same number of workers."""

    kind: str
    options: Mapping[str, Any]
    """Keyword arguments of dask-jobqueue's cluster class."""
    processes: int
    """Workers of each job."""
    gpus: int
    """Of each job."""
    threads: int
    """CPU threads of each worker."""
    jobs: int
    """How many there shall be; those to begin with where `adapt` is given."""
    adapt: tuple[int, int] | None
    """The least and the most jobs, where their number follows the work that is left."""
    security: bool | Mapping[str, str]
    """Whether to use TLS with temporary certificates, or the files of certificates."""
    devices: tuple[str, ...] | None
    dashboard_address: str | None
    walltime: float | None
    """Seconds."""
    notes: tuple[str, ...]
    """What was derived or looks wrong, for the user to read."""

    def with_jobs(self, number: int) -> QueueSpec:
        """The same with a fixed number of jobs."""
        return replace(self, jobs=number, adapt=None)


def read_queue(kind: str, values: dict[str, Any], source: str) -> QueueSpec:
    notes: list[str] = []
    own = {key: values.pop(key) for key in KEYS if key in values}
    options = _queues.clean(kind, values, source)
    _queues.require_memory(kind, options, source)
    gpus = _gpus_per_job(kind, own, options, notes)
    per_gpu = own.get("workers_per_gpu", 1)
    check_count("workers_per_gpu", per_gpu)
    processes = _processes(gpus, per_gpu, own, options, notes)
    cores = options.setdefault("cores", processes * own.get("threads_per_worker", 1))
    threads = own.get("threads_per_worker", max(1, cores // processes))
    check_count("threads_per_worker", threads)
    if threads * processes > cores:
        notes.append(
            f"{processes} workers with {threads} threads share {cores} CPUs: they will be slow. "
            f"Ask for cores: {threads * processes}."
        )
    options["processes"] = processes
    walltime = _queues.walltime(kind, options, notes)
    _check_lifetime(options, walltime, notes)
    if gpus:
        _queues.ask_for_gpus(kind, options, gpus)
    resource = "GPU" if gpus else "CPU"
    options["worker_extra_args"] = [
        *_without_resources(options.get("worker_extra_args", [])),
        *WORKER_ARGS,
        "--resources",
        f"{resource}=1",
        "--preload",
        PRELOAD,
    ]
    options["job_script_prologue"] = [*options.get("job_script_prologue", []), *_exports(threads)]
    options.setdefault("job_name", "dask-mohpo")
    options.setdefault("log_directory", LOG_DIRECTORY)
    jobs, adapt = _number_of_jobs(own, processes, gpus, notes)
    devices = own.get("devices")
    return QueueSpec(
        kind=kind,
        options=options,
        processes=processes,
        gpus=gpus,
        threads=threads,
        jobs=jobs,
        adapt=adapt,
        security=_security(own.get("security"), options),
        devices=None if devices is None else tuple(check_devices(devices)),
        dashboard_address=own.get("dashboard_address"),
        walltime=walltime,
        notes=tuple(notes),
    )


def _gpus_per_job(
    kind: str, own: Mapping[str, Any], options: Mapping[str, Any], notes: list[str]
) -> int:
    gpus = own.get("gpus")
    if gpus is not None:
        check_count("gpus", gpus, minimum=0)
    asked = _queues.asked_gpus(kind, options)
    if asked is None:
        return gpus or 0
    if gpus is None:
        notes.append(f"gpus: {asked}, as your own directives ask for")
        return asked
    if gpus != asked:
        raise UsageError(
            f"gpus: {gpus} contradicts the directives of the job, which ask for {asked}; "
            "leave one of them out."
        )
    return int(gpus)


def _processes(
    gpus: int,
    per_gpu: int,
    own: Mapping[str, Any],
    options: Mapping[str, Any],
    notes: list[str],
) -> int:
    given = options.get("processes")
    for name in ("processes", "cores"):
        if name in options:
            check_count(name, options[name])
    if gpus:
        if given is not None and given != gpus * per_gpu:
            raise UsageError(
                f"processes: {given} contradicts gpus: {gpus} with workers_per_gpu: {per_gpu}, "
                f"which make {gpus * per_gpu} workers; leave processes out."
            )
        return gpus * per_gpu
    if "workers_per_gpu" in own:
        raise UsageError("workers_per_gpu needs gpus: how many GPUs each job has.")
    if given is not None:
        return int(given)
    threads = own.get("threads_per_worker", 1)
    check_count("threads_per_worker", threads)
    processes = max(1, options.get("cores", 1) // threads)
    notes.append(f"processes: {processes}, one for every {threads} of the job's CPUs")
    return processes


def _number_of_jobs(
    own: Mapping[str, Any], processes: int, gpus: int, notes: list[str]
) -> tuple[int, tuple[int, int] | None]:
    if "scale" in own and "adapt" in own:
        raise UsageError("scale and adapt exclude each other: a fixed number of jobs, or a range.")
    if "adapt" in own:
        adapt = _numbers("adapt", own["adapt"], ADAPT_KEYS, minimum=0)
        least, most = adapt.get("minimum_jobs", 0), adapt.get("maximum_jobs", 0)
        if most < max(least, 1):
            raise UsageError(
                f"adapt: maximum_jobs: {most} must be at least 1 and not below minimum_jobs: "
                f"{least}."
            )
        return least, (least, most)
    scale = _numbers("scale", own.get("scale", {"jobs": 1}), SCALE_KEYS, minimum=1)
    if len(scale) != 1:
        raise UsageError(f"scale: give one of {', '.join(SCALE_KEYS)}, not {len(scale)}.")
    [(unit, number)] = scale.items()
    per_job = {"jobs": 1, "workers": processes, "gpus": gpus}[unit]
    if not per_job:
        raise UsageError("scale: gpus: … needs gpus: how many GPUs each job has.")
    jobs = math.ceil(number / per_job)
    if jobs * per_job != number:
        notes.append(f"scale: {number} {unit} make {jobs} jobs with {jobs * per_job} {unit}")
    return jobs, None


def _numbers(name: str, given: Any, keys: Sequence[str], *, minimum: int) -> dict[str, int]:
    if not isinstance(given, Mapping) or not given:
        example = f"{{{keys[0]}: 2}}"
        raise UsageError(
            f"{name} = {given!r} is not valid; give a mapping such as {example} with "
            f"{', '.join(keys)}."
        )
    for key, value in given.items():
        if key not in keys:
            raise UnknownNameError(f"key of {name}", str(key), keys)
        check_count(f"{name}: {key}", value, minimum=minimum)
    return dict(given)


def _check_lifetime(options: Mapping[str, Any], walltime: float | None, notes: list[str]) -> None:
    args = [str(arg) for arg in options.get("worker_extra_args", [])]
    text = " ".join(args)
    match = re.search(r"--lifetime[= ](\S+)", text)
    if match is None:
        return
    seconds = _queues.seconds(match.group(1), "--lifetime", "dask")
    if walltime is not None and seconds >= walltime:
        raise UsageError(
            f"worker_extra_args: --lifetime {match.group(1)} is not shorter than the walltime "
            f"({walltime:.0f} s): the queue would end the job first. Leave --lifetime out."
        )
    notes.append(
        f"--lifetime {match.group(1)} ends a worker without waiting for its seed, which then "
        "starts over: leave it out unless every seed is much shorter"
    )


def _without_resources(args: Any) -> list[str]:
    if not isinstance(args, list) or not all(isinstance(arg, str | int | float) for arg in args):
        raise UsageError(f"worker_extra_args = {args!r} is not valid; give a list of texts.")
    if any(str(arg).startswith("--resources") for arg in args):
        raise UsageError(
            "worker_extra_args: leave --resources out; each worker offers GPU=1 (CPU=1 without "
            "GPUs)."
        )
    return [str(arg) for arg in args]


def _exports(threads: int) -> list[str]:
    """Environment of the workers, as lines of the job script."""
    # Dask sets them to 1 where they are not set; sbatch hands on what the driver has.
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return [
        *(f"export {name}={threads}" for name in names),
        # training code may start processes of its own
        "export DASK_DISTRIBUTED__WORKER__DAEMON=False",
    ]


def _security(given: Any, options: Mapping[str, Any]) -> bool | Mapping[str, str]:
    if given is None:
        return not _queues.on_loopback(options)
    return given if isinstance(given, bool) else read_certificates(given)


def check_count(name: str, value: Any, *, minimum: int = 1) -> None:
    if type(value) is not int or value < minimum:
        raise UsageError(f"{name} = {value!r} is not valid; give an integer ≥ {minimum}.")


def read_certificates(security: Any) -> Mapping[str, str]:
    valid = isinstance(security, Mapping) and set(security) == set(SECURITY_KEYS)
    if not valid or not all(isinstance(value, str) for value in security.values()):
        raise UsageError(
            f"security = {security!r} is not valid; give the files as a mapping with the keys "
            f"{', '.join(SECURITY_KEYS)} (for a job queue also true or false)."
        )
    for name, file in security.items():
        if not Path(file).expanduser().is_file():
            raise UsageError(f"security: {name}: there is no file {file!r}.")
    return {name: str(Path(file).expanduser()) for name, file in security.items()}
