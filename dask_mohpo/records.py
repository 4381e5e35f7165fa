"""What travels between driver and workers: frozen records, plain enough to be stored as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

__all__ = ["Milestone", "SeedResult", "SeedRun", "SeedTask", "Trainable"]

Trainable = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """One seed of one trial: what one learner trains."""

    trial: int
    seed: int
    attempt: int
    """0 for the first try of this seed, one more for each retry."""
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SeedTask:
    """The training of one or more seeds, of one trial or of several, in one Dask task."""

    study: str
    runs: tuple[SeedRun, ...]
    """With several trials: of an algorithm that trains them in one batch."""
    session: str
    """Names one run of the driver; keeps the Dask keys of two runs of one study apart."""
    algo: Trainable | bytes
    """A name, a function, or a function pickled: what cannot be unpickled on a worker would end it,
    were it unpickled by Dask."""
    env_id: str
    total_timesteps: int
    ref_point: tuple[float, ...]
    eval_gamma: float
    num_eval_weights: int
    num_eval_episodes: int
    milestones: int
    checkpoint_dir: str
    exclusive: bool
    """True where the worker must train one seed task at a time although it has more threads."""

    @property
    def trials(self) -> list[int]:
        """Numbers of its trials, the oldest first."""
        return sorted({run.trial for run in self.runs})

    @property
    def key(self) -> str:
        """The Dask key; unique for every try of every seed of every run of the driver."""
        parts = []
        for trial in self.trials:
            runs = [run for run in self.runs if run.trial == trial]
            seeds = "+".join(str(run.seed) for run in runs)
            parts.append(f"trial{trial}-seed{seeds}-attempt{runs[0].attempt}")
        return f"{self.study}-{'-'.join(parts)}-{self.session}"


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """A point in training where the seed reported a front."""

    step: int
    hypervolume: float
    seconds: float
    """Wall seconds since the seed task started."""


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """What one seed gives back: front, learning curve, cost, provenance."""

    trial: int
    seed: int
    attempt: int
    state: str
    """``finished``, ``failed`` (see `error`), or ``stopped`` at a milestone on request."""
    front: np.ndarray | None
    """Non-dominated expected returns (n_points, n_objectives), maximised, discounted with
    `eval_gamma`; None unless finished."""
    milestones: tuple[Milestone, ...] = ()
    ref_point: tuple[float, ...] = ()
    eval_gamma: float = 1.0
    steps: int = 0
    """Environment steps trained."""
    started: float = 0.0
    """Unix time."""
    ended: float = 0.0
    """Unix time."""
    wall_seconds: float = 0.0
    """Of the seed task, divided by the number of seeds that shared it."""
    cpu_seconds: float = 0.0
    """Of the worker process while the task ran, divided likewise."""
    peak_memory: int = 0
    """Largest resident set of the worker process while the task ran, in bytes."""
    worker: str = ""
    host: str = ""
    """The node's name."""
    device: str = ""
    gpu: str = ""
    """The entry of CUDA_VISIBLE_DEVICES that the seed had to itself, or empty."""
    threads: int = 0
    error: str | None = None
    """One line."""
    traceback: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Only what `json.dumps` takes; the inverse of `from_json`."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["front"] = None if self.front is None else self.front.tolist()
        data["milestones"] = [asdict(milestone) for milestone in self.milestones]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SeedResult:
        """Build from what `to_json` gave; fields of later versions are passed over."""
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        ref_point = tuple(values.get("ref_point", ()))
        front = values["front"]
        if front is not None:
            front = np.asarray(front, dtype=float).reshape(-1, len(ref_point))
        milestones = tuple(Milestone(**m) for m in values.get("milestones", ()))
        return cls(**{**values, "front": front, "ref_point": ref_point, "milestones": milestones})
