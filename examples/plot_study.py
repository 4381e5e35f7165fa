"""Plot the history of a study: every seed, every trial, and the best so far.

Run it with ``python examples/plot_study.py STUDY``, also while the study goes on::

    python examples/plot_study.py demo --run-dir runs -o history.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState

from dask_mohpo import MohpoError, hypervolume
from dask_mohpo.environments import known_front
from dask_mohpo.errors import UsageError
from dask_mohpo.ledger import DEFAULT, load_study, read_settings, trial_results
from dask_mohpo.objectives import seed_value

# Blue, vermilion and green of Okabe and Ito: told apart also with a colour vision deficiency. Each
# thing has its own mark or line as well, so that the picture can be read in black and white.
BEST, DEFAULT_LINE, KNOWN, SEED, TRIAL = "#0072B2", "#D55E00", "#009E73", "#8a8a8a", "#222222"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the study named on the command line."""
    parser = argparse.ArgumentParser(description="Plot the history of a study.")
    parser.add_argument("study_name", metavar="STUDY", help="the study's name")
    parser.add_argument("--run-dir", default="runs", help="where studies lie (default: runs)")
    parser.add_argument(
        "-o", "--output", default="history.png", help="file to write: .png, .pdf or .svg"
    )
    args = parser.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        figure = plot_history(load_study(args.study_name, args.run_dir))
    except MohpoError as error:
        print(f"plot_study: {error}", file=sys.stderr)
        return 2
    figure.savefig(args.output, dpi=150)
    print(args.output)
    return 0


def plot_history(study: optuna.Study) -> Figure:
    """Draw hypervolume over trials.

    Parameters
    ----------
    study : a study of dask_mohpo, finished or running.

    Raises
    ------
    UsageError
        No seed has finished yet.
    """
    settings = read_settings(study)
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    trials = study.get_trials(deepcopy=False)
    if not _draw_seeds(axes, trials):
        raise UsageError(f"study {study.study_name!r} has no finished seed yet.")
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if complete:
        _draw_trials(axes, complete)
        _draw_best(axes, complete, settings.aggregate)
    _draw_failures(axes, trials)
    for trial in complete:
        if trial.user_attrs.get(DEFAULT) and trial.value is not None:
            label = f"default configuration: {trial.value:.5g}"
            axes.axhline(trial.value, color=DEFAULT_LINE, ls="--", lw=1.6, label=label, zorder=1)
    known = known_front(settings.env_id, settings.eval_gamma)
    if known is not None:
        most = hypervolume(known, settings.ref_point)
        label = f"known front: {most:.5g}"
        axes.axhline(most, color=KNOWN, ls=":", lw=2.0, label=label, zorder=1)

    axes.set_title(f"{study.study_name}: {settings.algo} on {settings.env_id}", loc="left")
    axes.set_xlabel("trial")
    ref_point = ", ".join(f"{number:g}" for number in settings.ref_point)
    axes.set_ylabel(f"hypervolume, ref point ({ref_point})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", color="#e4e4e4", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    entries = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    order = sorted(entries, key=lambda label: not label.startswith(("seed", "trial")))
    figure.legend(
        [entries[label] for label in order],
        order,
        loc="outside lower left",
        ncols=3,
        frameon=False,
        fontsize="small",
    )
    return figure


def _draw_seeds(axes: Axes, trials: Sequence[FrozenTrial]) -> int:
    """A dot per finished seed, side by side beyond the trial's mark; returns how many."""
    places: list[float] = []
    values: list[float] = []
    for trial in trials:
        results = trial_results(trial)
        offsets = 0.16 + 0.3 * np.arange(len(results)) / max(2, len(results) - 1)
        for result, offset in zip(results, offsets, strict=True):
            value = seed_value(result)
            if value is not None:
                places.append(trial.number + offset)
                values.append(value)
    axes.plot(places, values, "o", ms=5, mfc="white", mec=SEED, mew=1.1, label="seed", zorder=3)
    return len(values)


def _draw_trials(axes: Axes, complete: Sequence[FrozenTrial]) -> None:
    """A mark per trial at the mean of its seeds, with a bar of one standard deviation."""
    means: list[float] = []
    deviations: list[float] = []
    for trial in complete:
        # A seed that failed in a complete trial counts as an empty front.
        values = [seed_value(result) or 0.0 for result in trial_results(trial)]
        means.append(float(np.mean(values)))
        deviations.append(float(np.std(values, ddof=1)) if len(values) > 1 else 0.0)
    axes.errorbar(
        [trial.number for trial in complete],
        means,
        yerr=deviations,
        fmt="D",
        ms=6,
        color=TRIAL,
        elinewidth=1.2,
        capsize=4,
        label="trial: mean ± standard deviation",
        zorder=4,
    )


def _draw_best(axes: Axes, complete: Sequence[FrozenTrial], aggregate: str) -> None:
    """The best value so far, by number of the trial."""
    values = np.array([trial.value for trial in complete], dtype=float)
    best = np.maximum.accumulate(values)
    label = f"best {aggregate} so far: {best[-1]:.5g}"
    # A little beyond the last trial, so that a single one has a line as well.
    places = [*(trial.number for trial in complete), complete[-1].number + 0.5]
    steps = [*best, best[-1]]
    axes.plot(places, steps, color=BEST, lw=2.4, drawstyle="steps-post", label=label, zorder=2)


def _draw_failures(axes: Axes, trials: Sequence[FrozenTrial]) -> None:
    """A cross on the lower edge for each trial that failed."""
    failed = [trial.number for trial in trials if trial.state == TrialState.FAIL]
    if failed:
        axes.plot(
            failed,
            np.zeros(len(failed)),
            "x",
            ms=8,
            mew=2,
            color=TRIAL,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
            label="failed trial",
            zorder=5,
        )


if __name__ == "__main__":
    sys.exit(main())
