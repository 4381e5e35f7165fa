"""run_study: a hyperparameter search from end to end."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optuna
from distributed import Client
from distributed.deploy import Cluster
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from dask_mohpo import ledger
from dask_mohpo.agents import Algorithm, load_algorithm
from dask_mohpo.clusters import connect, dashboard_hint, keeper_of, read_target
from dask_mohpo.environments import EnvironmentInfo, describe
from dask_mohpo.errors import UsageError
from dask_mohpo.executor import Executor, Plan
from dask_mohpo.objectives import AGGREGATES, FAILED_SEEDS, OBJECTIVES, check_choice
from dask_mohpo.progress import Progress
from dask_mohpo.records import SeedRun, SeedTask, Trainable
from dask_mohpo.slots import choose_resources
from dask_mohpo.space import SearchSpace, check_config_names
from dask_mohpo.training import resolve_function
from dask_mohpo.waiting import AUTO

__all__ = ["run_study"]

logger = logging.getLogger(__name__)

SpaceSpec = (
    SearchSpace
    | Mapping[str, Any]
    | str
    | os.PathLike[str]
    | Callable[[optuna.Trial], dict[str, Any]]
)


def run_study(
    algo: Trainable,
    env_id: str,
    *,
    search_space: SpaceSpec | None = None,
    ref_point: Sequence[float] | None = None,
    total_timesteps: int = 50_000,
    n_trials: int = 100,
    num_seeds: int = 3,
    seed: int = 10,
    seeds_per_task: int | str = 1,
    trials_per_task: int = 1,
    train_hyperparams: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | str | os.PathLike[str] | Cluster | Client | None = None,
    num_workers: int | None = None,
    devices: Sequence[str] | None = None,
    resources: Mapping[str, float] | None = None,
    objectives: str = "hypervolume",
    aggregate: str = "mean",
    eval_gamma: float | None = None,
    num_eval_weights: int = 50,
    num_eval_episodes: int | None = None,
    milestones: int = 10,
    sampler: BaseSampler | None = None,
    storage: str | BaseStorage | None = None,
    study_name: str | None = None,
    run_dir: str | os.PathLike[str] = "runs",
    timeout: float | None = None,
    worker_timeout: float = 300.0,
    seed_retries: int = 2,
    failed_seeds: str = "fail",
    max_failures: int = 5,
    progress: bool = True,
    callbacks: Sequence[Callable[[optuna.Study, FrozenTrial], None]] = (),
) -> optuna.Study:
    """Search the hyperparameters of a multi-objective RL algorithm on a Dask cluster.

    The same call again continues the study: finished seeds are not trained again.

    Parameters
    ----------
    algo : ``"envelope"``, ``"pcn"``, ``"package.module:function"``, or a function
        ``train(config, context) -> front`` (see `SeedContext`).
    env_id : a MO-Gymnasium id, or ``"module:Id"`` for an env that the module registers.
    search_space : None for the algorithm's own; a mapping of name → Optuna distribution, range or
        choices; a YAML file of that form or a W&B sweep; or a callable ``trial -> dict``.
    ref_point : the reference point of the hypervolume, one number per objective; None: the one
        known for the env.
    total_timesteps : training budget of each seed, in environment steps.
    n_trials : trials of the study in all, those of earlier calls included.
    num_seeds, seed : each trial is trained with the seeds ``seed … seed + num_seeds - 1``.
    seeds_per_task : how many seeds of a trial train as one batch in one slot; ``"auto"``: all of
        them, but fewer where slots would be left without work.
    trials_per_task : how many trials may share such a batch. Of the built-in algorithms, those
        trials share one that agree in the hyperparameters that shape it (for instance net_arch and
        batch_size; ``SHARED`` of the algorithm's `Config`), so fix these in `train_hyperparams`.
        More than 1 asks the sampler for as many trials at a time.
    train_hyperparams : fixed values; they win over the search space.
    cluster : None for this machine; a spec for `open_cluster`: a mapping, a YAML file or the name
        of a shipped one, such as ``"slurm-4gpu"``; a Dask cluster or client, which is not closed;
        or a scheduler's address.
    num_workers, devices : worker processes and torch devices of the cluster on this machine.
    resources : Dask resources that one seed task needs; None: ``{"GPU": 1}`` where workers offer
        GPUs, else none.
    objectives : what is maximised; ``"hypervolume"``.
    aggregate : ``"mean"``, ``"median"`` or ``"min"`` over the seeds.
    eval_gamma : discount of the returns that make up a front; None: the one known for the env. It
        is the same for all trials, whatever discount the agent trains with.
    num_eval_weights : policies evaluated at the end of a seed; at milestones a fifth of it.
    num_eval_episodes : episodes per policy; None: 1 where the env is deterministic, else 5.
    milestones : evaluations per seed, evenly spaced, the last one at the end.
    sampler : an Optuna sampler; None: TPE, seeded with `seed`.
    storage : None for a journal file in the run directory; ``journal:PATH``; a database URL; or
        an Optuna storage.
    study_name : None: ``<algo>-<env_id>``.
    run_dir : the study's files lie in ``<run_dir>/<study_name>``.
    timeout : seconds after which no more seeds are started.
    worker_timeout : seconds to wait for workers.
    seed_retries : how often a failed seed is tried again.
    failed_seeds : ``"fail"``: a failed seed fails its trial; ``"worst"``: it counts as an empty
        front.
    max_failures : stop where the first so many trials all fail.
    progress : show a progress line.
    callbacks : called with (study, trial) after each trial, as those of `optuna.Study.optimize`.

    Returns
    -------
    The Optuna study. `seed_results` gives its fronts and costs.

    Raises
    ------
    UsageError
        An argument that cannot be used, with what is valid. Among its children: `ResumeError`, a
        study of that name exists with other settings.
    NoWorkersError
        No worker offers the resources.
    StudyFailedError
        The first `max_failures` trials all failed.
    KeyboardInterrupt
        Ctrl-C or SIGTERM; what was finished is stored.
    """
    _check_counts(
        total_timesteps=total_timesteps,
        n_trials=n_trials,
        num_seeds=num_seeds,
        trials_per_task=trials_per_task,
        num_eval_weights=num_eval_weights,
        milestones=milestones,
        max_failures=max_failures,
    )
    if num_eval_episodes is not None:
        _check_counts(num_eval_episodes=num_eval_episodes)
    if seeds_per_task != AUTO:
        _check_counts(seeds_per_task=seeds_per_task, hint=f", or {AUTO!r}")
    _check_counts(minimum=0, seed=seed, seed_retries=seed_retries)
    _check_seconds(timeout=timeout, worker_timeout=worker_timeout)
    check_choice("objective", objectives, OBJECTIVES)
    check_choice("aggregate", aggregate, list(AGGREGATES))
    check_choice("policy for failed seeds", failed_seeds, FAILED_SEEDS)
    if sampler is not None and not isinstance(sampler, BaseSampler):
        raise UsageError(f"sampler = {sampler!r} is not valid; give an Optuna sampler.")
    target = read_target(cluster, num_workers=num_workers, devices=devices)
    env = describe(env_id, ref_point=ref_point, eval_gamma=eval_gamma)
    problem = _Problem.read(algo, env, search_space, train_hyperparams or {})
    if problem.algorithm is None and trials_per_task > 1:
        raise UsageError(
            f"trials_per_task = {trials_per_task} is not valid for an algorithm of your own; only "
            "the built-in ones train several trials as one batch."
        )
    name = _study_name(study_name, problem.algo_name, env_id)
    folder = Path(run_dir).resolve() / name
    seeds = tuple(range(seed, seed + num_seeds))
    episodes = num_eval_episodes or (1 if env.deterministic else 5)
    settings = ledger.Settings(
        algo=problem.algo_name,
        env_id=env_id,
        ref_point=env.ref_point,
        eval_gamma=env.eval_gamma,
        objectives=objectives,
        aggregate=aggregate,
        failed_seeds=failed_seeds,
        seeds=seeds,
        total_timesteps=total_timesteps,
        num_eval_weights=num_eval_weights,
        num_eval_episodes=episodes,
        train_hyperparams=problem.fixed,
        search_space=problem.space.describe(),
    )
    default_params = problem.default_params() if problem.algorithm is not None else None
    if problem.algorithm is None and seeds_per_task == AUTO:
        seeds_per_task = 1  # a function trains its seeds one after the other
    study, existed = ledger.open_study(name, folder, storage, settings, sampler)
    _prepare_sampler(study, sampler, seed, existed)
    if not study.get_trials(deepcopy=False) and default_params is not None:
        study.enqueue_trial(default_params, user_attrs={ledger.DEFAULT: True})
    if _finished(study, n_trials):
        logger.info("study %s has its %d trials already", name, n_trials)
        return study

    def make_task(runs: tuple[SeedRun, ...], session: str) -> SeedTask:
        return SeedTask(
            study=name,
            runs=runs,
            session=session,
            algo=problem.payload,
            env_id=env_id,
            total_timesteps=total_timesteps,
            ref_point=env.ref_point,
            eval_gamma=env.eval_gamma,
            num_eval_weights=num_eval_weights,
            num_eval_episodes=episodes,
            milestones=milestones,
            checkpoint_dir=str(folder / "checkpoints"),
            exclusive=not plan.resources,
        )

    with (
        connect(target) as client,
        Progress(name, enabled=progress) as line,
    ):
        line.say(f"study {name} in {folder}")
        line.say(f"dashboard: {dashboard_hint(client)}")
        plan = Plan(
            n_trials=n_trials,
            seeds=seeds,
            seeds_per_task=seeds_per_task,
            trials_per_task=trials_per_task,
            seed_retries=seed_retries,
            max_failures=max_failures,
            aggregate=aggregate,
            failed_seeds=failed_seeds,
            timeout=timeout,
            worker_timeout=worker_timeout,
            resources=choose_resources(client, resources, keeper_of(client)),
        )
        executor = Executor(
            client,
            study,
            plan,
            suggest=problem.suggest,
            make_task=make_task,
            batch_key=problem.batch_key,
            callbacks=callbacks,
            on_change=line.update,
            keeper=keeper_of(client),
        )
        reason = executor.run()
    if reason != "done":
        states = ledger.count_states(study)
        told = states["complete"] + states["fail"]
        logger.warning(
            "study %s: %s after %d of %d trials; run the same call again to go on",
            name, "timeout" if reason == "timeout" else "interrupted", told, n_trials,
        )  # fmt: skip
    if reason == "interrupted":
        raise KeyboardInterrupt(f"study {name} was interrupted")
    return study


@dataclass(frozen=True)
class _Problem:
    """An algorithm, its search space and its fixed values, checked against each other."""

    algo_name: str
    algorithm: Algorithm | None
    """None for a function of the user's."""
    payload: str | bytes
    """The algorithm as workers get it: its name, or the function pickled."""
    space: SearchSpace
    fixed: dict[str, Any]

    @classmethod
    def read(
        cls, algo: Trainable, env: EnvironmentInfo, search_space: Any, given: Mapping[str, Any]
    ) -> _Problem:
        fixed = _json_values(given)
        if callable(algo) or ":" in algo:
            function = algo if callable(algo) else resolve_function(algo)
            pickled = _pickled(function)
            if search_space is None:
                raise UsageError(
                    "an algorithm of your own has no built-in search space: pass search_space=, "
                    "for instance {'learning_rate': {'low': 1e-4, 'high': 1e-2, 'log': True}}."
                )
            algo_name = (
                algo if isinstance(algo, str) else f"{function.__module__}:{function.__qualname__}"
            )
            space = SearchSpace.load(search_space).without(fixed)
            payload = algo if isinstance(algo, str) else pickled
            return cls(algo_name, None, payload, space, fixed)
        algorithm = load_algorithm(algo)
        check_config_names(fixed, algorithm.config.names(), algo, "train_hyperparams")
        config = algorithm.config.from_mapping(fixed)
        # An env that does not fit is refused here, not by each seed of each trial.
        algorithm.agent(config, env.env_id, [0], total_timesteps=1, device="cpu")
        if search_space is None:
            search_space = algorithm.search_space
        space = SearchSpace.load(search_space).without(fixed)
        space.check_names(algorithm.config.names(), algo)
        return cls(algo, algorithm, algo, space, fixed)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """The whole configuration of a trial, checked."""
        config = {**self.space.suggest(trial), **self.fixed}
        self._check(config)
        return config

    def batch_key(self, config: dict[str, Any]) -> Hashable:
        """Trials whose keys are equal can train in one batch; None: with no other."""
        if self.algorithm is None:
            return None
        return self.algorithm.config.from_mapping(config).batch_key()

    def default_params(self) -> dict[str, Any]:
        """Optuna's parameters of trial 0: the defaults, as near as the space allows."""
        assert self.algorithm is not None
        defaults = {**self.algorithm.config.defaults(), **self.fixed}
        params, config, notes = self.space.default_params(defaults)
        for note in notes:
            logger.info("trial 0 (default configuration): %s", note)
        self._check({**config, **self.fixed})
        return params

    def _check(self, config: dict[str, Any]) -> None:
        if self.algorithm is not None:
            names = self.algorithm.config.names()
            check_config_names(config, names, self.algorithm.name, self.space.source)
            self.algorithm.config.from_mapping(config)


def _pickled(function: Callable[..., Any]) -> bytes:
    """A trainable as workers get it; UsageError where it cannot be called or sent to a worker."""
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise UsageError(
            f"algo {function!r} cannot be called as train(config, context): {error}."
        ) from error
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:  # whatever the objects that it refers to raise
        raise UsageError(
            f"algo {function!r} cannot be sent to workers ({type(error).__name__}: {error}); "
            "create what cannot be pickled inside the function."
        ) from error


def _json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON would give them back: tuples become lists, NumPy numbers Python's."""
    if not isinstance(values, Mapping):
        raise UsageError(
            f"train_hyperparams = {values!r} is not valid; give a mapping of names to values."
        )

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        raise UsageError(
            f"train_hyperparams: {value!r} is not valid; give numbers, text, booleans, None or "
            "lists of them."
        )

    converted: dict[str, Any] = json.loads(json.dumps(dict(values), default=plain))
    return converted


def _check_counts(minimum: int = 1, hint: str = "", **counts: int | str) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise UsageError(f"{name} = {value!r} is not valid; give an integer ≥ {minimum}{hint}.")


def _check_seconds(**seconds: float | None) -> None:
    for name, value in seconds.items():
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise UsageError(f"{name} = {value!r} is not valid; give seconds > 0.")


def _study_name(given: str | None, algo_name: str, env_id: str) -> str:
    if given is None:
        return re.sub(r"[^\w.-]+", "-", f"{algo_name}-{env_id}")
    if not isinstance(given, str) or not re.fullmatch(r"[\w][\w.\-]*", given):
        raise UsageError(
            f"study_name = {given!r} is not valid; it names a folder: letters, digits, '.', '_' "
            "and '-', not beginning with '.' or '-'."
        )
    return given


def _prepare_sampler(
    study: optuna.Study, sampler: BaseSampler | None, seed: int, existed: bool
) -> None:
    """Give the study its sampler; one that goes on must not draw its first points again."""
    if sampler is None:
        number = len(study.get_trials(deepcopy=False))
        state = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        study.sampler = TPESampler(seed=state)
    elif existed:
        sampler.reseed_rng()


def _finished(study: optuna.Study, n_trials: int) -> bool:
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    told = sum(state.is_finished() for state in states)
    return told >= n_trials and TrialState.RUNNING not in states
