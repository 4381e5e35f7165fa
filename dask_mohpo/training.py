"""What a worker runs: train one configuration with one or more seeds and give back the fronts."""

from __future__ import annotations

import contextlib
import importlib
import logging
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from dask_mohpo.agents import load_algorithm
from dask_mohpo.devices import Slot, current_slot
from dask_mohpo.environments import make_env
from dask_mohpo.errors import FrontError, UsageError
from dask_mohpo.evaluation import Evaluator
from dask_mohpo.fronts import non_dominated, validate_front
from dask_mohpo.indicators import hypervolume
from dask_mohpo.records import Milestone, SeedResult, SeedRun, SeedTask

__all__ = ["SeedContext", "checkpoint_path", "request_stop", "resolve_function", "train_seeds"]

logger = logging.getLogger(__name__)

_stopped_sessions: set[str] = set()


class SeedStopped(BaseException):
    """Leaves a training function at a milestone; no `except Exception` of the user's stops it."""


class SeedContext:
    """What a trainable `train(config, context) -> front` may use.

    Attributes
    ----------
    seed : the random seed to use.
    device : torch device that this slot owns, for instance ``"cuda:0"``.
    threads : CPU threads that this slot owns; torch is set to it already.
    env_id : the environment's id.
    total_timesteps : the budget in environment steps.
    ref_point : the reference point, one number per objective.
    eval_gamma : discount of the returns that make up a front.
    checkpoint : a path to which the training may save its state. The file is kept until the
        seed's result is stored.
    resume : the same path where an earlier, interrupted try saved something, else None.
    """

    def __init__(self, task: SeedTask, run: SeedRun, slot: Slot) -> None:
        self.seed = run.seed
        self.device = slot.device
        self.threads = slot.threads
        self.env_id = task.env_id
        self.total_timesteps = task.total_timesteps
        self.ref_point = task.ref_point
        self.eval_gamma = task.eval_gamma
        self.checkpoint = checkpoint_path(task.checkpoint_dir, run.trial, run.seed)
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        self.resume = self.checkpoint if self.checkpoint.exists() else None
        self._session = task.session
        self._began = time.perf_counter()
        self._stop_seen = False
        self.milestones: list[Milestone] = []

    def make_env(self) -> gym.Env[Any, Any]:
        """A new copy of the environment, with vector rewards."""
        return make_env(self.env_id)

    def report(self, step: int, front: Any) -> None:
        """Tell how good the seed is after `step` environment steps: a milestone.

        Parameters
        ----------
        step : environment steps so far.
        front : (n_points, n_objectives) expected returns, every objective maximised.

        Notes
        -----
        Where the study was asked to stop, this call does not return: the training ends here.
        """
        points = validate_front(front, len(self.ref_point))
        self.milestones.append(
            Milestone(
                step=int(step),
                hypervolume=hypervolume(points, self.ref_point),
                seconds=time.perf_counter() - self._began,
            )
        )
        if self.should_stop():
            raise SeedStopped

    def should_stop(self) -> bool:
        """True where the study was asked to stop.

        A training that saw True once is not counted, whatever it returns: it goes on from its
        checkpoint, or starts over, when the study is resumed.
        """
        self._stop_seen = self._stop_seen or self._session in _stopped_sessions
        return self._stop_seen


def request_stop(session: str) -> None:
    """Ask all seeds of one run of a driver that train in this process to stop at a milestone."""
    _stopped_sessions.add(session)


def checkpoint_path(folder: str | Path, trial: int, seed: int) -> Path:
    """Where a seed's own checkpoint lies."""
    return Path(folder) / f"trial{trial}-seed{seed}"


def resolve_function(name: str) -> Callable[..., Any]:
    """Import ``"package.module:function"``.

    Raises
    ------
    UsageError
        The module cannot be imported, or there is no such function in it.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"algo {name!r}: module {module_name!r} cannot be imported here "
            f"({type(error).__name__}: {error}). It must be installed, or lie in the current "
            "folder, on the driver and on every worker."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(
            f"algo {name!r}: {module_name!r} has no function {function_name!r}; "
            f"it has: {', '.join(sorted(found)) or 'none'}."
        )
    return function


def train_seeds(task: SeedTask) -> list[SeedResult]:
    """Train the task's seeds, on the slot that this worker is.

    Parameters
    ----------
    task : seeds with their configurations, budget, and how to evaluate.

    Returns
    -------
    One result per seed. A training that raises gives a result with state ``failed``: a seed's
    fault is a result, not an exception.
    """
    slot = current_slot()
    with slot.lock if task.exclusive else contextlib.nullcontext(), _threads(slot):
        if not isinstance(task.algo, str) or ":" in task.algo:
            return [r for run in task.runs for r in _run(task, slot, (run,), _train_function)]
        return _run(task, slot, task.runs, _train_agent)


def _train_function(
    task: SeedTask, runs: Sequence[SeedRun], contexts: Sequence[SeedContext]
) -> list[Any]:
    if isinstance(task.algo, bytes):
        train = cloudpickle.loads(task.algo)
    else:
        train = task.algo if callable(task.algo) else resolve_function(task.algo)
    return [train(dict(run.config), c) for run, c in zip(runs, contexts, strict=True)]


def _train_agent(
    task: SeedTask, runs: Sequence[SeedRun], contexts: Sequence[SeedContext]
) -> list[Any]:
    """All seeds as one batch of learners."""
    assert isinstance(task.algo, str)
    algorithm = load_algorithm(task.algo)
    seeds = [run.seed for run in runs]
    agent = algorithm.agent(
        [algorithm.config.from_mapping(run.config) for run in runs],
        task.env_id,
        seeds,
        total_timesteps=task.total_timesteps,
        device=contexts[0].device,
    )
    evaluator = Evaluator(
        task.env_id, seeds, gamma=task.eval_gamma, num_episodes=task.num_eval_episodes
    )
    broken: dict[int, np.ndarray] = {}
    fewer = max(len(task.ref_point), task.num_eval_weights // 5)
    for k in range(1, task.milestones + 1):
        agent.train(round(task.total_timesteps * k / task.milestones))
        last = k == task.milestones
        fronts = evaluator.fronts(agent.policies(task.num_eval_weights if last else fewer))
        for s, (context, step) in enumerate(zip(contexts, agent.steps, strict=True)):
            if s in broken:
                fronts[s] = broken[s]
                continue
            try:
                context.report(step, fronts[s])
            except FrontError:  # this seed has failed; the others of the batch go on
                broken[s] = fronts[s]
            except SeedStopped:  # once all seeds of the batch have reported
                continue
        # The final front is a result, also where a stop was asked for meanwhile.
        if not last and any(context._stop_seen for context in contexts):
            raise SeedStopped
    evaluator.close()
    for context in contexts:
        context._stop_seen = False
    return fronts


def _run(
    task: SeedTask,
    slot: Slot,
    runs: tuple[SeedRun, ...],
    train: Callable[[SeedTask, Sequence[SeedRun], Sequence[SeedContext]], list[Any]],
) -> list[SeedResult]:
    """Run `train` and turn whatever happens into one result per seed."""
    if task.session in _stopped_sessions:
        return [_result(task, slot, run, _Outcome("stopped")) for run in runs]
    meter = _Meter()
    contexts = [SeedContext(task, run, slot) for run in runs]
    try:
        fronts = train(task, runs, contexts)
        if any(context._stop_seen for context in contexts):
            raise SeedStopped
        outcomes = [_front_outcome(front, len(task.ref_point)) for front in fronts]
    except SeedStopped:
        outcomes = [_Outcome("stopped")] * len(runs)
    except (Exception, SystemExit) as raised:
        outcomes = [_failure(raised)] * len(runs)
    cost = meter.read(len(runs))
    return [
        _result(task, slot, run, outcome, context.milestones, **cost)
        for run, outcome, context in zip(runs, outcomes, contexts, strict=True)
    ]


@dataclass(frozen=True)
class _Outcome:
    """How the training of one seed ended."""

    state: str
    front: np.ndarray | None = None
    error: str | None = None
    trace: str | None = None


def _front_outcome(returned: Any, num_objectives: int) -> _Outcome:
    """A seed whose front cannot be used fails alone, whatever the others of its batch gave."""
    try:
        return _Outcome("finished", non_dominated(validate_front(returned, num_objectives)))
    except FrontError as raised:
        return _failure(raised)


def _failure(raised: BaseException) -> _Outcome:
    """A front that is none needs no traceback: the message says all."""
    trace = str(raised) if isinstance(raised, FrontError) else traceback.format_exc()
    return _Outcome("failed", error=f"{type(raised).__name__}: {raised}", trace=trace)


def _result(
    task: SeedTask,
    slot: Slot,
    run: SeedRun,
    outcome: _Outcome,
    milestones: Sequence[Milestone] = (),
    **cost: Any,
) -> SeedResult:
    unreported = task.total_timesteps if outcome.state == "finished" else 0
    now = time.time()
    return SeedResult(
        trial=run.trial,
        seed=run.seed,
        attempt=run.attempt,
        state=outcome.state,
        front=outcome.front,
        milestones=tuple(milestones),
        ref_point=task.ref_point,
        eval_gamma=task.eval_gamma,
        steps=milestones[-1].step if milestones else unreported,
        worker=slot.worker,
        host=slot.host,
        device=slot.device,
        gpu=slot.gpu,
        threads=slot.threads,
        error=outcome.error,
        traceback=outcome.trace,
        **{"started": now, "ended": now, **cost},
    )


@contextlib.contextmanager
def _threads(slot: Slot) -> Iterator[None]:
    """torch uses the slot's CPU threads, and as many as before afterwards."""
    import torch

    if slot.own_process and torch.get_num_interop_threads() != 1:
        with contextlib.suppress(RuntimeError):  # too late where parallel work has begun already
            torch.set_num_interop_threads(1)
    before = torch.get_num_threads()
    torch.set_num_threads(slot.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Meter:
    """Wall and CPU time and peak memory of this process from now on."""

    def __init__(self) -> None:
        # Linux forgets the old peak when told so; elsewhere the peak is that of the process.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._started = time.time()
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def read(self, num_seeds: int) -> dict[str, Any]:
        """The costs in the fields of a `SeedResult`, shared evenly by the seeds."""
        return {
            "started": self._started,
            "ended": time.time(),
            "wall_seconds": (time.perf_counter() - self._wall) / num_seeds,
            "cpu_seconds": (time.process_time() - self._cpu) / num_seeds,
            "peak_memory": _peak_memory(),
        }


def _peak_memory() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
