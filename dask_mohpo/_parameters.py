"""One hyperparameter of a search space: how it is written, seen by Optuna, and described."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.trial import BaseTrial

from dask_mohpo._wandb_sweep import (
    SWEEP_KEYS,
    Normal,
    Rounded,
    check_keys,
    check_range,
    read_number,
    text_to_number,
)
from dask_mohpo.errors import SpaceError

__all__ = [
    "EXAMPLE",
    "Parameter",
    "as_float",
    "checked_value",
    "continues",
    "in_words",
    "plain_value",
    "read_parameter",
    "same_value",
]


_KEYS = ("choices", "high", "log", "low", "step", "type", "value", "values")
EXAMPLE = "learning_rate: {low: 1e-4, high: 1e-2, log: true}"
_PLAIN = "null, a truth value, a finite number, text, or lists and text-keyed mappings of these"


@dataclass(frozen=True)
class _Coded:
    """Choices that may be lists, which Optuna does not store: it sees their JSON text."""

    choices: tuple[Any, ...]
    codes: tuple[Any, ...]

    def decode(self, code: Any) -> Any:
        return copy.deepcopy(self.choices[self.codes.index(code)])


@dataclass(frozen=True)
class Parameter:
    """One hyperparameter: a constant where `distribution` is None."""

    name: str
    distribution: BaseDistribution | None = None
    transform: _Coded | Normal | Rounded | None = None
    constant: Any = None

    @property
    def optuna_name(self) -> str:
        return self.name + (self.transform.suffix if isinstance(self.transform, Normal) else "")

    def suggest(self, trial: BaseTrial) -> Any:
        name, dist = self.optuna_name, self.distribution
        if isinstance(dist, FloatDistribution):
            value: Any = float(
                trial.suggest_float(name, dist.low, dist.high, log=dist.log, step=dist.step)
            )
        elif isinstance(dist, IntDistribution):
            value = trial.suggest_int(name, dist.low, dist.high, log=dist.log, step=dist.step)
        elif isinstance(dist, CategoricalDistribution):
            value = trial.suggest_categorical(name, dist.choices)
        else:
            return copy.deepcopy(self.constant)
        return self.decode(value)

    def decode(self, value: Any) -> Any:
        """Turn Optuna's value into the configuration's."""
        return self.transform.decode(value) if self.transform else value

    def nearest(self, default: object) -> Any:
        """Return the value of Optuna's that comes closest to a value of the configuration."""
        dist = self.distribution
        if isinstance(dist, CategoricalDistribution):
            choices = self.transform.choices if isinstance(self.transform, _Coded) else dist.choices
            for code, choice in zip(dist.choices, choices, strict=True):
                if isinstance(choice, bool) == isinstance(default, bool) and choice == default:
                    return code
            return dist.choices[0]
        assert isinstance(dist, (FloatDistribution, IntDistribution))
        number = as_float(default)
        if number is None:
            middle = (
                math.sqrt(dist.low) * math.sqrt(dist.high)
                if dist.log
                else dist.low + (dist.high - dist.low) / 2
            )
            return _snap(dist, middle)
        if isinstance(self.transform, (Normal, Rounded)):
            number = self.transform.encode(number)
        return _snap(dist, number)

    def describe(self) -> dict[str, Any]:
        if self.distribution is None:
            return {"kind": "constant", "value": copy.deepcopy(self.constant)}
        described = json.loads(distribution_to_json(self.distribution))
        if isinstance(self.transform, (Normal, Rounded)):
            fields = {k: v for k, v in asdict(self.transform).items() if k not in ("low", "high")}
            return {"kind": self.transform.kind, "distribution": described, **fields}
        kind = described["name"].removesuffix("Distribution").lower()
        return {"kind": kind, "distribution": described}


def read_parameter(source: str, name: object, entry: Any, notes: list[str]) -> Parameter:
    if not isinstance(name, str) or not name:
        text = "parameter names as text (YAML reads on, off, yes, no as truth values: quote them)"
        raise SpaceError(source, None, name, text)
    if isinstance(entry, (Normal, Rounded)):
        return Parameter(name, entry.distribution, entry)
    if isinstance(entry, BaseDistribution):
        return _read_distribution(source, name, entry)
    if isinstance(entry, Mapping):
        return _read_keys(source, name, entry, notes)
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if isinstance(entry, (list, tuple)):
        return _categorical(source, name, entry)
    return _constant(source, name, entry)


def _read_distribution(source: str, name: str, dist: BaseDistribution) -> Parameter:
    if isinstance(dist, CategoricalDistribution):
        return _categorical(source, name, dist.choices)
    if not isinstance(dist, (FloatDistribution, IntDistribution)):
        text = "a FloatDistribution, IntDistribution or CategoricalDistribution"
        raise SpaceError(source, name, dist, text)
    read_number(source, name, "low", dist.low)
    read_number(source, name, "high", dist.high)
    # Optuna's deprecated subclasses become the class that they stand for.
    if isinstance(dist, IntDistribution):
        return Parameter(name, IntDistribution(dist.low, dist.high, dist.log, dist.step))
    return Parameter(name, FloatDistribution(dist.low, dist.high, dist.log, dist.step))


def _read_keys(source: str, name: str, entry: Mapping[Any, Any], notes: list[str]) -> Parameter:
    sweep_like = not SWEEP_KEYS.isdisjoint(entry) and "low" not in entry and "high" not in entry
    hint = "; the keys of a W&B sweep belong under a top-level `parameters:`" if sweep_like else ""
    check_keys(source, name, entry, _KEYS, hint)
    for key in ("value", "choices", "values"):
        if key in entry:
            if len(entry) > 1:
                raise SpaceError(source, name, dict(entry), f"{key} alone")
            if key == "value":
                return _constant(source, name, entry[key])
            return _categorical(source, name, entry[key])
    if "low" not in entry or "high" not in entry:
        raise SpaceError(source, name, dict(entry), "both low and high, or value, or choices")
    return Parameter(name, _read_range(source, name, entry, notes))


def _read_range(
    source: str, name: str, entry: Mapping[Any, Any], notes: list[str]
) -> BaseDistribution:
    low, high = (read_number(source, name, key, entry[key]) for key in ("low", "high"))
    step = read_number(source, name, "step", entry["step"]) if "step" in entry else None
    log, kind = entry.get("log", False), entry.get("type")
    if not isinstance(log, bool):
        raise SpaceError(source, name, {"log": log}, "log: true or log: false")
    if "type" in entry and kind not in ("int", "float"):
        raise SpaceError(source, name, {"type": kind}, "type: int or type: float")
    check_range(source, name, {"low": low, "high": high}, log)
    if step is not None and log:
        raise SpaceError(source, name, dict(entry), "step or log, not both")
    if step is not None and step <= 0:
        raise SpaceError(source, name, {"step": step}, "step above 0")
    given = [low, high] if step is None else [low, high, step]
    if kind is None:
        kind = "int" if all(isinstance(number, int) for number in given) else "float"
    if kind == "int":
        if any(number != int(number) for number in given):
            raise SpaceError(source, name, dict(entry), "whole low, high and step, or type: float")
        low, high, step = int(low), int(high), None if step is None else int(step)
    if step is not None:
        top = _grid_top(source, name, low, high, step)
        if top == low:
            raise SpaceError(source, name, dict(entry), "a step that fits between low and high")
        if top != high:
            notes.append(f"{name}: high {high} is not on the grid of step {step}; {top} is used.")
        high = top
    if kind == "int":
        return IntDistribution(int(low), int(high), log, int(step or 1))
    return FloatDistribution(low, high, log, step)


def _grid_top(source: str, name: str, low: float, high: float, step: float) -> int | float:
    """Return the highest value of the grid. Optuna lowers `high` too, with a warning each time."""
    bottom, width = Decimal(str(low)), Decimal(str(step))
    try:
        top = bottom + (Decimal(str(high)) - bottom) // width * width
        exact = (Decimal(str(float(top))) - bottom) % width == 0
    except InvalidOperation:
        exact = False
    if not exact:
        raise SpaceError(source, name, {"low": low, "step": step}, "low and step with fewer digits")
    return int(top) if isinstance(high, int) and top == int(top) else float(top)


def _categorical(source: str, name: str, choices: object) -> Parameter:
    if not isinstance(choices, (list, tuple)) or not choices:
        raise SpaceError(source, name, choices, "a list of at least one choice")
    values = [checked_value(source, name, choice, parse_text=True) for choice in choices]
    codes: list[Any] = []
    for value in values:
        if _has_mapping(value):
            text = "choices that are null, truth values, numbers, text, or lists of these"
            raise SpaceError(source, name, value, text)
        code = json.dumps(value) if isinstance(value, list) else value
        if code in codes:
            text = "each choice once (1, 1.0 and true are one choice to Optuna)"
            raise SpaceError(source, name, value, text)
        codes.append(code)
    coded = _Coded(tuple(values), tuple(codes))
    return Parameter(name, CategoricalDistribution(codes), coded)


def _constant(source: str, name: str, value: object) -> Parameter:
    return Parameter(name, constant=checked_value(source, name, value, parse_text=True))


def _has_mapping(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_mapping, value)))


def checked_value(source: str, name: str, value: object, parse_text: bool = False) -> Any:
    try:
        return plain_value(value, parse_text)
    except ValueError:
        raise SpaceError(source, name, value, _PLAIN) from None


def plain_value(value: Any, parse_text: bool = False) -> Any:
    """Return a value as JSON can hold it: tuples as lists, NumPy's scalars as Python's.

    Raises
    ------
    ValueError : JSON cannot hold it.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if parse_text:
        value = text_to_number(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(item, parse_text) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain_value(item, parse_text) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(f"{value!r} is not plain")


def as_float(value: Any) -> float | None:
    """Return a number as a float; None for what is not a number, or not one that floats hold."""
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def _snap(dist: FloatDistribution | IntDistribution, number: float) -> int | float:
    """Return the value of a distribution that is nearest to a number."""
    clipped = min(max(number, dist.low), dist.high)
    if isinstance(dist, IntDistribution):
        return dist.low + round((clipped - dist.low) / dist.step) * dist.step
    if dist.step is None:
        return clipped
    steps = round((clipped - dist.low) / dist.step)
    return float(Decimal(str(dist.low)) + steps * Decimal(str(dist.step)))


def same_value(used: object, default: object) -> bool:
    """Whether a value is the default, up to the rounding of a quantile."""
    if isinstance(used, bool) != isinstance(default, bool):
        return False
    a, b = as_float(used), as_float(default)
    if a is None or b is None:
        return bool(used == default)
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def in_words(entry: dict[str, Any] | None) -> str:
    """Return a parameter's description as people read it."""
    if entry is None:
        return "absent"
    kind = entry["kind"]
    if kind == "constant":
        return f"constant {entry['value']!r}"
    if kind == "normal":
        return f"normal mu {entry['mu']} sigma {entry['sigma']}"
    attributes = entry["distribution"]["attributes"]
    if kind == "categorical":
        return f"categorical {list(attributes['choices'])}"
    text = f"{kind} {attributes['low']}..{attributes['high']}"
    if attributes["log"]:
        text += " log"
    if attributes["step"] not in (None, 1) or (kind == "float" and attributes["step"]):
        text += f" step {attributes['step']}"
    return f"{text} to multiples of {entry['q']}" if kind == "rounded" else text


def continues(old: dict[str, Any] | None, new: dict[str, Any] | None) -> bool:
    """Whether a parameter's description still contains an older one: its range may have grown."""
    if old is None or new is None:
        return False
    before, after = dict(old), dict(new)
    attributes_before = dict(before.pop("distribution", {}).get("attributes", {}))
    attributes_after = dict(after.pop("distribution", {}).get("attributes", {}))
    if before != after:
        return False
    if "low" not in attributes_before:
        return attributes_before == attributes_after
    low, high = attributes_before.pop("low"), attributes_before.pop("high")
    new_low, new_high = attributes_after.pop("low"), attributes_after.pop("high")
    if attributes_before != attributes_after or new_low > low or new_high < high:
        return False
    steps = (low - new_low) / (attributes_before["step"] or 1)
    return attributes_before["step"] is None or math.isclose(steps, round(steps), abs_tol=1e-8)
