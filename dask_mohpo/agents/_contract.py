"""What an agent is: a batch of S independent learners that train together.

The training function drives an agent through `train` and asks it for `policies`; evaluation rolls
those out. Neither knows which algorithm it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np

from dask_mohpo.errors import UnknownNameError, UsageError

__all__ = [
    "Actor",
    "Agent",
    "Config",
    "Policies",
    "Schedule",
    "per_learner",
]

ConfigT = TypeVar("ConfigT", bound="Config")


class Actor(Protocol):
    """Policies in the middle of their episodes: N rows for each of S learners."""

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Actions (S, N) or (S, N, action_dim) for observations (S, N, obs_dim)."""
        ...

    def observe(self, rewards: np.ndarray) -> None:
        """Take note of the rewards (S, N, num_objectives) that the last actions brought."""
        ...

    def keep(self, rows: np.ndarray) -> None:
        """Go on with these rows (S, M) only; a row may stand in it more than once."""
        ...


class Policies(Protocol):
    """The greedy policies that S learners have to offer; their returns make the fronts."""

    @property
    def counts(self) -> Sequence[int]:
        """How many policies each learner has, at least 1."""
        ...

    def start(self, policy: np.ndarray) -> Actor:
        """Begin an episode in every row: row (s, n) follows policy `policy[s, n]` of learner s."""
        ...


class Agent(Protocol):
    """S learners, each with a seed of its own, and maybe with a configuration of its own.

    Learner s draws from its own random generators only, so its result does not depend on who
    shares the batch, up to floating-point reassociation.
    """

    @property
    def steps(self) -> Sequence[int]:
        """Environment steps that each learner has taken."""
        ...

    def train(self, until: int) -> None:
        """Train until every learner has taken at least `until` steps."""
        ...

    def policies(self, num_weights: int) -> Policies:
        """The policies to evaluate: about `num_weights` for each learner."""
        ...


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the algorithms' hyperparameters: reads and checks a configuration."""

    ALGO: ClassVar[str]
    SHARED: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters in which the learners of one batch must agree: those that shape arrays, or
    say what is computed when."""

    def batch_key(self) -> tuple[Any, ...]:
        """Learners whose keys are equal can train in one batch."""
        return tuple(getattr(self, name) for name in self.SHARED)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Name → default value, in plain JSON values."""
        values = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a configuration.

        Raises
        ------
        UnknownNameError
            A name that the algorithm does not take.
        UsageError
            A value of the wrong type or out of range.
        """
        for name in values:
            if name not in cls.names():
                raise UnknownNameError(f"hyperparameter of {cls.ALGO}", name, cls.names())
        types = {f.name: str(f.type) for f in fields(cls)}
        return cls(**{k: cls._convert(k, types[k], v) for k, v in values.items()})

    @classmethod
    def _convert(cls, name: str, kind: str, value: Any) -> Any:
        """A value in the type of its field, or a UsageError that names both."""
        options = [part.strip() for part in kind.split("|")]
        if value is None and "None" in options:
            return None
        if isinstance(value, np.generic):
            value = value.item()
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if ("bool" in options and isinstance(value, bool)) or (
            "str" in options and isinstance(value, str)
        ):
            return value
        if "int" in options and is_number and float(value).is_integer():
            return float(value) if "float" in options and isinstance(value, float) else int(value)
        if "float" in options and is_number and np.isfinite(value):
            return float(value)
        for item in ("int", "float"):
            if f"tuple[{item}, ...]" in options and isinstance(value, list | tuple):
                return tuple(cls._convert(name, item, v) for v in value)
        raise UsageError(f"{cls.ALGO}: {name} = {value!r} is not valid; it takes {kind}.")

    def _require(self, name: str, valid: bool, what: str) -> None:
        if not valid:
            value = getattr(self, name)
            raise UsageError(f"{self.ALGO}: {name} = {value!r} is not valid; it takes {what}.")


def per_learner(config: ConfigT | Sequence[ConfigT], num_learners: int) -> list[ConfigT]:
    """A list with the configuration of each learner.

    Raises
    ------
    UsageError
        There are not as many as learners, or they differ where one batch must have one value.
    """
    if isinstance(config, Config):
        return [config] * num_learners
    configs = list(config)
    if len(configs) != num_learners:
        raise UsageError(
            f"{len(configs)} configurations for {num_learners} learners; give one for all, or one "
            "for each."
        )
    for other in configs[1:]:
        if other.batch_key() != configs[0].batch_key():
            raise UsageError(
                f"learners of one batch must agree in {', '.join(other.SHARED)}, not have "
                f"{configs[0].batch_key()} and {other.batch_key()}."
            )
    return configs


class Schedule:
    """Linear schedules of S learners: from `start` at step 0 to `end` at `steps`, then constant.

    Parameters
    ----------
    start, end : one number per learner.
    steps : one per learner; ≤ 1 is a fraction of the budget `total`; None keeps `start` for ever.
    total : steps of the whole training.
    """

    def __init__(
        self,
        start: Sequence[float],
        end: Sequence[float],
        steps: Sequence[float | None],
        total: int,
    ) -> None:
        self._start = np.array(start, float)
        self._change = np.array(end, float) - self._start
        self._length = np.array(
            [np.inf if n is None else n * total if n <= 1 else n for n in steps], float
        )

    def __call__(self, step: int) -> np.ndarray:
        """The values (S,) at this step."""
        return self._start + self._change * np.minimum(step / self._length, 1.0)
