"""Drivers that are killed or interrupted, as real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from optuna.trial import TrialState

from dask_mohpo import seed_results
from dask_mohpo.ledger import load_study
from trainables import read_log

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).parent / "driver.py"


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    """Drivers that a test started; whatever is left of them ends with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for driver in started:
        driver.kill()
        driver.wait()
        assert driver.stderr is not None
        driver.stderr.close()


def start(
    drivers: list[subprocess.Popen[str]], folder: Path, seconds: float
) -> subprocess.Popen[str]:
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), str(folder), str(seconds)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=DRIVER.parent,
    )
    drivers.append(driver)
    return driver


def wait_for_starts(folder: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(read_log(folder / "log", "start")) < number:
        assert time.monotonic() < deadline, "the seeds do not start"
        time.sleep(0.02)


def wait_until_gone(pids: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "worker processes are left"
        time.sleep(0.1)


def count_starts(folder: Path) -> Counter[tuple[int, int]]:
    return Counter((line["trial"], line["seed"]) for line in read_log(folder / "log", "start"))


def test_kill_9_of_the_driver(drivers: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    killed = start(drivers, tmp_path, 1.0)
    wait_for_starts(tmp_path, 6)
    killed.kill()
    killed.wait()
    pids = {line["pid"] for line in read_log(tmp_path / "log", "start")}
    wait_until_gone(pids, 10)

    stored = {(r.trial, r.seed) for r in seed_results(load_study("study", tmp_path))}
    assert len(stored) >= 3
    again = start(drivers, tmp_path, 1.0)
    assert again.wait(60) == 0

    study = load_study("study", tmp_path)
    assert [t.number for t in study.trials] == [0, 1, 2, 3]
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 4
    finished = [(r.trial, r.seed) for r in seed_results(study) if r.state == "finished"]
    assert finished == [(t, s) for t in range(4) for s in range(3)]
    starts = count_starts(tmp_path)
    assert {starts[seed] for seed in stored} == {1}, "a finished seed was trained again"
    assert max(starts.values()) == 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_at_milestones(
    drivers: list[subprocess.Popen[str]], tmp_path: Path, signum: signal.Signals
) -> None:
    driver = start(drivers, tmp_path, 4.0)
    wait_for_starts(tmp_path, 2)
    began = time.monotonic()
    driver.send_signal(signum)
    assert driver.wait(30) != 0
    assert time.monotonic() - began < 4.0, "the running seeds were waited for to their end"
    assert driver.stderr is not None
    told = driver.stderr.read()
    assert "run the same call again to go on" in told
    assert "KeyboardInterrupt: study study was interrupted" in told
    assert not read_log(tmp_path / "log", "end")
    states = [t.state for t in load_study("study", tmp_path).trials]
    assert set(states) == {TrialState.RUNNING}


def test_a_second_interrupt_stops_at_once(
    drivers: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    driver = start(drivers, tmp_path, 300.0)  # a milestone every 30 s
    wait_for_starts(tmp_path, 2)
    pids = {line["pid"] for line in read_log(tmp_path / "log", "start")}
    driver.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert driver.poll() is None, "the first interrupt waits for the next milestone"
    driver.send_signal(signal.SIGINT)
    assert driver.wait(20) != 0
    wait_until_gone(pids, 5)


def test_kill_9_of_a_worker(drivers: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    driver = start(drivers, tmp_path, 1.0)
    wait_for_starts(tmp_path, 3)
    running = read_log(tmp_path / "log", "start")[-1]
    psutil.Process(running["pid"]).kill()
    assert driver.wait(60) == 0

    study = load_study("study", tmp_path)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 4
    assert len([r for r in seed_results(study) if r.state == "finished"]) == 12
    starts = count_starts(tmp_path)
    assert starts.pop((running["trial"], running["seed"])) == 2
    assert set(starts.values()) == {1}
