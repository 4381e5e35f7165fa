"""What the keeper of jobs makes of Slurm's answers; on a real Slurm in tests/slurm."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dask_mohpo.errors import ClusterError
from dask_mohpo.executor import Executor
from dask_mohpo.jobs import JobKeeper, _Known, _parse_squeue, _words
from dask_mohpo.specs import QueueSpec, read_spec


class StandInCluster:
    """Two jobs with ids 1 and 2, and nothing behind them."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {
            f"C-{n}": SimpleNamespace(job_id=str(n + 1)) for n in range(2)
        }
        self.worker_spec: dict[str, Any] = dict.fromkeys(self.workers)
        self.scheduler = SimpleNamespace(workers={})
        self.loop = SimpleNamespace(add_callback=lambda function: function())
        self.scaled: list[int] = []

    def scale(self, jobs: int) -> None:
        self.scaled.append(jobs)

    def job_script(self) -> str:
        return "#!/bin/bash"


def keeper(**changes: Any) -> tuple[JobKeeper, StandInCluster]:
    values = {"kind": "slurm", "gpus": 2, "cores": 2, "memory": "1GB", "walltime": "01:00:00"}
    given = {**values, "scale": {"jobs": 2}, **changes}
    spec = read_spec({k: v for k, v in given.items() if v is not None})
    assert isinstance(spec, QueueSpec)
    cluster = StandInCluster()
    one = JobKeeper(spec)
    one._cluster = cluster
    one._known = {f"C-{n}": _Known(job_id=str(n + 1), had_workers=True) for n in range(2)}
    return one, cluster


def test_squeue_is_read_and_ending_jobs_do_not_count() -> None:
    answer = "12|RUNNING|None\n13|PENDING|Resources\n14|COMPLETING|None\n\n"
    assert _parse_squeue(answer) == {"12": ("RUNNING", "None"), "13": ("PENDING", "Resources")}


def test_waiting_jobs_are_counted_by_reason() -> None:
    one, _ = keeper()
    one._note_states({"1": ("PENDING", "Resources"), "2": ("PENDING", "Priority")})
    assert one.pending == 2
    assert one.waiting_text() == "waiting for workers: 2 jobs pending (Priority, Resources)"
    one._note_states({"1": ("RUNNING", "None"), "2": ("RUNNING", "None")})
    assert one.waiting_text() == ""


def test_a_lost_job_is_let_go_and_replaced_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("dask_mohpo.jobs.time.monotonic", lambda: now[0])
    one, cluster = keeper()
    one._note_states({"2": ("RUNNING", "None")})
    assert list(cluster.worker_spec) == ["C-1"]
    one._scale()
    assert cluster.scaled[-1] == 1  # it waits a second, and for Dask to forget the lost one
    now[0] += 1.5
    one._scale()
    assert cluster.scaled[-1] == 1
    del cluster.workers["C-0"]
    one._scale()
    assert cluster.scaled[-1] == 2


def test_a_job_that_takes_the_name_of_a_lost_one_is_another_job() -> None:
    one, cluster = keeper()
    cluster.workers["C-0"] = SimpleNamespace(job_id="9")
    one._note_workers()
    assert one._known["C-0"].job_id == "9"
    assert not one._known["C-0"].had_workers
    assert one._known["C-1"].had_workers
    cluster.scheduler.workers["tcp://x"] = SimpleNamespace(name="C-0-1")
    one._note_workers()
    assert one._known["C-0"].had_workers


def test_the_pause_doubles_with_each_loss_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_mohpo.jobs.time.monotonic", lambda: 1000.0)
    one, _ = keeper()
    pauses = []
    for _ in range(8):
        one._known["C-0"] = _Known(job_id="1", since=999.0, had_workers=True)
        one._lose("C-0", early=False)
        pauses.append(one._wait_until - 1000.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    one._known["C-0"] = _Known(job_id="1", since=0.0, had_workers=True)  # lived long enough
    one._lose("C-0", early=False)
    assert one._wait_until - 1000.0 == 1


def test_early_deaths_are_fatal_only_where_no_other_job_lives(tmp_path: Any) -> None:
    one, _ = keeper(log_directory=str(tmp_path))
    (tmp_path / "dask-mohpo-7.err").write_text("no such module\n")
    for _ in range(3):
        one._known["C-5"] = _Known(job_id="7")
        one._lose("C-5", early=True)
    one.check()  # C-0 and C-1 do their work
    for known in one._known.values():
        known.had_workers = False
    one._lose("C-5", early=True)
    with pytest.raises(ClusterError, match=r"jobs in a row ended(.|\n)*no such module") as raised:
        one.check()
    assert "#!/bin/bash" in str(raised.value)


def test_there_is_a_limit_to_replacements() -> None:
    one, cluster = keeper()
    cluster.worker_spec.clear()
    one._replaced = 1000
    one._scale()
    with pytest.raises(ClusterError, match="1000 jobs were lost"):
        one.check()


def test_the_first_refusal_is_fatal_and_a_later_one_is_not() -> None:
    one, _ = keeper()
    one.submitted("1")
    one.refused("C-1", "sbatch: error: QOSMaxSubmitJobPerUserLimit", "script")
    one.check()
    other, _ = keeper()
    other.refused("C-0", "sbatch: error: invalid account", "the script")
    with pytest.raises(ClusterError, match=r"invalid account\nThe job script was:\nthe script"):
        other.check()


def test_the_queues_own_words_are_taken_from_dask_jobqueues_error() -> None:
    error = RuntimeError(
        "Command exited with non-zero exit code.\nExit code: 1\nCommand:\nsbatch x.sh\n"
        "stdout:\n\nstderr:\nsbatch: error: invalid partition specified: x\n\n"
    )
    assert _words(error) == "sbatch: error: invalid partition specified: x"
    assert _words(FileNotFoundError(2, "No such file", "sbatch")).startswith("[Errno 2]")


@pytest.mark.parametrize(
    ("seed_tasks", "busy", "wanted", "stay"),
    [
        (9, [], 4, {"C-0", "C-1"}),  # no more than maximum_jobs
        (3, [], 2, {"C-0", "C-1"}),
        (2, ["C-1-0"], 1, {"C-1"}),  # the idle one goes
        (0, ["C-0-1", "C-1-0"], 0, {"C-0", "C-1"}),  # no busy one goes
        (0, [], 0, set()),
    ],
)
def test_jobs_follow_the_work(
    seed_tasks: int, busy: list[str], wanted: int, stay: set[str]
) -> None:
    one, cluster = keeper(scale=None, adapt={"minimum_jobs": 0, "maximum_jobs": 4})
    one.follow_work(seed_tasks, busy)
    assert one.wanted == wanted
    assert set(cluster.worker_spec) == stay
    assert {name for name in ("C-0", "C-1") if one.retires(f"{name}-0")} == {"C-0", "C-1"} - stay


@pytest.mark.parametrize(("seconds", "warned"), [(3000.0, True), (600.0, False)])
def test_a_walltime_near_the_time_of_a_seed_is_warned_of(
    seconds: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = keeper()
    Executor._compare_with_walltime(SimpleNamespace(_keeper=one), seconds)  # type: ignore[arg-type]
    assert ("Ask for a longer walltime" in caplog.text) == warned


def test_a_squeue_that_fails_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, cluster = keeper()
    monkeypatch.setattr("dask_mohpo.jobs._squeue", lambda: ["false"])
    for _ in range(3):
        assert asyncio.run(one._states()) is None
    assert caplog.text.count("squeue fails") == 1
    monkeypatch.setattr("dask_mohpo.jobs._squeue", lambda: ["echo", "1|RUNNING|None"])
    assert asyncio.run(one._states()) == {"1": ("RUNNING", "None")}
    monkeypatch.setattr("dask_mohpo.jobs._squeue", lambda: ["no-such-program"])
    assert asyncio.run(one._states()) is None
    assert caplog.text.count("squeue fails") == 2
    assert list(cluster.worker_spec) == ["C-0", "C-1"]
