"""How many trials per second the driver handles: seeds that do nothing, so only overhead is left.

    python benchmarks/driver_scale.py [--trials 1000] [--workers 64] [--profile]
    python benchmarks/driver_scale.py --memory [--trials 5000]
    python benchmarks/driver_scale.py --simulated [--trials 10000] [--slots 1000] [--sampler tpe]

64 Dask workers as threads of this process: driver, scheduler and workers share one interpreter, so
the figure is a lower bound for a driver with workers elsewhere. 4 seeds per trial, journal storage,
Optuna's random sampler, 10 hyperparameters. Beside it, on the same cluster, Dask alone: a bare
`as_completed` loop that submits as many tasks that do nothing and stores nothing.

--profile prints where the driver's thread spends its time.
--memory prints how the process grows from 1,000 trials on, per trial, beside Optuna alone with the
same trials and attributes (in-memory storage for both).
--simulated drives the executor with a simulated cluster of 1,000 slots, real journal and real
ledger, through 10,000 trials: CPU seconds of the driver per trial and what they go to, in the
second and in the ninth tenth of them (at both ends asks and tells are not as many), memory, size of
the journal, and the time from opening the finished study, to go on with it, until the first seed
task is submitted. The journal lies in the folder for temporary files; a TMPDIR in memory spares the
disk, and the waiting for it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import logging
import pstats
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import psutil
from distributed import Client, Future, LocalCluster, as_completed
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from results import Figure, save
from simulated_cluster import Clock, FirstSubmitError, SimulatedClient, simulated_completions

from dask_mohpo import SearchSpace, SeedContext, ledger, run_study
from dask_mohpo.executor import Executor, Plan
from dask_mohpo.records import SeedRun, SeedTask
from dask_mohpo.tally import Snapshot

SPACE = {f"x{i}": {"low": 0.0, "high": 1.0} for i in range(10)}


def no_op(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    return [[config["x0"] + context.seed, 0.0]]


def run(client: Client, trials: int, folder: str, **extra: Any) -> tuple[optuna.Study, float]:
    """A study of no-op seeds, and the seconds that it took."""
    start = time.perf_counter()
    study = run_study(
        no_op,
        "deep-sea-treasure-v0",
        search_space=SPACE,
        n_trials=trials,
        num_seeds=4,
        cluster=client,
        resources={"SLOT": 1},
        sampler=optuna.samplers.RandomSampler(seed=0),
        run_dir=folder,
        progress=False,
        **extra,
    )
    return study, time.perf_counter() - start


def dask_alone(client: Client, tasks: int, at_once: int) -> float:
    """Seconds that Dask itself needs for tasks that do nothing."""
    start = time.perf_counter()
    numbers = iter(range(tasks))

    def submit(number: int) -> Future:
        return client.submit(abs, number, pure=False, resources={"SLOT": 1}, priority=-number)

    done = as_completed([submit(n) for n in itertools.islice(numbers, at_once)], loop=client.loop)
    for future in done:
        future.release()
        for number in itertools.islice(numbers, 1):
            done.add(submit(number))
    return time.perf_counter() - start


def rss() -> float:
    """Resident MB of this process."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 1e6


def optuna_alone(model: optuna.Study, trials: int) -> float:
    """MB that Optuna's own trials take: the same number, with the attributes of the model's."""
    pattern = model.get_trials(deepcopy=False)[-1]
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    before = rss()
    for _ in range(trials):
        trial = study.ask()
        for name in SPACE:
            trial.suggest_float(name, 0.0, 1.0)
        for name, value in pattern.user_attrs.items():
            trial.set_user_attr(name, _copy(value))
        study.tell(trial, 1.0)
    return rss() - before


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


# --- a simulated cluster --------------------------------------------------------------------------

SEEDS = (10, 11, 12, 13)
STUDY = "simulated"
SETTINGS = ledger.Settings(
    algo="driver_scale:no_op",
    env_id="deep-sea-treasure-v0",
    ref_point=(0.0, 0.0),
    eval_gamma=0.99,
    objectives="hypervolume",
    aggregate="mean",
    failed_seeds="fail",
    seeds=SEEDS,
    total_timesteps=50_000,
    num_eval_weights=50,
    num_eval_episodes=1,
    train_hyperparams={},
    search_space=SearchSpace.load(SPACE).describe(),
)
SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "random": lambda: RandomSampler(seed=0),
    "tpe": lambda: TPESampler(seed=0),
}
SAMPLING = (
    "infer_relative_search_space",
    "sample_relative",
    "sample_independent",
    "before_trial",
    "after_trial",
)
LABELS = {
    "sampler": "the sampler",
    "ask": "the rest of Optuna's ask and suggest",
    "record": "making records and telling",
    "journal": "writing to the journal",
    "loop": "the loop and hypervolumes",
}
"""What a driver's CPU seconds go to; the clock's other labels are the benchmark's."""
OWN = ("record", "journal", "loop")


@dataclass
class Marks:
    """What was measured when so many trials were told."""

    told: list[int] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def note(self, told: int, clock: Clock) -> None:
        with clock.on("measuring"):
            self.told.append(told)
            self.megabytes.append(rss())
            self.seconds.append(clock())

    def per_trial(self, first: int, last: int, *labels: str) -> float:
        """CPU milliseconds per trial between two marks."""
        trials = self.told[last] - self.told[first]
        before, after = self.seconds[first], self.seconds[last]
        return 1e3 * sum(after.get(x, 0.0) - before.get(x, 0.0) for x in labels) / trials


@contextmanager
def open_executor(
    client: SimulatedClient,
    folder: Path,
    trials: int,
    sampler: BaseSampler,
    clock: Clock,
    on_change: Callable[[Snapshot], None] | None = None,
) -> Iterator[Executor]:
    """What `run_study` does between its checks of arguments and `Executor.run`."""
    study, existed = ledger.open_study(STUDY, folder, None, SETTINGS, sampler)
    if existed:
        sampler.reseed_rng()
    space = SearchSpace.load(SPACE)

    def make_task(runs: tuple[SeedRun, ...], session: str) -> SeedTask:
        return SeedTask(
            study=STUDY,
            runs=runs,
            session=session,
            algo=SETTINGS.algo,
            env_id=SETTINGS.env_id,
            total_timesteps=SETTINGS.total_timesteps,
            ref_point=SETTINGS.ref_point,
            eval_gamma=SETTINGS.eval_gamma,
            num_eval_weights=SETTINGS.num_eval_weights,
            num_eval_episodes=SETTINGS.num_eval_episodes,
            milestones=10,
            checkpoint_dir=str(folder / "checkpoints"),
            exclusive=False,
        )

    plan = Plan(
        n_trials=trials,
        seeds=SEEDS,
        seeds_per_task=1,
        trials_per_task=1,
        seed_retries=2,
        max_failures=5,
        aggregate=SETTINGS.aggregate,
        failed_seeds=SETTINGS.failed_seeds,
        timeout=None,
        worker_timeout=300.0,
        resources={"SLOT": 1},
    )
    with ExitStack() as stack:
        stack.enter_context(simulated_completions())
        for name in SAMPLING:
            patched = clock.wrap("sampler", getattr(sampler, name))
            stack.enter_context(mock.patch.object(sampler, name, patched))
        for owner, name, label in (
            (study, "ask", "ask"),
            (study, "tell", "record"),
            (ledger, "record_result", "record"),
            (ledger, "record_config", "record"),
            (JournalFileBackend, "append_logs", "journal"),
        ):
            patched = clock.wrap(label, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, patched))
        executor = Executor(
            client,  # type: ignore[arg-type]
            study,
            plan,
            suggest=clock.wrap("ask", space.suggest),
            make_task=make_task,
            on_change=on_change,
        )
        yield executor


def simulate(
    trials: int, slots: int, sampler: str, folder: Path, profile: cProfile.Profile | None = None
) -> tuple[Marks, SimulatedClient]:
    """A whole study; marks after every tenth of it."""
    clock, marks = Clock(), Marks()
    client = SimulatedClient(slots, clock)
    step = max(1, trials // 10)

    def on_change(snapshot: Snapshot) -> None:
        told = snapshot.done + snapshot.failed
        if told % step == 0 and told != marks.told[-1]:
            marks.note(told, clock)

    with open_executor(client, folder, trials, SAMPLERS[sampler](), clock, on_change) as executor:
        marks.note(0, clock)
        if profile is not None:
            profile.enable()
        reason = executor.run()
        if profile is not None:
            profile.disable()
    if reason != "done":
        sys.exit(reason)
    return marks, client


def resume(
    trials: int,
    slots: int,
    sampler: str,
    folder: Path,
    profile: cProfile.Profile | None = None,
) -> tuple[float, float]:
    """Seconds, and those of CPU, from opening the study, for one more trial, to its first seed."""
    gc.collect()
    clock = Clock()
    client = SimulatedClient(slots, clock, takes_tasks=False)
    start, processor = time.perf_counter(), time.thread_time()
    with profile or nullcontext():
        try:
            with open_executor(client, folder, trials + 1, SAMPLERS[sampler](), clock) as executor:
                executor.run()
        except FirstSubmitError:
            return time.perf_counter() - start, time.thread_time() - processor
    raise AssertionError("nothing was submitted")


def simulated(args: argparse.Namespace) -> None:
    trials = args.trials or 10_000
    rounds = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.rounds):
            folder = Path(temporary) / str(number)
            profile = cProfile.Profile() if args.profile else None
            start = time.perf_counter()
            marks, client = simulate(trials, args.slots, args.sampler, folder, profile)
            seconds = time.perf_counter() - start
            size = (folder / ledger.JOURNAL).stat().st_size
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
            profile = cProfile.Profile() if args.profile else None
            back = resume(trials, args.slots, args.sampler, folder, profile)
            rounds.append((marks, client, seconds, size, back))
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    report(trials, args, rounds)


def report(trials: int, args: argparse.Namespace, rounds: list[Any]) -> None:
    """Print the figures and, of a whole measurement, store them."""

    def median(figure: Callable[[Marks], float]) -> float:
        return statistics.median(figure(marks) for marks, *_ in rounds)

    def growth(marks: Marks, *labels: str) -> float:
        late, early = marks.per_trial(8, 9, *labels), marks.per_trial(1, 2, *labels)
        # The simulation does the same work all along: how it grew is other processes' doing.
        others = marks.per_trial(8, 9, "simulation") / marks.per_trial(1, 2, "simulation")
        return late / early / others

    tenth = max(1, trials // 10)
    whole = median(lambda m: m.per_trial(0, -1, *LABELS))
    rows = [
        Figure(
            what=f"CPU of the driver per trial of 4 seeds, {args.sampler} sampler",
            value=f"{whole:.1f} ms",
            detail="; ".join(
                f"{words} {median(lambda m, x=label: m.per_trial(0, -1, x)):.1f} ms"  # type: ignore[misc]
                for label, words in LABELS.items()
            ),
        ),
        Figure(
            what="the same without the sampler and Optuna's ask: ninth tenth of the trials "
            "against the second",
            value=f"{(grew := median(lambda m: growth(m, *OWN))):.2f} ×",
            bar="≤ 1.2",
            met=grew <= 1.2,
            detail=f"{median(lambda m: m.per_trial(8, 9, *OWN)):.1f} against "
            f"{median(lambda m: m.per_trial(1, 2, *OWN)):.1f} ms",
        ),
    ]
    for label in ("sampler", "ask"):
        first, last = (
            median(lambda m, a=a, x=label: m.per_trial(a, a + 1, x))  # type: ignore[misc]
            for a in (1, 8)
        )
        rows.append(
            Figure(
                what=f"{LABELS[label]}: ninth tenth of the trials against the second",
                value=f"{median(lambda m, x=label: growth(m, x)):.2f} ×",  # type: ignore[misc]
                detail=f"{last:.2f} against {first:.2f} ms",
            )
        )
    grown = median(lambda m: m.megabytes[-1] - m.megabytes[1])
    back, processor = (statistics.median(r[4][i] for r in rounds) for i in (0, 1))
    waited = statistics.median(r[2] - sum(r[0].seconds[-1].values()) for r in rounds)
    rows += [
        Figure(
            what="waiting, for the disk and for other processes",
            value=f"{1e3 * waited / trials:.1f} ms per trial",
            detail=f"{waited:.0f} s in all",
        ),
        Figure(
            what=f"memory from {tenth:,} to {trials:,} trials",
            value=f"{1e3 * grown / (trials - tenth):.1f} kB per trial",
            detail=f"{grown:.0f} MB in all",
        ),
        Figure(
            what="journal",
            value=f"{rounds[0][3] / trials / 1e3:.1f} kB per trial",
            detail=f"{rounds[0][3] / 1e6:.0f} MB in all",
        ),
        Figure(
            what=f"from opening the study of {trials:,} trials to the first submit",
            value=f"{back:.1f} s",
            bar="≤ 20 s",
            met=back <= 20,
            detail=f"{processor:.1f} s of CPU",
        ),
    ]
    for row in rows:
        bar = f" (bar {row.bar})" if row.bar else ""
        print(f"{row.what}: {row.value}{bar}{'; ' if row.detail else ''}{row.detail}")
    print("CPU ms per trial, tenth by tenth:")
    for label, words in LABELS.items():
        per = [f"{median(lambda m, a=a, x=label: m.per_trial(a, a + 1, x)):.2f}" for a in range(10)]  # type: ignore[misc]
        print(f"  {' '.join(f'{x:>7}' for x in per)}  {words}")
    print("Growths are divided by that of the simulation's own CPU, which other processes cause.")
    marks, client, *_ = rounds[-1]
    used = client.busy_seconds / client.slots / client.now
    print(
        f"{client.events:,} seeds, {client.now / 3600:.1f} simulated hours, slots {used:.1%} busy; "
        f"the simulation took {marks.seconds[-1]['simulation']:.0f} s of CPU"
    )
    if not args.profile and trials >= 10_000 and args.sampler == "random":
        save(
            "driver-scale",
            f"The driver with {trials:,} trials on {args.slots:,} simulated slots",
            f"python {shlex.join(['benchmarks/driver_scale.py', *sys.argv[1:]])}",
            len(rounds),
            rows,
            note="Journal storage, 10 hyperparameters, 4 seeds per trial. The cluster is "
            "simulated: what Dask's client would spend on messages is not in it.",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--slots", type=int, default=1000, help="with --simulated")
    parser.add_argument("--sampler", choices=SAMPLERS, default="random", help="with --simulated")
    parser.add_argument("--rounds", type=int, default=1, help="with --simulated")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("distributed").setLevel(logging.ERROR)
    if args.simulated:
        simulated(args)
        return
    trials = args.trials or (5000 if args.memory else 1000)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            processes=False,
            n_workers=args.workers,
            threads_per_worker=1,
            resources={"SLOT": 1},
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        run(client, 20, folder, study_name="warm-up")
        if args.memory:
            marks = {}

            def note(study: optuna.Study, trial: FrozenTrial) -> None:
                if trial.number + 1 in (1000, trials):
                    marks[trial.number + 1] = rss()

            storage = optuna.storages.InMemoryStorage()
            study, _ = run(client, trials, folder, storage=storage, callbacks=[note])
            grown = marks[trials] - marks[1000]
            own = optuna_alone(study, trials - 1000)
            print(
                f"driver, scheduler and workers grow by {grown:.1f} MB from 1,000 to {trials:,} "
                f"trials; Optuna alone by {own:.1f} MB for as many"
            )
            return
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        _, seconds = run(client, trials, folder, study_name="scale")
        profile.disable()
        size = (Path(folder) / "scale" / "journal.log").stat().st_size
        print(
            f"{trials} trials x 4 seeds, {args.workers} workers: {trials / seconds:.1f} trials/s, "
            f"{size / trials / 1e3:.1f} kB of journal per trial"
        )
        alone = dask_alone(client, 4 * trials, args.workers + args.workers // 2)
        print(f"Dask alone, {4 * trials} tasks: worth {trials / alone:.1f} trials/s")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
