"""What differs between job queues: dask-jobqueue's classes and keys, GPUs, walltime.

dask_jobqueue is imported only here and only when asked for: its import replaces the handler of
SIGINT and writes a file into the user's home.
"""

from __future__ import annotations

import importlib
import inspect
import re
import signal
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dask.utils import parse_bytes, parse_timedelta

from dask_mohpo.errors import UsageError

__all__ = [
    "KINDS",
    "ask_for_gpus",
    "asked_gpus",
    "clean",
    "cluster_class",
    "keys",
    "on_loopback",
    "require_memory",
    "seconds",
    "walltime",
]

_CLASSES = {
    "slurm": "SLURM",
    "pbs": "PBS",
    "lsf": "LSF",
    "sge": "SGE",
    "htcondor": "HTCondor",
    "oar": "OAR",
}
KINDS = tuple(_CLASSES)

_OURS = {"n_workers", "job_cls", "loop", "security", "asynchronous", "dashboard_address", "nanny"}
_INTERNAL = {"self", "scheduler", "name", "host", "scheduler_cls", "protocol", "worker_command"}
_DEPRECATED = {"extra", "job_extra", "env_extra", "header_skip"}
_LISTS = ("job_extra_directives", "job_script_prologue", "worker_extra_args", "job_directives_skip")

_GPUS = {
    "slurm": re.compile(
        r"(?:--gres[=\s](?:\S*,)?gpu(?::[A-Za-z][\w.-]*)?|"
        r"--gpus(?:-per-node|-per-task)?[=\s](?:[A-Za-z][\w.-]*)?|-G\s*)[:\s]?(?P<n>\d+)?"
    ),
    "pbs": re.compile(r"\bngpus=(?P<n>\d+)"),
    "lsf": re.compile(r"-gpu\b(?:.*\bnum=(?P<n>\d+))?"),
    "sge": re.compile(r"\bn?gpus?=(?P<n>\d+)"),
    "oar": re.compile(r"\bgpu=(?P<n>\d+)"),
}


def jobqueue() -> ModuleType:
    """The module dask_jobqueue, its side effect on SIGINT undone."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    module = importlib.import_module("dask_jobqueue")
    if in_main and before is not None:
        signal.signal(signal.SIGINT, before)
    return module


def cluster_class(kind: str) -> Any:
    """dask-jobqueue's cluster class."""
    return getattr(jobqueue(), f"{_CLASSES[kind]}Cluster")


def keys(kind: str) -> list[str]:
    """The keys of a spec that dask-jobqueue takes for this queue."""
    cluster = cluster_class(kind)
    job = cluster.job_cls
    base = inspect.getmro(job)[1]
    names: dict[str, None] = {}
    for part in (job, base, inspect.getmro(cluster)[1]):
        names.update(dict.fromkeys(inspect.signature(part).parameters))
    drop = {*_OURS, *_INTERNAL, *_DEPRECATED, "base_class_kwargs", "job_kwargs"}
    if kind in ("slurm", "pbs"):
        drop.add("project")  # renamed to account
    return [name for name in names if name not in drop]


def clean(kind: str, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A copy of dask-jobqueue's options, each of the type that it can use."""
    options = {key: value for key, value in values.items() if value is not None}
    for key in _LISTS:
        if key not in options:
            continue
        takes = dict if (kind, key) == ("htcondor", "job_extra_directives") else list
        if not isinstance(options[key], takes):
            form = "a mapping" if takes is dict else "a list, an entry for each line or argument"
            raise UsageError(f"{source}: {key} = {options[key]!r} is not valid; give {form}.")
        options[key] = takes(options[key])
    return options


def require_memory(kind: str, options: dict[str, Any], source: str) -> None:
    """Every queue needs `memory`, but for a Slurm whose directives ask for it in another way."""
    directives = options.get("job_extra_directives", [])
    other = [d for d in directives if re.match(r"--mem(-per-(gpu|cpu))?\b", str(d))]
    if kind == "slurm" and other:
        if "memory" in options:
            raise UsageError(
                f"{source}: memory: {options['memory']} and {other[0]} contradict each other, and "
                "sbatch refuses a job with both; leave one of them out."
            )
        options["memory"] = "1GB"  # dask-jobqueue wants one; the line is skipped
        options["job_directives_skip"] = [*options.get("job_directives_skip", []), "--mem="]
        return
    try:
        parse_bytes(options["memory"])
    except (KeyError, ValueError, TypeError) as error:
        given = f"memory = {options['memory']!r} is not valid" if "memory" in options else "memory"
        raise UsageError(
            f"{source}: {given}{': ' if 'memory' in options else ' is needed: '}"
            "how much each job gets, such as memory: 16GB."
        ) from error


def asked_gpus(kind: str, options: Mapping[str, Any]) -> int | None:
    """How many GPUs the user's own directives ask for; None: they do not ask."""
    directives = options.get("job_extra_directives", [])
    if kind == "htcondor":
        for name, value in dict(directives).items():
            if name.lower() == "request_gpus":
                return int(value)
        return None
    for text in (*directives, options.get("resource_spec", "")):
        match = _GPUS[kind].search(str(text))
        if match:
            return int(match["n"] or 1)
    return None


def ask_for_gpus(kind: str, options: dict[str, Any], gpus: int) -> None:
    """Add the directive for GPUs, unless the user's own ask for them."""
    if asked_gpus(kind, options) is not None:
        return
    if kind in ("pbs", "oar") and "resource_spec" in options:
        missing = f":ngpus={gpus}" if kind == "pbs" else f"/gpu={gpus}"
        raise UsageError(
            f"resource_spec = {options['resource_spec']!r} does not ask for gpus: {gpus}; add "
            f"{missing} to it, or leave it out."
        )
    if kind == "pbs":
        megabytes = -(-parse_bytes(options["memory"]) // 2**20)
        options["resource_spec"] = (
            f"select=1:ncpus={options['cores']}:mem={megabytes}MB:ngpus={gpus}"
        )
    elif kind == "oar":
        options["resource_spec"] = f"/nodes=1/gpu={gpus}"
    elif kind == "htcondor":
        options["job_extra_directives"] = {
            **options.get("job_extra_directives", {}),
            "request_gpus": gpus,
        }
    else:
        directive = {"slurm": f"--gres=gpu:{gpus}", "sge": f"-l gpu={gpus}"}.get(
            kind, f'-gpu "num={gpus}"'
        )
        options["job_extra_directives"] = [*options.get("job_extra_directives", []), directive]


def walltime(kind: str, options: Mapping[str, Any], notes: list[str]) -> float | None:
    """The walltime in seconds; None where the queue's own default holds."""
    given = options.get("walltime")
    if given is None:
        if kind not in ("htcondor",):
            notes.append("walltime is not given: dask-jobqueue asks for 30 minutes")
        return None if kind == "htcondor" else 1800.0
    if not isinstance(given, str):
        raise UsageError(
            f"walltime = {given!r} is not text; YAML reads 1:00:00 as a number. Put it in quotes: "
            'walltime: "01:00:00".'
        )
    return seconds(given, "walltime", kind)


def seconds(text: str, name: str, kind: str = "slurm") -> float:
    """Seconds of a walltime as queues write it (``2-12:00:00``, ``12:00:00``) or as Dask does.

    Without a unit, a number is minutes in Slurm and LSF, and seconds elsewhere.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        try:
            return float(parse_timedelta(text))
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"{name} = {text!r} is not valid; give HH:MM:SS, such as 04:00:00."
            ) from error
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        units = (3600, 60, 1)  # days-hours[:minutes[:seconds]]
    elif len(parts) == 3:
        units = (3600, 60, 1)
    elif kind == "lsf":
        units = (3600, 60, 1) if len(parts) == 2 else (60, 1, 1)
    elif len(parts) == 2:
        units = (60, 1, 1)
    else:
        units = (60 if kind == "slurm" else 1, 1, 1)
    total = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return float(total + 86400 * int(days or 0))


def on_loopback(options: Mapping[str, Any]) -> bool:
    """Whether the scheduler listens on this machine's loopback alone."""
    scheduler = options.get("scheduler_options") or {}
    host = str(scheduler.get("host", ""))
    if host:
        return host.startswith("127.") or host in ("localhost", "::1")
    interface = scheduler.get("interface", options.get("interface"))
    return interface in ("lo", "lo0")
