"""Studies on two real nodes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from distributed import Client

import trainables
from dask_mohpo import open_cluster, run_study, seed_results
from dask_mohpo.cli import main
from dask_mohpo.errors import ClusterError
from dask_mohpo.jobs import JobKeeper
from dask_mohpo.progress import describe
from dask_mohpo.records import SeedResult
from dask_mohpo.tally import Snapshot
from queue_tools import squeue, wait_for
from trainables import read_log

SPACE = {"x": {"low": 0.0, "high": 1.0}}


@pytest.fixture
def call(queue: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a study of 4 trials × 4 seeds of half a second."""
    return {
        "env_id": trainables.ENV_ID,
        "search_space": SPACE,
        "train_hyperparams": {"log": str(queue / "log"), "seconds": 0.5},
        "n_trials": 4,
        "num_seeds": 4,
        "seed": 0,
        "cluster": spec,
        "progress": False,
        "study_name": "study",
        "run_dir": queue / "runs",
    }


def assert_complete(results: list[SeedResult]) -> None:
    assert [(r.trial, r.seed) for r in results] == list(itertools.product(range(4), range(4)))
    assert {r.state for r in results} == {"finished"}


def assert_queue_empties() -> None:
    """Nobody but the driver ends jobs; they take a moment to end."""
    wait_for(lambda: squeue() == [], "empty queue", timeout=10)


def test_every_seed_has_a_device_of_its_own_on_two_nodes(
    call: dict[str, Any], spec: dict[str, Any]
) -> None:
    spec["cores"] = 16  # all of a node: the two jobs go to two nodes

    results = seed_results(run_study(trainables.slow, **call))

    assert_complete(results)
    assert {r.host for r in results} == {"n1", "n2"}
    owners = {(r.host, r.gpu) for r in results}
    assert len(owners) == 4
    assert {gpu for _, gpu in owners} <= {"0", "1", "2", "3"}
    for owner in owners:
        mine = sorted((r for r in results if (r.host, r.gpu) == owner), key=lambda r: r.started)
        assert all(a.ended <= b.started for a, b in itertools.pairwise(mine))
    assert_queue_empties()


def test_four_workers_of_one_job_own_four_gpus(call: dict[str, Any], spec: dict[str, Any]) -> None:
    spec.update(gpus=4, cores=4, scale={"gpus": 4})

    results = seed_results(run_study(trainables.slow, **call))

    assert_complete(results)
    assert {r.gpu for r in results} == {"0", "1", "2", "3"}
    assert len({r.worker for r in results}) == 4
    assert {r.threads for r in results} == {1}


def test_the_environment_of_the_workers(
    spec: dict[str, Any], queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "1")  # sbatch hands the driver's environment on
    spec.update(gpus=2, cores=6, scale={"jobs": 1})
    with open_cluster(spec) as cluster, Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
        some = [
            client.submit(trainables.look_around, 0.5, resources={"GPU": 1}, pure=False)
            for _ in range(2)
        ]
        found = client.gather(some)
    assert {one["OMP_NUM_THREADS"] for one in found} == {"3"}
    assert {one["MKL_NUM_THREADS"] for one in found} == {"3"}
    assert {one["OPENBLAS_NUM_THREADS"] for one in found} == {"3"}
    assert len({one["CUDA_VISIBLE_DEVICES"] for one in found}) == 2
    assert not any(one["daemon"] for one in found)  # training code may start processes


def test_workers_share_a_gpu_where_told_to(call: dict[str, Any], spec: dict[str, Any]) -> None:
    spec.update(gpus=1, workers_per_gpu=4, cores=4, scale={"workers": 4})

    results = seed_results(run_study(trainables.slow, **call))

    assert_complete(results)
    assert len({r.gpu for r in results}) == 1
    assert len({r.worker for r in results}) == 4


def test_a_cancelled_job_is_replaced(
    call: dict[str, Any], queue: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call["train_hyperparams"]["seconds"] = 2.5

    def cancel_one() -> None:
        wait_for(lambda: len(read_log(queue / "log", "start")) >= 4, "running seeds", timeout=60)
        subprocess.run(["scancel", min(squeue(), key=int)], check=True)

    thread = Thread(target=cancel_one)
    thread.start()
    results = seed_results(run_study(trainables.slow, **call))
    thread.join()

    assert_complete(results)
    assert "another takes its place" in caplog.text
    ended = Counter((line["trial"], line["seed"]) for line in read_log(queue / "log", "end"))
    assert set(ended.values()) == {1}  # no finished seed was trained again
    logs = (queue / "dask-mohpo-logs").glob("*.err")
    assert len({log.stem for log in logs}) == 3  # two jobs and the new one
    assert_queue_empties()


def test_a_refused_job_is_an_error_in_slurms_own_words(
    call: dict[str, Any], spec: dict[str, Any]
) -> None:
    spec["queue"] = "no-such-partition"
    began = time.monotonic()

    with pytest.raises(ClusterError) as raised:
        run_study(trainables.slow, **call)

    assert time.monotonic() - began < 30
    assert "invalid partition specified: no-such-partition" in str(raised.value)
    assert "#SBATCH -p no-such-partition" in str(raised.value)
    assert_queue_empties()


def test_jobs_that_die_at_once_are_an_error_with_their_log(
    call: dict[str, Any], spec: dict[str, Any]
) -> None:
    spec["python"] = "/no/such/python"

    with pytest.raises(ClusterError) as raised:
        run_study(trainables.slow, **call)

    assert "3 jobs in a row ended" in str(raised.value)
    assert "/no/such/python: No such file or directory" in str(raised.value)
    assert_queue_empties()


def test_jobs_come_with_the_work_and_go_with_it(
    call: dict[str, Any], spec: dict[str, Any], queue: Path
) -> None:
    del spec["scale"]
    spec["adapt"] = {"minimum_jobs": 0, "maximum_jobs": 2}
    seen = set()
    with open_cluster(spec) as cluster:
        time.sleep(1.5)
        assert squeue() == []

        def note(*_: Any) -> None:
            seen.add(len(squeue()))

        results = seed_results(
            run_study(trainables.slow, **{**call, "cluster": cluster, "callbacks": [note]})
        )
        assert_complete(results)
        assert max(seen) == 2
        assert_queue_empties()
    assert len(read_log(queue / "log", "start")) == 16  # no job ended under a seed


def test_waiting_jobs_are_shown_and_are_no_failure(
    call: dict[str, Any], spec: dict[str, Any]
) -> None:
    spec.update(gpus=4, cores=4, scale={"jobs": 3})  # two nodes: the third must wait
    texts: set[str] = set()
    original = JobKeeper.waiting_text

    def note(self: JobKeeper) -> str:
        texts.add(original(self))
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobKeeper, "waiting_text", note)
        results = seed_results(run_study(trainables.slow, **call))

    assert_complete(results)
    assert "waiting for workers: 1 job pending (Resources)" in texts


def test_the_progress_line_says_why_nothing_goes_on() -> None:
    now = Snapshot(
        n_trials=4, done=0, running=0, failed=0, seeds_done=0, seeds_total=16, best=None,
        busy=0, slots=0, seconds_left=None, note="waiting for workers: 3 jobs pending (Resources)",
    )  # fmt: skip
    assert "waiting for workers: 3 jobs pending (Resources)" in describe(now)


def test_tls_keeps_strangers_out(call: dict[str, Any], spec: dict[str, Any], queue: Path) -> None:
    spec["security"] = True
    with open_cluster(spec) as cluster:
        address = cluster.scheduler_address
        assert address.startswith("tls://")
        with pytest.raises((OSError, TypeError)):
            Client(address, timeout=5)
        with pytest.raises(OSError):
            Client(address.replace("tls://", "tcp://"), timeout=5)
        secrets = list((queue / "dask-mohpo-logs").glob(".dask-jobqueue.worker.*"))
        assert len(secrets) == 3  # the authority's and the worker's certificate, and a key
        assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}
        assert_complete(seed_results(run_study(trainables.slow, **{**call, "cluster": cluster})))
    assert not any(file.exists() for file in secrets)
    assert_queue_empties()


def write_yaml(path: Path, spec: dict[str, Any]) -> str:
    import yaml

    path.write_text(yaml.safe_dump(spec))
    return str(path)


def arguments(call: dict[str, Any], spec_file: str, queue: Path) -> list[str]:
    space = queue / "space.yaml"
    space.write_text("x: {low: 0.0, high: 1.0}\n")
    fixed = call["train_hyperparams"]
    return [
        *("run", "--algo", "trainables:slow", "--env-id", trainables.ENV_ID),
        *("--n-trials", "4", "--num-seeds", "4", "--seed", "0", "--study-name", "study"),
        *("--run-dir", str(queue / "runs"), "--config-name", str(space)),
        *("--train-hyperparams", f"log:{fixed['log']}", f"seconds:{fixed['seconds']}"),
        *("--cluster", spec_file),
    ]


def test_the_queue_is_empty_after_an_interrupt_of_the_command(
    call: dict[str, Any], spec: dict[str, Any], queue: Path
) -> None:
    call["train_hyperparams"]["seconds"] = 3
    command = [
        sys.executable,
        "-m",
        "dask_mohpo",
        *arguments(call, write_yaml(queue / "c.yaml", spec), queue),
    ]
    with subprocess.Popen(command, cwd=queue, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: bool(read_log(queue / "log", "start")), "running seeds", timeout=60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "run the same" in errors
    # the dashboard listens on the loopback; this is how to get there
    assert re.search(
        r"http://127.0.0.1:(\d+)/status \(from elsewhere: ssh -L \1:localhost:\1 ", errors
    )
    assert_queue_empties()


def test_the_queue_is_empty_after_an_error_in_the_driver(call: dict[str, Any]) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a callback of the user's")

    with pytest.raises(RuntimeError, match="a callback of the user's"):
        run_study(trainables.slow, **{**call, "callbacks": [fail]})
    assert_queue_empties()


def test_the_driver_may_be_a_job_itself(
    call: dict[str, Any], spec: dict[str, Any], queue: Path
) -> None:
    spec.update(gpus=1, cores=1)
    words = " ".join(arguments(call, write_yaml(queue / "c.yaml", spec), queue))
    script = queue / "driver.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH -c 1 --mem=500M -o driver.log\n"
        f"exec {sys.executable} -m dask_mohpo {words}\n"
    )
    subprocess.run(["sbatch", str(script)], check=True, cwd=queue, env=dict(os.environ))
    wait_for(lambda: squeue() == [], "end of the driver", timeout=120)
    assert "trials       4 complete" in (queue / "driver.log").read_text()


def test_the_readmes_example(queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"^```(yaml|python)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    [spec] = [text for kind, text in blocks if kind == "yaml" and "kind: slurm" in text]
    [code] = [text for kind, text in blocks if kind == "python" and "my-cluster.yaml" in text]
    # the stand-in cluster has no other network, and two nodes for three such jobs
    (queue / "my-cluster.yaml").write_text(
        f"{spec}interface: lo\ndashboard_address: '127.0.0.1:0'\n"
    )

    def small(*args: Any, **kwargs: Any) -> None:
        kwargs.update(n_trials=2, total_timesteps=200, milestones=1, progress=False)
        kwargs.update(num_eval_weights=2, num_eval_episodes=1)
        results.extend(seed_results(run_study(*args, **kwargs)))

    results: list[SeedResult] = []
    exec(code, {"run_study": small})

    assert [(r.trial, r.seed, r.state) for r in results] == [
        (trial, seed, "finished") for trial in range(2) for seed in range(10, 14)
    ]
    assert {r.host for r in results} == {"n1", "n2"}
    assert_queue_empties()


def test_check_submits_one_job_and_looks_at_each_slot(
    spec: dict[str, Any], queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec.update(gpus=4, cores=4)

    assert main(["check", "--cluster", write_yaml(queue / "c.yaml", spec), "--submit"]) == 0

    out = capsys.readouterr().out
    assert "#SBATCH --gres=gpu:4" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("SLURMCluster-")]
    assert len(rows) == 4
    assert {row[1] for row in rows} <= {"n1", "n2"}
    assert {row[2] for row in rows} == {"0", "1", "2", "3"}
    assert_queue_empties()
