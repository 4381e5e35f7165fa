"""The journal file with several writes put into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from dask_mohpo.journal import GroupingJournalStorage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.log"


def make_study(storage: optuna.storages.BaseStorage) -> optuna.Study:
    return optuna.create_study(storage=storage, study_name="s", load_if_exists=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask(study: optuna.Study, value: float) -> optuna.Trial:
    return configure(study.ask(), value)


def configure(trial: optuna.Trial, value: float) -> optuna.Trial:
    trial.suggest_float("x", value, value + 1)
    trial.set_user_attr("config", {"x": value})
    return trial


def test_a_group_is_written_at_its_end_and_read_before(path: Path) -> None:
    storage = GroupingJournalStorage(path)
    study = make_study(storage)
    trial = study.ask()
    before = len(lines(path))

    with storage.together():
        configure(trial, 1.0)
        assert len(lines(path)) == before
        assert study.trials[0].params == trial.params
        assert study.trials[0].user_attrs == {"config": {"x": 1.0}}

    assert len(lines(path)) == before + 2
    study.tell(trial, 5.0)
    other = make_study(JournalStorage(JournalFileBackend(str(path))))
    assert other.trials == study.trials


def test_many_groups_with_single_writes_between(path: Path) -> None:
    storage = GroupingJournalStorage(path)
    study = make_study(storage)

    for number in range(20):
        trial = study.ask()
        with storage.together():
            configure(trial, number)
        if number % 3:
            trial.set_user_attr("seed", number)
        with storage.together(), storage.together():  # the inner one is part of the outer
            trial.set_user_attr("last", number)
            study.tell(trial, float(number))

    assert [t.value for t in study.trials] == list(range(20))
    again = make_study(GroupingJournalStorage(path))
    assert again.trials == study.trials
    assert [t.user_attrs["last"] for t in again.trials] == list(range(20))


def test_each_group_is_one_write_and_the_file_is_not_read_from_the_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = GroupingJournalStorage(path)
    study = make_study(storage)
    appended: list[int] = []
    read_from: list[tuple[int, bool]] = []
    append, read = JournalFileBackend.append_logs, JournalFileBackend.read_logs

    def noting_append(self: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        appended.append(len(logs))
        append(self, logs)

    def noting_read(self: JournalFileBackend, log_number_from: int) -> Any:
        known = log_number_from in self._log_number_offset
        read_from.append((log_number_from, known))
        return read(self, log_number_from)

    monkeypatch.setattr(JournalFileBackend, "append_logs", noting_append)
    monkeypatch.setattr(JournalFileBackend, "read_logs", noting_read)

    for number in range(5):
        trial = study.ask()
        with storage.together():
            configure(trial, number)
        study.trials  # noqa: B018

    assert appended == [1, 2] * 5
    assert all(known for _, known in read_from)


def test_what_came_before_an_error_is_written(path: Path) -> None:
    storage = GroupingJournalStorage(path)
    study = make_study(storage)

    trial = study.ask()
    with pytest.raises(RuntimeError, match="in the group"), storage.together():
        trial.set_user_attr("written", True)
        raise RuntimeError("in the group")

    [again] = make_study(GroupingJournalStorage(path)).trials
    assert again.user_attrs == {"written": True}
    ask(study, 2.0)
    assert len(make_study(GroupingJournalStorage(path)).trials) == 2


def test_an_empty_group_writes_nothing(path: Path) -> None:
    storage = GroupingJournalStorage(path)
    make_study(storage)
    before = path.read_bytes()

    with storage.together():
        pass

    assert path.read_bytes() == before
    assert not Path(f"{path}.lock").is_symlink()


def test_another_process_writes_during_a_group(path: Path) -> None:
    """It may add trials of its own; both see everything, whatever the order in the file."""
    study = make_study(ours := GroupingJournalStorage(path))
    other = make_study(JournalStorage(JournalFileBackend(str(path))))
    trial = study.ask()

    for number in range(3):
        with ours.together():
            trial.set_user_attr(f"a{number}", number)
            assert not Path(f"{path}.lock").is_symlink()
            theirs = other.ask()
            theirs.set_user_attr("from", "elsewhere")
            trial.set_user_attr(f"b{number}", number)
        assert not Path(f"{path}.lock").is_symlink()
        if number:
            trial.set_user_attr(f"c{number}", number)
    study.tell(trial, 1.0)

    expected = {f"{c}{n}": n for c in "ab" for n in range(3)} | {"c1": 1, "c2": 2}
    for each in (study, other, make_study(GroupingJournalStorage(path))):
        assert [t.user_attrs for t in each.trials] == [expected] + [{"from": "elsewhere"}] * 3
        assert [t.value for t in each.trials] == [1.0, None, None, None]


def test_a_group_that_is_cut_off_by_death_leaves_no_lock(path: Path) -> None:
    storage = GroupingJournalStorage(path)
    trial = make_study(storage).ask()
    group = storage.together()
    group.__enter__()
    trial.suggest_float("x", 0.0, 1.0)  # the process ends here

    assert not Path(f"{path}.lock").is_symlink()
    [again] = make_study(GroupingJournalStorage(path)).trials
    assert again.params == {}
    group.__exit__(None, None, None)


def test_waiting_trials_are_found_without_going_through_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = GroupingJournalStorage(path)
    study = make_study(storage)
    for number in range(10):
        study.tell(ask(study, number), 0.0)
    study.enqueue_trial({"x": 3.5})
    looked_at: list[int] = []
    get_trial = storage.get_trial

    def noting(trial_id: int) -> optuna.trial.FrozenTrial:
        looked_at.append(trial_id)
        return get_trial(trial_id)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "get_trial", noting)
        waiting = storage.get_all_trials(study._study_id, states=(TrialState.WAITING,))
    assert [t.number for t in waiting] == [10]
    assert looked_at == [9, 10]

    enqueued = study.ask()
    assert (enqueued.number, enqueued.suggest_float("x", 0.0, 10.0)) == (10, 3.5)
    assert storage.get_all_trials(study._study_id, states=(TrialState.WAITING,)) == []
    assert len(study.get_trials(states=(TrialState.COMPLETE,))) == 10
    study.enqueue_trial({"x": 4.5})
    study.enqueue_trial({"x": 5.5})
    assert [study.ask().number for _ in range(3)] == [11, 12, 13]
