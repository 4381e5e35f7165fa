"""A real Slurm on this machine: two nodes with four stand-in GPUs each, in a private folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dask_mohpo import jobs
from queue_tools import sinfo, squeue, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
REQUIRED = os.environ.get("DASK_MOHPO_REQUIRE_SLURM") == "1"
NODES = ("n1", "n2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(240))


def free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def slurm_conf(folder: Path) -> str:
    host = socket.gethostname()
    control, *ports = free_ports(1 + len(NODES))
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={control}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket",
        "CredType=cred/munge",
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "GresTypes=gpu",
        "AccountingStorageType=accounting_storage/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "JobRequeue=0",
        "KillWait=2",
        "SchedulerParameters=sched_min_interval=10000,batch_sched_delay=0",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 "
            "RealMemory=64000 Gres=gpu:4"
            for node, port in zip(NODES, ports, strict=True)
        ),
        f"PartitionName=main Default=YES Nodes={','.join(NODES)} MaxTime=INFINITE State=UP",
        f"PartitionName=gpu Nodes={','.join(NODES)} MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def slurm() -> Iterator[Path]:
    """Its folder; SLURM_CONF is set for this process and what it starts."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    reason = f"Slurm is not installed here: no {', '.join(missing)}"
    if os.geteuid() != 0:
        missing, reason = ["root"], "only root can start slurmd"
    if missing:
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    # Not pytest's own folder: its path is too long for a socket.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    conf = folder / "slurm.conf"
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    conf.write_text(slurm_conf(folder))
    devices = "\n".join(f"NodeName={node} Name=gpu File=/dev/tty[0-3]" for node in NODES)
    (folder / "gres.conf").write_text(devices + "\n")
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o400)
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munge.pid",
            f"--seed-file={folder}/munge.seed",
            f"--log-file={folder}/munge.log",
        ],
        ["slurmctld", "-D", "-f", str(conf)],
        *(["slurmd", "-D", "-N", node, "-f", str(conf)] for node in NODES),
    ]
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(conf)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("ab") as out:
                started.append(subprocess.Popen(command, stdout=out, stderr=out))
            if command[0] == "munged":
                wait_for((folder / "munge.socket").exists, "munged's socket")
        wait_for(lambda: set(sinfo().split()) == {*NODES, "idle"}, "idle nodes", folder)
        yield folder
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(20)
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def queue(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty queue, a folder to work in, and a keeper that looks twice a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "LOOK_SECONDS", 0.5)
    # workers import the tests' trainables
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    wait_for(lambda: squeue() == [], "empty queue")
    yield tmp_path
    left = squeue()
    if left:
        subprocess.run(["scancel", *left], check=True)
        wait_for(lambda: squeue() == [], "empty queue")


@pytest.fixture
def spec() -> dict[str, Any]:
    """A job with two stand-in GPUs and two workers, on the loopback."""
    return {
        "kind": "slurm",
        "queue": "main",
        "gpus": 2,
        "cores": 2,
        "memory": "1GB",
        "walltime": "00:10:00",
        "interface": "lo",
        "scale": {"jobs": 2},
        "dashboard_address": "127.0.0.1:0",
        # else the handlers of pytest are set to errors alone: it hangs them at Dask's logger, too
        "silence_logs": False,
    }
