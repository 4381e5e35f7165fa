"""The driver's loop: keep every slot busy, oldest trial first, and lose nothing.

One `as_completed` loop in one thread. A seed task goes to a free slot as soon as there is one; a
look-ahead of half the slots waits behind running ones, so that a short seed's slot does not idle
until the driver has noticed. Optuna is asked only when there is a place for a seed task and no
seed of an older trial to put there.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from distributed import Client, Future, as_completed
from optuna.trial import TrialState

from dask_mohpo import ledger
from dask_mohpo._process import Interrupts, short_switch_interval
from dask_mohpo.errors import ClusterError, StudyFailedError
from dask_mohpo.jobs import JobKeeper
from dask_mohpo.objectives import seed_value, trial_value
from dask_mohpo.records import SeedResult, SeedRun, SeedTask
from dask_mohpo.slots import Slots
from dask_mohpo.tally import Snapshot, Tally
from dask_mohpo.training import checkpoint_path, request_stop, train_seeds
from dask_mohpo.waiting import Waiting, WaitingSeeds

__all__ = ["Executor", "Plan"]

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.2
REFRESH_SECONDS = 1.0
USAGE_SECONDS = 30.0
ASK_AHEAD_SECONDS = 0.02
"""Where asking for a trial takes as long, one is asked for before a slot is free."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run, and how to deal with what goes wrong."""

    n_trials: int
    seeds: tuple[int, ...]
    seeds_per_task: int | str
    trials_per_task: int
    seed_retries: int
    max_failures: int
    aggregate: str
    failed_seeds: str
    timeout: float | None
    worker_timeout: float
    resources: Mapping[str, float]


@dataclass
class _OpenTrial:
    """A trial that was asked and not yet told."""

    trial: optuna.Trial
    config: dict[str, Any]
    batch_key: Hashable = None
    """Trials with equal keys can train in one batch; None: with no other."""
    values: dict[int, float | None] = field(default_factory=dict)
    """Seed → its value, None for a seed that failed for good."""
    running: int = 0
    doomed: bool = False
    """A seed failed and so the trial will: no more seeds are started."""
    error: str = ""


async def _stop_here(session: str) -> None:
    """`request_stop` as a coroutine: Dask waits for no answer to those."""
    request_stop(session)


class Executor:
    """Runs a study on a cluster.

    Parameters
    ----------
    client : connected to the cluster.
    study : to ask and to tell.
    plan : what to run.
    suggest : Optuna trial → configuration.
    batch_key : configuration → key; trials with equal keys can train in one batch, those whose key
        is None with no other.
    make_task : (seeds with their configurations, session) → seed task.
    callbacks : called with (study, finished trial) after each trial, as Optuna calls its own.
    on_change : called with a `Snapshot` now and then.
    keeper : of the cluster's jobs, if it has any.
    """

    def __init__(
        self,
        client: Client,
        study: optuna.Study,
        plan: Plan,
        *,
        suggest: Callable[[optuna.Trial], dict[str, Any]],
        make_task: Callable[[tuple[SeedRun, ...], str], SeedTask],
        batch_key: Callable[[dict[str, Any]], Hashable] = lambda config: None,
        callbacks: Sequence[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]] = (),
        on_change: Callable[[Snapshot], None] | None = None,
        keeper: JobKeeper | None = None,
    ) -> None:
        self.session = os.urandom(4).hex()
        self.open_at_ask: list[int] = []
        """How many trials were open at each ask: fewer is fresher for the sampler."""
        self._client = client
        self._study = study
        self._plan = plan
        self._suggest = suggest
        self._make_task = make_task
        self._batch_key = batch_key
        self._callbacks = callbacks
        self._on_change = on_change
        self._keeper = keeper
        self._slots = Slots(client, plan.resources, plan.worker_timeout, keeper)
        self._done = as_completed(with_results=True, raise_errors=False, loop=client.loop)
        self._in_flight: dict[Future, SeedTask] = {}
        self._adrift: list[Future] = []
        """Finished on a worker that was gone when the driver looked."""
        self._open: dict[int, _OpenTrial] = {}
        self._waiting = WaitingSeeds(plan.seeds_per_task, plan.trials_per_task)
        self._moves = 0
        self._seeds_of_open = 0
        self._ask_seconds = 0.0
        self._began = time.monotonic()
        self._stopped_seconds = 0.0
        self._stop_reason: str | None = None
        self._tally = Tally()
        self._first_error = ""

    def run(self) -> str:
        """Run until `n_trials` trials are told, or until stopped.

        Returns
        -------
        ``"done"``, ``"timeout"`` or ``"interrupted"``.

        Raises
        ------
        NoWorkersError
            No worker offers what a seed task needs.
        StudyFailedError
            The first trials all failed.
        KeyboardInterrupt
            A second Ctrl-C.
        """
        interrupts = Interrupts()
        self._began = time.monotonic()
        with interrupts.installed(), short_switch_interval():
            try:
                self._take_up()
                if self._remaining():
                    self._refresh()
                    self._loop(interrupts)
            finally:
                if self._keeper is not None:
                    self._keeper.follow_work(0, ())
                self._client.cancel(list(self._in_flight), force=True)
                self._in_flight.clear()
                self._record_usage()
                self._show()
        return self._stop_reason or "done"

    def _loop(self, interrupts: Interrupts) -> None:
        refreshed = shown = recorded = time.monotonic()
        while True:
            self._fill()
            if not self._in_flight and (self._stop_reason or not self._remaining()):
                self._slots.refresh()
                return
            if not self._done.has_ready():
                self._ask_ahead()
            event = self._next_event()
            if event is not None:
                self._handle(*event)
            now = time.monotonic()
            if self._stop_reason is None:
                if interrupts.requested:
                    self._stop("interrupted")
                elif self._plan.timeout is not None and now - self._began >= self._plan.timeout:
                    self._stop("timeout")
            if now - recorded >= USAGE_SECONDS:
                recorded = now
                self._record_usage()
            if now - refreshed >= REFRESH_SECONDS:
                refreshed = now
                self._refresh()
                if self._stop_reason is not None:
                    self._tell_workers_to_stop()  # some may have joined since
            if event is None or now - shown >= REFRESH_SECONDS:
                shown = now
                self._show()

    def _refresh(self) -> None:
        """Look which workers there are, and how many there should be."""
        if self._keeper is not None:
            self._keeper.check()
            stopping = self._stop_reason is not None
            left = len(self._in_flight) + (0 if stopping else self._unplaced())
            self._keeper.follow_work(left, self._slots.busy_workers())
        self._move_lost(self._slots.refresh())

    def _record_usage(self) -> None:
        elapsed = time.monotonic() - self._began
        usage = ledger.Usage(
            slot_seconds=self._slots.slot_seconds,
            stopped_seconds=self._stopped_seconds,
            elapsed_seconds=elapsed,
        )
        ledger.record_usage(self._study, self.session, usage)

    def _next_event(self) -> tuple[Future, Any] | None:
        """The next finished future, or None after a tick."""
        with self._done.thread_condition:
            if not self._done.has_ready():
                self._done.thread_condition.wait(TICK_SECONDS)
        return next(self._done) if self._done.has_ready() else None

    # --- what to run next -----------------------------------------------------------------

    def _take_up(self) -> None:
        """Go on with the trials that an earlier driver left unfinished."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == TrialState.WAITING:
                continue
            self._tally.asked += 1
            if trial.state == TrialState.COMPLETE:
                self._tally.count_trial(trial.value, here=False)
            elif trial.state == TrialState.FAIL:
                self._tally.count_trial(None, here=False)
            elif trial.state == TrialState.RUNNING:
                self._reopen(trial)

    def _reopen(self, frozen: optuna.trial.FrozenTrial) -> None:
        trial = optuna.Trial(self._study, frozen._trial_id)
        config = ledger.stored_config(frozen)
        if config is not None:
            opened = _OpenTrial(trial, config, self._batch_key(config))
        else:
            opened = self._configure(trial)
            if opened.doomed:
                self._tell(opened, None)
                return
        self._open[trial.number] = opened
        attempts: dict[int, int] = {}
        for result in ledger.trial_results(frozen):
            if result.state == "finished" or result.attempt >= self._plan.seed_retries:
                self._settle(opened, result)
            else:
                attempts[result.seed] = result.attempt + 1
        fresh = [s for s in self._plan.seeds if s not in opened.values and s not in attempts]
        self._queue(opened, fresh)
        for seed, attempt in attempts.items():
            self._waiting.add(trial.number, (seed,), attempt, None)
        self._conclude_if_over(trial.number)

    def _ask(self) -> None:
        self.open_at_ask.append(len(self._open))
        began = time.perf_counter()
        trial = self._study.ask()
        self._tally.asked += 1
        with ledger.together(self._study):
            opened = self._configure(trial)
        if opened.doomed:
            self._tell(opened, None)
        else:
            self._open[trial.number] = opened
            self._queue(opened, self._plan.seeds)
        self._ask_seconds = (self._ask_seconds + time.perf_counter() - began) / 2

    def _ask_ahead(self) -> None:
        """Have a trial ready for the next free slot where the sampler would keep it waiting.

        TPE takes longer with every trial. The price is one trial that the sampler knows less.
        """
        slow = self._ask_seconds >= ASK_AHEAD_SECONDS and self._stop_reason is None
        if slow and self._to_ask and self._waiting.wants_more(self._is_open):
            self._ask()

    def _configure(self, trial: optuna.Trial) -> _OpenTrial:
        """The trial with its configuration, stored; doomed where the search space itself failed."""
        try:
            config = self._suggest(trial)
        except Exception as error:  # a user's callable may raise anything
            text = "".join(traceback.format_exception(error))
            logger.warning("trial %d: the search space failed: %s", trial.number, error)
            return _OpenTrial(trial, {}, doomed=True, error=text)
        ledger.record_config(trial, config)
        return _OpenTrial(trial, config, self._batch_key(config))

    def _queue(self, opened: _OpenTrial, seeds: Sequence[int]) -> None:
        number, slots = opened.trial.number, self._slots.total
        self._waiting.add_trial(number, seeds, opened.batch_key, self._to_ask, slots)

    @property
    def _to_ask(self) -> int:
        return max(0, self._plan.n_trials - self._tally.asked)

    def _remaining(self) -> bool:
        """Whether anything is left to train."""
        return bool(self._waiting or self._open or self._to_ask)

    def _is_open(self, trial: int) -> bool:
        opened = self._open.get(trial)
        return opened is not None and not opened.doomed

    def _next_waiting(self, *, ask: bool) -> list[Waiting]:
        """What makes up the next task; empty: nothing, or nothing without asking."""
        if not ask and self._to_ask and self._waiting.wants_more(self._is_open):
            return []
        while self._to_ask and self._waiting.wants_more(self._is_open):
            self._ask()
        return self._waiting.pop(self._is_open)

    def _fill(self, *, ask: bool = True) -> None:
        """Give every free slot a seed task, then queue the look-ahead."""
        while self._stop_reason is None:
            address = self._slots.idle() or self._look_ahead()
            if address is None:
                return
            entries = self._next_waiting(ask=ask)
            if not entries:
                return
            self._submit(entries, address)

    def _look_ahead(self) -> str | None:
        """Where a seed task should wait behind another; None: nowhere.

        Not near the end, where the slot that frees first should take the next seed.
        """
        enough = self._unplaced() > 3 * self._slots.total
        return self._slots.next_in_line() if enough else None

    def _unplaced(self) -> int:
        """Seed tasks that are still to be given to a slot."""
        return self._waiting.num_tasks(self._to_ask, len(self._plan.seeds), self._slots.total)

    def _submit(self, entries: Sequence[Waiting], address: str) -> None:
        runs = tuple(
            SeedRun(
                trial=entry.trial,
                seed=seed,
                attempt=entry.attempt,
                config=self._open[entry.trial].config,
            )
            for entry in entries
            for seed in entry.seeds
        )
        task = self._make_task(runs, self.session)
        future = self._client.submit(
            train_seeds,
            task,
            key=task.key if not self._moves else f"{task.key}-{self._moves}",
            workers=[address],
            resources=dict(self._plan.resources) or None,
            priority=-task.trials[0],
            pure=False,
        )
        for trial in task.trials:
            self._open[trial].running += 1
        self._in_flight[future] = task
        self._slots.give(address, future)
        self._done.add(future)

    # --- what came back -------------------------------------------------------------------

    def _handle(self, future: Future, outcome: Any) -> None:
        task = self._in_flight.pop(future, None)
        if task is None:
            return  # it was moved to another worker
        self._slots.take_back(future)
        status = future.status
        # The slot need not wait until the result is stored. Nor must the future be released first:
        # Dask sends that at once, and what follows within 10 ms only after these.
        self._fill(ask=False)
        future.release()
        if status == "cancelled":
            self._requeue(task)
            self._conclude(task)
            return
        with ledger.together(self._study):
            if status == "finished":
                for result in outcome:
                    self._absorb(result)
            else:
                error = outcome[1] if isinstance(outcome, tuple) else outcome
                self._absorb_loss(task, error)
        if status == "finished":
            for result in outcome:
                if result.state == "finished":
                    path = checkpoint_path(task.checkpoint_dir, result.trial, result.seed)
                    path.unlink(missing_ok=True)
        self._conclude(task)

    def _absorb(self, result: SeedResult) -> None:
        """Store one seed's result; try the seed again where it failed."""
        opened = self._open[result.trial]
        if result.state == "stopped":
            self._stopped_seconds += result.wall_seconds
            return
        ledger.record_result(opened.trial, result)
        if result.state == "failed" and result.attempt < self._plan.seed_retries:
            logger.warning(
                "trial %d, seed %d failed and is tried again (%d of %d): %s",
                result.trial,
                result.seed,
                result.attempt + 1,
                self._plan.seed_retries,
                result.error,
            )
            self._waiting.add(result.trial, (result.seed,), result.attempt + 1, None)
            return
        self._settle(opened, result)

    def _absorb_loss(self, task: SeedTask, error: object) -> None:
        """A task that gave no result: its process died, or it could not even be started."""
        reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        for run in task.runs:
            result = SeedResult(
                trial=run.trial,
                seed=run.seed,
                attempt=run.attempt,
                state="failed",
                front=None,
                ref_point=task.ref_point,
                eval_gamma=task.eval_gamma,
                ended=time.time(),
                error=reason,
                traceback="".join(traceback.format_exception(error))
                if isinstance(error, Exception)
                else reason,
            )
            self._absorb(result)

    def _settle(self, opened: _OpenTrial, result: SeedResult) -> None:
        """The last word on a seed."""
        value = seed_value(result)
        opened.values[result.seed] = value
        self._seeds_of_open += 1
        if value is None:
            opened.error = opened.error or result.traceback or result.error or ""
            opened.doomed = opened.doomed or self._plan.failed_seeds == "fail"
            logger.warning("trial %d, seed %d failed: %s", result.trial, result.seed, result.error)
        elif result.wall_seconds:
            self._tally.count_seed(result.wall_seconds)
            if self._tally.seeds == 1:
                self._compare_with_walltime(result.ended - result.started)

    def _compare_with_walltime(self, seconds: float) -> None:
        walltime = self._keeper.spec.walltime if self._keeper is not None else None
        if walltime is not None and walltime < 1.5 * seconds:
            logger.warning(
                "a seed takes %.0f s, and the walltime of a job is %.0f s: seeds that it cuts off "
                "start over. Ask for a longer walltime, or save to context.checkpoint.",
                seconds,
                walltime,
            )

    def _conclude(self, task: SeedTask) -> None:
        """The task is over; tell the trials that are over with it."""
        for trial in task.trials:
            self._open[trial].running -= 1
        for trial in task.trials:
            self._conclude_if_over(trial)

    def _conclude_if_over(self, number: int) -> None:
        opened = self._open[number]
        missing = [s for s in self._plan.seeds if s not in opened.values]
        if opened.running or (missing and not opened.doomed):
            return
        del self._open[number]
        values = [opened.values[s] for s in self._plan.seeds if s in opened.values]
        self._tell(opened, trial_value(values, self._plan.aggregate, self._plan.failed_seeds))

    def _tell(self, opened: _OpenTrial, value: float | None) -> None:
        state = TrialState.FAIL if value is None else None
        frozen = self._study.tell(opened.trial, value, state=state)
        self._tally.count_trial(value, here=True)
        if value is None:
            self._first_error = self._first_error or opened.error
        self._seeds_of_open -= len(opened.values)
        for callback in self._callbacks:
            callback(self._study, frozen)
        self._show()
        failures = self._tally.failed_here
        if failures >= self._plan.max_failures and not self._tally.complete:
            raise StudyFailedError(self._study.study_name, failures, self._first_error)

    def _requeue(self, task: SeedTask) -> None:
        self._moves += 1
        for trial in task.trials:
            runs = [run for run in task.runs if run.trial == trial]
            seeds, key = tuple(run.seed for run in runs), self._open[trial].batch_key
            self._waiting.add(trial, seeds, runs[0].attempt, key)

    def _move_lost(self, lost: Sequence[tuple[Future, bool]]) -> None:
        """Deal with the seed tasks of workers that are gone.

        The one that may have been running is charged with the death; those queued behind it never
        ran, and go elsewhere without losing one of their retries.
        """
        candidates = [*((future, True) for future in self._adrift), *lost]
        self._adrift = []
        for future, may_have_run in candidates:
            task = self._in_flight.get(future)
            if task is None:
                continue
            if future.status == "finished":
                # Its result is on the way through the loop, unless it died with the worker.
                self._adrift.append(future)
                continue
            del self._in_flight[future]
            future.cancel()
            if may_have_run:
                error = ClusterError("the worker process died while it trained this seed")
                self._absorb_loss(task, error)
            else:
                self._requeue(task)
            self._conclude(task)

    # --- stopping and telling -------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        self._stop_reason = reason
        if self._in_flight:
            logger.warning(
                "study %s: %s; waiting until %d seed tasks reach their next milestone "
                "(Ctrl-C again stops at once)",
                self._study.study_name,
                "the time is over" if reason == "timeout" else reason,
                min(len(self._in_flight), self._slots.busy),
            )
        self._tell_workers_to_stop()

    def _tell_workers_to_stop(self) -> None:
        """Running seeds stop at their next milestone; queued ones return as soon as they start."""
        self._client.run(_stop_here, self.session, wait=False, on_error="ignore")

    def _show(self) -> None:
        if self._on_change is None:
            return
        self._on_change(
            self._tally.snapshot(
                n_trials=self._plan.n_trials,
                seeds_per_trial=len(self._plan.seeds),
                running=len(self._open),
                seeds_of_running=self._seeds_of_open,
                busy=self._slots.busy,
                slots=self._slots.total,
                note=self._keeper.waiting_text() if self._keeper is not None else "",
            )
        )
