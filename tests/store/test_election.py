"""The right to fill a store, and what a process leaves that dies with it."""

from __future__ import annotations

import os
from pathlib import Path

from flextensor.store import TensorSource, shared_store
from flextensor.store.election import Election
from flextensor.store.naming import StoreName
from tests.store.small_models import small_weights, units_of


def test_who_died_between_the_last_byte_and_giving_the_right_back_leaves_nothing(shm_dir: str) -> None:
    tensors = small_weights()
    source = TensorSource(tensors)
    with shared_store(units_of(tensors), source, namespace="t", directory=shm_dir) as store:
        lock = Path(StoreName(shm_dir, "t", store.identity).lock)
        lock.touch()  # nobody holds it
        with shared_store(units_of(tensors), source, namespace="t", directory=shm_dir):
            assert not lock.exists()
        held = Election.win(str(lock))
        assert held is not None
        with shared_store(units_of(tensors), source, namespace="t", directory=shm_dir):
            assert lock.exists(), "somebody holds it"
        held.release()
    assert os.listdir(shm_dir) == []
