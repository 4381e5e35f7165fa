"""How busy the slots are: seeds that only sleep, so that all idle time is the scheduling's.

    python benchmarks/utilisation.py [--variants seed,trial,wide] [--rounds 3] [--mean 0.5]
    python benchmarks/utilisation.py --peers

Workloads, lognormal durations with a mean of 0.5 s, drawn with `default_rng(0)`:

- seed:  40 trials × 4 seeds on 4 worker processes, every seed drawn alone, sigma 0.6
- trial: the same, sigma 0.6 between trials, 0.2 between the seeds of a trial
- wide:  the first 12 trials of `trial` on 16 in-process workers

Efficiency = total sleep ÷ workers ÷ makespan; the makespan is that of the whole `run_study` call
on warm workers. Beside it, in the same run: what a greedy list schedule without any overhead
reaches, a process pool and a barrier per trial (as morl-baselines' launch_sweep.py), and Optuna's
n_jobs with a trial's seeds one after the other.

With --peers also the libraries of `peers/`, each in an environment of its own, and the results are
stored. They take turns with ours within a round. A log that each seed writes shows that all ran,
each of them once, and never more at a time than there are workers.

`open` is how many trials were open at each ask, on average: with fewer, the sampler knows more.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import logging
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import results
import venvs
from distributed import Client, LocalCluster
from results import Figure

from dask_mohpo import SeedContext, run_study, seed_results
from dask_mohpo.executor import Executor

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Workload:
    name: str
    trials: int
    workers: int
    processes: bool
    alone: bool
    """Every seed is drawn alone, instead of trials that differ with seeds alike."""

    def durations(self, mean: float) -> np.ndarray:
        """Seconds of sleep (trials, 4)."""
        rng = np.random.default_rng(0)
        if self.alone:
            return rng.lognormal(np.log(mean) - 0.5 * 0.6**2, 0.6, size=(40, 4))[: self.trials]
        base = rng.lognormal(np.log(mean) - 0.5 * 0.6**2, 0.6, size=(40, 1))
        noise = rng.lognormal(-0.5 * 0.2**2, 0.2, size=(40, 4))
        return (base * noise)[: self.trials]


WORKLOADS = [
    Workload("seed", trials=40, workers=4, processes=True, alone=True),
    Workload("trial", trials=40, workers=4, processes=True, alone=False),
    Workload("wide", trials=12, workers=16, processes=False, alone=False),
]


def list_schedule(seconds: Sequence[float], workers: int) -> float:
    """Makespan where idle workers take the next job in order and nothing costs any time."""
    free = [0.0] * workers
    for job in seconds:
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def sleep_seed(config: dict[str, Any], context: SeedContext) -> list[list[float]]:
    """The trainable: sleep as long as the table says for this trial and seed."""
    trial = int(context.checkpoint.name.split("-")[0].removeprefix("trial"))
    time.sleep(config["durations"][trial][context.seed])
    return [[config["x"], 0.0]]


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return 0.0


def ours(work: Workload, durations: np.ndarray, client: Client) -> tuple[float, list[int]]:
    """Makespan of run_study on warm workers, and the open trials at each ask."""
    asked: list[list[int]] = []
    original = Executor.run

    def run(self: Executor) -> str:
        asked.append(self.open_at_ask)
        return original(self)

    Executor.run = run  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            study = run_study(
                sleep_seed,
                "deep-sea-treasure-v0",
                search_space={"x": {"low": 0.0, "high": 1.0}},
                train_hyperparams={"durations": durations.tolist()},
                n_trials=work.trials,
                num_seeds=4,
                seed=0,
                cluster=client,
                resources={"SLOT": 1},
                run_dir=folder,
                progress=False,
            )
            makespan = time.perf_counter() - start
            results = seed_results(study)
            assert len(results) == durations.size
            assert all(r.state == "finished" for r in results)
            return makespan, asked[0]
    finally:
        Executor.run = original  # type: ignore[method-assign]


def barrier(work: Workload, durations: np.ndarray) -> float:
    """A process pool per trial, and a wait for all of its seeds."""
    study = optuna.create_study(direction="maximize")
    start = time.perf_counter()
    for row in durations:
        trial = study.ask()
        x = trial.suggest_float("x", 0.0, 1.0)
        with ProcessPoolExecutor(work.workers) as pool:
            list(pool.map(sleep, row))
        study.tell(trial, x)
    return time.perf_counter() - start


def optuna_jobs(work: Workload, durations: np.ndarray) -> float:
    """Optuna's threads, each with the seeds of one trial one after the other."""
    study = optuna.create_study(direction="maximize")

    def objective(trial: optuna.Trial) -> float:
        for seconds in durations[trial.number]:
            sleep(seconds)
        return trial.suggest_float("x", 0.0, 1.0)

    start = time.perf_counter()
    study.optimize(objective, n_trials=work.trials, n_jobs=work.workers)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Peer:
    name: str
    environment: str
    script: str
    packages: tuple[str, ...]


PEERS = [
    Peer(
        "Optuna DaskStorage",
        "optuna",
        "optuna_dask_storage.py",
        ("optuna", "optuna-integration", "distributed"),
    ),
    Peer("SMAC3", "smac", "smac3.py", ("smac", "distributed")),
    Peer("Ray Tune, Repeater, reused actors", "ray", "ray_tune.py", ("ray", "optuna")),
    Peer("Syne Tune", "syne-tune", "syne_tune_local.py", ("syne-tune",)),
]


class PeerError(Exception):
    """A peer did not run the workload; the message says why, in a line."""


def run_peer(peer: Peer, work: Workload, durations: np.ndarray) -> tuple[float, float]:
    """Makespan of a peer, and the part of it between the first seed's start and the last's end."""
    limit = 120 + 10 * float(durations.sum()) / work.workers
    with tempfile.TemporaryDirectory() as folder:
        log, job = Path(folder) / "log", Path(folder) / "job.json"
        job.write_text(
            json.dumps(
                {
                    "durations": durations.tolist(),
                    "workers": work.workers,
                    "processes": work.processes,
                    "log": str(log),
                }
            )
        )
        script = HERE / "peers" / peer.script
        text = output([str(python_of(peer)), str(script), str(job)], folder, limit)
        with contextlib.suppress(json.JSONDecodeError, IndexError):
            line = [line for line in text.splitlines() if line.startswith('{"makespan"')][-1]
            makespan = float(json.loads(line)["makespan"])
            return makespan, check_log(log, durations, work.workers, makespan)
    raise PeerError("no makespan was printed")


def python_of(peer: Peer) -> Path:
    try:
        return venvs.python_of(peer.environment)
    except subprocess.CalledProcessError as error:
        raise PeerError("its environment cannot be made") from error


def output(command: list[str], folder: str, limit: float) -> str:
    """What a command prints; PeerError where it fails or takes too long."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        raise PeerError(f"not done after {limit:.0f} s") from None
    if process.returncode != 0:
        lines = text.replace(f"{HERE}/", "").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise PeerError(f"exit status {process.returncode}: {last[:200]}")
    return text


def check_log(log: Path, durations: np.ndarray, workers: int, makespan: float) -> float:
    """Seconds from the first seed's start to the last one's end.

    PeerError where not all seeds ran, or one ran twice, or too many at a time.
    """
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    ran = sorted((row["trial"], row["seed"]) for row in rows)
    if ran != sorted(np.ndindex(durations.shape)):
        raise PeerError(f"{len(ran)} seeds ran, {len(set(ran))} different, of {durations.size}")
    events = sorted([(row["start"], 1) for row in rows] + [(row["end"], -1) for row in rows])
    most = int(np.cumsum([change for _, change in events]).max())
    if most > workers:
        raise PeerError(f"{most} seeds ran at a time on {workers} workers")
    busy = float(events[-1][0] - events[0][0])
    if busy > makespan + 0.05:
        raise PeerError(f"a makespan of {makespan:.2f} s, but its seeds took {busy:.2f} s")
    return busy


@dataclass
class Row:
    """What a tool reached in each round."""

    efficiency: list[float] = field(default_factory=list)
    from_first_seed: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.efficiency)


OURS = "dask-mohpo"
BARS = {"seed": (0.98, False), "trial": (0.95, False), "wide": (0.97, True)}
"""Efficiency that ours should reach, and whether it is that of the list schedule which counts."""


def measure_ours(work: Workload, durations: np.ndarray) -> tuple[float, float]:
    """Makespan on warm workers, and the mean of the open trials at an ask."""
    with (
        LocalCluster(
            n_workers=work.workers,
            threads_per_worker=1,
            processes=work.processes,
            resources={"SLOT": 1},
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        warm = Workload("warm-up", 2 * work.workers, work.workers, work.processes, False)
        ours(warm, np.full((warm.trials, 4), 0.01), client)
        makespan, open_at_ask = ours(work, durations, client)
        return makespan, statistics.mean(open_at_ask)


def measure(
    work: Workload, durations: np.ndarray, rounds: int, others: bool, peers: Sequence[Peer]
) -> tuple[dict[str, Row], float]:
    """The rows of a workload, and the mean of the open trials at an ask of ours."""
    ideal = float(durations.sum()) / work.workers
    rows: dict[str, Row] = {OURS: Row()}
    opened: list[float] = []
    in_process = {
        "process pool, barrier per trial": barrier,
        f"Optuna n_jobs={work.workers}": optuna_jobs,
    }
    for _ in range(rounds):
        makespan, open_at_ask = measure_ours(work, durations)
        rows[OURS].efficiency.append(ideal / makespan)
        opened.append(open_at_ask)
        for name, tool in in_process.items() if others else ():
            rows.setdefault(name, Row()).efficiency.append(ideal / tool(work, durations))
        for peer in peers:
            row = rows.setdefault(peer.name, Row())
            if row.error:
                continue
            try:
                makespan, busy = run_peer(peer, work, durations)
            except PeerError as error:
                row.error = str(error)
                continue
            row.efficiency.append(ideal / makespan)
            row.from_first_seed.append(ideal / busy)
    return rows, statistics.mean(opened)


def number(values: Sequence[float]) -> str:
    """Median and range."""
    median = statistics.median(values)
    return f"{median:.3f} ({min(values):.3f}–{max(values):.3f})"


def figures_of(work: Workload, rows: dict[str, Row], bound: float, opened: float) -> list[Figure]:
    figures = []
    for name, row in rows.items():
        what = f"{work.name}: {name}"
        if row.error:
            detail = row.error.replace("|", "/")
            figures.append(Figure(what=what, value="failed", detail=detail))
            continue
        share = row.median / bound
        detail = f"{share:.3f} of the list schedule ({bound:.3f})"
        bar, met = "", None
        if name == OURS:
            least, of_bound = BARS[work.name]
            bar = f"≥ {least:g}" + (" of the list schedule" if of_bound else "")
            met = (share if of_bound else row.median) >= least
            detail += f"; {opened:.1f} trials open at an ask"
        if row.from_first_seed:
            median = statistics.median(row.from_first_seed)
            detail += f"; {median:.3f} from its first seed's start on"
        figures.append(
            Figure(what=what, value=number(row.efficiency), bar=bar, met=met, detail=detail)
        )
    others = {name: row for name, row in rows.items() if name != OURS and not row.error}
    if others:
        best = max(others, key=lambda name: others[name].median)
        ratio = rows[OURS].median / others[best].median
        figures.append(
            Figure(
                what=f"{work.name}: ours ÷ the best of the others",
                value=f"{ratio:.3f} ×",
                bar="> 1",
                met=ratio > 1,
                detail=f"the best of them: {best}",
            )
        )
    return figures


def main() -> None:
    names = [work.name for work in WORKLOADS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default=",".join(names))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mean", type=float, default=0.5, help="mean seconds of a seed")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--peers", action="store_true", help="also the libraries of peers/")
    parser.add_argument("--print-only", action="store_true", help="store no results")
    args = parser.parse_args()
    variants = args.variants.split(",")
    if unknown := set(variants) - set(names):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(names)}")
    if args.peers and args.only_ours:
        parser.error("--peers and --only-ours exclude each other")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("distributed").setLevel(logging.ERROR)
    peers = PEERS if args.peers else []
    for peer in peers:  # make the environments before anything is measured
        with contextlib.suppress(PeerError):
            python_of(peer)
    figures: list[Figure] = []
    for work in WORKLOADS:
        if work.name not in variants:
            continue
        durations = work.durations(args.mean)
        ideal = float(durations.sum()) / work.workers
        bound = ideal / list_schedule(durations.ravel().tolist(), work.workers)
        print(
            f"{work.name}: {work.trials} trials x 4 seeds of {args.mean} s on {work.workers} "
            f"workers; list schedule without overhead {bound:.3f}",
            flush=True,
        )
        rows, opened = measure(work, durations, args.rounds, not args.only_ours, peers)
        found = figures_of(work, rows, bound, opened)
        for figure in found:
            met = {None: "", True: "met", False: "missed"}[figure.met]
            print(f"  {figure.what}: {figure.value} {figure.bar} {met} ({figure.detail})")
        figures += found
    if args.peers and not args.print_only:
        save(args, figures)


def save(args: argparse.Namespace, figures: list[Figure]) -> None:
    versions = {}
    for peer in PEERS:
        with contextlib.suppress(PeerError, subprocess.CalledProcessError):
            python_of(peer)
            found = venvs.versions_of(peer.environment, list(peer.packages))
            versions.update({f"{peer.environment}: {name}": v for name, v in found.items()})
    command = f"python benchmarks/utilisation.py --peers --rounds {args.rounds}"
    if args.mean != 0.5:
        command += f" --mean {args.mean}"
    if args.variants != ",".join(work.name for work in WORKLOADS):
        command += f" --variants {args.variants}"
    results.save(
        "utilisation",
        "Utilisation: total sleep ÷ workers ÷ makespan",
        command,
        args.rounds,
        figures,
        versions,
        f"Seeds that sleep {args.mean} s on average: {'; '.join(DESCRIPTIONS.values())}. Workers "
        "are warm, except for Ray's actors and Syne Tune's processes, which start with the study. "
        "Optuna, SMAC3 and Syne Tune run the seeds of a trial one after the other. Each seed of a "
        "peer is seen to run once.",
    )


DESCRIPTIONS = {
    "seed": "`seed`, 40 trials × 4 seeds on 4 workers, each seed's time drawn alone",
    "trial": "`trial`, the same where trials differ and their seeds are alike",
    "wide": "`wide`, 12 of its trials on 16 workers",
}


if __name__ == "__main__":
    main()
