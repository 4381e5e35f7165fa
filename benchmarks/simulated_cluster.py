"""A Dask cluster that is only pretended, to measure what the driver itself costs.

It speaks as much of `Client`, `Future` and `as_completed` as the driver's loop uses. Time is
simulated: seeds end in the order of their durations, at once, with results made beforehand; there
are no threads, no sockets and no sleeping. What Dask's client would spend in its own thread on
messages and on unpickling results is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from dask_mohpo.records import Milestone, SeedResult, SeedRun, SeedTask

__all__ = ["Clock", "FirstSubmitError", "SimulatedClient", "simulated_completions"]

POINTS, OBJECTIVES, MILESTONES = 20, 2, 10
TEMPLATES = 64


class Clock:
    """CPU seconds of this thread, by what they were spent on; what is nested counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stack = ["loop"]
        self._last = time.thread_time()

    def __call__(self) -> dict[str, float]:
        """Label → CPU seconds so far."""
        self._turn()
        return dict(self.seconds)

    @contextlib.contextmanager
    def on(self, label: str) -> Iterator[None]:
        """Within, time counts for this label."""
        self._turn()
        self._stack.append(label)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def wrap(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted for this label."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._stack.append(label)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._stack.pop()

        return timed

    def _turn(self) -> None:
        now = time.thread_time()
        label = self._stack[-1]
        self.seconds[label] = self.seconds.get(label, 0.0) + now - self._last
        self._last = now


class FirstSubmitError(Exception):
    """Raised instead of taking a task, by a client that shall take none."""


class SimulatedFuture:
    def __init__(self, client: SimulatedClient, key: str, task: SeedTask, address: str) -> None:
        self.key = key
        self.status = "pending"
        self.task = task
        self.address = address
        self._client = client

    def cancel(self, **kwargs: Any) -> None:
        self._client.cancel([self])

    def release(self) -> None:
        pass


class SimulatedScheduler:
    address = "simulated://scheduler"

    def __init__(self, workers: dict[str, Any]) -> None:
        self._workers = workers

    def identity(self, n_workers: int = -1) -> dict[str, Any]:
        return {"workers": dict(self._workers)}


class SimulatedClient:
    """In place of `distributed.Client`, connected to workers of one slot each.

    Parameters
    ----------
    slots : how many workers.
    clock : the client's own time is counted on it, as ``"simulation"``.
    mean_seconds, spread : of the lognormal durations of seeds; spread is that of the logarithm.
    seed : of the durations and the fronts.
    takes_tasks : False: `submit` raises `FirstSubmitError`.
    """

    cluster = None

    def __init__(
        self,
        slots: int,
        clock: Clock,
        *,
        mean_seconds: float = 600.0,
        spread: float = 0.5,
        seed: int = 0,
        takes_tasks: bool = True,
    ) -> None:
        self.loop = self
        """The executor hands it to `as_completed`: so that one finds its client."""
        self.now = 0.0
        """Simulated seconds since the start."""
        self.events = 0
        self.busy_seconds = 0.0
        self.slots = slots
        self._clock = clock
        self._takes_tasks = takes_tasks
        self._random = np.random.default_rng(seed)
        self._mean, self._spread = mean_seconds, spread
        self._durations: list[float] = []
        self._templates = [self._template() for _ in range(TEMPLATES)]
        self._began = time.time()
        self._count = itertools.count()
        addresses = [f"simulated://10.0.{i // 250}.{i % 250}:40000" for i in range(slots)]
        self.scheduler = SimulatedScheduler(
            {
                address: {
                    "name": f"worker-{i}",
                    "status": "running",
                    "resources": {"SLOT": 1.0},
                    "nthreads": 1,
                }
                for i, address in enumerate(addresses)
            }
        )
        self._queued: dict[str, list[tuple[float, int, SimulatedFuture]]] = {
            address: [] for address in addresses
        }
        self._running: dict[str, SimulatedFuture] = {}
        self._ends: list[tuple[float, int, SimulatedFuture]] = []

    # --- what the driver calls ------------------------------------------------------------

    def sync(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._clock.on("simulation"):
            return function(*args, **kwargs)

    def submit(
        self,
        function: Callable[..., Any],
        task: SeedTask,
        *,
        key: str,
        workers: Sequence[str],
        priority: float,
        **kwargs: Any,
    ) -> SimulatedFuture:
        if not self._takes_tasks:
            raise FirstSubmitError
        with self._clock.on("simulation"):
            [address] = workers
            future = SimulatedFuture(self, key, task, address)
            heapq.heappush(self._queued[address], (-priority, next(self._count), future))
            if address not in self._running:
                self._start(address)
            return future

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Stopping is not simulated."""

    def cancel(self, futures: Sequence[SimulatedFuture], **kwargs: Any) -> None:
        for future in futures:
            future.status = "cancelled"

    # --- what happens meanwhile -----------------------------------------------------------

    @property
    def has_ready(self) -> bool:
        return bool(self._ends)

    def next_done(self) -> tuple[SimulatedFuture, list[SeedResult]]:
        """Go on to the next end of a seed task."""
        with self._clock.on("simulation"):
            self.now, _, future = heapq.heappop(self._ends)
            del self._running[future.address]
            self._start(future.address)
            self.events += 1
            if future.status == "pending":
                future.status = "finished"
            return future, [self._result(run, future) for run in future.task.runs]

    def _start(self, address: str) -> None:
        if not self._queued[address]:
            return
        _, _, future = heapq.heappop(self._queued[address])
        self._running[address] = future
        seconds = self._duration()
        self.busy_seconds += seconds
        heapq.heappush(self._ends, (self.now + seconds, next(self._count), future))

    def _duration(self) -> float:
        if not self._durations:
            median = math.log(self._mean) - self._spread**2 / 2
            self._durations = self._random.lognormal(median, self._spread, 10_000).tolist()
        return self._durations.pop()

    def _template(self) -> SeedResult:
        """A result of the size that results have."""
        angles = np.sort(self._random.uniform(0, math.pi / 2, POINTS))
        radius = self._random.uniform(0.5, 1.0)
        return SeedResult(
            trial=0,
            seed=0,
            attempt=0,
            state="finished",
            front=radius * np.column_stack([np.sin(angles), np.cos(angles)]),
            milestones=tuple(
                Milestone(
                    step=5000 * (i + 1),
                    hypervolume=radius * self._random.uniform(),
                    seconds=float(self._random.uniform(55, 65)) * (i + 1),
                )
                for i in range(MILESTONES)
            ),
            ref_point=(0.0, 0.0),
            eval_gamma=0.99,
            steps=50_000,
            cpu_seconds=float(self._random.uniform(500, 700)),
            peak_memory=612_368_384,
            host="node-0123.cluster.example.org",
            device="cpu",
            threads=1,
        )

    def _result(self, run: SeedRun, future: SimulatedFuture) -> SeedResult:
        template = self._templates[(7 * run.trial + run.seed) % TEMPLATES]
        assert template.front is not None
        quality = 1.0 - (float(run.config.get("x0", 0.5)) - 0.3) ** 2
        ended = self._began + self.now
        seconds = template.milestones[-1].seconds
        return dataclasses.replace(
            template,
            trial=run.trial,
            seed=run.seed,
            attempt=run.attempt,
            front=quality * template.front,
            started=ended - seconds,
            ended=ended,
            wall_seconds=seconds,
            worker=future.address,
        )


class _Condition:
    """In place of the condition of `as_completed`: nothing else runs, so nothing is waited for."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def wait(self, timeout: float | None = None) -> None: ...


class _Completions:
    """In place of `as_completed`."""

    def __init__(self, *, loop: SimulatedClient, **kwargs: Any) -> None:
        self._client = loop
        self.thread_condition = _Condition()

    def add(self, future: SimulatedFuture) -> None:
        """The client knows its futures."""

    def has_ready(self) -> bool:
        return self._client.has_ready

    def __next__(self) -> tuple[SimulatedFuture, list[SeedResult]]:
        return self._client.next_done()


def simulated_completions() -> contextlib.AbstractContextManager[Any]:
    """Within, executors wait for the seed tasks of simulated clients."""
    return mock.patch("dask_mohpo.executor.as_completed", _Completions)
