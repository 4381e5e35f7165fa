"""Which device and how many threads a worker owns."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dask_mohpo import devices
from dask_mohpo.devices import SlotPlugin, check_devices, current_slot, place_of
from dask_mohpo.errors import UsageError


class FakeWorker(SimpleNamespace):
    """What a plugin sees of a worker, on this process's main thread."""


def worker(name: object, *, gpu: bool = True, own_process: bool = True) -> Any:
    thread = threading.main_thread().ident if own_process else -1
    resources = {"GPU": 1.0} if gpu else {}
    return FakeWorker(
        name=name,
        address=f"inproc://{name}",
        thread_id=thread,
        state=SimpleNamespace(total_resources=resources, nthreads=1),
    )


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Set first, so that whatever a test's code puts there is undone.
    for name in (devices.VISIBLE, "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(devices, "_slots", {})
    monkeypatch.setattr(devices, "_torch_sees_cuda", lambda: True)
    monkeypatch.setattr(devices, "cpu_count", lambda: 8)
    monkeypatch.setattr(devices.signal, "signal", lambda *_: None)
    yield


def slot_of(one: Any, plugin: SlotPlugin) -> devices.Slot:
    plugin.setup(one)
    return devices._slots[one.address]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("0", 0),
        ("3", 3),
        ("SLURMCluster-0", 0),
        ("SLURMCluster-7", 0),
        ("SLURMCluster-0-0", 0),
        ("SLURMCluster-12-3", 3),
        ("my-own-cluster-4-2", 2),
        ("tcp://10.0.0.1:4567", 0),
        ("node", 0),
    ],
)
def test_place_of_a_worker(name: str, place: int) -> None:
    assert place_of(name) == place


@pytest.mark.parametrize(
    "visible",
    ["0,1,2,3", "4,5,6,7", "GPU-aa,GPU-bb,GPU-cc,GPU-dd", "MIG-1/2,MIG-1/3,MIG-2/0,MIG-2/1"],
)
def test_each_worker_of_a_job_narrows_the_list_to_its_own_entry(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, entry in enumerate(visible.split(",")):
        monkeypatch.setenv(devices.VISIBLE, visible)

        slot = slot_of(worker(f"SLURMCluster-5-{place}"), SlotPlugin(None, 2, 4))

        assert (slot.gpu, slot.device) == (entry, "cuda:0")
        assert os.environ[devices.VISIBLE] == entry


def test_workers_share_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = []
    for place in range(4):
        monkeypatch.setenv(devices.VISIBLE, "2,5")
        owned.append(slot_of(worker(f"SLURMCluster-0-{place}"), SlotPlugin(None, 1, 4)).gpu)
    assert owned == ["2", "5", "2", "5"]


def test_the_users_devices_name_entries_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = []
    for place in range(4):
        monkeypatch.setenv(devices.VISIBLE, "4,5,6,7")
        plugin = SlotPlugin(["cuda:3", "cuda:1", "cpu"], 1, 4)
        slot = slot_of(worker(str(place)), plugin)
        owned.append((slot.gpu, slot.device))
    assert owned == [("7", "cuda:0"), ("5", "cuda:0"), ("", "cpu"), ("7", "cuda:0")]


def test_a_device_that_is_not_in_the_list_is_left_for_torch_to_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(devices.VISIBLE, "4,5")
    slot = slot_of(worker("0"), SlotPlugin(["cuda:9"], 1, 1))
    assert (slot.gpu, slot.device) == ("", "cuda:9")
    assert os.environ[devices.VISIBLE] == "4,5"


def test_workers_in_one_process_leave_its_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(devices.VISIBLE, "4,5")
    slot = slot_of(worker("1", own_process=False), SlotPlugin(None, 1, 2))
    assert (slot.gpu, slot.device) == ("5", "cuda:1")
    assert os.environ[devices.VISIBLE] == "4,5"


def test_without_a_gpu_in_sight_the_cpu_is_used_and_a_warning_given(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_torch_sees_cuda", lambda: False)
    assert slot_of(worker("0"), SlotPlugin(None, 1, 1)).device == "cpu"
    assert "a GPU was asked for, but none is in sight" in caplog.text


def test_a_worker_that_offers_no_gpu_gets_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(devices.VISIBLE, "0,1")
    slot = slot_of(worker("0", gpu=False), SlotPlugin(None, 1, 1))
    assert (slot.gpu, slot.device) == ("", "cpu")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("asked", "processes", "reserved", "threads"),
    [
        (2, 4, None, 2),  # 8 CPUs
        (4, 4, None, 2),  # no more than a fair share of the machine
        (1, 4, None, 1),  # the spec's own wish
        (4, 2, "4", 2),  # of what Slurm reserved
        (4, 4, "2", 1),  # at least one
        (3, 1, "nonsense", 3),
    ],
)
def test_threads(
    asked: int,
    processes: int,
    reserved: str | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reserved is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", reserved)
    slot = slot_of(worker("0", gpu=False), SlotPlugin(None, asked, processes))
    assert slot.threads == threads


def test_the_node_has_the_name_that_slurm_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n17")
    assert slot_of(worker("0", gpu=False), SlotPlugin(None, 1, 1)).host == "n17"


def test_outside_of_a_worker_the_slot_is_the_whole_machine() -> None:
    slot = current_slot()
    assert (slot.worker, slot.device, slot.threads) == ("driver", "cpu", 8)


@pytest.mark.parametrize("given", ["cuda:0", [], 5, ["cuda:0", "gpu"], ["cuda:x"], [0]])
def test_devices_that_are_none(given: Any) -> None:
    with pytest.raises(UsageError, match="cuda:0"):
        check_devices(given)


def test_devices_that_are_some() -> None:
    assert check_devices(("cpu", "cuda", "cuda:12")) == ["cpu", "cuda", "cuda:12"]
