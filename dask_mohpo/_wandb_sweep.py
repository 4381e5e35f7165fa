"""W&B sweep files, read into Optuna distributions.

The keys and distributions are those of https://docs.wandb.ai/models/sweeps/sweep-config-keys. Two
of them have no counterpart in Optuna; `Normal` and `Rounded` sample something that Optuna has and
compute the hyperparameter from it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from statistics import NormalDist
from typing import Any, ClassVar

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from dask_mohpo.errors import SpaceError

__all__ = [
    "SWEEP_KEYS",
    "Normal",
    "Rounded",
    "check_keys",
    "check_range",
    "is_sweep",
    "read_number",
    "read_sweep",
    "text_to_number",
]

_RANGE = ("min", "max")
_DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "categorical": ("values", "probabilities"),
    "constant": ("value",),
    "int_uniform": _RANGE,
    "log_uniform": _RANGE,
    "log_uniform_values": _RANGE,
    "normal": ("mu", "sigma"),
    "q_log_uniform": (*_RANGE, "q"),
    "q_log_uniform_values": (*_RANGE, "q"),
    "q_uniform": (*_RANGE, "q"),
    "uniform": _RANGE,
}
_REQUIRED = ("value", "values", "min", "max")

SWEEP_KEYS = frozenset(key for keys in _DISTRIBUTIONS.values() for key in keys) | {"distribution"}
"""What may stand in one parameter of a sweep."""

_NOT_SENT = "nothing is sent to W&B"
_WORKERS = "the workers call the algorithm themselves"
_IGNORED = {
    "apiVersion": _NOT_SENT,
    "command": _WORKERS,
    "controller": "the driver of the study asks for every trial",
    "description": _NOT_SENT,
    "early_terminate": "every trial trains all of its seeds",
    "entity": _NOT_SENT,
    "image_uri": _WORKERS,
    "job": _WORKERS,
    "kind": _NOT_SENT,
    "method": "sampler= chooses the next configuration",
    "metric": "objectives= says what is searched for",
    "metrics": "objectives= says what is searched for",
    "name": "study_name= names the study",
    "program": _WORKERS,
    "project": _NOT_SENT,
    "run_cap": "n_trials= bounds the study",
    "scheduler": "sampler= chooses the next configuration",
    "template_file": _NOT_SENT,
}

# YAML 1.1, which PyYAML speaks, wants a dot and a signed exponent: it reads 1e-4 and 1.5e3 as text.
_MISSED_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@dataclass(frozen=True)
class Normal:
    """A normal distribution, searched by its quantile.

    Optuna has no normal distribution. It samples the quantile uniformly from 0.001 to 0.999, so a
    value lies within 3.09 standard deviations of the mean.
    """

    mu: float
    sigma: float

    kind: ClassVar[str] = "normal"
    suffix: ClassVar[str] = ".quantile"
    distribution: ClassVar[BaseDistribution] = FloatDistribution(1e-3, 1 - 1e-3)

    def decode(self, quantile: float) -> float:
        return NormalDist(self.mu, self.sigma).inv_cdf(quantile)

    def encode(self, value: float) -> float:
        return NormalDist(self.mu, self.sigma).cdf(value)


@dataclass(frozen=True)
class Rounded:
    """A range whose values are rounded to multiples of `q` after Optuna sampled them."""

    low: float
    high: float
    log: bool
    q: int | float

    kind: ClassVar[str] = "rounded"
    suffix: ClassVar[str] = ""

    @property
    def distribution(self) -> BaseDistribution:
        return FloatDistribution(self.low, self.high, log=self.log)

    def decode(self, value: float) -> int | float:
        return _multiple(round(value / self.q), self.q)

    def encode(self, value: float) -> float:
        return value


def is_sweep(data: Mapping[Any, Any]) -> bool:
    """Whether a mapping has the form of a W&B sweep: parameters under `parameters`."""
    parameters = data.get("parameters")
    if not isinstance(parameters, Mapping):
        return False
    return any(isinstance(entry, Mapping) for entry in parameters.values()) or any(
        key in _IGNORED for key in data
    )


def read_sweep(data: Mapping[Any, Any], source: str) -> tuple[dict[Any, object], list[str]]:
    """Read a sweep.

    Parameters
    ----------
    data : the whole sweep.
    source : the file, for error messages.

    Returns
    -------
    entries : per parameter an Optuna distribution, a `Normal`, a `Rounded`, ``{"value": ...}`` or
        ``{"values": ...}``.
    notes : sentences about what is ignored.

    Raises
    ------
    SpaceError : an unknown key or distribution, or a bad bound.
    """
    check_keys(source, None, data, ("parameters", *_IGNORED))
    notes = [f"{key}: ignored; {_IGNORED[key]}." for key in data if key in _IGNORED]
    metrics = [data.get("metric"), *_as_list(data.get("metrics"))]
    if any(isinstance(metric, Mapping) and metric.get("goal") == "minimize" for metric in metrics):
        notes.append("metric.goal: minimize is ignored; every objective is maximised here.")
    parameters = data["parameters"]
    if not parameters:
        raise SpaceError(source, "parameters", parameters, "at least one parameter")
    return {name: _read(source, name, entry, notes) for name, entry in parameters.items()}, notes


def check_keys(
    source: str,
    parameter: str | None,
    mapping: Mapping[Any, Any],
    valid: Iterable[str],
    hint: str = "",
) -> None:
    """Raise a SpaceError for the first key that is not valid, with the valid and the closest."""
    names = sorted(valid)
    for key in mapping:
        if key not in names:
            matches = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            closest = f" (did you mean {matches[0]!r}?)" if matches else ""
            text = f"the keys {', '.join(names)}{closest}{hint}"
            raise SpaceError(source, parameter, key, text)


def check_range(source: str, parameter: str, bounds: Mapping[str, Any], log: bool) -> None:
    """Raise a SpaceError unless the two bounds, lower first, are a range."""
    (low_key, low), (high_key, high) = bounds.items()
    if low == high:
        raise SpaceError(
            source,
            parameter,
            dict(bounds),
            f"{low_key} below {high_key}, or a constant: {{value: {low}}}",
        )
    if low > high:
        raise SpaceError(source, parameter, dict(bounds), f"{low_key} below {high_key}")
    if log and low <= 0:
        raise SpaceError(source, parameter, dict(bounds), f"{low_key} above 0 in a log range")


def read_number(source: str, parameter: str, key: str, value: object) -> int | float:
    """Return a finite number, also one that YAML read as text; raise a SpaceError for others."""
    number = text_to_number(value.tolist() if hasattr(value, "tolist") else value)
    finite = False
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        try:
            finite = math.isfinite(number)
        except OverflowError:
            pass
    if not finite:
        raise SpaceError(source, parameter, {key: value}, f"{key} as a finite number")
    return number


def text_to_number(value: Any) -> Any:
    """Return the number that a text such as "1e-4" spells; anything else comes back as it is."""
    if isinstance(value, str) and _MISSED_FLOAT.fullmatch(value.strip()):
        return float(value)
    return value


def _read(source: str, name: str, entry: object, notes: list[str]) -> object:
    if not isinstance(entry, Mapping):
        raise SpaceError(
            source, name, entry, "a mapping, such as {value: 0.98} or {min: 0, max: 1}"
        )
    if "parameters" in entry:
        raise SpaceError(
            source,
            name,
            "parameters",
            "parameters of one level; nested `parameters:` are not supported",
        )
    distribution = _distribution(source, name, entry)
    keys = _DISTRIBUTIONS[distribution]
    check_keys(source, name, entry, ("distribution", *keys), f" for {distribution}")
    required = [key for key in keys if key in _REQUIRED]
    if any(key not in entry for key in required):
        raise SpaceError(source, name, dict(entry), f"{distribution} with {' and '.join(required)}")
    if distribution == "constant":
        return {"value": entry["value"]}
    if distribution == "categorical":
        if "probabilities" in entry:
            notes.append(
                f"{name}: probabilities are ignored; each of the values is equally likely."
            )
        return {"values": entry["values"]}
    if distribution == "normal":
        return _read_normal(source, name, entry)
    return _read_range(source, name, entry, distribution, notes)


def _distribution(source: str, name: str, entry: Mapping[Any, Any]) -> str:
    """Return the distribution that an entry names, or the one that W&B infers."""
    if "value" in entry and "values" in entry:
        raise SpaceError(source, name, dict(entry), "value or values, not both")
    if "distribution" in entry:
        given = entry["distribution"]
        if given == "categorical_w_probabilities":
            return "categorical"
        if not isinstance(given, str) or given not in _DISTRIBUTIONS:
            matches = difflib.get_close_matches(str(given), _DISTRIBUTIONS, n=1)
            closest = f" (did you mean {matches[0]!r}?)" if matches else ""
            names = ", ".join(_DISTRIBUTIONS)
            text = f"one of the distributions {names}{closest}"
            raise SpaceError(source, name, {"distribution": given}, text)
        return given
    if "value" in entry:
        return "constant"
    if "values" in entry:
        return "categorical"
    if "min" in entry and "max" in entry:
        bounds = [read_number(source, name, key, entry[key]) for key in _RANGE]
        return "int_uniform" if all(isinstance(bound, int) for bound in bounds) else "uniform"
    raise SpaceError(
        source,
        name,
        dict(entry),
        "value, values, both min and max, or a distribution with its keys",
    )


def _read_normal(source: str, name: str, entry: Mapping[Any, Any]) -> Normal:
    mu = read_number(source, name, "mu", entry.get("mu", 0.0))
    sigma = read_number(source, name, "sigma", entry.get("sigma", 1.0))
    if sigma <= 0:
        raise SpaceError(source, name, {"sigma": sigma}, "sigma above 0")
    return Normal(float(mu), float(sigma))


def _read_range(
    source: str, name: str, entry: Mapping[Any, Any], distribution: str, notes: list[str]
) -> BaseDistribution | Rounded:
    low, high = (read_number(source, name, key, entry[key]) for key in _RANGE)
    log = "log" in distribution
    if distribution in ("log_uniform", "q_log_uniform"):
        low, high = _exponentials(source, name, low, high, distribution, notes)
    check_range(source, name, {"min": low, "max": high}, log)
    if distribution == "int_uniform":
        if low != int(low) or high != int(high):
            raise SpaceError(source, name, {"min": low, "max": high}, "whole min and max")
        return IntDistribution(int(low), int(high))
    if not distribution.startswith("q_"):
        return FloatDistribution(low, high, log=log)
    q = read_number(source, name, "q", entry.get("q", 1))
    if q <= 0:
        raise SpaceError(source, name, {"q": q}, "q above 0")
    return _quantised(source, name, low, high, log, q)


def _exponentials(
    source: str, name: str, low: float, high: float, distribution: str, notes: list[str]
) -> tuple[float, float]:
    check_range(source, name, {"min": low, "max": high}, log=False)
    try:
        bounds = math.exp(low), math.exp(high)
    except OverflowError:
        bounds = 0.0, math.inf
    if not 0 < bounds[0] < bounds[1] < math.inf:
        raise SpaceError(
            source,
            name,
            {"min": low, "max": high},
            f"exponents of e between -700 and 700, or {distribution}_values with the values",
        )
    if 0 < low and high <= 1:
        notes.append(
            f"{name}: the bounds of {distribution} are exponents of e, so values lie in "
            f"{bounds[0]:.6g}..{bounds[1]:.6g}; {distribution}_values takes the values themselves."
        )
    return bounds


def _quantised(
    source: str, name: str, low: float, high: float, log: bool, q: int | float
) -> BaseDistribution | Rounded:
    """Return a distribution whose values are ``round(x / q) * q``; integers where q is one.

    Optuna has steps for linear ranges and for integers in a log range. It then sees the very
    value that the algorithm gets, which is what a sampler models best.
    """
    first, last = round(low / q), round(high / q)
    if first == last:
        raise SpaceError(
            source,
            name,
            {"min": low, "max": high, "q": q},
            "a q that leaves more than one value between min and max",
        )
    if log:
        if q == 1 and isinstance(q, int) and first >= 1:
            return IntDistribution(first, last, log=True)
        return Rounded(low, high, log, q)
    if isinstance(q, int):
        return IntDistribution(first * q, last * q, step=q)
    bottom, top = _multiple(first, q), _multiple(last, q)
    exact = (Decimal(str(top)) - Decimal(str(bottom))) % Decimal(str(q)) == 0
    return FloatDistribution(bottom, top, step=q) if exact else Rounded(low, high, log, q)


def _multiple(k: int, q: int | float) -> int | float:
    """Return ``k * q`` without the noise of binary fractions: three times 0.1 is 0.3."""
    return k * q if isinstance(q, int) else float(k * Decimal(str(q)))


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
