"""Making environments, what the registry says of them, and the fronts that they know."""

from __future__ import annotations

import os
import subprocess
import sys

import gymnasium
import mo_gymnasium
import numpy as np
import pytest

from dask_mohpo.environments import (
    DEFAULT_EVAL_GAMMA,
    REGISTRY,
    EnvironmentInfo,
    describe,
    known_front,
    make_env,
)
from dask_mohpo.errors import EnvironmentSpecError
from dask_mohpo.fronts import non_dominated
from dask_mohpo.indicators import hypervolume


class TwoCounters(gymnasium.Env):
    """Three steps; each action earns one of two rewards."""

    observation_space = gymnasium.spaces.Discrete(4)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reward_space=None, reward=None, front=None):
        self.reward_space = reward_space or gymnasium.spaces.Box(0.0, 1.0, (2,))
        self.reward = reward
        self.front = front

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.time, {}

    def step(self, action):
        self.time += 1
        reward = np.eye(2)[action] if self.reward is None else self.reward
        return self.time, reward, self.time == 3, False, {}

    def pareto_front(self, gamma):
        if isinstance(self.front, Exception):
            raise self.front
        return self.front


class Broken(gymnasium.Env):
    def __init__(self):
        raise RuntimeError("no licence")


@pytest.fixture
def register(monkeypatch):
    """Register an environment for the time of a test."""
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry.copy())
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    known_front.cache_clear()

    def register(env_id, entry_point=TwoCounters, **kwargs):
        gymnasium.register(env_id, entry_point=entry_point, kwargs=kwargs)
        return env_id

    yield register
    known_front.cache_clear()


@pytest.fixture
def module(tmp_path, monkeypatch, register):
    """Write an importable module for the time of a test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def rollout(env, seed, actions):
    """Return observation, reward and end of each step."""
    obs, _ = env.reset(seed=seed)
    trace: list[tuple] = [(gymnasium.spaces.flatten(env.observation_space, obs), None, None)]
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        end = bool(terminated or truncated)
        trace.append((gymnasium.spaces.flatten(env.observation_space, obs), reward, end))
        if end:
            break
    return trace


def same(first, second):
    return len(first) == len(second) and all(
        np.array_equal(left[0], right[0])
        and np.array_equal(left[1], right[1])
        and left[2] == right[2]
        for left, right in zip(first, second, strict=True)
    )


def scripts(env, env_id):
    """Sequences of actions that reach what is random in an environment."""
    if env_id.startswith("minecart"):
        accelerate, brake, mine, none = 3, 4, 0, 5
        yield [accelerate] + [none] * 9 + [brake, mine, mine, mine]
        return
    for seed in range(20):
        env.action_space.seed(seed)
        yield [env.action_space.sample() for _ in range(100)]


# --- the registry ---------------------------------------------------------------------------------


def test_registry_holds_every_mo_gymnasium_env_that_needs_no_extra():
    need_extras = ("highway", "lunar_lander", "mario", "mujoco")
    folders = {
        env_id: str(spec.entry_point).split(".")[2]
        for env_id, spec in gymnasium.registry.items()
        if str(spec.entry_point).startswith("mo_gymnasium.envs.")
    }
    plain = {env_id for env_id, folder in folders.items() if folder not in need_extras}
    assert set(REGISTRY) == plain - {"minecart-rgb-v0"}  # image observations


@pytest.mark.parametrize("env_id", REGISTRY)
def test_registered_env_is_described(env_id):
    info = describe(env_id)
    known = REGISTRY[env_id]
    assert len(info.ref_point) == info.num_objectives
    assert info == EnvironmentInfo(
        env_id=env_id,
        num_objectives=info.num_objectives,
        ref_point=known.ref_point,
        eval_gamma=known.eval_gamma,
        deterministic=known.deterministic,
    )
    assert 0 < info.eval_gamma <= 1


@pytest.mark.parametrize("env_id", REGISTRY)
def test_reference_point_is_worse_than_random_play(env_id):
    info = describe(env_id)
    env = make_env(env_id)
    env.action_space.seed(0)
    returns = np.zeros((10, info.num_objectives))
    for episode in range(len(returns)):
        env.reset(seed=episode)
        discount, end = 1.0, False
        while not end:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            returns[episode] += discount * np.asarray(reward)
            discount *= info.eval_gamma
            end = terminated or truncated
    env.close()
    assert np.mean((returns > info.ref_point).all(axis=1)) >= 0.5
    assert hypervolume(returns, info.ref_point) > 0


@pytest.mark.parametrize("env_id", REGISTRY)
def test_deterministic_flag_and_seeded_episodes(env_id):
    env = make_env(env_id)
    differs = False
    for actions in scripts(env, env_id):
        once, again, other = (rollout(env, seed, actions) for seed in (0, 0, 1))
        assert same(once, again)
        differs = differs or not same(once, other)
    env.close()
    assert differs is not REGISTRY[env_id].deterministic


def test_minecart_neither_reads_nor_moves_the_global_generator():
    env = make_env("minecart-v0")
    actions = next(scripts(env, "minecart-v0"))
    np.random.seed(0)
    first = rollout(env, 7, actions)
    untouched = np.random.random()
    second = rollout(env, 7, actions)
    assert same(first, second)
    np.random.seed(0)
    assert np.random.random() == untouched


# --- making ---------------------------------------------------------------------------------------


def test_makes_an_env_that_this_process_registered(register):
    env = make_env(register("test/TwoCounters-v0"))
    env.reset(seed=0)
    assert np.asarray(env.step(1)[1]).tolist() == [0.0, 1.0]


def test_makes_an_env_of_a_module(module):
    module(
        "own_envs",
        "import gymnasium, mo_gymnasium\n"
        "gymnasium.register('own-treasure-v0', entry_point="
        "'mo_gymnasium.envs.deep_sea_treasure.deep_sea_treasure:DeepSeaTreasure')\n",
    )
    assert describe("own_envs:own-treasure-v0", ref_point=[0, -50]).num_objectives == 2


def test_registry_counts_for_an_id_with_its_module():
    assert describe("mo_gymnasium:minecart-v0").ref_point == (-1.0, -1.0, -200.0)


def test_unknown_id_names_the_closest():
    with pytest.raises(EnvironmentSpecError, match=r"unknown environment.*minecart-v0") as caught:
        make_env("minecart-v9")
    assert caught.value.env_id == "minecart-v9"
    assert "package.module:minecart-v9" in str(caught.value)


@pytest.mark.parametrize("env_id", ["minecart", "", "CartPole-v9", "a:b:c", "zzz"])
def test_id_that_is_not_registered(env_id):
    with pytest.raises(EnvironmentSpecError):
        make_env(env_id)


@pytest.mark.parametrize("env_id", [None, 3, TwoCounters])
def test_id_that_is_no_string(env_id):
    with pytest.raises(EnvironmentSpecError, match="must be a string"):
        make_env(env_id)


def test_module_that_is_not_there():
    with pytest.raises(EnvironmentSpecError, match="importing 'no_such_module' failed") as caught:
        make_env("no_such_module:Env-v0")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_module_that_fails(module):
    module("failing_envs", "raise OSError('licence server down')")
    with pytest.raises(EnvironmentSpecError, match="OSError: licence server down"):
        make_env("failing_envs:Env-v0")


def test_env_that_fails(register):
    with pytest.raises(EnvironmentSpecError, match="cannot be made: RuntimeError: no licence"):
        make_env(register("test/Broken-v0", Broken))


@pytest.mark.parametrize(
    ("env_id", "extra", "package"),
    [
        ("mo-hopper-v5", "mujoco", "mujoco"),
        ("mo-lunar-lander-v3", "box2d", "Box2D"),
        ("mo-highway-v0", "highway", "highway_env"),
        ("mo-supermario-v0", "mario", "gym_super_mario_bros"),
    ],
)
def test_missing_extra_names_the_install_command(env_id, extra, package, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n.startswith("gymnasium.envs.") and extra in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentSpecError) as caught:
        make_env(env_id)
    assert f"pip install 'mo-gymnasium[{extra}]'" in str(caught.value)


# --- multi-objective or not -----------------------------------------------------------------------


def test_env_without_a_reward_space():
    with pytest.raises(EnvironmentSpecError, match=r"has no reward_space.*LinearReward"):
        make_env("CartPole-v1")


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(0.0, 1.0, (1,)),
        gymnasium.spaces.Box(0.0, 1.0, ()),
        gymnasium.spaces.Box(0.0, 1.0, (2, 2)),
        gymnasium.spaces.Discrete(2),
    ],
)
def test_env_with_an_unfit_reward_space_is_closed_again(register, monkeypatch, space):
    closed: list[bool] = []
    monkeypatch.setattr(TwoCounters, "close", lambda self: closed.append(True))
    with pytest.raises(EnvironmentSpecError, match="has the reward_space"):
        make_env(register("test/TwoCounters-v0", reward_space=space))
    assert len(closed) == 1


@pytest.mark.parametrize("reward", [1.0, np.zeros(3), np.zeros((2, 1))])
def test_reward_that_is_not_what_the_env_announces(register, reward):
    with pytest.raises(EnvironmentSpecError, match=r"a step gave a reward of shape .*\(2,\)"):
        describe(register("test/TwoCounters-v0", reward=reward), ref_point=[0, 0])


def test_env_that_scalarises_its_reward(register):
    def entry_point():
        return mo_gymnasium.wrappers.LinearReward(TwoCounters(), weight=np.ones(2))

    with pytest.raises(EnvironmentSpecError, match=r"a reward of shape \(\).*LinearReward"):
        describe(register("test/Scalar-v0", entry_point), ref_point=[0, 0])


def test_first_step_that_fails(register, monkeypatch):
    def fail(self, action):
        raise KeyError("speed")

    monkeypatch.setattr(TwoCounters, "step", fail)
    with pytest.raises(EnvironmentSpecError, match="first step failed: KeyError: 'speed'"):
        describe(register("test/TwoCounters-v0"), ref_point=[0, 0])


# --- describing -----------------------------------------------------------------------------------


def test_user_overrides_both():
    info = describe("minecart-v0", ref_point=np.array([0, 0, -100]), eval_gamma=1)
    assert info.ref_point == (0.0, 0.0, -100.0)
    assert info.eval_gamma == 1.0
    assert [type(number) for number in info.ref_point] == [float] * 3


def test_unknown_env_with_a_reference_point(register):
    info = describe(register("test/TwoCounters-v0"), ref_point=[-1, -1])
    assert info.eval_gamma == DEFAULT_EVAL_GAMMA == 0.99
    assert not info.deterministic


def test_unknown_env_without_a_reference_point(register):
    with pytest.raises(EnvironmentSpecError) as caught:
        describe(register("test/TwoCounters-v0"))
    for part in ["ref_point=[…, …]", "--ref-point", "minecart-v0", "fruit-tree-v0"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("ref_point", "said"),
    [
        ([0, 0], "got 2 numbers.*3 objectives"),
        ([0, 0, np.nan], "nan"),
        ("0,0,0", "'0,0,0'"),
        (0.0, "a list of 3 finite numbers"),
    ],
)
def test_reference_point_that_does_not_fit(ref_point, said):
    with pytest.raises(EnvironmentSpecError, match=f"minecart-v0: ref_point: .*{said}"):
        describe("minecart-v0", ref_point=ref_point)


@pytest.mark.parametrize("gamma", [0, -0.5, 1.01, np.nan, np.inf, "0.9", True, [0.9]])
def test_evaluation_discount_out_of_range(gamma):
    with pytest.raises(EnvironmentSpecError, match="evaluation discount"):
        describe("deep-sea-treasure-v0", eval_gamma=gamma)


def test_describe_closes_the_env(register, monkeypatch):
    closed: list[bool] = []
    monkeypatch.setattr(TwoCounters, "close", lambda self: closed.append(True))
    describe(register("test/TwoCounters-v0"), ref_point=[0, 0])
    assert len(closed) == 1


# --- known fronts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "gamma", "expected"),
    [
        ("deep-sea-treasure-v0", 1.0, 994.3),
        ("deep-sea-treasure-v0", 0.99, 854.8504),
        ("deep-sea-treasure-concave-v0", 0.99, 3688.3771),
        ("minecart-v0", 0.98, 668.183),
        ("minecart-v0", 0.99, 763.519),
        ("minecart-v0", 1.0, 879.695),
        ("fruit-tree-v0", 0.99, 46034.80),
    ],
)
def test_golden_hypervolume_of_the_known_front(env_id, gamma, expected):
    front = known_front(env_id, gamma)
    assert front is not None
    value = hypervolume(front, REGISTRY[env_id].ref_point)
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("env_id", REGISTRY)
def test_known_front_is_non_dominated_and_better_than_the_reference_point(env_id):
    known = REGISTRY[env_id]
    front = known_front(env_id, known.eval_gamma)
    if front is not None:
        assert np.array_equal(non_dominated(front), front)
        assert (front > known.ref_point).all()
        assert not front.flags.writeable


def test_known_front_is_kept():
    assert known_front("fruit-tree-v0", 0.99) is known_front("fruit-tree-v0", 0.99)


def test_known_front_of_an_env(register):
    front = known_front(register("test/TwoCounters-v0", front=[[1, 2], [0, 1], [2, 1]]), 0.9)
    assert front is not None
    assert front.tolist() == [[1.0, 2.0], [2.0, 1.0]]


@pytest.mark.parametrize(
    "front",
    [None, [], 3.0, [[1.0, 2.0, 3.0]], [[1.0, np.nan]], [[1.0], [1.0, 2.0]], ValueError("no")],
    ids=["none", "empty", "scalar", "wide", "nan", "uneven", "raises"],
)
def test_no_known_front_where_the_method_is_unfit(register, front):
    assert known_front(register("test/TwoCounters-v0", front=front), 0.99) is None


@pytest.mark.parametrize("attribute", [None, [[1.0, 2.0]], lambda self: [[1.0, 2.0]]])
def test_no_known_front_where_it_is_not_the_usual_method(register, monkeypatch, attribute):
    monkeypatch.setattr(TwoCounters, "pareto_front", attribute)
    assert known_front(register("test/TwoCounters-v0"), 0.99) is None


def test_no_known_front_where_there_is_no_method():
    assert known_front("mo-mountaincar-v0", 0.99) is None


@pytest.mark.parametrize("gamma", [0.0, 1.5])
def test_known_front_of_a_discount_out_of_range(gamma):
    with pytest.raises(EnvironmentSpecError, match="evaluation discount"):
        known_front("deep-sea-treasure-v0", gamma)


# --- a process of its own -------------------------------------------------------------------------


def test_import_is_light():
    code = (
        "import sys, dask_mohpo.environments\n"
        "assert not {'gymnasium', 'mo_gymnasium', 'pymoo', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_makes_every_env_without_a_word_on_a_machine_without_fonts(tmp_path):
    code = (
        "from dask_mohpo.environments import REGISTRY, make_env\n"
        "for env_id in REGISTRY: make_env(env_id).close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_warnings_of_the_users_own_env_are_shown(register, recwarn):
    import warnings

    def entry_point():
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        return TwoCounters()

    warnings.simplefilter("always")
    make_env(register("test/Warns-v0", entry_point))
    assert [str(warning.message) for warning in recwarn] == ["mind the gap"]
