"""Speed of training and of evaluation, beside morl-baselines with equal hyperparameters.

    python benchmarks/speed.py [--only NAME,...] [--rounds 5] [--steps N] [--print-only]

In each round ours and theirs take turns, every measurement in a process of its own with one torch
thread. A ratio is the median of the rounds' ratios, with the smallest and the largest behind it.

- envelope-dst, envelope-minecart: training steps per second, after a warm-up
- envelope-update: an update of ours, beside its matrix products alone
- pcn-minecart, pcn-dst: training steps per second from the start, without evaluations
- pcn-minecart-default: the same with the evaluations that each side makes by default
- evaluation-minecart, evaluation-dst: env steps per second while a front is evaluated
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import venvs
from results import Figure

HERE = Path(__file__).resolve().parent
PEER = "morl-baselines"
PEER_PACKAGES = ["morl-baselines", "torch", "mo-gymnasium"]
DST, MINECART, MINECART_FIXED = (
    "deep-sea-treasure-v0",
    "minecart-v0",
    "minecart-deterministic-v0",
)

Settings = dict[str, Any]

WARM_UP = 1000
"""Steps before the clock starts: Adam's moments of units that died have become denormal by then,
which slows it down."""

# Hyperparameters go to both sides. Epsilon and lambda stay where a training has them half-way, so
# that the agents act by their networks and compute both losses.
ENVELOPE: Settings = {
    "learning_rate": 3e-4,
    "initial_epsilon": 0.05,
    "final_epsilon": 0.05,
    "epsilon_decay_steps": None,
    "tau": 1.0,
    "target_net_update_freq": 200,
    "buffer_size": 100_000,
    "learning_starts": 100,
    "gradient_updates": 1,
    "gamma": 0.99,
    "max_grad_norm": 1.0,
    "envelope": True,
    "num_sample_w": 4,
    "per": True,
    "per_alpha": 0.6,
    "initial_homotopy_lambda": 0.5,
    "final_homotopy_lambda": 0.5,
    "homotopy_decay_steps": None,
}
ENVELOPE_DST: Settings = {**ENVELOPE, "net_arch": [128] * 2, "batch_size": 64}
ENVELOPE_MINECART: Settings = {**ENVELOPE, "net_arch": [256] * 4, "batch_size": 32}
PCN: Settings = {
    "learning_rate": 1e-3,
    "gamma": 1.0,
    "batch_size": 256,
    "hidden_dim": 64,
    "num_er_episodes": 20,
    "num_step_episodes": 10,
    "max_buffer_size": 100,
}
PCN_MINECART: Settings = {
    **PCN,
    "num_model_updates": 50,
    "scaling_factor": [1.0, 1.0, 0.1, 0.1],
    "max_return": [1.5, 1.5, 0.0],
}
PCN_DST: Settings = {
    **PCN,
    "num_model_updates": 10,
    "scaling_factor": [0.1, 0.1, 0.01],
    "max_return": [124.0, -1.0],
}


class MeasurementError(Exception):
    """A side's process ended with an error, which is printed already."""


def measure(side: str, measurement: str, settings: Settings) -> Settings:
    """The figures of one measurement, made by a new process with one thread."""
    if side == "ours":
        command = [sys.executable, str(HERE / "speed_ours.py")]
    else:
        command = [str(venvs.python_of(PEER)), str(HERE / "speed_morl_baselines.py")]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, measurement, json.dumps(settings)],
            cwd=folder,
            env={**os.environ, **threads, "WANDB_MODE": "disabled"},
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        raise MeasurementError(f"{measurement} of {side} failed")
    figures: Settings = json.loads(done.stdout.splitlines()[-1])
    shown = ", ".join(f"{name} {number(value)}" for name, value in figures.items())
    print(f"  {side:>6} {measurement}: {shown}", flush=True)
    return figures


def number(value: float) -> str:
    """Three digits, or all digits before the point."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def spread(values: list[float]) -> str:
    """Median and range."""
    low, high = number(min(values)), number(max(values))
    return f"{number(statistics.median(values))} × ({low}–{high})"


def at_least(what: str, bar: float, ours: list[Settings], theirs: list[Settings]) -> Figure:
    """How many times as fast ours is."""
    fast = [figures["steps_per_second"] for figures in ours]
    slow = [figures["steps_per_second"] for figures in theirs]
    ratios = [a / b for a, b in zip(fast, slow, strict=True)]
    return Figure(
        what=what,
        value=spread(ratios),
        bar=f"≥ {bar:g}",
        met=statistics.median(ratios) >= bar,
        detail=f"{number(statistics.median(fast))} against "
        f"{number(statistics.median(slow))} steps/s",
    )


def at_most(what: str, bar: float | None, ratios: list[float], detail: str) -> Figure:
    """What ours takes of what is needed anyhow."""
    return Figure(
        what=what,
        value=spread(ratios),
        bar="" if bar is None else f"≤ {bar:g}",
        met=None if bar is None else statistics.median(ratios) <= bar,
        detail=detail,
    )


def median_of(name: str, rounds: list[Settings]) -> str:
    return number(statistics.median(figures[name] for figures in rounds))


def envelope_dst(rounds: int, steps: int | None) -> list[Figure]:
    base = {"env_id": DST, "config": ENVELOPE_DST, "warm_up": WARM_UP}
    half = {**base, "config": {**ENVELOPE_DST, "precision": "bf16"}}
    one: list[Settings] = []
    eight: list[Settings] = []
    eight_half: list[Settings] = []
    theirs: list[Settings] = []
    for seed in range(rounds):
        ours = {**base, "seed": seed, "steps": steps or 5000}
        one.append(measure("ours", "envelope", ours))
        theirs.append(measure("theirs", "envelope", {**base, "seed": seed, "steps": steps or 2000}))
        batch = {"seed": seed, "steps": steps or 2000, "learners": 8}
        eight.append(measure("ours", "envelope", {**base, **batch}))
        eight_half.append(measure("ours", "envelope", {**half, **batch}))
    what = "8 learners in one batch, steps of all, against one of theirs"
    return [
        at_least("one learner", 2.5, one, theirs),
        at_least(what, 6, eight, theirs),
        at_least(f"{what}; `precision: bf16`", 6, eight_half, theirs),
    ]


def envelope_minecart(rounds: int, steps: int | None) -> list[Figure]:
    figures = []
    for num_w, bar, our_steps, their_steps in ((4, 2.5, 1500, 500), (10, 4.0, 1000, 200)):
        config = {**ENVELOPE_MINECART, "num_sample_w": num_w}
        base = {"env_id": MINECART, "config": config, "warm_up": WARM_UP}
        half = {**config, "precision": "bf16"}
        ours: list[Settings] = []
        ours_half: list[Settings] = []
        theirs: list[Settings] = []
        for seed in range(rounds):
            one = {**base, "seed": seed, "steps": steps or our_steps}
            ours.append(measure("ours", "envelope", one))
            ours_half.append(measure("ours", "envelope", {**one, "config": half}))
            theirs.append(
                measure("theirs", "envelope", {**base, "seed": seed, "steps": steps or their_steps})
            )
        what = f"one learner, {num_w} weights"
        figures.append(at_least(what, bar, ours, theirs))
        figures.append(at_least(f"{what}; `precision: bf16`", bar, ours_half, theirs))
    return figures


def envelope_update(rounds: int, steps: int | None) -> list[Figure]:
    settings = {
        "env_id": MINECART,
        "config": {**ENVELOPE_MINECART, "batch_size": 256},
        "warm_up": WARM_UP,
        "updates": 20,
        "blocks": 15,
    }
    runs = [
        measure("ours", "envelope-update", {**settings, "seed": seed}) for seed in range(rounds)
    ]
    detail = f"{median_of('update_ms', runs)} against {median_of('products_ms', runs)} ms"
    ratios = [run["ratio"] for run in runs]
    return [at_most("time of an update ÷ that of its matrix products", 1.5, ratios, detail)]


def pcn_minecart(rounds: int, steps: int | None) -> list[Figure]:
    base = {
        "env_id": MINECART_FIXED,
        "config": PCN_MINECART,
        "ref_point": [-1.0, -1.0, -200.0],
        "steps": steps or 100_000,
    }
    ours: list[Settings] = []
    theirs: list[Settings] = []
    for seed in range(rounds):
        ours.append(measure("ours", "pcn", {**base, "seed": seed}))
        theirs.append(measure("theirs", "pcn", {**base, "seed": seed}))
    return [at_least("one learner, no evaluations", 3, ours, theirs)]


def pcn_minecart_default(rounds: int, steps: int | None) -> list[Figure]:
    base = {
        "env_id": MINECART_FIXED,
        "config": PCN_MINECART,
        "ref_point": [-1.0, -1.0, -200.0],
        "steps": steps or 100_000,
        "milestones": 10,
        "num_eval_weights": 50,
    }
    ours: list[Settings] = []
    theirs: list[Settings] = []
    for seed in range(rounds):
        ours.append(measure("ours", "pcn-evaluated", {**base, "seed": seed}))
        theirs.append(measure("theirs", "pcn-evaluated", {**base, "seed": seed}))
    return [at_least("one learner, evaluations as by default", 10, ours, theirs)]


def pcn_dst(rounds: int, steps: int | None) -> list[Figure]:
    base = {
        "env_id": DST,
        "config": PCN_DST,
        "ref_point": [0.0, -50.0],
        "steps": steps or 20_000,
    }
    ours: list[Settings] = []
    theirs: list[Settings] = []
    for seed in range(rounds):
        ours.append(measure("ours", "pcn", {**base, "seed": seed, "learners": 8}))
        theirs.append(measure("theirs", "pcn", {**base, "seed": seed}))
    return [
        at_least("8 learners in one batch, steps of all, against one of theirs", 6, ours, theirs)
    ]


def evaluation(
    env_id: str,
    config: Settings,
    bar: float,
    bare_bar: float | None,
    rounds: int,
    *,
    train_steps: int,
    repeats: tuple[int, int],
) -> list[Figure]:
    """Both sides evaluate the same networks, which ours trained for a while.

    `repeats` are how often ours and theirs evaluate in one measurement.
    """
    ours: list[Settings] = []
    theirs: list[Settings] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(rounds):
            settings = {
                "env_id": env_id,
                "config": config,
                "seed": seed,
                "train_steps": train_steps,
                "num_weights": 100,
                "episodes": 5,
                "network": str(Path(folder) / f"{seed}.npz"),
            }
            ours.append(measure("ours", "evaluation", {**settings, "repeats": repeats[0]}))
            theirs.append(measure("theirs", "evaluation", {**settings, "repeats": repeats[1]}))
    first = at_least("100 weights × 5 episodes, env steps per second", bar, ours, theirs)
    totals = (
        f"in all {median_of('seconds', ours)} s for {median_of('steps', ours)} steps against "
        f"{median_of('seconds', theirs)} s for {median_of('steps', theirs)}; the first time, with "
        f"the making of the env copies, ours takes {median_of('first_seconds', ours)} s"
    )
    ratios = [run["bare_steps_per_second"] / run["steps_per_second"] for run in ours]
    bare = f"{median_of('bare_steps_per_second', ours)} steps/s without an agent"
    return [
        Figure(
            what=first.what,
            value=first.value,
            bar=first.bar,
            met=first.met,
            detail=f"{first.detail}; {totals}",
        ),
        at_most("time of ours ÷ that of the same env steps alone", bare_bar, ratios, bare),
    ]


def evaluation_minecart(rounds: int, steps: int | None) -> list[Figure]:
    return evaluation(MINECART, ENVELOPE_MINECART, 4, 1.5, rounds, train_steps=2000, repeats=(1, 1))


def evaluation_dst(rounds: int, steps: int | None) -> list[Figure]:
    return evaluation(DST, ENVELOPE_DST, 8, None, rounds, train_steps=5000, repeats=(20, 4))


EVALUATION_NOTE = (
    "Both sides evaluate the same networks, which ours trained for some thousand steps; ours on "
    "its seeded episodes, theirs on its own. The env steps alone are those of the evaluation, "
    "taken again in copies of the env, with the resets."
)
# name → what measures it, title, rounds where none are asked for, note
BENCHMARKS: dict[str, tuple[Callable[[int, int | None], list[Figure]], str, int, str]] = {
    "envelope-dst": (
        envelope_dst,
        "Envelope on deep-sea-treasure-v0, beside morl-baselines",
        5,
        "Net 128 × 128, batch 64, 4 weights, prioritised replay.",
    ),
    "envelope-minecart": (
        envelope_minecart,
        "Envelope on minecart-v0, beside morl-baselines",
        5,
        "Net 4 × 256, batch 32, prioritised replay.",
    ),
    "envelope-update": (
        envelope_update,
        "An update of Envelope, beside its matrix products",
        5,
        "Net 4 × 256, batch 256, 4 weights, shapes of minecart-v0. The products are three forward "
        "passes and those of the backward pass, into memory that is there already.",
    ),
    "pcn-minecart": (
        pcn_minecart,
        "PCN on minecart-deterministic-v0, beside morl-baselines",
        5,
        "Batch 256, 50 updates per iteration of 10 episodes. The speed depends on how long the "
        "episodes are that a side learns.",
    ),
    "pcn-minecart-default": (
        pcn_minecart_default,
        "PCN on minecart-deterministic-v0 with evaluations, beside morl-baselines",
        3,
        "As `pcn-minecart`, but ours evaluates at 10 milestones as a study does, and theirs up to "
        "100 episodes and a file after every iteration that passed another thousandth of the "
        "steps, as its `train` does by itself.",
    ),
    "pcn-dst": (
        pcn_dst,
        "PCN on deep-sea-treasure-v0, 8 learners, beside morl-baselines",
        5,
        "Batch 256, 10 updates per iteration of 10 episodes, no evaluations.",
    ),
    "evaluation-minecart": (
        evaluation_minecart,
        "Evaluation of a front on minecart-v0, beside morl-baselines",
        3,
        EVALUATION_NOTE,
    ),
    "evaluation-dst": (
        evaluation_dst,
        "Evaluation of a front on deep-sea-treasure-v0, beside morl-baselines",
        5,
        EVALUATION_NOTE,
    ),
}
WITHOUT_PEER = ("envelope-update",)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="names, with commas")
    parser.add_argument("--rounds", type=int, help="5, and 3 for the two longest by default")
    parser.add_argument("--steps", type=int, help="training steps that are timed, on both sides")
    parser.add_argument("--print-only", action="store_true", help="store no results")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    failed = []
    for name in names:
        function, title, default_rounds, note = BENCHMARKS[name]
        rounds = args.rounds or default_rounds
        print(f"{name}, {rounds} rounds", flush=True)
        try:
            figures = function(rounds, args.steps)
        except MeasurementError as error:
            print(f"  {error}", flush=True)
            failed.append(name)
            continue
        for figure in figures:
            met = {None: "", True: "met", False: "missed"}[figure.met]
            print(f"  {figure.what}: {figure.value} {figure.bar} {met} ({figure.detail})")
        if args.print_only:
            continue
        command = f"python benchmarks/speed.py --only {name} --rounds {rounds}"
        if args.steps:
            command += f" --steps {args.steps}"
        peers = {} if name in WITHOUT_PEER else venvs.versions_of(PEER, PEER_PACKAGES)
        peers = {f"theirs: {package}": version for package, version in peers.items()}
        results.save(name, title, command, rounds, figures, peers, note)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
