"""Reading and checking configurations; one for each learner; schedules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from dask_mohpo.agents._contract import Config, Schedule, per_learner
from dask_mohpo.agents.envelope import EnvelopeConfig
from dask_mohpo.agents.pcn import PCNConfig
from dask_mohpo.errors import UnknownNameError, UsageError


@dataclass(frozen=True, kw_only=True)
class ToyConfig(Config):
    ALGO: ClassVar[str] = "toy"
    SHARED: ClassVar[tuple[str, ...]] = ("batch_size", "net_arch")

    learning_rate: float = 0.5
    batch_size: int = 8
    double: bool = True
    max_norm: float | None = 1.0
    limit: int | None = None
    net_arch: tuple[int, ...] = (4, 4)
    scales: tuple[float, ...] | None = None
    kind: str = "soft"

    def __post_init__(self) -> None:
        self._require("batch_size", self.batch_size >= 1, "an integer ≥ 1")


@dataclass(frozen=True, kw_only=True)
class NeedyConfig(Config):
    ALGO: ClassVar[str] = "needy"

    depth: int
    rate: float | int = 1


def read(**values):
    return ToyConfig.from_mapping(values)


def exactly(value):
    """A value together with its types, so that 1, 1.0 and True differ."""
    if isinstance(value, tuple):
        return (tuple, *map(exactly, value))
    return type(value), value


def test_names_and_defaults():
    numbers = ("learning_rate", "batch_size", "double", "max_norm", "limit", "net_arch", "scales")
    assert ToyConfig.names() == (*numbers, "kind")
    assert ToyConfig.defaults() == {
        "learning_rate": 0.5,
        "batch_size": 8,
        "double": True,
        "max_norm": 1.0,
        "limit": None,
        "net_arch": [4, 4],
        "scales": None,
        "kind": "soft",
    }
    json.dumps(ToyConfig.defaults())
    assert ToyConfig.from_mapping(ToyConfig.defaults()) == ToyConfig() == read()
    assert NeedyConfig.defaults() == {"rate": 1}


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("learning_rate", 1e-3, 1e-3),
        ("learning_rate", 1, 1.0),
        ("learning_rate", np.float32(0.25), 0.25),
        ("learning_rate", np.int64(2), 2.0),
        ("batch_size", 64, 64),
        ("batch_size", 64.0, 64),
        ("batch_size", np.int32(64), 64),
        ("batch_size", np.float64(64.0), 64),
        ("double", False, False),
        ("double", np.bool_(False), False),
        ("max_norm", None, None),
        ("max_norm", 2, 2.0),
        ("limit", None, None),
        ("limit", 3.0, 3),
        ("net_arch", [8, 16], (8, 16)),
        ("net_arch", (8, 16.0), (8, 16)),
        ("net_arch", [np.int64(8)], (8,)),
        ("net_arch", [], ()),
        ("scales", None, None),
        ("scales", [1, 2.5], (1.0, 2.5)),
        ("kind", "hard", "hard"),
        ("kind", np.str_("hard"), "hard"),
    ],
)
def test_values_get_the_type_of_their_field(name, given, wanted):
    assert exactly(getattr(read(**{name: given}), name)) == exactly(wanted)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("learning_rate", "1e-3"),
        ("learning_rate", None),
        ("learning_rate", True),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", [0.1]),
        ("batch_size", 64.5),
        ("batch_size", True),
        ("batch_size", np.bool_(True)),
        ("batch_size", None),
        ("batch_size", "64"),
        ("batch_size", float("nan")),
        ("batch_size", -float("inf")),
        ("double", 1),
        ("double", 0.0),
        ("double", "true"),
        ("double", None),
        ("max_norm", "none"),
        ("max_norm", False),
        ("limit", 1.5),
        ("net_arch", 64),
        ("net_arch", None),
        ("net_arch", "[64, 64]"),
        ("net_arch", [64, 1.5]),
        ("net_arch", [64, True]),
        ("net_arch", [[64]]),
        ("scales", [None]),
        ("scales", ["1"]),
        ("kind", 1),
        ("kind", None),
        ("kind", True),
        ("kind", ["hard"]),
    ],
)
def test_a_value_of_the_wrong_type_is_named(name, given):
    with pytest.raises(UsageError, match=f"^toy: {name} = ") as raised:
        read(**{name: given})
    assert "it takes" in str(raised.value)


def test_a_value_out_of_range_is_named():
    with pytest.raises(UsageError, match=r"^toy: batch_size = 0 .* it takes an integer ≥ 1\.$"):
        read(batch_size=0)
    with pytest.raises(UsageError):
        ToyConfig(batch_size=0)


def test_an_unknown_name_is_named_with_the_closest():
    with pytest.raises(UnknownNameError, match="Did you mean 'batch_size'") as raised:
        read(batchsize=1)
    error = raised.value
    assert (error.kind, error.given) == ("hyperparameter of toy", "batchsize")
    assert error.closest == "batch_size"
    assert error.valid == sorted(ToyConfig.names())
    with pytest.raises(UnknownNameError) as raised:
        read(zzz=1)
    assert raised.value.closest is None
    # names of the class are not hyperparameters
    with pytest.raises(UnknownNameError):
        read(ALGO="other")


def test_what_takes_both_whole_and_other_numbers_keeps_them():
    for given in (2, 2.0, 2.5):
        config = NeedyConfig.from_mapping({"depth": 1, "rate": given})
        assert exactly(config.rate) == exactly(given)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_precision_is_chosen_by_its_name(precision):
    assert EnvelopeConfig.from_mapping({"precision": precision}).precision == precision


def test_an_unknown_precision_is_told_the_valid_ones():
    with pytest.raises(UsageError, match=r"^envelope: precision = 'fp8' .* it takes") as raised:
        EnvelopeConfig.from_mapping({"precision": "fp8"})
    for name in ("'float32'", "'bf16'"):
        assert name in str(raised.value)
    with pytest.raises(UsageError, match=r"precision = 16 is not valid; it takes str\."):
        EnvelopeConfig.from_mapping({"precision": 16})


# --- one configuration for each learner -----------------------------------------------------------


def test_the_key_of_a_batch_is_what_its_learners_share():
    one = read(batch_size=4, net_arch=[8])
    assert one.batch_key() == (4, (8,))
    assert read(batch_size=4, net_arch=[8], learning_rate=1e-3).batch_key() == one.batch_key()
    assert read(batch_size=5, net_arch=[8]).batch_key() != one.batch_key()
    assert read(batch_size=4, net_arch=[8, 8]).batch_key() != one.batch_key()
    hash(one.batch_key())
    assert NeedyConfig(depth=1).batch_key() == NeedyConfig(depth=2, rate=3).batch_key()


@pytest.mark.parametrize("kind", [EnvelopeConfig, PCNConfig])
def test_all_that_is_shared_is_a_hyperparameter(kind):
    assert set(kind.SHARED) < set(kind.names())
    assert len(kind().batch_key()) == len(set(kind.SHARED))


def test_one_configuration_is_for_all_learners():
    config = read()
    assert per_learner(config, 3) == [config] * 3


def test_each_learner_has_the_configuration_at_its_place():
    configs = [read(learning_rate=rate) for rate in (0.1, 0.2, 0.3)]
    assert per_learner(tuple(configs), 3) == configs
    assert per_learner(configs[:1], 1) == configs[:1]


@pytest.mark.parametrize("num_learners", [1, 3])
def test_as_many_configurations_as_learners(num_learners):
    with pytest.raises(UsageError, match=f"^2 configurations for {num_learners} learners"):
        per_learner([read(), read()], num_learners)


def test_learners_that_differ_in_what_they_share_are_named():
    configs = [read(), read(double=False), read(batch_size=9)]
    with pytest.raises(UsageError, match="must agree in batch_size, net_arch") as raised:
        per_learner(configs, 3)
    assert "(8, (4, 4))" in str(raised.value)
    assert "(9, (4, 4))" in str(raised.value)


# --- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "step", "wanted"),
    [
        (0.5, 0, 1.0),
        (0.5, 250, 0.6),
        (0.5, 500, 0.2),
        (0.5, 1000, 0.2),
        (0.5, 5000, 0.2),
        (1, 500, 0.6),
        (1.0, 1000, 0.2),
        (200, 0, 1.0),
        (200, 50, 0.8),
        (200, 200, 0.2),
        (200, 999, 0.2),
        (4000, 1000, 0.8),
        (None, 0, 1.0),
        (None, 10_000, 1.0),
    ],
)
def test_a_schedule_runs_over_steps_or_a_fraction_of_the_budget(steps, step, wanted):
    assert Schedule([1.0], [0.2], [steps], 1000)(step) == pytest.approx([wanted], abs=1e-12)


def test_each_learner_has_a_schedule_of_its_own():
    schedule = Schedule([1.0, 0.0, 0.5, 0.3], [0.0, 1.0, 0.0, 0.3], [0.1, 40, None, 0.5], 200)
    for step, wanted in [
        (0, [1.0, 0.0, 0.5, 0.3]),
        (10, [0.5, 0.25, 0.5, 0.3]),
        (20, [0.0, 0.5, 0.5, 0.3]),
        (30, [0.0, 0.75, 0.5, 0.3]),
        (10**9, [0.0, 1.0, 0.5, 0.3]),
    ]:
        values = schedule(step)
        assert values.shape == (4,)
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-12)


def test_a_constant_schedule_is_exact():
    for number in (0.1, 0.3, 0.7):
        assert Schedule([number], [number], [0.5], 100)(37).tolist() == [number]
