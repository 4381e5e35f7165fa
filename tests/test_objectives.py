"""From seeds to the number that a trial is told."""

from __future__ import annotations

import numpy as np
import pytest

from dask_mohpo.errors import UnknownNameError
from dask_mohpo.objectives import AGGREGATES, FAILED_SEEDS, check_choice, seed_value, trial_value
from dask_mohpo.records import SeedResult


def result(front, state="finished"):
    return SeedResult(trial=0, seed=1, attempt=0, state=state, front=front, ref_point=(0.0, -10.0))


def test_a_seeds_value_is_the_hypervolume_of_its_front():
    assert seed_value(result(np.array([[2.0, -5.0], [3.0, -8.0]]))) == 2 * 5 + 1 * 2
    assert seed_value(result(np.array([[2.0, -11.0]]))) == 0.0


def test_an_empty_front_is_worth_nothing_and_a_missing_one_has_no_value():
    assert seed_value(result(np.empty((0, 2)))) == 0.0
    assert seed_value(result(None, "failed")) is None
    assert seed_value(result(None, "stopped")) is None


@pytest.mark.parametrize(("aggregate", "wanted"), [("mean", 4.0), ("median", 2.0), ("min", 1.0)])
@pytest.mark.parametrize("failed_seeds", FAILED_SEEDS)
def test_aggregates(aggregate, wanted, failed_seeds):
    value = trial_value([2.0, 1.0, 9.0], aggregate, failed_seeds)
    assert value == wanted
    assert type(value) is float


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_one_failed_seed_fails_the_trial(aggregate):
    assert trial_value([2.0, None, 9.0], aggregate, "fail") is None
    assert trial_value([None], aggregate, "fail") is None


@pytest.mark.parametrize(("aggregate", "wanted"), [("mean", 11 / 3), ("median", 2.0), ("min", 0.0)])
def test_a_failed_seed_may_count_as_an_empty_front(aggregate, wanted):
    assert trial_value([2.0, None, 9.0], aggregate, "worst") == pytest.approx(wanted)
    assert trial_value([None, None], aggregate, "worst") == 0.0


def test_a_single_seed_is_itself():
    assert {trial_value([3.25], aggregate, "fail") for aggregate in AGGREGATES} == {3.25}


def test_check_choice():
    check_choice("aggregate", "mean", list(AGGREGATES))
    with pytest.raises(UnknownNameError, match="unknown aggregate: 'medium'") as raised:
        check_choice("aggregate", "medium", list(AGGREGATES))
    assert raised.value.closest == "median"
    assert raised.value.valid == ["mean", "median", "min"]
