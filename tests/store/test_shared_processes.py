"""Processes that share a store, and die: at any moment, by any signal, in any order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flextensor.store import StoreTimeoutError, TensorSource, shared_store
from flextensor.store.election import StoreProgress
from flextensor.store.inventory import list_stores
from flextensor.store.memory import weights_pss
from tests.store.holder import PATIENCE, Holder
from tests.store.small_models import same, small_weights, units_of


def test_one_fills_and_the_others_attach(shm_dir: str) -> None:
    holders = [Holder.start(shm_dir, delay=0.02) for _ in range(4)]
    ready = [holder.wait("ready") for holder in holders]
    assert sorted(r["created"] for r in ready) == [False, False, False, True]
    assert all(r["wrong"] == [] for r in ready)
    assert len(os.listdir(shm_dir)) == 1
    (entry,) = list_stores(shm_dir)
    assert entry.state == "in use" and set(entry.holders) == {holder.pid for holder in holders}
    for holder in holders:
        assert os.listdir(shm_dir)
        holder.close()
    assert os.listdir(shm_dir) == []


def test_a_waiting_process_says_who_fills_and_how_far(shm_dir: str) -> None:
    filler = Holder.start(shm_dir, stands=True)
    at = filler.wait_in_filling()
    (entry,) = list_stores(shm_dir)
    assert (entry.state, entry.holders) == ("filling", (filler.pid,))
    waiter = Holder.start(shm_dir)

    def waits_at(done: int) -> StoreProgress:
        return waiter.wait_for_progress(lambda told: told.phase == "waiting" and told.done >= done)

    for _ in range(3):
        told = waits_at(at.done)
        assert (told.pid, told.done, told.total) == (filler.pid, at.done, at.total)
        filler.go_on(to_next=True)
        at = filler.wait_in_filling()
    filler.go_on()
    assert waiter.wait("ready")["created"] is False
    waited = [progress for progress in waiter.progress if progress.phase == "waiting"]
    assert {progress.pid for progress in waited} == {filler.pid}
    assert [p.done for p in waited] == sorted(p.done for p in waited)
    filler.wait("ready")
    filler.close()
    waiter.close()


def test_a_filler_that_is_killed_is_replaced_at_once(shm_dir: str) -> None:
    filler = Holder.start(shm_dir, stands=True)
    filler.wait_in_filling()
    waiter = Holder.start(shm_dir)
    waiter.wait_for_progress(lambda told: told.phase == "waiting")
    filler.kill()
    before = len(waiter.told())
    assert waiter.wait("ready") == {"created": True, "wrong": []}
    since = [told for told in waiter.progress[before:] if told.phase == "waiting"]
    assert len(since) <= 1, "by one look, which had begun before the filler was gone"
    waiter.close()
    assert os.listdir(shm_dir) == []


def test_a_killed_filler_leaves_no_store_and_no_memory(small_tmpfs: str) -> None:
    directory = small_tmpfs
    filler = Holder.start(directory, rows=15_000, stands=True)  # about 42 MiB
    filler.wait_in_filling()
    used = os.statvfs(directory)
    filler.kill()
    assert not [name for name in os.listdir(directory) if name.endswith(".safetensors")]
    freed = (os.statvfs(directory).f_bfree - used.f_bfree) * used.f_frsize
    assert freed > 40 << 20
    again = Holder.start(directory)
    assert again.wait("ready") == {"created": True, "wrong": []}
    again.close()
    assert os.listdir(directory) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_creator_dies_and_the_others_go_on(shm_dir: str, number: int) -> None:
    creator = Holder.start(shm_dir)
    assert creator.wait("ready")["created"]
    user = Holder.start(shm_dir)
    user.wait("ready")
    creator.kill(number)
    assert user.ask("check", "checked") == []
    newcomer = Holder.start(shm_dir)
    assert newcomer.wait("ready") == {"created": False, "wrong": []}
    user.close()
    assert newcomer.ask("check", "checked") == []
    newcomer.close()
    assert os.listdir(shm_dir) == []


def test_a_process_that_only_attached_ends_and_a_new_one_attaches(shm_dir: str) -> None:
    creator = Holder.start(shm_dir)
    creator.wait("ready")
    for how in ("close", "exit", "kill"):
        guest = Holder.start(shm_dir)
        assert guest.wait("ready")["created"] is False
        if how == "close":
            guest.close()
        elif how == "exit":
            guest.pipe.send("exit")
            guest.process.join(PATIENCE)
            assert guest.process.exitcode == 0
        else:
            guest.kill()
        assert creator.ask("check", "checked") == []
    creator.close()
    assert os.listdir(shm_dir) == []


GUEST = """
import os, sys
from multiprocessing import resource_tracker
import psutil
from flextensor.store import TensorSource, shared_store
from tests.store.small_models import small_weights, units_of

tensors = small_weights()
for _ in range(2):  # the second one is open at the end
    store = shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=sys.argv[1])
    assert not store.report().created_by_us
    store.verify()
    views = [store.tensor(name) for name in tensors]
    _ == 0 and store.close()
print(resource_tracker._resource_tracker._pid, psutil.Process().children(recursive=True))
"""


def test_a_process_that_attaches_and_exits_has_no_resource_tracker_to_warn_or_to_take_the_store_away(
    shm_dir: str,
) -> None:
    creator = Holder.start(shm_dir)
    creator.wait("ready")
    before = os.listdir(shm_dir)
    guest = subprocess.run([sys.executable, "-c", GUEST, shm_dir], capture_output=True, text=True, timeout=240)
    assert (guest.returncode, guest.stderr, guest.stdout) == (0, "", "None []\n")
    assert os.listdir(shm_dir) == before
    assert creator.ask("check", "checked") == []
    creator.close()
    assert os.listdir(shm_dir) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_are_killed_and_the_next_start_takes_over_what_is_complete(shm_dir: str, number: int) -> None:
    holders = [Holder.start(shm_dir) for _ in range(3)]
    for holder in holders:
        holder.wait("ready")
    for holder in holders:
        holder.kill(number)
    (entry,) = list_stores(shm_dir)
    assert (entry.state, entry.holders) == ("dead", ())
    again = Holder.start(shm_dir)
    assert again.wait("ready") == {"created": False, "wrong": []}
    again.close()
    assert os.listdir(shm_dir) == []


def test_a_start_removes_dead_stores_and_never_living_or_kept_ones(shm_dir: str) -> None:
    dead, living = Holder.start(shm_dir, 1), Holder.start(shm_dir, 2)
    kept = Holder.start(shm_dir, 3, keep=True)
    for holder in (dead, living, kept):
        holder.wait("ready")
    dead.kill()
    kept.close()
    other = Holder.start(shm_dir, 4)
    assert other.wait("ready") == {"created": True, "wrong": []}
    assert sorted(entry.state for entry in list_stores(shm_dir)) == ["in use", "in use", "kept"]
    assert living.ask("check", "checked") == []
    warm = Holder.start(shm_dir, 3)
    assert warm.wait("ready") == {"created": False, "wrong": []}
    for holder in (living, other, warm):
        holder.close()
    assert [entry.state for entry in list_stores(shm_dir)] == ["kept"]


def test_edits_of_one_process_are_never_seen_by_another(shm_dir: str) -> None:
    editor, reader = Holder.start(shm_dir), Holder.start(shm_dir)
    editor.wait("ready")
    reader.wait("ready")
    assert editor.ask("edit", "edited") == sum(t.nbytes for t in small_weights().values())
    assert reader.ask("check", "checked") == []
    assert set(reader.ask("scribble", "scribbled")) == set(small_weights())
    newcomer = Holder.start(shm_dir)
    assert newcomer.wait("ready") == {"created": False, "wrong": []}
    for holder in (editor, reader, newcomer):
        holder.close()


def test_waiting_ends_with_who_is_waited_for(shm_dir: str) -> None:
    filler = Holder.start(shm_dir, stands=True)
    filler.wait_in_filling()
    tensors = small_weights()
    with pytest.raises(StoreTimeoutError, match=rf"waited 0\.2 s.*process {filler.pid} on"):
        shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=shm_dir, wait_timeout=0.2)
    filler.go_on()
    filler.wait("ready")
    filler.close()


@pytest.mark.parametrize("backing", ["file", "memfd"])
def test_host_memory_is_one_copy_however_many_processes(shm_dir: str, backing: str) -> None:
    tensors = small_weights(rows=20_000)
    holders = [Holder.start(shm_dir, rows=20_000, backing=backing) for _ in range(3)]
    for holder in holders:
        assert holder.wait("ready")["wrong"] == []
    with shared_store(
        units_of(tensors), TensorSource(tensors), namespace="t", directory=shm_dir, backing=backing
    ) as store:
        assert not store.report().created_by_us
        assert set(store.report().holders or ()) == {os.getpid(), *(holder.pid for holder in holders)}
        store.verify()
        pss = weights_pss([os.getpid(), *(holder.pid for holder in holders)], store)
        assert 0.99 * store.layout.nbytes <= pss <= 1.02 * store.layout.nbytes
    for holder in holders:
        holder.close()
    assert os.listdir(shm_dir) == []


def test_a_memfd_is_handed_on_by_whoever_still_lives(shm_dir: str) -> None:
    creator, second = (Holder.start(shm_dir, backing="memfd") for _ in range(2))
    created = [creator.wait("ready")["created"], second.wait("ready")["created"]]
    assert sorted(created) == [False, True]
    first, other = (creator, second) if created[0] else (second, creator)
    first.kill()
    third = Holder.start(shm_dir, backing="memfd")
    assert third.wait("ready") == {"created": False, "wrong": []}
    other.close()
    assert third.ask("check", "checked") == []
    third.kill()
    fresh = Holder.start(shm_dir, backing="memfd")
    assert fresh.wait("ready") == {"created": True, "wrong": []}
    fresh.close()
    assert os.listdir(shm_dir) == []


def test_an_unlinked_store_serves_its_users_to_the_end(shm_dir: str) -> None:
    user = Holder.start(shm_dir)
    user.wait("ready")
    (path,) = Path(shm_dir).iterdir()
    path.unlink()
    newcomer = Holder.start(shm_dir)
    assert newcomer.wait("ready") == {"created": True, "wrong": []}
    assert user.ask("check", "checked") == []
    user.close()
    assert len(os.listdir(shm_dir)) == 1
    newcomer.close()
    assert os.listdir(shm_dir) == []


def test_views_keep_their_memory_after_close(shm_dir: str) -> None:
    tensors = small_weights()
    store = shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=shm_dir)
    views = {name: store.tensor(name) for name in tensors}
    raw = store.bytes(0, store.layout.nbytes)
    total = int(raw.sum())
    store.close()
    assert os.listdir(shm_dir) == []
    assert all(same(views[name], tensor) for name, tensor in tensors.items())
    assert int(raw.sum()) == total
    assert isinstance(raw, torch.Tensor)
