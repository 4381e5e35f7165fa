"""How many trials per second the driver handles: seeds that do nothing, so only overhead is left.

    python benchmarks/driver_scale.py [--trials 1000] [--workers 64] [--profile]
    python benchmarks/driver_scale.py --memory [--trials 5000]

64 Dask workers as threads of this process: driver, scheduler and workers share one interpreter, so
the figure is a lower bound for a driver with workers elsewhere. 4 seeds per trial, journal storage,
Optuna's random sampler, 10 hyperparameters. Beside it, on the same cluster, Dask alone: a bare
`as_completed` loop that submits as many tasks that do nothing and stores nothing.

--profile prints where the driver's thread spends its time.
--memory prints how the process grows from 1,000 trials on, per trial, beside Optuna alone with the
same trials and attributes (in-memory storage for both).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import logging
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna
import psutil
from distributed import Client, Future, LocalCluster, as_completed
from optuna.trial import FrozenTrial

from dask_mohpo import SeedContext, run_study

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("distributed").setLevel(logging.ERROR)
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
