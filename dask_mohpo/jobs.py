"""Keeps the jobs of a cluster as many as they shall be, and knows why they are not.

dask-jobqueue submits jobs and forgets them: a refused job, one that dies at once and one that is
lost later all look like workers that are still to come. The keeper lives in the event loop of the
cluster. Every few seconds it compares the jobs with the workers that have come and, on Slurm, with
what squeue says; it replaces lost jobs, and it remembers what cannot be mended.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.deploy.spec import ProcessInterface
from tornado.ioloop import PeriodicCallback

from dask_mohpo.errors import ClusterError
from dask_mohpo.specs import QueueSpec

__all__ = ["JobKeeper", "kept_class"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
SQUEUE_SECONDS = 20.0
MAX_EARLY_DEATHS = 3
"""So many jobs in a row that ended before a worker of theirs appeared, while there are no others,
are too many."""
MAX_REPLACEMENTS = 20
"""Lost jobs that are replaced, per job that was wanted."""
MAX_BACK_OFF = 60.0
SETTLED_SECONDS = 60.0
"""A job that lived for so long does not make the next replacement wait."""
LOG_LINES = 20


@dataclass(frozen=True)
class _Refusal:
    words: str
    script: str


@dataclass
class _Known:
    """What is known of one job."""

    job_id: str = ""
    since: float = 0.0
    had_workers: bool = False


class JobKeeper:
    """Watches over the jobs of one cluster.

    Parameters
    ----------
    spec : what the cluster shall be.

    Attributes
    ----------
    wanted : how many jobs there shall be now.
    """

    def __init__(self, spec: QueueSpec) -> None:
        self.spec = spec
        self.wanted = spec.jobs
        self.failure: ClusterError | None = None
        self._cluster: Any = None
        self._timer: PeriodicCallback | None = None
        self._looking = False
        self._deaf = False
        self._known: dict[str, _Known] = {}
        self._ids: set[str] = set()
        self._pending: Counter[str] = Counter()
        self._retiring: set[str] = set()
        self._refused: list[_Refusal] = []
        self._early_deaths = 0
        self._losses = 0
        self._replaced = 0
        self._wait_until = 0.0

    # --- what others ask, from any thread --------------------------------------------------

    @property
    def dashboard_on_loopback(self) -> bool:
        address = str(self._cluster.scheduler_spec["options"].get("dashboard_address"))
        return address.startswith(("127.", "localhost"))

    @property
    def pending(self) -> int:
        """Jobs that wait in the queue."""
        return sum(self._pending.values())

    def check(self) -> None:
        """Raise the error that keeps the jobs from running, if there is one."""
        if self.failure is not None:
            raise self.failure

    def waiting_text(self) -> str:
        """Such as ``waiting for workers: 3 jobs pending (Resources)``, or empty."""
        if not self._pending:
            return ""
        number = self.pending
        reasons = ", ".join(sorted(reason for reason in self._pending if reason))
        text = f"waiting for workers: {number} job{'s' if number > 1 else ''} pending"
        return f"{text} ({reasons})" if reasons else text

    def retires(self, worker_name: str) -> bool:
        """Whether the job of this worker is to end, so that no seed should start there."""
        return any(_belongs(worker_name, job) for job in self._retiring)

    def follow_work(self, seed_tasks: int, busy_workers: Iterable[str]) -> None:
        """Adapt the number of jobs to the seed tasks that are left, where the spec says so.

        Jobs with a busy worker stay.
        """
        if self.spec.adapt is None or self._cluster is None:
            return
        least, most = self.spec.adapt
        jobs = -(-seed_tasks // self.spec.processes)
        self.wanted = min(most, max(least, jobs))
        surplus = len(self._cluster.worker_spec) - len(self._retiring) - self.wanted
        if surplus > 0:
            busy = set(busy_workers)
            idle = [
                job
                for job in list(self._cluster.worker_spec)
                if job not in self._retiring and not any(_belongs(name, job) for name in busy)
            ]
            # those that still wait in the queue go first
            idle.sort(key=lambda job: self._known.get(job, _Known()).had_workers)
            self._retiring.update(idle[:surplus])
        self._cluster.loop.add_callback(self._scale)

    # --- in the event loop of the cluster ----------------------------------------------------

    def start(self, cluster: Any) -> None:
        """Submit the jobs and begin to watch."""
        self._cluster = cluster

        async def begin() -> None:
            self._timer = PeriodicCallback(self._look, LOOK_SECONDS * 1000)
            self._timer.start()
            self._scale()

        cluster.sync(begin)

    def wait_until_accepted(self, timeout: float) -> None:
        """Wait until the queue has taken, or refused, the first job.

        Raises
        ------
        ClusterError
            It was refused, in the queue's own words, with the job script.
        """
        deadline = time.monotonic() + timeout
        while self.wanted and not self._ids and time.monotonic() < deadline:
            self.check()
            time.sleep(0.05)
        self.check()

    def submitted(self, job_id: str) -> None:
        self._ids.add(job_id)

    def refused(self, job: str, words: str, script: str) -> None:
        """The queue did not take a job."""
        self._refused.append(_Refusal(words, script))
        if not self._ids:
            self.failure = ClusterError(
                f"the job queue refused the job:\n{words}\nThe job script was:\n{script}"
            )
        else:
            logger.warning("the job queue refused a further job: %s", words)
        self._lose(job, early=False)

    def _scale(self) -> None:
        """Have as many jobs as wanted, and none of those that retire."""
        spec = self._cluster.worker_spec
        gone = [job for job in self._retiring if job not in self._cluster.workers]
        self._retiring.difference_update(job for job in gone if job not in spec)
        for job in self._retiring:
            spec.pop(job, None)
        ready = self.failure is None and time.monotonic() >= self._wait_until
        unsettled = any(job not in spec for job in self._cluster.workers)
        number = self.wanted if ready and not unsettled else min(len(spec), self.wanted)
        most = MAX_REPLACEMENTS * max(1, self.spec.jobs, *(self.spec.adapt or ()))
        if self._replaced > most:
            number = min(number, len(spec))
            if not spec and self.wanted and self.failure is None:
                self.failure = ClusterError(f"{self._replaced} jobs were lost; no more are tried.")
        # Never fewer than there are: scale() would end any job, also a busy one.
        self._cluster.scale(jobs=max(number, len(spec)))

    async def _look(self) -> None:
        if self._looking or self._cluster.status.name != "running":
            return
        self._looking = True
        try:
            # In this order: squeue cannot know a job that is submitted after it was asked.
            self._note_workers()
            states = await self._states()
            if states is not None:
                self._note_states(states)
            self._scale()
        finally:
            self._looking = False

    def _note_workers(self) -> None:
        names = [str(worker.name) for worker in self._cluster.scheduler.workers.values()]
        for job, process in self._cluster.workers.items():
            known = self._known.get(job)
            job_id = process.job_id or ""
            if known is None or known.job_id != job_id:  # Dask gives the names of lost ones again
                known = self._known[job] = _Known(job_id=job_id, since=time.monotonic())
            if not known.had_workers and any(_belongs(name, job) for name in names):
                known.had_workers = True
                self._early_deaths = 0
        for job in [job for job in self._known if job not in self._cluster.workers]:
            del self._known[job]

    async def _states(self) -> dict[str, tuple[str, str]] | None:
        """Job id → (state, reason), of jobs that are not ending; None where it cannot be known."""
        if self.spec.kind != "slurm":
            return None
        try:
            process = await asyncio.create_subprocess_exec(
                *_squeue(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await asyncio.wait_for(process.communicate(), SQUEUE_SECONDS)
            if process.returncode == 0:
                self._deaf = False
                return _parse_squeue(output.decode())
            reason = errors.decode().strip()
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer"
        if not self._deaf:
            logger.warning("squeue fails; lost jobs are not noticed until it works: %s", reason)
        self._deaf = True
        return None

    def _note_states(self, states: dict[str, tuple[str, str]]) -> None:
        pending: Counter[str] = Counter()
        for job, known in list(self._known.items()):
            if job not in self._cluster.worker_spec or not known.job_id:
                continue
            state, reason = states.get(known.job_id, ("GONE", ""))
            if state in ("PENDING", "CONFIGURING", "REQUEUED"):
                pending[reason if reason != "None" else ""] += 1
            elif state == "GONE":
                self._lose(job, early=not known.had_workers)
        self._pending = pending

    def _lose(self, job: str, *, early: bool) -> None:
        """A job is over although it is wanted: let it go, so that another takes its place."""
        known = self._known.get(job, _Known(since=time.monotonic()))
        self._cluster.worker_spec.pop(job, None)
        if time.monotonic() - known.since >= SETTLED_SECONDS and known.had_workers:
            self._losses = 0
        self._losses += 1
        self._replaced += 1
        self._wait_until = time.monotonic() + min(MAX_BACK_OFF, 2.0 ** (self._losses - 1))
        if not known.job_id:
            return
        if not early:
            logger.warning(
                "job %s is gone; another takes its place (%d so far)", known.job_id, self._replaced
            )
            return
        self._early_deaths += 1
        log = self._log_tail(known.job_id)
        logger.warning(
            "job %s ended before a worker of it appeared (%d of %d in a row)",
            known.job_id,
            self._early_deaths,
            MAX_EARLY_DEATHS,
        )
        others = any(k.had_workers for k in self._known.values())
        if self._early_deaths >= MAX_EARLY_DEATHS and self.failure is None and not others:
            self.failure = ClusterError(
                f"{self._early_deaths} jobs in a row ended before a worker of theirs appeared. "
                f"The last one, {known.job_id}, says:\n{log}\nThe job script is:\n"
                f"{self._cluster.job_script()}"
            )

    def _log_tail(self, job_id: str) -> str:
        """The last lines of what a job wrote."""
        folder = Path(self.spec.options["log_directory"])
        lines = []
        for file in sorted(folder.glob(f"*-{job_id}.*")):
            lines += file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:]) or f"(nothing: no log of it in {folder})"

    # --- the end -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Watch no more; in the event loop."""
        if self._timer is not None:
            self._timer.stop()
        self.wanted = 0

    def sweep(self) -> None:
        """Cancel what is left of the jobs in the queue."""
        if self.spec.kind != "slurm" or not self._ids:
            return
        try:
            answer = subprocess.run(
                _squeue(), capture_output=True, text=True, timeout=SQUEUE_SECONDS, check=True
            )
            left = sorted(self._ids & set(_parse_squeue(answer.stdout)))
            if left:
                subprocess.run(["scancel", *left], timeout=SQUEUE_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning(
                "jobs %s may be left in the queue: %s", ", ".join(sorted(self._ids)), error
            )


def kept_class(cluster_class: Any, keeper: JobKeeper) -> Any:
    """A class of clusters whose jobs are kept.

    Parameters
    ----------
    cluster_class : of dask-jobqueue.
    keeper : watches over them; it is the cluster's attribute `job_keeper`.
    """

    class KeptJob(cluster_class.job_cls):
        async def start(self) -> None:
            try:
                await super().start()
            except (RuntimeError, OSError, ValueError) as error:
                # Not raised again: Dask would only log it, and stop half-way.
                keeper.refused(str(self.name), _words(error), self.job_script())
                await ProcessInterface.start(self)
            else:
                keeper.submitted(self.job_id)

    class KeptCluster(cluster_class):
        job_cls = KeptJob
        job_keeper = keeper

        async def _close(self) -> None:
            keeper.stop()
            await super()._close()

        def close(self, timeout: float | None = None) -> Any:
            try:
                return super().close(timeout)
            finally:
                if not self.asynchronous:
                    keeper.sweep()
                    for part in ("ca_file", "cert", "key"):
                        secret = getattr(self, f"_job_{part}", None)
                        if secret is not None:
                            secret.close()  # which deletes it

    KeptJob.__name__ = cluster_class.job_cls.__name__
    KeptCluster.__name__ = cluster_class.__name__
    return KeptCluster


def _words(error: Exception) -> str:
    """What the submit command said, without dask-jobqueue's frame around it."""
    text = str(error)
    _, found, rest = text.partition("stderr:\n")
    return (rest if found and rest.strip() else text).strip()


def _squeue() -> list[str]:
    return ["squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i|%T|%r"]


def _parse_squeue(text: str) -> dict[str, tuple[str, str]]:
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") >= 2]
    return {row[0]: (row[1], row[2]) for row in rows if row[1] != "COMPLETING"}


def _belongs(worker_name: str, job: str) -> bool:
    return worker_name == job or worker_name.startswith(f"{job}-")
