"""Make an environment by its id; its objectives, reference point, discount and known front."""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_mohpo.errors import EnvironmentSpecError, UsageError
from dask_mohpo.fronts import non_dominated, validate_front, validate_ref_point

if TYPE_CHECKING:
    import gymnasium

__all__ = [
    "DEFAULT_EVAL_GAMMA",
    "REGISTRY",
    "EnvironmentInfo",
    "RegisteredEnvironment",
    "describe",
    "known_front",
    "make_env",
]

DEFAULT_EVAL_GAMMA = 0.99
"""Evaluation discount of an environment that the registry does not hold."""


@dataclass(frozen=True, kw_only=True)
class RegisteredEnvironment:
    """What the library knows about an environment beforehand."""

    ref_point: tuple[float, ...]
    """Reference point, shape (num_objectives,)."""
    eval_gamma: float = DEFAULT_EVAL_GAMMA
    """Discount of the returns that make a front."""
    deterministic: bool = False
    """True where start and transitions never vary, so that one episode tells a policy's return."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentInfo:
    """What a study needs to know about its environment."""

    env_id: str
    num_objectives: int
    ref_point: tuple[float, ...]
    """Reference point, shape (num_objectives,)."""
    eval_gamma: float
    """Discount of the returns that make a front, in (0, 1]; the agent's own gamma may differ."""
    deterministic: bool
    """True where one evaluation episode per policy is enough; False where that is not known."""


# Sources of the reference points:
#   IPRO      Röpke et al., "Divide and Conquer: Provably Unveiling the Pareto Front with
#             Multi-Objective Reinforcement Learning", 2024 (arXiv 2402.07182), and its experiments.
#   MORL/D    the openrlbenchmark runs of MORL-Baselines, as its documentation lists them.
#   example   the environment's example in MORL-Baselines.
#   bounds    no published value known: reward_space bounds times the longest episode, undiscounted,
#             and one unit less where a good policy may sit on the bound itself, since a point
#             counts only if it is better than the reference point in every objective.
# Sources of the discounts: 0.98 for minecart is that of the experiments of Alegre et al. 2023
# (arXiv 2301.07784) and IPRO; 0.99 is that of the MORL/D runs and the usual one elsewhere.
REGISTRY: Mapping[str, RegisteredEnvironment] = MappingProxyType(
    {
        # [time penalty, bottles delivered, potential]. Bounds: -1 a step for 100 steps; never below
        # 0; the potential falls by 1 at the first broken bottle and stays there.
        "breakable-bottles-v0": RegisteredEnvironment(ref_point=(-100.0, -1.0, -2.0)),
        # [treasure, time penalty]. IPRO and MORL/D, on the concave map; the others are alike.
        "deep-sea-treasure-v0": RegisteredEnvironment(ref_point=(0.0, -50.0), deterministic=True),
        "deep-sea-treasure-concave-v0": RegisteredEnvironment(
            ref_point=(0.0, -50.0), deterministic=True
        ),
        "deep-sea-treasure-mirrored-v0": RegisteredEnvironment(
            ref_point=(0.0, -50.0), deterministic=True
        ),
        # [fish, wood]. Bounds: counts, never below 0, and only fishing brings no wood.
        "fishwood-v0": RegisteredEnvironment(ref_point=(-1.0, -1.0)),
        # [blue, green, red items]. Bounds: counts, never below 0.
        "four-room-v0": RegisteredEnvironment(ref_point=(-1.0, -1.0, -1.0), deterministic=True),
        # [six nutrients]. Bounds: never below 0, and many fruits lack one.
        "fruit-tree-v0": RegisteredEnvironment(ref_point=(-1.0,) * 6, deterministic=True),
        # [ore 1, ore 2, fuel]. IPRO.
        "minecart-v0": RegisteredEnvironment(ref_point=(-1.0, -1.0, -200.0), eval_gamma=0.98),
        # The same map and rewards as minecart-v0, without the noise.
        "minecart-deterministic-v0": RegisteredEnvironment(
            ref_point=(-1.0, -1.0, -200.0), eval_gamma=0.98, deterministic=True
        ),
        # [time, reverse, forward penalty]. Bounds: -1 a step for 200 steps. The start is random.
        "mo-mountaincar-v0": RegisteredEnvironment(ref_point=(-200.0, -200.0, -200.0)),
        # [time penalty, move penalty, speed]. Bounds: as above; the car always moves, so speed > 0.
        "mo-mountaincar-3d-v0": RegisteredEnvironment(ref_point=(-200.0, -200.0, 0.0)),
        # [time penalty, move penalty]. Bounds: as above.
        "mo-mountaincar-timemove-v0": RegisteredEnvironment(ref_point=(-200.0, -200.0)),
        # [time penalty, speed]. Bounds: as above.
        "mo-mountaincar-timespeed-v0": RegisteredEnvironment(ref_point=(-200.0, 0.0)),
        # [time penalty, fuel]. Example; it is also the bounds, -1 a step for 999 steps.
        "mo-mountaincarcontinuous-v0": RegisteredEnvironment(ref_point=(-1000.0, -1000.0)),
        # [death, gold, gem]. Bounds: gold and gem never below 0; -1 is certain death.
        "resource-gathering-v0": RegisteredEnvironment(ref_point=(-1.0, -1.0, -1.0)),
        # [flooding, water deficit]. No bounds in the reward_space. Flooding: the level after a step
        # is at most 100 plus the inflow, about 40, so at most about 90 above the dam's 50, for 100
        # steps. Deficit: at most the demand of 50 a step.
        "water-reservoir-v0": RegisteredEnvironment(ref_point=(-10_000.0, -5_000.0)),
    }
)

# Folder of mo_gymnasium.envs → extra that its environments need.
_EXTRAS = {"highway": "highway", "lunar_lander": "box2d", "mario": "mario", "mujoco": "mujoco"}

# Warnings that making a sound environment gives, about nothing that a user of this library can act
# on: Gymnasium about bounds that the env gave as float64, pygame about fonts and about setuptools.
_HARMLESS = (
    r".*precision lowered by casting to",
    r".*[Ss]ystem fonts? cannot be loaded",
    r"pkg_resources is deprecated",
)


def make_env(env_id: str) -> gymnasium.Env:
    """Make a multi-objective environment.

    With `reset(seed=...)` the episode is a function of the seed and the actions; minecart's mines,
    which draw from NumPy's global generator, are made to draw from the environment's own.

    Parameters
    ----------
    env_id : an id of MO-Gymnasium, an id that an imported module registered, or
        ``"package.module:EnvId-v0"``, where importing the module registers the id.

    Returns
    -------
    The environment; its rewards are vectors of shape (num_objectives,).

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, it cannot be made, or its reward is a scalar.
    """
    import gymnasium

    name = _register(env_id)
    spec = gymnasium.registry[name]
    try:
        with _no_harmless_warnings():
            # Gymnasium's checker insists on scalar rewards.
            env = gymnasium.make(name, disable_env_checker=True)
    except Exception as error:
        reason = f"cannot be made: {type(error).__name__}: {error}."
        raise EnvironmentSpecError(
            env_id, f"{reason} {_install_hint(str(spec.entry_point), error)}".rstrip()
        ) from error
    try:
        _num_objectives(env_id, env)
    except EnvironmentSpecError:
        env.close()
        raise
    return _with_seeded_mines(env)


def describe(
    env_id: str,
    *,
    ref_point: Sequence[float] | np.ndarray | None = None,
    eval_gamma: float | None = None,
) -> EnvironmentInfo:
    """Make an environment once, try one step of it, and say what a study needs to know about it.

    Parameters
    ----------
    env_id : see `make_env`.
    ref_point : reference point, shape (num_objectives,); None takes the registry's.
    eval_gamma : evaluation discount in (0, 1]; None takes the registry's, else 0.99.

    Raises
    ------
    EnvironmentSpecError
        If the environment cannot be made, its rewards do not have the shape that its reward_space
        says, `ref_point` or `eval_gamma` does not fit, or `ref_point` is None and the registry has
        none.
    """
    env = make_env(env_id)
    try:
        num_objectives = _num_objectives(env_id, env)
        _try_step(env_id, env, num_objectives)
    finally:
        env.close()
    known = REGISTRY.get(_name(env_id))
    if eval_gamma is None:
        eval_gamma = known.eval_gamma if known else DEFAULT_EVAL_GAMMA
    if ref_point is None:
        if known is None:
            zeros = ", ".join(["…"] * num_objectives)
            raise EnvironmentSpecError(
                env_id,
                f"no reference point is known for it. Pass one number per objective, each worse "
                f"than every return that should count: ref_point=[{zeros}] in Python, --ref-point "
                f"with {num_objectives} numbers on the command line. Environments with a known "
                f"one: {', '.join(sorted(REGISTRY))}.",
            )
        ref_point = known.ref_point
    try:
        reference = validate_ref_point(ref_point, num_objectives)
    except UsageError as error:
        raise EnvironmentSpecError(env_id, str(error)) from error
    return EnvironmentInfo(
        env_id=env_id,
        num_objectives=num_objectives,
        ref_point=reference,
        eval_gamma=_validate_gamma(env_id, eval_gamma),
        deterministic=known.deterministic if known else False,
    )


@lru_cache(maxsize=64)
def known_front(env_id: str, gamma: float) -> np.ndarray | None:
    """Return the Pareto front of discounted returns that an environment knows of itself.

    It is what the environment's `pareto_front(gamma)` gives. A policy may exceed it: for minecart
    it is approximate, and resource-gathering discounts one step more than a return does here.

    Parameters
    ----------
    env_id : see `make_env`.
    gamma : discount in (0, 1].

    Returns
    -------
    Read-only float64 array (n_points, num_objectives) of non-dominated points in ascending
    lexicographic order; None where the environment has no such method, or what it gives is empty
    or no front.

    Raises
    ------
    EnvironmentSpecError
        If the environment cannot be made, or `gamma` is out of range.
    """
    gamma = _validate_gamma(env_id, gamma)
    env = make_env(env_id)
    try:
        points = env.unwrapped.pareto_front(gamma=gamma)  # type: ignore[attr-defined]
        front = non_dominated(validate_front(points, _num_objectives(env_id, env)))
    except Exception:  # the method is the environment's own code: absent, or unfit in any way
        return None
    finally:
        env.close()
    front.setflags(write=False)  # the cache hands the same array to every caller
    return front if len(front) else None


def _name(env_id: str) -> str:
    """Return the id without the module in front of it."""
    return env_id.rpartition(":")[2]


def _register(env_id: str) -> str:
    """Import what registers the id, and return the id's name in Gymnasium's registry."""
    import gymnasium

    if not isinstance(env_id, str):
        raise EnvironmentSpecError(repr(env_id), "an environment id must be a string")
    module, _, name = env_id.rpartition(":")
    for needed in ["mo_gymnasium", *([module] if module else [])]:
        try:
            with _no_harmless_warnings():
                importlib.import_module(needed)
        except Exception as error:  # importing runs the user's code, which may raise anything
            raise EnvironmentSpecError(
                env_id,
                f"importing {needed!r} failed: {type(error).__name__}: {error}. The part before "
                "the colon must name a module that can be imported here and on every worker.",
            ) from error
    if name not in gymnasium.registry:
        # Gymnasium's own environments have scalar rewards, so there is no point in naming them.
        specs = gymnasium.registry.items()
        known = [key for key, spec in specs if not str(spec.entry_point).startswith("gymnasium.")]
        closest = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
        suggestion = f" Closest known ids: {', '.join(closest)}." if closest else ""
        raise EnvironmentSpecError(
            env_id,
            f"unknown environment.{suggestion} For an environment of your own, give the module "
            f"that registers it too: 'package.module:{name}'.",
        )
    return name


def _install_hint(entry_point: str, error: Exception) -> str:
    """Return the install command for a missing extra of MO-Gymnasium; empty if none is missing."""
    from gymnasium.error import DependencyNotInstalled

    package, _, rest = entry_point.partition("mo_gymnasium.envs.")
    extra = _EXTRAS.get(rest.partition(".")[0]) if not package else None
    if extra and isinstance(error, DependencyNotInstalled | ImportError):
        return f"Install what it needs: pip install 'mo-gymnasium[{extra}]'."
    return ""


def _num_objectives(env_id: str, env: gymnasium.Env) -> int:
    """Return the width of the environment's reward vector."""
    from gymnasium.spaces import Box

    space = getattr(env.unwrapped, "reward_space", None)
    if isinstance(space, Box) and len(space.shape) == 1 and space.shape[0] >= 2:
        return space.shape[0]
    found = "has no reward_space" if space is None else f"has the reward_space {space}"
    raise EnvironmentSpecError(env_id, f"it {found}. {_WANTED}")


_WANTED = (
    "A multi-objective environment is one whose rewards are vectors, with a reward_space on the "
    "unwrapped environment that is a Box of shape (d,) with d of 2 or more. Wrappers such as "
    "mo_gymnasium's LinearReward make scalar rewards of them: leave those out."
)


def _try_step(env_id: str, env: gymnasium.Env, num_objectives: int) -> None:
    """Step once, since a wrapper may have made a scalar of the reward that the env announces."""
    env.action_space.seed(0)
    try:
        env.reset(seed=0)
        reward: Any = env.step(env.action_space.sample())[1]
    except Exception as error:
        raise EnvironmentSpecError(
            env_id, f"its first step failed: {type(error).__name__}: {error}"
        ) from error
    if np.shape(reward) != (num_objectives,):
        raise EnvironmentSpecError(
            env_id,
            f"a step gave a reward of shape {np.shape(reward)}, but its reward_space has the shape "
            f"({num_objectives},). {_WANTED}",
        )


def _validate_gamma(env_id: str, gamma: object) -> float:
    number = isinstance(gamma, Real) and not isinstance(gamma, bool)
    if not number or not 0.0 < float(gamma) <= 1.0:  # type: ignore[arg-type]
        raise EnvironmentSpecError(
            env_id, f"evaluation discount: got {gamma!r}; valid: a number above 0, at most 1"
        )
    return float(gamma)  # type: ignore[arg-type]


def _with_seeded_mines(env: gymnasium.Env) -> gymnasium.Env:
    """Make minecart's mines draw from the generator that `reset(seed=...)` seeds.

    They draw from NumPy's global one, so the same seed would not give the same episode, and
    learners in one process would disturb each other.
    """
    import gymnasium

    minecart = sys.modules.get("mo_gymnasium.envs.minecart.minecart")
    if minecart is None or not isinstance(env.unwrapped, minecart.Minecart):
        return env

    class SeededMines(gymnasium.Wrapper):
        def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            result = self.env.reset(**kwargs)
            for mine in self.unwrapped.mines:  # type: ignore[attr-defined]
                for distribution in mine.distributions:
                    distribution.random_state = self.unwrapped.np_random
            return result

    return SeededMines(env)


@contextmanager
def _no_harmless_warnings() -> Iterator[None]:
    # Warning filters belong to the process, so two threads must not be in here at once and expect
    # the filters of a third to hold. Workers have one thread per slot, and this is over in no time.
    with warnings.catch_warnings():
        for message in _HARMLESS:
            warnings.filterwarnings("ignore", message=message)
        yield
