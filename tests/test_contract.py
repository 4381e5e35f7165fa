"""Reading and checking configurations, schedules, random streams."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from dask_mohpo.agents._contract import Config, decay, generators
from dask_mohpo.errors import UnknownNameError, UsageError


@dataclass(frozen=True, kw_only=True)
class ToyConfig(Config):
    ALGO: ClassVar[str] = "toy"

    learning_rate: float = 0.5
    batch_size: int = 8
    double: bool = True
    max_norm: float | None = 1.0
    limit: int | None = None
    net_arch: tuple[int, ...] = (4, 4)
    scales: tuple[float, ...] | None = None

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
    names = ("learning_rate", "batch_size", "double", "max_norm", "limit", "net_arch", "scales")
    assert ToyConfig.names() == names
    assert ToyConfig.defaults() == {
        "learning_rate": 0.5,
        "batch_size": 8,
        "double": True,
        "max_norm": 1.0,
        "limit": None,
        "net_arch": [4, 4],
        "scales": None,
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
def test_decay(steps, step, wanted):
    assert decay(1.0, 0.2, steps, 1000, step) == pytest.approx(wanted, abs=1e-12)


def test_decay_ends_exactly():
    assert decay(1.0, 0.1, 0.3, 1000, 300) == 0.1
    assert decay(0.0, 1.0, 3, 1000, 3) == 1.0
    assert decay(0.3, 0.3, 0.5, 1000, 123) == 0.3


def test_decay_rises_as_well():
    values = [decay(0.0, 1.0, 10, 100, step) for step in range(12)]
    assert values == sorted(values)
    assert values[5] == pytest.approx(0.5)


# --- random streams -------------------------------------------------------------------------------


def test_generators_depend_on_the_seed_and_the_stream_alone():
    def draws(seeds, stream):
        return [tuple(g.random(3)) for g in generators(seeds, stream)]

    first = draws([4, 5], 0)
    assert first == draws([4, 5], 0)
    assert draws([5], 0) == first[1:]
    assert len({*first, *draws([4, 5], 1), *draws([4, 5], 2)}) == 6
