"""The `dask-mohpo` command: run, status, best, report, check."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dask_mohpo.errors import MohpoError, UnknownNameError, UsageError

__all__ = ["main"]

LIST_TAG = "tag:yaml.org,2002:seq"
DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

RUN_EXAMPLE = """\
example:
  dask-mohpo run --algo envelope --env-id minecart-v0 --n-trials 50 --num-seeds 3 \\
      --num-workers 4 --devices cuda:0 cuda:1 --train-hyperparams num_sample_w:4 per:true

The same command again goes on with the study. A study file holds the same keys:
  algo: envelope
  env_id: minecart-v0
  n_trials: 50
  train_hyperparams: {num_sample_w: 4}
"""
READ_EXAMPLE = """\
example:
  dask-mohpo {command} envelope-minecart-v0 --run-dir runs
"""
BEST_EXAMPLE = """\
example:
  dask-mohpo best envelope-minecart-v0 --format yaml > best.yaml
  dask-mohpo run --algo envelope --env-id minecart-v0 --train-hyperparams best.yaml \\
      --study-name best-of-minecart --n-trials 1 --num-seeds 10
"""
CHECK_EXAMPLE = """\
example:
  dask-mohpo check --cluster slurm-4gpu
  dask-mohpo check --cluster my-cluster.yaml --submit
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : arguments without the program's name; None: those of this process.

    Returns
    -------
    0 done, 1 a study or cluster that failed, 2 wrong usage, 130 interrupted.
    """
    args = _parser().parse_args(argv)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # modules of the user's, as with `python -m`
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        code = command(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"dask-mohpo: {error}", file=sys.stderr)
        return USAGE
    except MohpoError as error:
        print(f"dask-mohpo: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        # Python flushes what is left as it ends: to nowhere, or it would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dask-mohpo",
        description="Hyperparameter search for multi-objective RL on Dask clusters.",
        epilog=RUN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_check(commands)
    for name, command, text in (
        ("status", _status, "where a study stands"),
        ("best", _best, "the best configuration of a study"),
        ("report", _report, "outcome and table of trials of a study"),
    ):
        example = BEST_EXAMPLE if name == "best" else READ_EXAMPLE.format(command=name)
        sub = commands.add_parser(
            name,
            help=text,
            description=f"Print {text}.",
            epilog=example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("study_name", metavar="STUDY", help="the study's name")
        sub.add_argument("--run-dir", default="runs", help="where studies lie (default: runs)")
        sub.add_argument("--storage", help="only for a storage that needs a password")
        if name == "best":
            sub.add_argument("--format", choices=["text", "yaml"], default="text")
        sub.set_defaults(command=command)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run or continue a study",
        description="Run a study, or continue it where it exists.",
        epilog=RUN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # As Python 3.14 does: -5e1 is a number and not an option.
    run._negative_number_matcher = re.compile(r"-\.?\d")
    # No defaults here: what is not given comes from the study file or from run_study.
    option = run.add_argument
    option("--study", metavar="FILE.yaml", help="a file with the same keys; flags win over it")
    option("--algo", help="envelope, pcn, or package.module:function")
    option("--env-id", help="a MO-Gymnasium id, or module:Id")
    option("--ref-point", type=float, nargs="+", help="one number per objective")
    option("--n-trials", "--sweep-count", type=int, help="trials in all (default: 100)")
    option("--num-seeds", type=int, help="seeds per trial (default: 3)")
    option("--seed", type=int, help="the first seed (default: 10)")
    option(
        "--seeds-per-task",
        type=lambda text: int(text) if text.isdigit() else text,
        help="seeds of a trial that train as one batch in one slot, or auto (default: 1)",
    )
    option("--trials-per-task", type=int, help="trials that may share such a batch (default: 1)")
    option("--total-timesteps", type=int, help="steps per seed (default: 50000)")
    option("--num-workers", type=int, help="worker processes on this machine")
    option("--devices", nargs="+", help="their torch devices, such as cuda:0 cuda:1")
    option(
        "--train-hyperparams",
        nargs="+",
        metavar="NAME:VALUE",
        help="fixed hyperparameters, or a YAML file of them",
    )
    option("--config-name", metavar="SPACE", help="search space: a YAML file, or its name")
    option("--study-name", help="default: ALGO-ENV_ID")
    option("--storage", help="journal:PATH or a database URL (default: a journal in the run dir)")
    option("--run-dir", help="where studies lie (default: runs)")
    option("--timeout", type=float, help="seconds after which no more seeds start")
    option(
        "--cluster",
        metavar="SPEC",
        help="a YAML file, a shipped spec such as slurm-4gpu, or a scheduler's address",
    )
    option("--no-progress", dest="progress", action="store_false", default=None)
    run.set_defaults(command=_run)


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="what a cluster spec would submit, and whether its workers are right",
        description="Print the slots of a cluster spec, its warnings and its job script.",
        epilog=CHECK_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("--cluster", metavar="SPEC", required=True, help="as for run")
    check.add_argument(
        "--submit", action="store_true", help="start one job, look at each slot, and leave"
    )
    check.add_argument(
        "--timeout", type=float, default=300.0, help="seconds to wait for workers (default: 300)"
    )
    check.set_defaults(command=_check)


def _check(args: argparse.Namespace) -> int:
    from dask_mohpo.check import describe_spec, probe
    from dask_mohpo.specs import read_spec

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    spec = read_spec(args.cluster)
    print(describe_spec(spec), flush=True)
    if not args.submit:
        return DONE
    table, faults = probe(spec, args.timeout)
    print(f"\n{table}")
    for fault in faults:
        print(f"dask-mohpo: {fault}", file=sys.stderr)
    return FAILED if faults else DONE


def _run(args: argparse.Namespace) -> int:
    import optuna
    from tqdm.contrib.logging import logging_redirect_tqdm

    from dask_mohpo import run_study
    from dask_mohpo.report import status_text, summary_text

    given = {k: v for k, v in vars(args).items() if v is not None}
    del given["command"]
    keys = _study_file(given.pop("study")) if "study" in given else {}
    if "train_hyperparams" in given:
        fixed = keys.get("train_hyperparams") or {}
        if isinstance(fixed, dict):  # else run_study says what is wrong with it
            given["train_hyperparams"] = {**fixed, **_hyperparams(given["train_hyperparams"])}
    keys.update(given)
    if "config_name" in keys:
        keys["search_space"] = _space_file(keys.pop("config_name"))
    for name in ("algo", "env_id"):
        if name not in keys:
            raise UsageError(f"--{name.replace('_', '-')} is needed (or {name} in --study).")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dask_mohpo").setLevel(logging.INFO)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with logging_redirect_tqdm():
        study = run_study(keys.pop("algo"), keys.pop("env_id"), **keys)
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    if optuna.trial.TrialState.COMPLETE not in states:
        print(f"dask-mohpo: no trial completed\n{status_text(study)}", file=sys.stderr)
        return FAILED
    print(summary_text(study, str(Path(keys.get("run_dir", "runs")) / study.study_name)))
    return DONE


def _study_file(path: str) -> dict[str, Any]:
    """The keys of a study file, checked against the arguments of run_study."""
    import inspect

    from dask_mohpo import run_study

    data = _read_mapping(path)
    keys = {str(k).replace("-", "_"): v for k, v in data.items()}
    if "sweep_count" in keys:
        keys["n_trials"] = keys.pop("sweep_count")
    valid = [*inspect.signature(run_study).parameters, "config_name"]
    for name in keys:
        if name not in valid:
            raise UnknownNameError(f"key in {path}", name, valid)
    if isinstance(keys.get("train_hyperparams"), str | list):
        keys["train_hyperparams"] = _hyperparams(keys["train_hyperparams"])
    return keys


def _read_mapping(path: str, hint: str = "") -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.{hint}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a mapping of names to values, not {data!r}.")
    return {str(name): _with_numbers(value) for name, value in data.items()}


def _with_numbers(value: Any) -> Any:
    """What YAML read, with the likes of ``1e-4``, which it takes for text, as numbers."""
    from dask_mohpo._wandb_sweep import text_to_number

    if isinstance(value, dict):
        return {name: _with_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry) for entry in value]
    return text_to_number(value)


def _hyperparams(given: str | Sequence[str]) -> dict[str, Any]:
    """``name:value`` with the value read as YAML, never evaluated; or files of such."""
    import yaml

    usage = "give NAME:VALUE such as learning_rate:3e-4 or net_arch:[64,64], or a YAML file."
    values: dict[str, Any] = {}
    for item in [given] if isinstance(given, str) else given:
        name, colon, text = str(item).partition(":")
        if not colon:
            values.update(_read_mapping(name, hint=f" For train_hyperparams {usage}"))
            continue
        try:
            values[name] = _with_numbers(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise UsageError(f"train_hyperparams {item!r} is not valid; {usage}") from error
    return values


def _space_file(name: str) -> str:
    """A search-space file by its path, or by its name here or in ./configs."""
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    candidates = [*dict.fromkeys([Path(name), Path(file)]), Path("configs") / file]
    for path in candidates:
        if path.is_file():
            return str(path)
    tried = ", ".join(map(str, candidates))
    raise UsageError(f"--config-name {name!r}: no such file; tried {tried}.")


def _load(args: argparse.Namespace) -> Any:
    import optuna

    from dask_mohpo.ledger import load_study

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return load_study(args.study_name, args.run_dir, args.storage)


def _status(args: argparse.Namespace) -> int:
    from dask_mohpo.report import status_text

    print(status_text(_load(args)))
    return DONE


def _best(args: argparse.Namespace) -> int:
    from dask_mohpo.ledger import stored_config
    from dask_mohpo.report import best_text, best_trial

    study = _load(args)
    if args.format == "text":
        print(best_text(study))
    else:
        print(_yaml(stored_config(best_trial(study)) or {}), end="")
    return DONE


def _yaml(config: dict[str, Any]) -> str:
    """A line per name; lists in brackets, as people write them."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(
        list, lambda dumper, value: dumper.represent_sequence(LIST_TAG, value, flow_style=True)
    )
    return yaml.dump(config, Dumper=Dumper, default_flow_style=False, width=float("inf"))


def _report(args: argparse.Namespace) -> int:
    from dask_mohpo.report import summary_text, trials_text

    study = _load(args)
    print(summary_text(study, str(Path(args.run_dir) / args.study_name)))
    print()
    print(trials_text(study, width=shutil.get_terminal_size((100, 24)).columns))
    return DONE
