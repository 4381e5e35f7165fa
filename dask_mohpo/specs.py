"""What a cluster shall be: reads a spec, from a mapping or a YAML file, and checks it.

Nothing is started here. A spec of a job queue takes dask-jobqueue's own keys and a few of ours;
what users often get wrong is derived, and what contradicts itself is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dask_mohpo import _queues
from dask_mohpo._queue_specs import KEYS, QueueSpec, check_count, read_certificates, read_queue
from dask_mohpo.devices import check_devices, cpu_count
from dask_mohpo.errors import UnknownNameError, UsageError

__all__ = ["ExistingSpec", "LocalSpec", "QueueSpec", "Spec", "read_spec", "shipped_specs"]

KINDS = ("local", *_queues.KINDS, "existing")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class LocalSpec:
    """A cluster on this machine."""

    num_workers: int
    """Worker processes, one thread each."""
    devices: tuple[str, ...]
    """Assigned to the workers round robin."""
    threads: int
    """torch threads of each worker."""
    dashboard_address: str | None = None

    @classmethod
    def of(
        cls,
        num_workers: int | None = None,
        devices: Sequence[str] | None = None,
        workers_per_gpu: int = 1,
        threads_per_worker: int | None = None,
        dashboard_address: str | None = None,
    ) -> LocalSpec:
        """Fill in what is not given.

        Without `devices`: every GPU that torch sees, else the CPU. Without `num_workers`:
        `workers_per_gpu` for each GPU, else one per CPU.
        """
        check_count("workers_per_gpu", workers_per_gpu)
        chosen = check_devices(devices) if devices is not None else _visible_devices()
        gpus = [device for device in chosen if device != "cpu"]
        if num_workers is None:
            num_workers = len(gpus) * workers_per_gpu if gpus else cpu_count()
        check_count("num_workers", num_workers)
        if threads_per_worker is None:
            threads_per_worker = max(1, cpu_count() // num_workers)
        check_count("threads_per_worker", threads_per_worker)
        return cls(
            num_workers=num_workers,
            devices=tuple(chosen),
            threads=threads_per_worker,
            dashboard_address=dashboard_address,
        )


@dataclass(frozen=True, kw_only=True)
class ExistingSpec:
    """A scheduler that runs already."""

    address: str | None
    scheduler_file: str | None
    security: Mapping[str, str] | None


Spec = LocalSpec | QueueSpec | ExistingSpec


def read_spec(spec: Mapping[str, Any] | str | os.PathLike[str] | None) -> Spec:
    """Read a spec.

    Parameters
    ----------
    spec : None for this machine; a mapping; a YAML file; the name of a shipped file, such as
        ``"slurm-4gpu"``; or a scheduler's address. ``${VAR}`` is replaced by the environment
        variable.

    Raises
    ------
    UsageError
        A file that is not there, a key that is unknown, a value that is not valid, or values that
        contradict each other.
    """
    if spec is None:
        return LocalSpec.of()
    if isinstance(spec, Mapping):
        return _from_mapping(spec, "cluster spec")
    text = os.fspath(spec)
    if "://" in text:
        return ExistingSpec(address=text, scheduler_file=None, security=None)
    path = _find(text)
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cluster spec {path} cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise UsageError(f"cluster spec {path} must hold a mapping of keys, not {data!r}.")
    return _from_mapping(data, str(path))


def shipped_specs() -> dict[str, Path]:
    """Name → file of the specs that come with the library."""
    here = Path(__file__).parent
    for folder in (here / "cluster_configs", here.parent / "cluster_configs"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def _find(text: str) -> Path:
    """A file of the user's, or a shipped one by its name."""
    path = Path(text).expanduser()
    if path.is_file():
        return path
    shipped = shipped_specs()
    name = path.name.removesuffix(".yaml")
    if name in shipped and path.parent in (Path(), Path("cluster_configs")):
        return shipped[name]
    raise UnknownNameError(
        "cluster spec",
        text,
        shipped,
        "Those are shipped; your own is a path to a YAML file, or a scheduler's address such as "
        "'tcp://node1:8786'.",
    )


def _from_mapping(data: Mapping[str, Any], source: str) -> Spec:
    values = {str(key): _expand(value, source) for key, value in data.items()}
    kind = values.pop("kind", "local")
    if kind not in KINDS:
        raise UnknownNameError(f"kind of cluster in {source}", str(kind), KINDS)
    if kind == "local":
        return LocalSpec.of(**_known(values, source, kind, _LOCAL_KEYS))
    if kind == "existing":
        return _existing(_known(values, source, kind, ("address", "scheduler_file", "security")))
    return read_queue(kind, _known(values, source, kind, (*KEYS, *_queues.keys(kind))), source)


_LOCAL_KEYS = (
    "num_workers",
    "devices",
    "workers_per_gpu",
    "threads_per_worker",
    "dashboard_address",
)


def _known(values: dict[str, Any], source: str, kind: str, valid: Sequence[str]) -> dict[str, Any]:
    for key in values:
        if key not in valid:
            raise UnknownNameError(f"key in {source} (kind: {kind})", key, ["kind", *valid])
    return values


def _expand(value: Any, source: str) -> Any:
    """Replace ``${VAR}`` in all texts."""
    if isinstance(value, Mapping):
        return {key: _expand(entry, source) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_expand(entry, source) for entry in value]
    if not isinstance(value, str):
        return value

    def lookup(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise UsageError(
                f"{source}: the environment variable {name} of {value!r} is not set; export it, "
                "or write the value itself."
            )
        return os.environ[name]

    return _VARIABLE.sub(lookup, value)


def _existing(values: Mapping[str, Any]) -> ExistingSpec:
    address, file = values.get("address"), values.get("scheduler_file")
    if (address is None) == (file is None):
        raise UsageError(
            "a spec of kind existing takes either address (such as tcp://node1:8786) or "
            "scheduler_file."
        )
    security = values.get("security")
    if security is not None:
        security = read_certificates(security)
    return ExistingSpec(address=address, scheduler_file=file, security=security)


def _visible_devices() -> list[str]:
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
