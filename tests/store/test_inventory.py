"""``flextensor store ls | verify | rm`` and what they stand on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flextensor.store import StoreCorruptError, StoreError, TensorSource, shared_store
from flextensor.store.inventory import list_stores, remove_store, verify_store
from flextensor.store.shared import SharedStore
from launch.store import app
from tests.store.holder import Holder
from tests.store.small_models import small_weights, units_of


def _store(directory: str, seed: int = 0, *, namespace: str = "t", keep: bool = True) -> SharedStore:
    tensors = small_weights(seed)
    return shared_store(units_of(tensors), TensorSource(tensors), namespace=namespace, directory=directory, keep=keep)


def _flip(store_path: str, name: str, directory: str) -> None:
    with _store(directory) as store:
        place = store.manifest.header_bytes + store.layout.by_name[name].offset
    with open(store_path, "r+b") as file:
        file.seek(place + 17)
        byte = file.read(1)[0]
        file.seek(place + 17)
        file.write(bytes([byte ^ 4]))


def test_a_corrupted_byte_is_found_and_named(shm_dir: str) -> None:
    with _store(shm_dir) as store:
        path = store.path
    (entry,) = list_stores(shm_dir)
    assert list(verify_store(entry)) == []
    _flip(path, "layers.1.up", shm_dir)
    (error,) = verify_store(entry)
    assert isinstance(error, StoreCorruptError)
    assert error.tensors == ("layers.1.up",)
    result = CliRunner().invoke(app, ["verify", "--dir", shm_dir])
    assert result.exit_code == 1
    assert "layers.1.up" in result.output and "2 of 3 units right" in result.output


def test_ls_verify_and_rm_do_what_they_say(shm_dir: str) -> None:
    runner = CliRunner()
    assert "no host stores" in runner.invoke(app, ["ls", "--dir", shm_dir]).output
    _store(shm_dir, 0, namespace="one").close()
    held = _store(shm_dir, 1, namespace="two")
    listing = runner.invoke(app, ["ls", "--dir", shm_dir], env={"COLUMNS": "200"}).output
    assert "kept" in listing and "in use" in listing and held.identity[:12] in listing and str(os.getpid()) in listing
    checked = runner.invoke(app, ["verify", "--dir", shm_dir], env={"COLUMNS": "200"})
    assert checked.exit_code == 0 and checked.output.count("3 of 3 units right") == 2
    refused = runner.invoke(app, ["rm", "two", "--dir", shm_dir])
    assert refused.exit_code == 1 and str(os.getpid()) in refused.output
    assert runner.invoke(app, ["rm", "--dir", shm_dir]).exit_code == 1
    unknown = runner.invoke(app, ["rm", "three", "--dir", shm_dir])
    assert unknown.exit_code == 1 and "namespaces there: one, two" in unknown.output
    swept = runner.invoke(app, ["rm", "--all", "--dir", shm_dir], env={"COLUMNS": "200"})
    assert swept.exit_code == 0 and "left" in swept.output and "removed" in swept.output
    assert [entry.namespace for entry in list_stores(shm_dir)] == ["two"]
    assert runner.invoke(app, ["rm", "two", "--force", "--dir", shm_dir]).exit_code == 0
    assert os.listdir(shm_dir) == []
    assert held.verify() > 0
    held.close()
    assert os.listdir(shm_dir) == []


def test_looking_at_a_dead_store_does_not_remove_it(shm_dir: str) -> None:
    holder = Holder.start(shm_dir)
    holder.wait("ready")
    holder.kill()
    (entry,) = list_stores(shm_dir)
    assert list(verify_store(entry)) == []
    assert [e.state for e in list_stores(shm_dir)] == ["dead"]
    remove_store(entry)
    assert os.listdir(shm_dir) == []


def test_a_store_that_is_being_filled_is_not_removed(shm_dir: str) -> None:
    filler = Holder.start(shm_dir, stands=True)
    filler.wait_in_filling()
    (entry,) = list_stores(shm_dir)
    assert entry.state == "filling"
    with pytest.raises(StoreError, match=f"process {filler.pid}"):
        remove_store(entry)
    filler.go_on()
    filler.wait("ready")
    filler.close()


def test_an_unreadable_file_is_shown_and_can_be_removed(shm_dir: str) -> None:
    with _store(shm_dir) as store:
        path = Path(store.path)
    path.write_bytes(b"rubbish")
    (entry,) = list_stores(shm_dir)
    assert entry.state == "unreadable" and "safetensors header" in entry.detail
    assert CliRunner().invoke(app, ["verify", "--dir", shm_dir]).exit_code == 1
    remove_store(entry)
    assert os.listdir(shm_dir) == []


def test_other_files_are_left_alone(shm_dir: str) -> None:
    other = Path(shm_dir) / "flextensor-u0-notes.txt"
    other.write_text("mine")
    _store(shm_dir, keep=False).close()
    assert list_stores(shm_dir) == []
    assert os.listdir(shm_dir) == [other.name]


@pytest.mark.parametrize("namespace", ["", "a/b", "-a", "x" * 65, "a b"])
def test_a_namespace_that_is_no_file_name_is_refused(shm_dir: str, namespace: str) -> None:
    with pytest.raises(ValueError, match="shm_namespace"):
        _store(shm_dir, namespace=namespace)


def test_one_namespace_with_two_models_keeps_them_apart(shm_dir: str) -> None:
    with _store(shm_dir, 0, keep=False) as first, _store(shm_dir, 1, keep=False) as second:
        assert first.path != second.path
        assert len(os.listdir(shm_dir)) == 2
    assert os.listdir(shm_dir) == []
