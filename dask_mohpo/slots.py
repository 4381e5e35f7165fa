"""The slots of a cluster: which there are, and what each of them has been given.

The driver places every seed task on a worker itself. Dask sends a task that needs resources to a
worker at once and leaves it there, behind a long one, while another worker idles; and it counts a
worker's death against all tasks that were assigned to it, also those that never ran.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from distributed import Client, Future

from dask_mohpo.errors import ClusterError, NoWorkersError
from dask_mohpo.jobs import JobKeeper

__all__ = ["Slots", "choose_resources", "workers_of"]


def choose_resources(
    client: Client, resources: Mapping[str, float] | None, keeper: JobKeeper | None = None
) -> dict[str, float]:
    """What a seed task asks for: as given, else one GPU where any worker offers, or will, GPUs."""
    if resources is not None:
        return dict(resources)
    if keeper is not None:
        return {"GPU": 1} if keeper.spec.gpus else {}
    workers = workers_of(client).values()
    return {"GPU": 1} if any(w["resources"].get("GPU", 0) >= 1 for w in workers) else {}


def workers_of(client: Client) -> dict[str, Any]:
    """Address → what the scheduler says of the worker.

    Not `Client.scheduler_info`: that answers from a field which the client itself overwrites every
    two seconds with an answer that leaves the workers out.

    Raises
    ------
    ClusterError
        The scheduler does not answer.
    """
    scheduler: Any = client.scheduler
    try:
        return dict(client.sync(scheduler.identity, n_workers=-1)["workers"])
    except (OSError, TimeoutError) as error:
        raise ClusterError(
            f"the scheduler at {client.scheduler and client.scheduler.address} does not answer "
            f"({error}). The study's results so far are stored; run the same call again to go on."
        ) from error


class Slots:
    """Keeps count of the slots.

    Parameters
    ----------
    client : a connected client.
    resources : what one seed task needs; empty: each worker is one slot.
    worker_timeout : seconds without any slot until `refresh` raises, those apart in which jobs
        wait in a queue.
    keeper : of the cluster's jobs, if it has any.
    """

    def __init__(
        self,
        client: Client,
        resources: Mapping[str, float],
        worker_timeout: float,
        keeper: JobKeeper | None = None,
    ) -> None:
        self.resources = dict(resources)
        self.slot_seconds = 0.0
        self._client = client
        self._timeout = worker_timeout
        self._capacity: dict[str, int] = {}  # of the workers that take new tasks now
        self._slots_of: dict[str, int] = {}  # of all that were ever given one and are there
        self._given: dict[str, list[Future]] = {}
        self._where: dict[Future, str] = {}
        # Of the workers that take new tasks, kept up to date at every change:
        self._free: dict[str, None] = {}  # have a free slot
        self._full: dict[str, None] = {}  # are busy and have nothing queued; for longest first
        self._busy: dict[str, int] = {}  # slots that have something to do
        self._total = self._total_busy = 0
        self._keeper = keeper
        self._names: dict[str, str] = {}
        self._fixed = keeper is None and not _more_expected(client)
        self._last_seen = self._last_refresh = time.monotonic()

    @property
    def total(self) -> int:
        """Slots that there are now."""
        return self._total

    @property
    def busy(self) -> int:
        """Slots that have something to do, as far as the driver knows."""
        return self._total_busy

    def refresh(self) -> list[tuple[Future, bool]]:
        """Look which workers there are.

        Returns
        -------
        The futures whose worker is gone, each with whether it may have been running there.

        Raises
        ------
        NoWorkersError
            No worker offers the resources: at once where no more workers are on their way at the
            start, else after `worker_timeout`.
        """
        now = time.monotonic()
        self.slot_seconds += self.total * (now - self._last_refresh)
        self._last_refresh = now
        workers = workers_of(self._client)
        capacity = {a: n for a, w in workers.items() if (n := self._capacity_of(w)) > 0}
        self._names = {address: str(worker["name"]) for address, worker in workers.items()}
        lost = []
        for address in [a for a in self._given if a not in workers]:
            slots = self._slots_of.pop(address)
            for place, future in enumerate(self._given.pop(address)):
                del self._where[future]
                lost.append((future, place < slots))
        for address, slots in capacity.items():
            self._given.setdefault(address, [])
            self._slots_of[address] = slots
        before, self._capacity = self._capacity, capacity
        self._total = sum(capacity.values())
        for address in before | capacity:
            if before.get(address) != capacity.get(address):
                self._note(address)
        if capacity or (self._keeper is not None and self._keeper.pending):
            self._last_seen, self._fixed = now, False
        elif self._fixed or now - self._last_seen >= self._timeout:
            offers = {str(w["name"]): w["resources"] for w in workers.values()}
            raise NoWorkersError(self.resources, offers, now - self._last_seen)
        return lost

    def _capacity_of(self, worker: Mapping[str, Any]) -> int:
        if worker["status"] != "running":
            return 0
        if self._keeper is not None and self._keeper.retires(str(worker["name"])):
            return 0
        if not self.resources:
            return 1
        offers = worker["resources"]
        times = min(int(offers.get(name, 0) // need) for name, need in self.resources.items())
        return min(times, worker["nthreads"])

    def busy_workers(self) -> list[str]:
        """Names of the workers that have something to do."""
        return [self._names[a] for a, given in self._given.items() if given and a in self._names]

    def idle(self) -> str | None:
        """The address of a worker with a free slot, the least loaded; None: all are busy."""
        loads = ((len(self._given[a]) / self._capacity[a], a) for a in self._free)
        least, best = 1.0, None
        for load, address in loads:
            if load == 0:
                return address
            if load < least:
                least, best = load, address
        return best

    def next_in_line(self) -> str | None:
        """A worker that is busy, with nothing queued, the one busy for longest.

        None where half of the slots (at least one) have a seed task queued already.
        """
        queued = len(self._where) - self._total_busy
        if queued >= max(1, self.total // 2):
            return None
        return next(iter(self._full), None)

    def give(self, address: str, future: Future) -> None:
        self._given[address].append(future)
        self._where[future] = address
        self._note(address)

    def take_back(self, future: Future) -> None:
        """The future is done."""
        address = self._where.pop(future, None)
        if address is not None:
            self._given[address].remove(future)
            self._note(address)

    def _note(self, address: str) -> None:
        """What a worker has been given, or its number of slots, has changed."""
        slots, given = self._capacity.get(address, 0), len(self._given.get(address, ()))
        self._free.pop(address, None)
        self._full.pop(address, None)
        if given < slots:
            self._free[address] = None
        elif given == slots > 0:
            self._full[address] = None
        busy = min(given, slots)
        self._total_busy += busy - self._busy.pop(address, 0)
        if busy:
            self._busy[address] = busy


def _more_expected(client: Client) -> bool:
    """Whether workers may still be coming: the cluster asked for more than there are."""
    cluster = client.cluster
    workers = len(workers_of(client))
    if cluster is None:
        return workers == 0  # only an address: somebody may be starting workers just now
    adaptive = getattr(cluster, "_adaptive", None)
    if adaptive is not None and adaptive.maximum > workers:
        return True
    return len(getattr(cluster, "worker_spec", ())) > workers
