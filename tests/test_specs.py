"""Specs of clusters: what is derived, what is refused, and the job scripts that come out."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from dask_mohpo import _queues
from dask_mohpo.check import describe_spec, job_script
from dask_mohpo.cli import main
from dask_mohpo.errors import UnknownNameError, UsageError
from dask_mohpo.specs import ExistingSpec, LocalSpec, QueueSpec, read_spec, shipped_specs

BASE: dict[str, Any] = {
    "kind": "slurm",
    "gpus": 4,
    "cores": 8,
    "memory": "16GB",
    "walltime": "04:00:00",
}
NAMES = {
    "existing", "htcondor", "local", "local-2gpu", "lsf", "oar", "pbs", "sge", "slurm-1gpu-per-job",
    "slurm-4cpu", "slurm-4gpu", "slurm-adaptive", "slurm-multinode", "slurm-shared-gpu",
}  # fmt: skip


def queue(**changes: Any) -> QueueSpec:
    values = {k: v for k, v in {**BASE, **changes}.items() if v is not None}
    spec = read_spec(values)
    assert isinstance(spec, QueueSpec)
    return spec


def script(spec: QueueSpec, tmp_path: Path) -> str:
    return job_script(
        QueueSpec(**{**vars(spec), "options": {**spec.options, "log_directory": str(tmp_path)}})
    )


def test_gpus_make_workers_and_a_directive(tmp_path: Path) -> None:
    spec = queue()
    assert (spec.processes, spec.threads, spec.gpus, spec.jobs) == (4, 2, 4, 1)
    text = script(spec, tmp_path)
    assert "#SBATCH --gres=gpu:4" in text
    assert "#SBATCH --cpus-per-task=8" in text
    assert "--nworkers 4" in text
    # the last flag counts: one thread for each worker, and no limit of Dask's own to its memory
    assert re.findall(r"--nthreads (\d+)", text)[-1] == "1"
    assert re.findall(r"--memory-limit (\S+)", text)[-1] == "0"
    assert "--resources GPU=1" in text
    assert "export OMP_NUM_THREADS=2\nexport MKL_NUM_THREADS=2\n" in text


def test_workers_per_gpu() -> None:
    assert queue(gpus=2, workers_per_gpu=3, cores=6).processes == 6


def test_without_gpus_there_is_a_worker_for_each_cpu(tmp_path: Path) -> None:
    spec = queue(gpus=None, cores=4)
    assert (spec.processes, spec.threads) == (4, 1)
    assert "gres" not in script(spec, tmp_path)
    assert "--resources CPU=1" in script(spec, tmp_path)
    assert queue(gpus=None, cores=8, threads_per_worker=4).processes == 2


@pytest.mark.parametrize(
    ("directive", "gpus"),
    [
        ("--gres=gpu:2", 2),
        ("--gres=gpu:a100:3", 3),
        ("--gres=gpu", 1),
        ("--gres=shard:1,gpu:2", 2),
        ("--gpus=2", 2),
        ("--gpus a100:2", 2),
        ("--gpus-per-node=4", 4),
        ("-G 2", 2),
        ("--constraint=gpu", None),
        ("--comment=gpu:9", None),
    ],
)
def test_the_users_own_directive_for_gpus_counts(
    directive: str, gpus: int | None, tmp_path: Path
) -> None:
    spec = queue(gpus=None, cores=4, job_extra_directives=[directive])
    assert spec.gpus == (gpus or 0)
    assert script(spec, tmp_path).count("gres=") == directive.count("gres=")


def test_scale_by_gpus_and_by_workers() -> None:
    assert queue(scale={"gpus": 12}).jobs == 3
    assert queue(scale={"workers": 8}).jobs == 2
    assert queue(scale={"jobs": 5}).jobs == 5
    rounded = queue(scale={"gpus": 10})
    assert rounded.jobs == 3
    assert "10 gpus make 3 jobs with 12 gpus" in " ".join(rounded.notes)


def test_adapt() -> None:
    spec = queue(adapt={"minimum_jobs": 1, "maximum_jobs": 8})
    assert (spec.jobs, spec.adapt) == (1, (1, 8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "slrum"}, ["unknown kind", "Did you mean 'slurm'"]),
        ({"gpu": 4}, ["unknown key", "'gpu'", "Did you mean 'gpus'"]),
        ({"gpus": "4"}, ["gpus = '4'", "integer"]),
        ({"gpus": 2, "job_extra_directives": ["--gres=gpu:4"]}, ["gpus: 2", "ask for 4"]),
        ({"processes": 3}, ["processes: 3", "4 workers"]),
        ({"gpus": None, "workers_per_gpu": 2}, ["workers_per_gpu needs gpus"]),
        ({"memory": None}, ["memory is needed", "16GB"]),
        ({"memory": "much"}, ["memory = 'much'"]),
        ({"job_extra_directives": ["--mem-per-gpu=8G"]}, ["16GB", "--mem-per-gpu=8G"]),
        ({"walltime": 14400}, ["walltime = 14400", "quotes"]),
        ({"walltime": "soon"}, ["walltime = 'soon'", "HH:MM:SS"]),
        ({"job_script_prologue": "module load cuda"}, ["job_script_prologue", "give a list"]),
        ({"worker_extra_args": ["--resources", "FOO=1"]}, ["leave --resources out"]),
        ({"worker_extra_args": ["--lifetime", "4h"]}, ["--lifetime 4h", "not shorter"]),
        ({"scale": 2}, ["scale = 2", "jobs, workers, gpus"]),
        ({"scale": {"job": 2}}, ["key of scale", "Did you mean 'jobs'"]),
        ({"scale": {"jobs": 0}}, ["scale: jobs = 0", "≥ 1"]),
        ({"scale": {"jobs": 1, "gpus": 4}}, ["one of jobs, workers, gpus"]),
        ({"scale": {"jobs": 1}, "adapt": {"maximum_jobs": 2}}, ["exclude each other"]),
        ({"adapt": {"minimum_jobs": 3, "maximum_jobs": 2}}, ["maximum_jobs: 2", "minimum_jobs: 3"]),
        ({"security": "yes"}, ["security = 'yes'", "ca_file, cert, key"]),
        ({"security": {"ca_file": "a", "cert": "b", "key": "c"}}, ["there is no file"]),
        ({"devices": ["gpu0"]}, ["unknown device 'gpu0'"]),
        ({"python": "${NO_SUCH_VARIABLE}/bin/python"}, ["NO_SUCH_VARIABLE", "not set"]),
        ({"kind": "pbs", "resource_spec": "select=1:ncpus=8"}, [":ngpus=4"]),
    ],
)
def test_mistakes(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        queue(**changes)
    for word in words:
        assert word in str(raised.value)


def test_memory_by_gpu_leaves_the_memory_line_out(tmp_path: Path) -> None:
    text = script(queue(memory=None, job_extra_directives=["--mem-per-gpu=8G"]), tmp_path)
    assert "--mem=" not in text
    assert "#SBATCH --mem-per-gpu=8G" in text


def test_what_looks_wrong_is_noted() -> None:
    assert "30 minutes" in " ".join(queue(walltime=None).notes)
    assert "share 2 CPUs" in " ".join(queue(cores=2, threads_per_worker=1).notes)
    assert "--lifetime" in " ".join(queue(worker_extra_args=["--lifetime", "2h"]).notes)
    assert queue().notes == ()


@pytest.mark.parametrize(
    ("text", "kind", "seconds"),
    [
        ("30", "slurm", 1800), ("30:10", "slurm", 1810), ("04:00:00", "slurm", 14400),
        ("1-00", "slurm", 86400), ("2-12:30", "slurm", 217800), ("1-01:01:01", "slurm", 90061),
        ("04:30", "lsf", 16200), ("90", "lsf", 5400), ("3600", "pbs", 3600), ("2h", "slurm", 7200),
    ],
)  # fmt: skip
def test_walltimes(text: str, kind: str, seconds: float) -> None:
    assert _queues.seconds(text, "walltime", kind) == seconds


def test_tls_is_on_beyond_the_loopback() -> None:
    assert queue().security is True
    assert queue(interface="ib0").security is True
    assert queue(interface="lo").security is False
    assert queue(scheduler_options={"host": "127.0.0.1"}).security is False
    assert queue(interface="lo", security=True).security is True
    assert queue(security=False).security is False


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_PROJECT", "morl42")
    spec = queue(account="${MY_PROJECT}", job_script_prologue=["source ${MY_PROJECT}/bin/activate"])
    text = script(spec, tmp_path)
    assert "#SBATCH -A morl42" in text
    assert text.index("source morl42/bin/activate") < text.index("export OMP_NUM_THREADS")


def test_names_files_and_addresses(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("kind: local\nnum_workers: 3\n")
    mine = read_spec(file)
    assert isinstance(mine, LocalSpec)
    assert mine.num_workers == 3
    by_name, by_path = read_spec("slurm-4gpu"), read_spec("cluster_configs/slurm-4gpu.yaml")
    assert by_name == by_path
    address = read_spec("tls://node1:8786")
    assert address == ExistingSpec(address="tls://node1:8786", scheduler_file=None, security=None)
    with pytest.raises(UnknownNameError, match="Did you mean 'slurm-4gpu'"):
        read_spec("slurm-4gpus")
    file.write_text("- a\n- list\n")
    with pytest.raises(UsageError, match="must hold a mapping"):
        read_spec(file)
    file.write_text("kind: {")
    with pytest.raises(UsageError, match="cannot be read"):
        read_spec(file)
    with pytest.raises(UsageError, match="either address"):
        read_spec({"kind": "existing"})


def test_local_specs() -> None:
    spec = read_spec({"devices": ["cuda:0", "cuda:1"], "workers_per_gpu": 2})
    assert isinstance(spec, LocalSpec)
    assert (spec.num_workers, spec.devices) == (4, ("cuda:0", "cuda:1"))
    with pytest.raises(UnknownNameError, match="Did you mean 'num_workers'"):
        read_spec({"kind": "local", "n_workers": 2})


def test_all_shipped_specs_are_valid_and_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(shipped_specs()) == NAMES
    for name in NAMES:
        text = describe_spec(read_spec(name))
        assert "note:" not in text or name == "slurm-4cpu", text
    assert list(tmp_path.iterdir()) == []


GOLDEN = {
    "pbs": [
        "#PBS -N dask-mohpo",
        "#PBS -l select=1:ncpus=4:mem=15259MB:ngpus=1",
        "#PBS -l walltime=04:00:00",
        "#PBS -e LOGS/",
        "#PBS -o LOGS/",
    ],
    "lsf": [
        "#BSUB -J dask-mohpo",
        "#BSUB -e LOGS/WORKER-%J.err",
        "#BSUB -o LOGS/WORKER-%J.out",
        "#BSUB -n 4",
        '#BSUB -R "span[hosts=1]"',
        "#BSUB -M 16000000",
        "#BSUB -W 04:00",
        '#BSUB -gpu "num=1"',
    ],
    "sge": [
        "#$ -N dask-mohpo",
        "#$ -l h_vmem=16G",
        "#$ -l h_rt=04:00:00",
        "#$ -e LOGS/",
        "#$ -o LOGS/",
        "#$ -cwd",
        "#$ -j y",
        "#$ -l gpu=1",
    ],
    "oar": ["#OAR -n dask-mohpo", "#OAR -l /nodes=1/gpu=1,walltime=04:00:00"],
    "slurm-multinode": [
        "#SBATCH -J dask-mohpo",
        "#SBATCH -e LOGS/dask-mohpo-%J.err",
        "#SBATCH -o LOGS/dask-mohpo-%J.out",
        "#SBATCH -n 1",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --mem=60G",
        "#SBATCH -t 12:00:00",
        "#SBATCH --gres=gpu:4",
    ],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_job_scripts(name: str, tmp_path: Path) -> None:
    spec = read_spec(name)
    assert isinstance(spec, QueueSpec)
    lines = script(spec, tmp_path).replace(str(tmp_path), "LOGS").splitlines()
    first = GOLDEN[name][0].split()[0]
    assert [line for line in lines if line.startswith(f"{first} ")] == GOLDEN[name]
    command = lines[-1]
    assert command.endswith("--protocol tls://")
    assert "-m distributed.cli.dask_worker SCHEDULER --name WORKER" in command
    assert "--nthreads 1 --memory-limit 0 --no-dashboard --resources GPU=1" in command


def test_job_script_of_htcondor(tmp_path: Path) -> None:
    spec = read_spec("htcondor")
    assert isinstance(spec, QueueSpec)
    lines = script(spec, tmp_path).splitlines()
    assert "request_gpus = 1" in lines
    assert "MY.DaskWorkerCores = 4" in lines
    assert "MY.DaskWorkerMemory = 16000000000" in lines
    [arguments] = [line for line in lines if line.startswith("Arguments")]
    assert "export OMP_NUM_THREADS=4; " in arguments
    assert "--resources GPU=1" in arguments


def test_reading_a_queues_spec_leaves_ctrl_c_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    read_spec("slurm-4gpu")
    assert signal.getsignal(signal.SIGINT) is before


def test_check_prints_what_would_be_submitted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--cluster", "slurm-shared-gpu"]) == 0
    out = capsys.readouterr().out
    assert "1 job, 4 slots in each" in out
    assert "slot 3: GPU 0 of the job, 2 threads" in out
    assert "TLS: on" in out
    assert "#SBATCH --gres=gpu:1" in out
    assert main(["check", "--cluster", "slurm-9gpu"]) == 2
    assert "Did you mean 'slurm-4gpu'" in capsys.readouterr().err


def test_check_looks_at_local_workers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "kind: local\nnum_workers: 2\ndevices: [cpu]\ndashboard_address: '127.0.0.1:0'\n"
    )
    assert main(["check", "--cluster", str(file), "--submit"]) == 0
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert {row.split()[3] for row in rows} == {"cpu"}
