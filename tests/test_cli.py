"""The command line: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import pytest
import yaml
from distributed import Client
from optuna.trial import TrialState

import dask_mohpo
from dask_mohpo import cli, seed_results
from dask_mohpo.errors import UsageError
from dask_mohpo.ledger import Settings, attempts, load_study, open_study, stored_config

ENV_ID = "deep-sea-treasure-v0"
COMMANDS = ["run", "status", "best", "report"]

MODULE = '''
import os
import time
from pathlib import Path

from dask_mohpo import SeedContext


def train(config: dict, context: SeedContext) -> list[list[float]]:
    """One point, whose hypervolume from (0, -50) is 50 · x."""
    return [[config["x"], 0.0]]


def slow(config: dict, context: SeedContext) -> list[list[float]]:
    """Half a minute; no time at all once there is a file called `fast`."""
    with Path("starts").open("a") as file:
        file.write(f"{context.seed}\\n")
    for step in range(1, 101):
        time.sleep(0.0 if Path("fast").exists() else 0.3)
        context.report(step, [[config["x"], 0.0]])
    return [[config["x"], 0.0]]
'''


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test in a folder of its own, which holds a module and a search space of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the current folder
    Path("mine.py").write_text(MODULE)
    Path("space.yaml").write_text("x: {low: 1.0, high: 2.0}\n")
    level, verbosity = logging.getLogger("dask_mohpo").level, optuna.logging.get_verbosity()
    yield
    sys.modules.pop("mine", None)
    logging.getLogger("dask_mohpo").setLevel(level)
    optuna.logging.set_verbosity(verbosity)


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command, in this process."""

    def call(*args: object) -> Ran:
        capsys.readouterr()
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as left:  # argparse's
            code = int(left.code or 0)
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command hands to `run_study`, which does not run."""
    found: dict[str, Any] = {}

    @functools.wraps(dask_mohpo.run_study)
    def record(algo: Any, env_id: str, **keys: Any) -> optuna.Study:
        found.update(keys, algo=algo, env_id=env_id)
        raise UsageError("recorded")

    monkeypatch.setattr(dask_mohpo, "run_study", record, raising=False)
    return found


@pytest.fixture
def address(client: Client) -> str:
    """Of a scheduler with two workers, which can import the modules of this folder."""
    return str(client.scheduler_info()["address"])


ESSENTIALS = ("run", "--algo", "envelope", "--env-id", ENV_ID)


class TestHelp:
    def test_of_the_command(self, run_cli: Callable[..., Ran]) -> None:
        ran = run_cli("--help")

        assert ran.code == 0
        assert "dask-mohpo run --algo envelope --env-id minecart-v0" in ran.out
        assert all(f"    {command} " in ran.out for command in COMMANDS)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_each_command_shows_an_example(
        self, run_cli: Callable[..., Ran], command: str
    ) -> None:
        ran = run_cli(command, "--help")

        assert ran.code == 0
        assert f"example:\n  dask-mohpo {command} " in ran.out

    @pytest.mark.parametrize("command", COMMANDS)
    def test_examples_can_be_typed(self, run_cli: Callable[..., Ran], command: str) -> None:
        example = run_cli(command, "--help").out.split("example:\n")[1].split("\n\n")[0]
        lines = example.replace("\\\n", " ").splitlines()

        for line in lines:
            words = line.split(">")[0].split()
            assert words[0] == "dask-mohpo"
            cli._parser().parse_args(words[1:])

    def test_as_a_module(self) -> None:
        ran = subprocess.run(
            [sys.executable, "-m", "dask_mohpo", "--help"], capture_output=True, text=True
        )

        assert ran.returncode == 0
        assert ran.stdout.startswith("usage: dask-mohpo ")

    def test_without_a_command(self, run_cli: Callable[..., Ran]) -> None:
        ran = run_cli()

        assert ran.code == 2
        assert "COMMAND" in ran.err


class TestArguments:
    def test_flags(self, run_cli: Callable[..., Ran], arguments: dict[str, Any]) -> None:
        command = """--n-trials 5 --num-seeds 2 --seed 3 --total-timesteps 700 --num-workers 2
            --devices cuda:0 cuda:1 --train-hyperparams per:true gamma:0.9 --study-name s
            --storage journal:j --run-dir there --timeout 1.5 --no-progress --ref-point 0 -40
            --seeds-per-task auto --trials-per-task 3"""

        assert run_cli(*ESSENTIALS, *command.split()) == (2, "", "dask-mohpo: recorded\n")
        assert arguments == {
            "algo": "envelope",
            "env_id": ENV_ID,
            "n_trials": 5,
            "num_seeds": 2,
            "seed": 3,
            "total_timesteps": 700,
            "num_workers": 2,
            "devices": ["cuda:0", "cuda:1"],
            "train_hyperparams": {"per": True, "gamma": 0.9},
            "study_name": "s",
            "storage": "journal:j",
            "run_dir": "there",
            "timeout": 1.5,
            "progress": False,
            "ref_point": [0.0, -40.0],
            "seeds_per_task": "auto",
            "trials_per_task": 3,
        }

    def test_what_is_not_given_is_left_to_run_study(
        self, run_cli: Callable[..., Ran], arguments: dict[str, Any]
    ) -> None:
        run_cli(*ESSENTIALS)

        assert arguments == {"algo": "envelope", "env_id": ENV_ID}

    def test_negative_numbers(self, run_cli: Callable[..., Ran], arguments: dict[str, Any]) -> None:
        run_cli(*ESSENTIALS, "--ref-point", "-1", "-1", "-200")

        assert arguments["ref_point"] == [-1.0, -1.0, -200.0]

    def test_sweep_count_is_n_trials(
        self, run_cli: Callable[..., Ran], arguments: dict[str, Any]
    ) -> None:
        run_cli(*ESSENTIALS, "--sweep-count", 7)

        assert arguments["n_trials"] == 7

    @pytest.mark.parametrize("given", ["space.yaml", "space", "other"])
    def test_config_name_finds_a_file(
        self, run_cli: Callable[..., Ran], arguments: dict[str, Any], given: str
    ) -> None:
        Path("configs").mkdir()
        Path("configs/other.yaml").write_text("x: [1, 2]\n")
        run_cli(*ESSENTIALS, "--config-name", given)

        assert Path(arguments["search_space"]).is_file()

    def test_config_name_of_no_file(self, run_cli: Callable[..., Ran]) -> None:
        ran = run_cli(*ESSENTIALS, "--config-name", "nowhere")

        assert ran.code == 2
        assert "tried nowhere, nowhere.yaml, configs/nowhere.yaml" in ran.err


class TestStudyFile:
    def test_keys(self, run_cli: Callable[..., Ran], arguments: dict[str, Any]) -> None:
        Path("study.yaml").write_text(
            textwrap.dedent("""\
                algo: mine:train
                env-id: deep-sea-treasure-v0
                sweep_count: 12
                total-timesteps: 1e4
                ref_point: [0, -40]
                config_name: space
                train_hyperparams: {learning_rate: 1e-4, rates: [1e-3, 2], net_arch: [64, 64]}
                cluster: {kind: local, num_workers: 2}
                progress: false
                """)
        )
        run_cli("run", "--study", "study.yaml")

        assert arguments == {
            "algo": "mine:train",
            "env_id": ENV_ID,
            "n_trials": 12,
            "total_timesteps": 10_000,
            "ref_point": [0, -40],
            "search_space": "space.yaml",
            "train_hyperparams": {
                "learning_rate": 1e-4,
                "rates": [1e-3, 2],
                "net_arch": [64, 64],
            },
            "cluster": {"kind": "local", "num_workers": 2},
            "progress": False,
        }

    def test_flags_win(self, run_cli: Callable[..., Ran], arguments: dict[str, Any]) -> None:
        Path("study.yaml").write_text(
            f"algo: envelope\nenv_id: {ENV_ID}\nsweep_count: 12\nseed: 4\n"
            "train_hyperparams: {gamma: 0.9}\n"
        )
        run_cli("run", "--study", "study.yaml", "--n-trials", 3, "--algo", "pcn")

        assert arguments["algo"] == "pcn"
        assert arguments["n_trials"] == 3
        assert arguments["seed"] == 4

    @pytest.mark.parametrize("given", ["best.yaml", "[per:true, 'gamma:0.9']"])
    def test_hyperparams_as_on_the_command_line(
        self, run_cli: Callable[..., Ran], arguments: dict[str, Any], given: str
    ) -> None:
        Path("best.yaml").write_text("{per: true, gamma: 0.9}\n")
        Path("study.yaml").write_text(f"train_hyperparams: {given}\n")
        run_cli(*ESSENTIALS, "--study", "study.yaml")

        assert arguments["train_hyperparams"] == {"per": True, "gamma": 0.9}

    def test_unknown_key(self, run_cli: Callable[..., Ran]) -> None:
        Path("study.yaml").write_text("n_trails: 3\n")
        ran = run_cli(*ESSENTIALS, "--study", "study.yaml")

        assert ran.code == 2
        assert "unknown key in study.yaml: 'n_trails'. Did you mean 'n_trials'?" in ran.err

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"a: [1, 2", "study.yaml is not YAML"),
            (b"\xff\xfe\x00", "study.yaml is not YAML"),
            (b"!!python/object/apply:os.getcwd []", "study.yaml is not YAML"),
            (b"- algo\n- envelope\n", "study.yaml must hold a mapping"),
            (b"", "study.yaml must hold a mapping"),
            (None, "study.yaml cannot be read: No such file or directory."),
        ],
    )
    def test_unfit_files(
        self, run_cli: Callable[..., Ran], content: bytes | None, message: str
    ) -> None:
        if content is not None:
            Path("study.yaml").write_bytes(content)
        ran = run_cli(*ESSENTIALS, "--study", "study.yaml")

        assert ran.code == 2
        assert message in ran.err


class TestHyperparams:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("x:3", 3),
            ("x: 3", 3),
            ("x:0.5", 0.5),
            ("x:1e-4", 1e-4),
            ("x:-1E-4", -1e-4),
            ("x:[64, 64]", [64, 64]),
            ("x:[1e-4,1]", [1e-4, 1]),
            ("x:{a: 1e-4}", {"a": 1e-4}),
            ("x:true", True),
            ("x:False", False),
            ("x:null", None),
            ("x:", None),
            ("x:relu", "relu"),
            ("x:a:b", "a:b"),
            ("x:__import__('os').getcwd()", "__import__('os').getcwd()"),
            ("x:1+1", "1+1"),
        ],
    )
    def test_values_are_yaml(
        self,
        run_cli: Callable[..., Ran],
        arguments: dict[str, Any],
        text: str,
        expected: object,
    ) -> None:
        run_cli(*ESSENTIALS, "--train-hyperparams", text)

        assert arguments["train_hyperparams"] == {"x": expected}
        assert type(arguments["train_hyperparams"]["x"]) is type(expected)

    def test_files_and_values_mix_and_the_last_wins(
        self, run_cli: Callable[..., Ran], arguments: dict[str, Any]
    ) -> None:
        Path("best.yaml").write_text("{per: true, gamma: 0.9, learning_rate: 1e-4}\n")
        run_cli(*ESSENTIALS, "--train-hyperparams", "per:false", "best.yaml", "gamma:0.8")

        expected = {"per": True, "gamma": 0.8, "learning_rate": 1e-4}
        assert arguments["train_hyperparams"] == expected

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("x:[1, 2", "'x:[1, 2' is not valid; give NAME:VALUE such as learning_rate:3e-4"),
            ("x:!!python/object/apply:os.getcwd []", "is not valid; give NAME:VALUE"),
            ("per", "per cannot be read: No such file or directory. For train_hyperparams give"),
            ("per=true", "per=true cannot be read: No such file or directory. For"),
        ],
    )
    def test_mistakes(self, run_cli: Callable[..., Ran], given: str, message: str) -> None:
        ran = run_cli(*ESSENTIALS, "--train-hyperparams", given)

        assert ran.code == 2
        assert message in ran.err
        assert "Traceback" not in ran.err

    def test_text_where_a_number_is_needed(self, run_cli: Callable[..., Ran]) -> None:
        ran = run_cli(*ESSENTIALS, "--train-hyperparams", "gamma:__import__('os')")

        assert ran.code == 2
        assert """gamma = "__import__('os')" is not valid; it takes float.""" in ran.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--env-id", ENV_ID], "--algo is needed (or algo in --study)"),
        (["--algo", "pcn"], "--env-id is needed (or env_id in --study)"),
        (["--algo", "envelop", "--env-id", ENV_ID], "Did you mean 'envelope'? Valid: envelope"),
        (["--algo", "nowhere:train", "--env-id", ENV_ID], "module 'nowhere' cannot be imported"),
        (["--algo", "mine:trian", "--env-id", ENV_ID], "it has: Path, SeedContext, slow, train."),
        (["--algo", "mine:train", "--env-id", ENV_ID], "pass search_space="),
        (["--algo", "pcn", "--env-id", "deep-sea-tresure-v0"], "deep-sea-treasure-v0"),
        ([*ESSENTIALS[1:], "--ref-point", "0"], "got 1 numbers"),
        ([*ESSENTIALS[1:], "--ref-point", "0", "-5", "-5"], "there are 2 objectives"),
        ([*ESSENTIALS[1:], "--ref-point", "zero"], "invalid float value: 'zero'"),
        ([*ESSENTIALS[1:], "--n-trials", "0"], "n_trials = 0 is not valid"),
        ([*ESSENTIALS[1:], "--timeout", "0"], "timeout = 0.0 is not valid"),
        ([*ESSENTIALS[1:], "--train-hyperparams", "gama:1"], "Did you mean 'gamma'?"),
        ([*ESSENTIALS[1:], "--devices", "gpu"], "unknown device 'gpu'"),
        ([*ESSENTIALS[1:], "--storage", "study.db"], "storage = 'study.db' is not valid"),
        ([*ESSENTIALS[1:], "--n-trails", "3"], "unrecognized arguments: --n-trails 3"),
    ],
)
def test_run_refuses(run_cli: Callable[..., Ran], args: list[str], message: str) -> None:
    ran = run_cli("run", *args)

    assert ran.code == 2
    assert message in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("command", ["status", "best", "report"])
def test_an_unknown_study(run_cli: Callable[..., Ran], command: str) -> None:
    Path("runs/other").mkdir(parents=True)
    Path("runs/other/study.yaml").write_text("storage: null\n")

    ran = run_cli(command, "nowhere")

    assert ran.code == 2
    assert "no study 'nowhere' in 'runs'; studies there: other." in ran.err


@pytest.mark.slow
def test_from_run_to_best_and_back(run_cli: Callable[..., Ran]) -> None:
    """A module in the current folder, on workers of the command's own."""
    command = f"run --algo mine:train --env-id {ENV_ID} --config-name space --num-workers 1"

    ran = run_cli(*command.split(), *"--n-trials 2 --num-seeds 2 --no-progress".split())

    assert ran.code == 0
    study = load_study("mine-train-deep-sea-treasure-v0")
    best = study.best_trial
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 2
    headline = f"trial {best.number}: hypervolume {50 * best.params['x']:.2f} ± 0.00 (2 seeds)"
    assert f"best         {headline}" in ran.out
    assert "files        runs/mine-train-deep-sea-treasure-v0" in ran.out

    status = run_cli("status", study.study_name)
    assert status.code == 0
    assert "trials: 2 complete\nseeds: 4 finished, 0 failed\n" in status.out
    assert f"best: {headline}" in status.out

    report = run_cli("report", study.study_name)
    assert report.code == 0
    assert report.out.startswith(ran.out.strip())
    assert f"\n{best.number}      complete" in report.out

    text = run_cli("best", study.study_name)
    assert text.code == 0
    assert text.out.splitlines()[0] == headline
    assert text.out.splitlines()[-1].split() == ["x", f"{best.params['x']:.4g}"]

    exact = run_cli("best", study.study_name, "--format", "yaml")
    assert exact.code == 0
    assert yaml.safe_load(exact.out) == best.params

    again = run_cli(*command.split(), "--n-trials", 2, "--num-seeds", 2)
    assert again.code == 0
    assert again.out == ran.out


@pytest.mark.slow
def test_envelope_and_its_best_configuration_again(
    run_cli: Callable[..., Ran], address: str
) -> None:
    common = [*ESSENTIALS, "--cluster", address, "--num-seeds", 1]
    budget = ["--n-trials", 1, "--total-timesteps", 120, "--no-progress"]

    ran = run_cli(*common, *budget, "--train-hyperparams", "net_arch:[8, 8]", "batch_size:4")

    assert ran.code == 0, ran.err
    assert "default      trial 0: hypervolume" in ran.out
    best = run_cli("best", f"envelope-{ENV_ID}", "--format", "yaml").out
    assert "net_arch: [8, 8]\n" in best
    Path("best.yaml").write_text(best)

    again = run_cli(*common, *budget, "--train-hyperparams", "best.yaml", "--study-name", "again")

    assert again.code == 0, again.err
    first = load_study(f"envelope-{ENV_ID}")
    second = load_study("again")
    assert stored_config(second.trials[0]) == stored_config(first.trials[0])
    assert second.trials[0].value == first.trials[0].value


def test_other_settings_are_refused(run_cli: Callable[..., Ran], address: str) -> None:
    command = f"run --algo trainables:quick --env-id {ENV_ID} --config-name space --no-progress"
    fixed = ["--train-hyperparams", f"log:{Path.cwd()}/log", "--cluster", address]
    common = [*command.split(), *fixed, "--n-trials", 1, "--num-seeds", 1]

    assert run_cli(*common).code == 0
    ran = run_cli(*common, "--seed", 3)

    assert ran.code == 2
    assert "seeds: stored [10], now [3]" in ran.err


@pytest.mark.parametrize("n_trials", [1, 6])
def test_all_trials_fail(run_cli: Callable[..., Ran], address: str, n_trials: int) -> None:
    command = f"run --algo trainables:always_fails --env-id {ENV_ID} --config-name space"
    where = ["--cluster", address, "--no-progress"]

    ran = run_cli(*command.split(), *where, "--n-trials", n_trials, "--num-seeds", 1)

    assert ran.code == 1
    assert ran.out == ""
    assert "RuntimeError: this set-up cannot work" in ran.err
    best = run_cli("best", f"trainables-always_fails-{ENV_ID}")
    assert best.code == 2
    assert "has no complete trial yet" in best.err


def test_no_scheduler_there(run_cli: Callable[..., Ran]) -> None:
    import dask

    with dask.config.set({"distributed.comm.timeouts.connect": "0.5s"}):
        ran = run_cli(*ESSENTIALS, "--cluster", "tcp://127.0.0.1:1", "--no-progress")

    assert ran.code == 1
    assert "no Dask scheduler answers at 'tcp://127.0.0.1:1'" in ran.err


def test_timeout(run_cli: Callable[..., Ran], address: str) -> None:
    command = f"run --algo trainables:slow --env-id {ENV_ID} --config-name space --no-progress"
    fixed = ["--train-hyperparams", f"log:{Path('log').resolve()}", "seconds:0.2"]
    size = ["--n-trials", 500, "--num-seeds", 1, "--timeout", 1]
    began = time.monotonic()

    ran = run_cli(*command.split(), *fixed, *size, "--cluster", address)

    assert ran.code == 0
    assert time.monotonic() - began < 15
    study = load_study(f"trainables-slow-{ENV_ID}")
    assert 1 <= len(study.get_trials(states=[TrialState.COMPLETE])) < 50


def test_a_reader_that_goes_away() -> None:
    """As in ``dask-mohpo status NAME | true``."""
    settings = Settings(
        algo="mine:train",
        env_id=ENV_ID,
        ref_point=(0.0, -50.0),
        eval_gamma=0.99,
        objectives="hypervolume",
        aggregate="mean",
        failed_seeds="fail",
        seeds=(10,),
        total_timesteps=10,
        num_eval_weights=10,
        num_eval_episodes=1,
        train_hyperparams={},
        search_space={"callable": "mine:space"},
    )
    open_study("study", Path("runs/study"), None, settings, None)
    reader, writer = os.pipe()
    os.close(reader)

    ran = subprocess.run(
        [sys.executable, "-m", "dask_mohpo", "status", "study"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)

    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_an_interrupt_and_the_same_command_again(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches every process of the command, workers included."""
    command = [
        *[sys.executable, "-m", "dask_mohpo", "run", "--algo", "mine:slow", "--env-id", ENV_ID],
        *["--config-name", "space", "--n-trials", "2", "--num-seeds", "2", "--num-workers", "2"],
        *["--devices", "cpu", "--study-name", "study"],
    ]
    starts, errors = Path("starts"), Path("errors")
    with errors.open("w") as stderr:
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while not starts.exists() or len(starts.read_text().split()) < 2:
            assert time.monotonic() < deadline and running.poll() is None, errors.read_text()
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        out, _ = running.communicate(timeout=25)
    finally:
        running.kill()
        running.wait()

    assert running.returncode == 130
    assert out == ""
    told = errors.read_text()
    assert "study study: interrupted after 0 of 2 trials; run the same call again" in told
    assert "Traceback" not in told
    assert not attempts(load_study("study").trials[0]), "an interrupt is no failure"

    Path("fast").touch()
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert again.returncode == 0, again.stderr
    assert "trials       2 complete" in again.stdout
    results = seed_results(load_study("study"))
    assert [(r.trial, r.seed, r.state) for r in results] == [
        (trial, seed, "finished") for trial in (0, 1) for seed in (10, 11)
    ]
