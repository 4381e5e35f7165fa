"""Search spaces: which hyperparameters are searched, and where.

A space is written in one of four forms:

- a mapping whose values are Optuna distributions, ``{low, high, log, step, type}``, lists of
  choices, or constants;
- our own YAML, which is that mapping in a file;
- a W&B sweep file;
- a callable ``trial -> dict`` for conditional spaces.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import BaseTrial, FixedTrial

from dask_mohpo._parameters import (
    EXAMPLE,
    Parameter,
    as_float,
    checked_value,
    continues,
    in_words,
    plain_value,
    read_parameter,
    same_value,
)
from dask_mohpo._wandb_sweep import is_sweep, read_sweep
from dask_mohpo.errors import SpaceError, UnknownNameError

__all__ = ["DefaultTrial", "SearchSpace", "check_config_names", "incompatible"]

_logger = logging.getLogger(__name__)

_UNKNOWN = object()


class DefaultTrial(FixedTrial):
    """A trial that suggests, for each name, the value nearest to a default.

    Parameters
    ----------
    defaults : configuration name → default value.
    parameters : the parameters of a space that was declared; a callable's are met as it suggests.

    Attributes
    ----------
    notes : a sentence for each suggestion that is not the default.
    """

    def __init__(self, defaults: Mapping[str, Any], parameters: Iterable[Parameter] = ()) -> None:
        # FixedTrial reads the dictionary at each suggestion, so it may grow until then.
        self._nearest: dict[str, Any] = {}
        super().__init__(self._nearest)
        self._defaults = defaults
        self._declared = {parameter.optuna_name: parameter for parameter in parameters}
        self.notes: list[str] = []

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        self._settle(name, FloatDistribution(low, high, log=log, step=step))
        return super().suggest_float(name, low, high, step=step, log=log)

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        self._settle(name, IntDistribution(low, high, log=log, step=step))
        return super().suggest_int(name, low, high, step=step, log=log)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        self._settle(name, CategoricalDistribution(choices))
        return super().suggest_categorical(name, choices)

    def _settle(self, name: str, distribution: BaseDistribution) -> None:
        if name in self._nearest:
            return
        parameter = self._declared.get(name, Parameter(name, distribution))
        default = self._defaults.get(parameter.name, _UNKNOWN)
        try:
            default = plain_value(default)
        except ValueError:
            pass
        value = self._nearest[name] = parameter.nearest(default)
        used = parameter.decode(value)
        if default is _UNKNOWN:
            self.notes.append(f"{parameter.name}: no default is known; {used!r} is used")
        elif not same_value(used, default):
            where = in_words(parameter.describe())
            if isinstance(distribution, (FloatDistribution, IntDistribution)):
                number, span = as_float(default), f"{distribution.low}..{distribution.high}"
                outside = number is not None and not distribution.low <= number <= distribution.high
                where = span if outside and parameter.transform is None else where
            text = f"default {default!r} lies outside {where}; {used!r} is used"
            self.notes.append(f"{parameter.name}: {text}")


class SearchSpace:
    """The hyperparameters that a study searches. Make one with `SearchSpace.load`.

    Attributes
    ----------
    source : the file, or what else the space came from.
    notes : sentences about what was ignored or adjusted as the space was read.
    """

    def __init__(
        self,
        source: str,
        parameters: Iterable[Parameter] = (),
        function: Callable[[Any], Any] | None = None,
        notes: Iterable[str] = (),
        dropped: Iterable[str] = (),
    ) -> None:
        self.source = source
        self.notes: tuple[str, ...] = tuple(notes)
        self._parameters = tuple(parameters)
        self._function = function
        self._dropped = frozenset(dropped)

    @classmethod
    def load(cls, spec: object, *, source: str | None = None) -> SearchSpace:
        """Read a search space.

        Parameters
        ----------
        spec : a SearchSpace, a mapping, the path of a ``.yaml`` or ``.yml`` file, or a callable
            ``trial -> dict``.
        source : how error messages call the space. None: the path, or the callable's name.

        Returns
        -------
        The space.

        Raises
        ------
        SpaceError : a mistake in the space.

        Notes
        -----
        A list-valued choice such as ``[256, 256]`` is the text ``"[256, 256]"`` in Optuna's trial.
        W&B's ``normal`` of a parameter ``x`` is ``x.quantile`` there, uniform in 0.001..0.999, as
        Optuna has no normal distribution.
        """
        if isinstance(spec, SearchSpace):
            return spec
        if isinstance(spec, Mapping):
            return cls._from_mapping(spec, source or "search_space")
        if isinstance(spec, (str, os.PathLike)):
            path = Path(spec)
            return cls._from_mapping(_read_yaml(path, source or str(path)), source or str(path))
        if callable(spec):
            return cls(source or _qualified_name(spec), function=spec)
        raise SpaceError(
            source or "search_space",
            None,
            spec,
            "a mapping, the path of a .yaml file, or a callable trial -> dict",
        )

    @classmethod
    def _from_mapping(cls, data: Mapping[Any, Any], source: str) -> SearchSpace:
        entries, notes = read_sweep(data, source) if is_sweep(data) else (data, [])
        parameters = [read_parameter(source, name, entry, notes) for name, entry in entries.items()]
        for note in notes:
            _logger.info("%s: %s", source, note)
        return cls(source, parameters, notes=notes)

    def __repr__(self) -> str:
        names = "callable" if self.names is None else ", ".join(self.names)
        return f"<SearchSpace {self.source}: {names}>"

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the configuration; None for a callable, which tells as it runs."""
        return None if self._function else tuple(p.name for p in self._parameters)

    def suggest(self, trial: BaseTrial) -> dict[str, Any]:
        """Return the configuration of a trial, as values that JSON can hold.

        Raises
        ------
        SpaceError : a callable returned something else than such a dict.
        """
        if self._function is None:
            return {p.name: p.suggest(trial) for p in self._parameters}
        result = self._function(trial)
        if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
            raise SpaceError(self.source, None, result, "a returned dict with text keys")
        config = {}
        for name, value in result.items():
            if name not in self._dropped:
                config[name] = checked_value(self.source, name, value)
        return config

    def check_names(self, valid: Collection[str], algo: str) -> None:
        """Raise an UnknownNameError for the first name that the algorithm does not take.

        A callable's names are known only as it runs: see `check_config_names`.
        """
        check_config_names(self.names or (), valid, algo, self.source)

    def without(self, names: Iterable[str]) -> SearchSpace:
        """Return the space without some names; a callable's results lose them."""
        dropped = self._dropped | set(names)
        kept = [p for p in self._parameters if p.name not in dropped]
        return SearchSpace(self.source, kept, self._function, self.notes, dropped)

    def describe(self) -> dict[str, Any]:
        """Return a description that JSON can hold, to be stored with the study.

        Returns
        -------
        ``{"callable": name}``, or ``{"parameters": {name: {"kind": ..., ...}}}``.
        """
        if self._function is not None:
            return {"callable": _qualified_name(self._function)}
        return {"parameters": {p.name: p.describe() for p in self._parameters}}

    def default_params(
        self, defaults: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Return the point of the space that comes closest to an algorithm's defaults.

        Parameters
        ----------
        defaults : configuration name → default value.

        Returns
        -------
        params : what to pass to `optuna.Study.enqueue_trial`.
        config : the configuration that results.
        notes : a sentence for each value that is not the default. Without a usable default it is
            the middle of the range (the geometric one of a log range), or the first choice.
        """
        trial = DefaultTrial(defaults, self._parameters)
        config = self.suggest(trial)
        return dict(trial.params), config, trial.notes


def check_config_names(
    config: Iterable[str], valid: Collection[str], algo: str, source: str
) -> None:
    """Raise an UnknownNameError for the first name in a configuration that is not valid.

    Parameters
    ----------
    config : a configuration, or its names.
    valid : the hyperparameters that the algorithm takes.
    algo : the algorithm's name.
    source : where the configuration came from.
    """
    for name in config:
        if name not in valid:
            hint = f"It stands in {source}."
            raise UnknownNameError(f"hyperparameter of {algo}", name, valid, hint)


def incompatible(
    stored: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    """Return the differences that make the trials of a resumed study incomparable.

    A range may grow, so that it still contains the trials that are there. Everything else counts.

    Parameters
    ----------
    stored, given : descriptions, from `SearchSpace.describe`.

    Returns
    -------
    Parameter → (stored, given), in words. Empty: the study can go on.
    """
    if "callable" in stored or "callable" in given:
        if dict(stored) == dict(given):
            return {}
        return {"search_space": (_space_in_words(stored), _space_in_words(given))}
    old, new = stored["parameters"], given["parameters"]
    return {
        name: (in_words(old.get(name)), in_words(new.get(name)))
        for name in dict.fromkeys([*old, *new])
        if not continues(old.get(name), new.get(name))
    }


def _space_in_words(description: Mapping[str, Any]) -> str:
    if "callable" in description:
        return f"callable {description['callable']}"
    return f"parameters {', '.join(description['parameters'])}"


def _qualified_name(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None) or '?'}.{named.__qualname__}"


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"{key.value!r} is given twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path, source: str) -> Mapping[Any, Any]:
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise SpaceError(source, None, str(path), "the path of a .yaml or .yml file")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        text = f"the path of a readable .yaml file ({error.strerror})"
        raise SpaceError(source, None, str(path), text) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise SpaceError(source, None, line + problem, f"YAML, such as `{EXAMPLE}`") from error
    if not isinstance(data, Mapping) or not data:
        given = data if data else "an empty file"
        raise SpaceError(source, None, given, f"a mapping of parameters, such as `{EXAMPLE}`")
    return data
