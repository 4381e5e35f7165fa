"""What a study's storage holds: the settings, each trial's configuration, every seed result.

Only the driver opens the storage. Settings are a study attribute, the rest trial attributes, so
any Optuna storage will do.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import optuna
import yaml
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from dask_mohpo.errors import ResumeError, StudyNotFoundError, UsageError
from dask_mohpo.journal import GroupingJournalStorage
from dask_mohpo.records import SeedResult
from dask_mohpo.space import incompatible

__all__ = [
    "DEFAULT",
    "Settings",
    "Usage",
    "attempts",
    "count_states",
    "load_study",
    "open_storage",
    "open_study",
    "read_settings",
    "record_config",
    "record_result",
    "record_usage",
    "seed_results",
    "stored_config",
    "together",
    "trial_results",
    "usage",
]

logger = logging.getLogger(__name__)

SETTINGS = "mohpo:settings"
CONFIG = "mohpo:config"
SEED = "mohpo:seed:"
USAGE = "mohpo:usage:"
DEFAULT = "mohpo:default"
"""Marks the trial with the algorithm's default configuration."""
JOURNAL = "journal.log"
STUDY_FILE = "study.yaml"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What must not change while a study goes on, or its trials could not be compared."""

    algo: str
    env_id: str
    ref_point: tuple[float, ...]
    eval_gamma: float
    objectives: str
    aggregate: str
    failed_seeds: str
    seeds: tuple[int, ...]
    total_timesteps: int
    num_eval_weights: int
    num_eval_episodes: int
    train_hyperparams: Mapping[str, Any]
    search_space: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data.update(ref_point=list(self.ref_point), seeds=list(self.seeds))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        values = dict(data)
        values.update(ref_point=tuple(data["ref_point"]), seeds=tuple(data["seeds"]))
        return cls(**values)

    def differences(self, given: Settings) -> dict[str, tuple[object, object]]:
        """Setting → (this one's, the given one's), where trials could not be compared."""
        old, new = self.to_json(), given.to_json()
        found: dict[str, tuple[object, object]] = {
            name: (old[name], new[name])
            for name in old
            if name != "search_space" and old[name] != new[name]
        }
        spaces = incompatible(dict(self.search_space), dict(given.search_space))
        found.update({f"search_space: {name}": pair for name, pair in spaces.items()})
        return found


def open_storage(storage: str | BaseStorage | None, folder: Path) -> BaseStorage:
    """The storage of a study.

    Parameters
    ----------
    storage : None for a journal file in the study's folder; ``journal:PATH``; a database URL as
        Optuna takes it (``sqlite:///…``, ``postgresql://…``); or an Optuna storage.
    folder : the study's folder; made if need be.

    Raises
    ------
    UsageError
        A storage that cannot be opened.
    """
    if isinstance(storage, BaseStorage):
        return storage
    if storage is None:
        storage = f"journal:{folder / JOURNAL}"
    if not isinstance(storage, str) or ":" not in storage:
        raise UsageError(
            f"storage = {storage!r} is not valid; give 'journal:PATH', a database URL such as "
            "'sqlite:///study.db' or 'postgresql://user@host/db', or an Optuna storage."
        )
    if storage.startswith("journal:"):
        return _open_journal(Path(storage.removeprefix("journal:")))
    try:
        return optuna.storages.get_storage(storage)
    except Exception as error:  # each database driver has errors of its own
        raise UsageError(
            f"storage {_without_password(storage)!r} cannot be opened: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _open_journal(path: Path) -> GroupingJournalStorage:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_journal(path)
        return GroupingJournalStorage(path)
    except OSError as error:
        raise UsageError(f"storage 'journal:{path}' cannot be opened: {error}") from error


def _mend_journal(path: Path) -> None:
    """Cut off a last line that a killed driver wrote only in part."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            logger.warning(
                "%s: the last line was written only in part (%d bytes) and is cut off",
                path,
                size - end,
            )
            file.truncate(end)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}@{host}"))


def open_study(
    study_name: str,
    folder: Path,
    storage: str | BaseStorage | None,
    settings: Settings,
    sampler: optuna.samplers.BaseSampler | None,
) -> tuple[optuna.Study, bool]:
    """Create the study, or open it where it exists.

    Returns
    -------
    The study, and whether it existed.

    Raises
    ------
    ResumeError
        It exists with other settings.
    """
    opened = open_storage(storage, folder)
    existed = study_name in optuna.get_all_study_names(opened)
    study = optuna.create_study(
        storage=opened,
        study_name=study_name,
        direction="maximize",
        load_if_exists=True,
        sampler=sampler,
    )
    stored = study.user_attrs.get(SETTINGS)
    if stored is not None:
        differences = Settings.from_json(stored).differences(settings)
        if differences:
            raise ResumeError(study_name, differences)
    elif study.get_trials(deepcopy=False):
        raise UsageError(
            f"study {study_name!r} in this storage was not made by dask_mohpo; "
            "give another study_name."
        )
    study.set_user_attr(SETTINGS, settings.to_json())
    _write_study_file(folder, study_name, storage, settings)
    return study, existed


def _write_study_file(
    folder: Path, study_name: str, storage: str | BaseStorage | None, settings: Settings
) -> None:
    """`study.yaml`: what the study is and where its storage lies, for people and for the CLI."""
    if isinstance(storage, BaseStorage):
        where: str | None = f"an Optuna {type(storage).__name__}, given in Python"
    else:
        where = None if storage is None else _without_password(storage)
    text = yaml.safe_dump(
        {"study_name": study_name, "storage": where, **settings.to_json()}, sort_keys=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{STUDY_FILE}.{os.getpid()}"
    part.write_text(text)
    os.replace(part, folder / STUDY_FILE)


def load_study(
    study_name: str, run_dir: str | Path = "runs", storage: str | BaseStorage | None = None
) -> optuna.Study:
    """Open an existing study to read it.

    Raises
    ------
    StudyNotFoundError
        There is none of that name.
    UsageError
        Its storage cannot be opened.
    """
    folder = Path(run_dir) / study_name
    if storage is None:
        file = folder / STUDY_FILE
        if not file.exists():
            found = [f.parent.name for f in Path(run_dir).glob(f"*/{STUDY_FILE}")]
            raise StudyNotFoundError(study_name, str(run_dir), found)
        where: str | None = yaml.safe_load(file.read_text())["storage"]
        if where is not None and where.startswith("an Optuna "):
            raise UsageError(
                f"study {study_name!r} lies in {where}: load it there with optuna.load_study."
            )
        storage = where
    opened = open_storage(storage, folder)
    names = optuna.get_all_study_names(opened)
    if study_name not in names:
        raise StudyNotFoundError(study_name, str(run_dir), names)
    return optuna.load_study(study_name=study_name, storage=opened)


def read_settings(study: optuna.Study) -> Settings:
    """The settings stored with a study.

    Raises
    ------
    UsageError
        The study was not made by this library.
    """
    stored = study.user_attrs.get(SETTINGS)
    if stored is None:
        raise UsageError(f"study {study.study_name!r} was not made by dask_mohpo.")
    return Settings.from_json(stored)


def together(study: optuna.Study) -> contextlib.AbstractContextManager[None]:
    """What is stored in this block reaches the disk at its end, in one piece where that is quicker.

    So it does for a study that `open_study` or `load_study` opened with a journal. No trial may be
    created in it.
    """
    storage = study._storage
    if isinstance(storage, GroupingJournalStorage):
        return storage.together()
    return contextlib.nullcontext()


def record_config(trial: optuna.Trial, config: Mapping[str, Any]) -> None:
    """Store the whole configuration that a trial trains, fixed values included."""
    trial.set_user_attr(CONFIG, dict(config))


def stored_config(trial: FrozenTrial) -> dict[str, Any] | None:
    """The configuration that a trial trains; None where the driver died before it was stored."""
    config = trial.user_attrs.get(CONFIG)
    return None if config is None else dict(config)


def record_result(trial: optuna.Trial, result: SeedResult) -> None:
    """Store what one try of one seed gave."""
    trial.set_user_attr(f"{SEED}{result.seed}:{result.attempt}", result.to_json())


def attempts(trial: FrozenTrial) -> list[SeedResult]:
    """The results of all tries of all seeds of a trial."""
    return [
        SeedResult.from_json(data)
        for name, data in trial.user_attrs.items()
        if name.startswith(SEED)
    ]


def trial_results(trial: FrozenTrial) -> list[SeedResult]:
    """The results of a trial: of each seed the finished one, else its last failure; by seed."""
    last: dict[int, SeedResult] = {}
    for result in attempts(trial):
        other = last.get(result.seed)
        if other is None or _rank(result) > _rank(other):
            last[result.seed] = result
    return [last[seed] for seed in sorted(last)]


def _rank(result: SeedResult) -> tuple[bool, int]:
    return result.state == "finished", result.attempt


def seed_results(study: optuna.Study) -> list[SeedResult]:
    """All seed results of a study, one for each trained seed of each trial.

    Parameters
    ----------
    study : what `run_study` returned, or any study of this library loaded with Optuna.

    Returns
    -------
    Ordered by trial and seed. A seed that was tried more than once appears once: with its
    finished result, or with its last failure where no try finished.
    """
    return [result for trial in study.get_trials(deepcopy=False) for result in trial_results(trial)]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the cluster spent on a study, in seconds."""

    slot_seconds: float
    """∫ slots dt while a driver ran."""
    stopped_seconds: float
    """Training of seeds that were asked to stop, and so left no result."""
    elapsed_seconds: float
    """While a driver ran."""


def record_usage(study: optuna.Study, session: str, usage: Usage) -> None:
    """Store what one run of the driver, so far, had and spent."""
    study.set_user_attr(f"{USAGE}{session}", asdict(usage))


def usage(study: optuna.Study) -> Usage:
    """That of all runs of the driver, added up."""
    runs = [v for k, v in study.user_attrs.items() if k.startswith(USAGE)]
    return Usage(**{f.name: sum(run[f.name] for run in runs) for f in fields(Usage)})


def count_states(study: optuna.Study) -> dict[str, int]:
    """How many trials are in each of Optuna's states, in lower case."""
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    return {state.name.lower(): states.count(state) for state in TrialState}
