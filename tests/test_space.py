"""Search spaces: the forms they are written in, what Optuna sees, and what a mistake says."""

from __future__ import annotations

import functools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from dask_mohpo.errors import SpaceError, UnknownNameError
from dask_mohpo.space import DefaultTrial, SearchSpace, check_config_names, incompatible

OWN = """
learning_rate: {low: 1e-4, high: 1e-2, log: true}
batch_size: [32, 64, 128]
gamma: 0.98
net_arch:
  - [256, 256]
  - [64, 64, 64]
updates: {low: 1, high: 9, step: 4}
tau: {low: 0, high: 1, step: 0.25, type: float}
per: [true, false]
activation: [relu, null, 1.5]
ent_coef: 1e-3
sizes: {value: [256, 256]}
"""

SWEEP = """
program: train.py
method: bayes
metric: {name: eval/hypervolume, goal: maximize}
parameters:
  uniform: {distribution: uniform, min: 0, max: 1}
  int_uniform: {distribution: int_uniform, min: 1, max: 4}
  q_uniform: {distribution: q_uniform, min: 0, max: 1, q: 0.1}
  q_uniform_int: {distribution: q_uniform, min: 32, max: 250, q: 16}
  log_uniform: {distribution: log_uniform, min: -9, max: -4}
  log_uniform_values: {distribution: log_uniform_values, min: 1e-5, max: 1e-2}
  q_log_uniform_values: {distribution: q_log_uniform_values, min: 8, max: 512, q: 8}
  q_log_one: {distribution: q_log_uniform_values, min: 1, max: 100}
  q_log_uniform: {distribution: q_log_uniform, min: 0, max: 3, q: 0.5}
  normal: {distribution: normal, mu: 10, sigma: 2}
  categorical: {distribution: categorical, values: [a, b]}
  constant: {distribution: constant, value: 3}
  value: {value: [256, 256]}
  values: {values: [[256, 256], [64]]}
  inferred_int: {min: 1, max: 3}
  inferred_float: {min: 1, max: 3.5}
"""


def write(folder: Path, text: str, name: str = "space.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def ask(space: SearchSpace, trials: int = 50) -> tuple[optuna.Study, list[dict[str, Any]]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    return study, [space.suggest(study.ask()) for _ in range(trials)]


def distribution_of(space: SearchSpace, name: str) -> optuna.distributions.BaseDistribution:
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1)).ask()
    space.suggest(trial)
    return trial.distributions[name]


def in_error(spec: object, *parts: str, parameter: str | None = "x") -> SpaceError:
    with pytest.raises(SpaceError) as caught:
        SearchSpace.load(spec, source="here.yaml")
    error = caught.value
    assert error.source == "here.yaml"
    assert error.parameter == parameter
    for part in ("here.yaml", *parts, *([parameter] if parameter else [])):
        assert part in str(error)
    return error


def sweep(**entry: object) -> dict[str, Any]:
    return {"method": "bayes", "parameters": {"x": entry}}


class TestOwnForm:
    def test_yaml(self, tmp_path: Path) -> None:
        space = SearchSpace.load(write(tmp_path, OWN))
        study, configs = ask(space)

        assert space.source == str(tmp_path / "space.yaml")
        assert space.names == tuple(configs[0])
        assert space.notes == ()
        for config in configs:
            assert 1e-4 <= config["learning_rate"] <= 1e-2
            assert type(config["updates"]) is int
            assert type(config["tau"]) is float
            assert config["gamma"] == 0.98
            assert config["ent_coef"] == 1e-3
            assert config["sizes"] == [256, 256]
            assert json.loads(json.dumps(config)) == config
        grids: dict[str, list[Any]] = {
            "batch_size": [32, 64, 128],
            "net_arch": [[256, 256], [64, 64, 64]],
            "updates": [1, 5, 9],
            "tau": [0.0, 0.25, 0.5, 0.75, 1.0],
            "per": [True, False],
            "activation": ["relu", None, 1.5],
        }
        for name, values in grids.items():
            seen = [config[name] for config in configs]
            assert all(value in values for value in seen)
            assert all(value in seen for value in values)
        distributions = study.trials[0].distributions
        assert distributions["learning_rate"] == FloatDistribution(1e-4, 1e-2, log=True)
        assert distributions["updates"] == IntDistribution(1, 9, step=4)
        assert distributions["net_arch"] == CategoricalDistribution(["[256, 256]", "[64, 64, 64]"])
        assert "gamma" not in distributions

    def test_python_mapping_is_the_same_form(self, tmp_path: Path) -> None:
        from_python = SearchSpace.load(
            {
                "lr": FloatDistribution(1e-4, 1e-2, log=True),
                "n": IntDistribution(2, 8, step=2),
                "arch": ([64], (32, 32)),
                "gamma": np.float32(0.5),
            }
        )
        text = "lr: {low: 1e-4, high: 1E-2, log: true}\nn: {low: 2, high: 8, step: 2}\n"
        from_yaml = SearchSpace.load(write(tmp_path, text + "arch: [[64], [32, 32]]\ngamma: 0.5"))

        assert from_python.describe() == from_yaml.describe()

    def test_optuna_categorical_and_choices_key(self) -> None:
        spec = {"x": CategoricalDistribution(["a", "b"]), "y": {"choices": ["a", "b"]}}
        assert SearchSpace.load(spec | {"z": {"values": ["a", "b"]}}).names == ("x", "y", "z")
        _, configs = ask(SearchSpace.load(spec))
        assert {config["x"] for config in configs} == {config["y"] for config in configs}

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("1e-4", 1e-4), ("1E5", 1e5), ("-2e3", -2e3), ("1.5e3", 1.5e3), (".5e1", 5.0)],
    )
    def test_numbers_that_yaml_reads_as_text(
        self, tmp_path: Path, text: str, expected: float
    ) -> None:
        space = SearchSpace.load(write(tmp_path, f"x: {text}\ny: [{text}]\nz: [[{text}, a]]"))
        _, (config,) = ask(space, 1)
        assert config == {"x": expected, "y": expected, "z": [expected, "a"]}

    @pytest.mark.parametrize("text", ["1e", "e5", "1e-4x", "v1e4"])
    def test_other_text_stays_text(self, text: str) -> None:
        _, (config,) = ask(SearchSpace.load({"x": text}), 1)
        assert config == {"x": text}

    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            ({"low": 1, "high": 8}, IntDistribution(1, 8)),
            ({"low": 1, "high": 8, "log": True}, IntDistribution(1, 8, log=True)),
            ({"low": 1, "high": 8, "type": "float"}, FloatDistribution(1, 8)),
            ({"low": 1e3, "high": "1e5", "type": "int"}, IntDistribution(1000, 100_000)),
            ({"low": 1, "high": 8.0}, FloatDistribution(1, 8)),
            ({"low": 0, "high": 1, "step": 0.5}, FloatDistribution(0, 1, step=0.5)),
            ({"low": 0.1, "high": 0.3, "step": 0.2}, FloatDistribution(0.1, 0.3, step=0.2)),
            ({"low": np.int64(1), "high": np.int64(3)}, IntDistribution(1, 3)),
        ],
    )
    def test_kind_of_a_range(
        self, entry: object, expected: optuna.distributions.BaseDistribution
    ) -> None:
        assert distribution_of(SearchSpace.load({"x": entry}), "x") == expected

    def test_high_off_the_grid_is_lowered_with_a_note(self) -> None:
        space = SearchSpace.load(
            {"x": {"low": 0.0, "high": 1.0, "step": 0.3}, "n": {"low": 1, "high": 8, "step": 4}}
        )
        assert distribution_of(space, "x") == FloatDistribution(0.0, 0.9, step=0.3)
        assert distribution_of(space, "n") == IntDistribution(1, 5, step=4)
        assert space.notes == (
            "x: high 1.0 is not on the grid of step 0.3; 0.9 is used.",
            "n: high 8 is not on the grid of step 4; 5 is used.",
        )

    def test_a_configuration_does_not_share_lists_with_the_space(self) -> None:
        space = SearchSpace.load({"x": {"value": [1, 2]}, "y": [[3]]})
        _, (config,) = ask(space, 1)
        config["x"].append(0)
        config["y"].append(0)
        assert ask(space, 1)[1] == [{"x": [1, 2], "y": [3]}]

    def test_a_finished_trial_gives_its_configuration(self) -> None:
        space = SearchSpace.load({"x": {"low": 0, "high": 1.0}, "arch": [[1], [2, 2]], "g": 1})
        study, (config,) = ask(space, 1)
        assert space.suggest(study.trials[0]) == config
        assert space.suggest(optuna.trial.FixedTrial(study.trials[0].params)) == config


class TestMistakes:
    @pytest.mark.parametrize(
        ("entry", "parts"),
        [
            ({"low": 2, "high": 1}, ("{'low': 2, 'high': 1}", "low below high")),
            ({"low": 1, "high": 1}, ("constant", "{value: 1}")),
            ({"low": 0, "high": 1.0, "log": True}, ("'low': 0", "above 0")),
            ({"low": 1, "high": 9, "step": 0}, ("{'step': 0}", "above 0")),
            ({"low": 1, "high": 9, "step": 10}, ("'step': 10", "fits between")),
            ({"low": 1, "high": 9, "step": 2, "log": True}, ("step or log",)),
            ({"low": True, "high": 9}, ("{'low': True}", "number")),
            ({"low": float("nan"), "high": 9}, ("nan", "finite")),
            ({"low": 0, "high": float("inf")}, ("inf", "finite")),
            ({"low": 0, "high": 10**400}, ("finite",)),
            ({"low": "small", "high": 9}, ("small", "number")),
            ({"low": None, "high": 9}, ("None", "number")),
            ({"low": 0.5, "high": 9, "type": "int"}, ("0.5", "whole")),
            ({"low": 0, "high": 9, "type": "bool"}, ("bool", "type: int or type: float")),
            ({"low": 1, "high": 9, "log": 1}, ("{'log': 1}", "log: true")),
            ({"low": 1 / 7, "high": 9, "step": 1 / 3}, ("fewer digits",)),
            ({"low": 1}, ("{'low': 1}", "both low and high")),
            ({}, ("both low and high",)),
            ({"low": 1, "hihg": 9}, ("'hihg'", "did you mean 'high'?", "choices, high, log, low")),
            ({"min": 1, "max": 9}, ("'min'", "`parameters:`")),
            ({"value": 1, "low": 2}, ("value alone",)),
            ({"choices": [1], "values": [1]}, ("choices alone",)),
            ({"choices": 3}, ("3", "list")),
            ([], ("[]", "at least one choice")),
            ([1, 2, 1.0], ("1.0", "each choice once")),
            ([True, 1], ("1", "each choice once")),
            (["1e-4", 1e-4], ("0.0001", "each choice once")),
            ([[1, 2], "[1, 2]"], ("each choice once",)),
            ([{"a": 1}, 2], ("{'a': 1}", "lists of these")),
            ([[{"a": 1}]], ("lists of these",)),
            (float("inf"), ("inf", "finite")),
            ({1, 2}, ("{1, 2}", "lists")),
            (FloatDistribution(0, float("inf")), ("inf", "finite")),
        ],
    )
    def test_in_a_parameter(self, entry: object, parts: tuple[str, ...]) -> None:
        in_error({"x": entry}, *parts)

    def test_names_that_are_not_text(self, tmp_path: Path) -> None:
        in_error(write(tmp_path, "on: 3"), "True", "as text", parameter=None)

    def test_not_a_space(self) -> None:
        in_error(3, "3", "a mapping", ".yaml", "callable", parameter=None)

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("", ("an empty file", "mapping")),
            ("{}", ("an empty file",)),
            ("- 1\n- 2", ("[1, 2]", "mapping")),
            ("a: 1\nb: {low: 1", ("line 2", "YAML")),
            ("a: 1\nb: 2\na: 3", ("line 3", "'a' is given twice")),
            ("a: !!python/object:os.system {}", ("line 1", "YAML")),
        ],
    )
    def test_in_a_file(self, tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
        in_error(write(tmp_path, text), *parts, parameter=None)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        in_error(tmp_path / "no.yaml", "no.yaml", "No such file", parameter=None)
        in_error(write(tmp_path, "a: 1", "space.json"), ".yaml or .yml", parameter=None)
        (tmp_path / "bytes.yml").write_bytes(b"a: \xff\xfe")
        in_error(tmp_path / "bytes.yml", "YAML", parameter=None)

    def test_the_path_is_the_source(self, tmp_path: Path) -> None:
        path = write(tmp_path, "x: {low: 2, high: 1}")
        with pytest.raises(SpaceError, match=r"space\.yaml: parameter 'x'"):
            SearchSpace.load(str(path))

    def test_unknown_names(self) -> None:
        space = SearchSpace.load({"gamma": 1, "learnign_rate": 1}, source="here.yaml")
        with pytest.raises(UnknownNameError) as caught:
            space.check_names({"learning_rate", "gamma"}, "envelope")
        assert caught.value.closest == "learning_rate"
        assert "hyperparameter of envelope" in str(caught.value)
        assert "here.yaml" in str(caught.value)
        space.check_names(["learnign_rate", "gamma"], "envelope")
        with pytest.raises(UnknownNameError, match="of pcn: 'b'"):
            check_config_names({"a": 1, "b": 2}, ["a"], "pcn", "here.py")


class TestSweep:
    def test_distributions(self, tmp_path: Path) -> None:
        space = SearchSpace.load(write(tmp_path, SWEEP))
        study, configs = ask(space)
        grids: dict[str, list[Any]] = {
            "int_uniform": [1, 2, 3, 4],
            "q_uniform_int": list(range(32, 257, 16)),
            "q_log_uniform_values": list(range(8, 513, 8)),
            "q_log_one": list(range(1, 101)),
            "q_log_uniform": [0.5 * k for k in range(2, 41)],
            "categorical": ["a", "b"],
            "constant": [3],
            "value": [[256, 256]],
            "values": [[256, 256], [64]],
            "inferred_int": [1, 2, 3],
        }
        bounds = {
            "uniform": (0, 1),
            "q_uniform": (0, 1),
            "log_uniform": (math.exp(-9), math.exp(-4)),
            "log_uniform_values": (1e-5, 1e-2),
            "normal": (10 - 2 * 3.0903, 10 + 2 * 3.0903),
            "inferred_float": (1, 3.5),
        }
        assert grids.keys() | bounds.keys() == set(configs[0])
        for config in configs:
            for name, grid in grids.items():
                assert config[name] in grid
                assert type(config[name]) is type(grid[0])
            for name, (low, high) in bounds.items():
                assert type(config[name]) is float
                assert low <= config[name] <= high
            assert config["q_uniform"] == pytest.approx(round(config["q_uniform"] * 10) / 10)

        distributions = study.trials[0].distributions
        low, high = math.exp(-9), math.exp(-4)
        assert distributions["log_uniform"] == FloatDistribution(low, high, log=True)
        assert distributions["q_uniform"] == FloatDistribution(0, 1, step=0.1)
        assert distributions["q_uniform_int"] == IntDistribution(32, 256, step=16)
        assert distributions["q_log_one"] == IntDistribution(1, 100, log=True)
        assert distributions["q_log_uniform_values"] == FloatDistribution(8, 512, log=True)
        assert distributions["normal.quantile"] == FloatDistribution(0.001, 0.999)
        normals = [config["normal"] for config in ask(space, 300)[1]]
        assert np.mean(normals) == pytest.approx(10, abs=0.4)
        assert np.std(normals) == pytest.approx(2, abs=0.3)

    def test_quantised_values(self) -> None:
        def quantised(trial: dict[str, Any], **entry: object) -> object:
            space = SearchSpace.load(sweep(**entry))
            return space.suggest(optuna.trial.FixedTrial(trial))["x"]

        entry = {"distribution": "q_log_uniform_values", "min": 0.1, "max": 1, "q": 0.1}
        assert quantised({"x": 0.31}, **entry) == 0.3
        entry = {"distribution": "q_log_uniform", "min": math.log(3), "max": 6, "q": 8}
        assert quantised({"x": 20.5}, **entry) == 24

    def test_quantised_grid_that_steps_cannot_hold(self) -> None:
        q = 1 / 3
        space = SearchSpace.load(sweep(distribution="q_uniform", min=10, max=20000, q=q))
        for config in ask(space, 20)[1]:
            assert config["x"] / q == pytest.approx(round(config["x"] / q))
            assert 10 - q <= config["x"] <= 20000 + q

    def test_what_is_ignored_is_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        text = (
            "method: bayes\nmetric: {name: loss, goal: minimize}\nrun_cap: 3\n"
            "parameters: {x: {values: [1, 2], probabilities: [0.1, 0.9]}}"
        )
        with caplog.at_level("INFO", logger="dask_mohpo.space"):
            space = SearchSpace.load(write(tmp_path, text))
        assert [note.split(":")[0] for note in space.notes] == [
            "method",
            "metric",
            "run_cap",
            "metric.goal",
            "x",
        ]
        assert "maximised" in space.notes[3]
        assert "equally likely" in space.notes[4]
        assert all(note in caplog.text for note in space.notes)

    def test_values_given_to_log_uniform_are_noticed(self) -> None:
        space = SearchSpace.load(sweep(distribution="log_uniform", min=1e-5, max=1e-2))
        assert "log_uniform_values" in space.notes[-1]
        assert "1.00001..1.01005" in space.notes[-1]

    def test_a_parameter_may_be_called_parameters(self) -> None:
        space = SearchSpace.load({"parameters": {"low": 1, "high": 3}})
        assert space.names == ("parameters",)

    @pytest.mark.parametrize(
        ("entry", "parts"),
        [
            ({"distribution": "inv_log_uniform", "min": 1, "max": 2}, ("inv_log_uniform",)),
            ({"distribution": "q_beta"}, ("q_beta", "log_uniform_values, normal", "uniform")),
            ({"distribution": ["normal"]}, ("normal",)),
            ({"distribution": "q_normal"}, ("q_normal", "q_uniform")),
            ({"distribution": "uniform", "min": 1}, ("uniform with min and max",)),
            ({"distribution": "constant"}, ("constant with value",)),
            ({"distribution": "categorical", "value": 1}, ("'value'", "values")),
            ({"distribution": "uniform", "min": 1, "max": 2, "q": 1}, ("'q'", "for uniform")),
            ({"distribution": "uniform", "min": 2, "max": 1}, ("min below max",)),
            ({"distribution": "uniform", "min": 2, "max": 2}, ("{value: 2}",)),
            ({"distribution": "uniform", "min": True, "max": 2}, ("{'min': True}",)),
            ({"distribution": "int_uniform", "min": 1, "max": 2.5}, ("whole",)),
            ({"distribution": "log_uniform_values", "min": 0, "max": 2}, ("min above 0",)),
            ({"distribution": "log_uniform", "min": 1, "max": 1000}, ("exponents",)),
            ({"distribution": "normal", "sigma": 0}, ("sigma above 0",)),
            ({"distribution": "q_uniform", "min": 0, "max": 1, "q": 0}, ("q above 0",)),
            ({"distribution": "q_uniform", "min": 0, "max": 1, "q": 9}, ("more than one value",)),
            ({"min": 1}, ("both min and max",)),
            ({"mu": 1}, ("distribution",)),
            ({}, ("distribution",)),
            ({"value": 1, "values": [1]}, ("not both",)),
            ({"values": 3}, ("3", "list")),
            ({"parameters": {"y": {"value": 1}}}, ("nested `parameters:`",)),
        ],
    )
    def test_mistakes(self, entry: dict[str, Any], parts: tuple[str, ...]) -> None:
        in_error(sweep(**entry), *parts)

    def test_mistakes_at_the_top(self) -> None:
        spec = {"metod": "bayes", "parameters": {"x": {"value": 1}}}
        in_error(spec, "'metod'", "did you mean 'method'?", "early_terminate", parameter=None)
        in_error({"method": "bayes", "parameters": {"x": 0.98}}, "0.98", "{value: 0.98}")
        in_error({"method": "bayes", "parameters": {}}, "at least one", parameter="parameters")


def conditional(trial: optuna.Trial) -> dict[str, Any]:
    config: dict[str, Any] = {"algo": trial.suggest_categorical("algo", ["big", "small"])}
    if config["algo"] == "big":
        config["layers"] = (trial.suggest_int("layers", 2, 4), np.int64(3))
    else:
        config["lr"] = np.float64(trial.suggest_float("lr", 1e-4, 1e-2, log=True))
    return config


class TestCallable:
    def test_configs(self) -> None:
        space = SearchSpace.load(conditional)
        _, configs = ask(space)
        assert space.names is None
        assert space.source.endswith("test_space.conditional")
        assert space.describe() == {"callable": space.source}
        assert SearchSpace.load(functools.partial(conditional)).source == space.source
        space.check_names([], "envelope")
        assert {tuple(config) for config in configs} == {("algo", "layers"), ("algo", "lr")}
        for config in configs:
            assert json.loads(json.dumps(config)) == config
            assert type(config.get("lr", 0.0)) is float
            assert config.get("layers", [3, 3])[1] == 3

    @pytest.mark.parametrize(
        ("result", "part"),
        [(None, "None"), ([1], "[1]"), ({1: 2}, "{1: 2}"), ({"a": object()}, "object at")],
    )
    def test_bad_results(self, result: object, part: str) -> None:
        def bad(trial: optuna.Trial) -> object:
            return result

        with pytest.raises(SpaceError) as caught:
            ask(SearchSpace.load(bad), 1)
        assert "bad" in caught.value.source
        assert part in str(caught.value)

    def test_without(self) -> None:
        _, configs = ask(SearchSpace.load(conditional).without(["algo"]))
        assert {tuple(config) for config in configs} == {("layers",), ("lr",)}

    def test_default_params(self) -> None:
        space = SearchSpace.load(conditional)
        params, config, notes = space.default_params({"algo": "small", "lr": 0.5})
        assert params == {"algo": "small", "lr": 0.01}
        assert config == {"algo": "small", "lr": 0.01}
        assert notes == ["lr: default 0.5 lies outside 0.0001..0.01; 0.01 is used"]


def test_load_returns_a_space_as_it_is() -> None:
    space = SearchSpace.load({"x": 1})
    assert SearchSpace.load(space) is space


def test_without_fixed_hyperparameters() -> None:
    space = SearchSpace.load({"x": [1, 2], "y": [3, 4], "z": 5}).without({"x", "other"})
    study, configs = ask(space, 1)
    assert space.names == ("y", "z")
    assert configs[0].keys() == {"y", "z"}
    assert study.trials[0].params.keys() == {"y"}


class TestDefaults:
    def test_the_defaults_come_back_from_the_study(self, tmp_path: Path) -> None:
        space = SearchSpace.load(write(tmp_path, OWN))
        defaults = {
            "learning_rate": 3e-4,
            "batch_size": 64,
            "gamma": 0.5,
            "net_arch": (64, 64, 64),
            "updates": 5,
            "tau": Fraction(3, 4),
            "per": False,
            "activation": None,
            "unused": object(),
        }
        params, config, notes = space.default_params(defaults)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
        study.enqueue_trial(params)

        assert notes == []
        assert space.suggest(study.ask()) == config
        assert config == {
            **{name: defaults[name] for name in ("learning_rate", "batch_size", "updates", "per")},
            "gamma": 0.98,
            "net_arch": [64, 64, 64],
            "tau": 0.75,
            "activation": None,
            "ent_coef": 1e-3,
            "sizes": [256, 256],
        }

    def test_transformed_parameters(self, tmp_path: Path) -> None:
        space = SearchSpace.load(write(tmp_path, SWEEP))
        _, config, _ = space.default_params(
            {"normal": 11.5, "q_log_uniform_values": 64, "q_log_uniform": 2.5, "values": [64]}
        )
        assert config["normal"] == pytest.approx(11.5)
        assert config["q_log_uniform_values"] == 64
        assert config["q_log_uniform"] == 2.5
        assert config["values"] == [64]

    @pytest.mark.parametrize(
        ("entry", "default", "used", "note"),
        [
            ({"low": 1e-4, "high": 1e-2, "log": True}, 0.5, 0.01, "lies outside 0.0001..0.01;"),
            ({"low": 1, "high": 9, "step": 4}, 6, 5, "outside int 1..9 step 4; 5 is used"),
            ({"low": 1, "high": 9}, 2.6, 3, "default 2.6 lies outside int 1..9; 3 is used"),
            ({"low": 1, "high": 9}, -math.inf, 1, "outside 1..9"),
            ({"low": 1, "high": 9}, math.nan, 5, "nan"),
            ({"low": 1, "high": 9}, "many", 5, "'many'"),
            ({"low": 1, "high": 9}, True, 5, "True"),
            ({"low": 1, "high": 9}, 10**400, 5, "0"),
            ({"low": 0.0, "high": 1, "step": 0.1}, [1], 0.5, "[1]"),
            ({"low": 1, "high": 100, "log": True}, None, 10, "None"),
            ([32, 64], 128, 32, "default 128 lies outside categorical [32, 64]; 32 is used"),
            ([1, 2], True, 1, "True"),
            ([[1], "a"], np.ones(2), [1], "[1.0, 1.0]"),
        ],
    )
    def test_defaults_that_do_not_fit(
        self, entry: object, default: object, used: object, note: str
    ) -> None:
        _, config, notes = SearchSpace.load({"x": entry}).default_params({"x": default})
        assert config["x"] == pytest.approx(used)
        assert type(config["x"]) is type(used)
        assert len(notes) == 1
        assert notes[0].startswith("x: default")
        assert note in notes[0]

    def test_normal_default_far_away(self) -> None:
        space = SearchSpace.load(sweep(distribution="normal"))
        params, config, notes = space.default_params({"x": 50})
        assert params == {"x.quantile": 0.999}
        assert config["x"] == pytest.approx(3.0902, abs=1e-4)
        assert notes[0].startswith("x: default 50 lies outside normal mu 0.0 sigma 1.0; 3.09")

    def test_unknown_defaults(self) -> None:
        space = SearchSpace.load(
            {
                "a": {"low": 1e-4, "high": 1e-2, "log": True},
                "b": {"low": 0.0, "high": 1},
                "c": ["x", "y"],
            }
        )
        _, config, notes = space.default_params({})
        assert config == {"a": pytest.approx(1e-3), "b": 0.5, "c": "x"}
        assert notes[1:] == [
            "b: no default is known; 0.5 is used",
            "c: no default is known; 'x' is used",
        ]
        _, config, _ = SearchSpace.load(sweep(distribution="normal", mu=7)).default_params({})
        assert config["x"] == pytest.approx(7)

    def test_default_trial_repeats_itself(self) -> None:
        trial = DefaultTrial({"x": 3})
        assert trial.number == 0
        assert [trial.suggest_int("x", 1, 9) for _ in range(2)] == [3, 3]
        assert trial.suggest_categorical("y", ["a", "b"]) == "a"
        assert trial.params == {"x": 3, "y": "a"}
        assert trial.notes == ["y: no default is known; 'a' is used"]


class TestIncompatible:
    BASE: dict[str, Any] = {  # noqa: RUF012
        "lr": {"low": 1e-4, "high": 1e-2, "log": True},
        "n": {"low": 2, "high": 8, "step": 2},
        "arch": [[64], [32, 32]],
        "gamma": 0.98,
    }

    def compare(self, **changes: object) -> dict[str, tuple[object, object]]:
        stored = json.loads(json.dumps(SearchSpace.load(self.BASE).describe()))
        return incompatible(stored, SearchSpace.load({**self.BASE, **changes}).describe())

    def test_the_same(self) -> None:
        assert self.compare() == {}

    def test_wider_is_compatible(self) -> None:
        assert self.compare(lr={"low": 1e-5, "high": 1e-1, "log": True}) == {}
        assert self.compare(n={"low": 0, "high": 10, "step": 2}) == {}

    @pytest.mark.parametrize(
        ("changes", "stored", "given"),
        [
            (
                {"lr": {"low": 1e-3, "high": 1e-2, "log": True}},
                "float 0.0001..0.01 log",
                "float 0.001..0.01 log",
            ),
            ({"lr": {"low": 1e-4, "high": 1e-2}}, "float 0.0001..0.01 log", "float 0.0001..0.01"),
            ({"n": {"low": 1, "high": 9, "step": 2}}, "int 2..8 step 2", "int 1..9 step 2"),
            ({"n": {"low": 2, "high": 8}}, "int 2..8 step 2", "int 2..8"),
            ({"n": {"low": 2, "high": 8.0, "step": 2}}, "int 2..8 step 2", "float 2.0..8.0 step 2"),
            ({"n": [2, 4]}, "int 2..8 step 2", "categorical [2, 4]"),
            ({"n": 4}, "int 2..8 step 2", "constant 4"),
            ({"arch": [[64]]}, "categorical ['[64]', '[32, 32]']", "categorical ['[64]']"),
            ({"gamma": 0.9}, "constant 0.98", "constant 0.9"),
            ({"new": 1}, "absent", "constant 1"),
        ],
    )
    def test_differences(self, changes: dict[str, Any], stored: str, given: str) -> None:
        differences = self.compare(**changes)
        assert list(differences) == list(changes)
        old, new = differences[next(iter(changes))]
        assert old == stored
        assert str(new).startswith(given)

    def test_removed(self) -> None:
        stored = SearchSpace.load(self.BASE)
        given = stored.without(["gamma"])
        assert incompatible(stored.describe(), given.describe()) == {
            "gamma": ("constant 0.98", "absent")
        }

    def test_transformed(self) -> None:
        def of(**entry: object) -> dict[str, Any]:
            return SearchSpace.load(sweep(**entry)).describe()

        normal = of(distribution="normal", mu=1)
        assert incompatible(normal, normal) == {}
        assert incompatible(normal, of(distribution="normal", mu=2)) == {
            "x": ("normal mu 1.0 sigma 1.0", "normal mu 2.0 sigma 1.0")
        }
        entry = {"distribution": "q_log_uniform_values", "min": 8, "max": 64}
        assert incompatible(of(**entry, q=8), of(**(entry | {"max": 128}), q=8)) == {}
        assert incompatible(of(**entry, q=8), of(**entry, q=4)) == {
            "x": (
                "rounded 8.0..64.0 log to multiples of 8",
                "rounded 8.0..64.0 log to multiples of 4",
            )
        }

    def test_callables(self) -> None:
        one = SearchSpace.load(conditional).describe()
        other = SearchSpace.load(self.BASE).describe()
        assert incompatible(one, dict(one)) == {}
        old, new = incompatible(one, other)["search_space"]
        assert str(old).endswith("test_space.conditional")
        assert new == "parameters lr, n, arch, gamma"
