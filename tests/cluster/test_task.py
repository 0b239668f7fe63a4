"""How a task travels: by name, or packed, with a clear word on what cannot be packed."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from pathlib import Path

import pytest

from cluster.packing import pack_task, resolve_task
from cluster.task import TaskError


def test_a_closure_over_a_lock_is_refused_and_the_lock_is_named() -> None:
    the_lock = threading.Lock()

    def factory(options: dict[str, object]) -> object:
        return the_lock

    with pytest.raises(TaskError, match="the_lock"):
        pack_task(factory)  # type: ignore[arg-type]


def test_a_closure_over_plain_data_travels() -> None:
    data = {"answer": 42}

    def factory(options: dict[str, object]) -> object:
        return data["answer"]

    assert resolve_task(pack_task(factory))({}) == 42  # type: ignore[arg-type, comparison-overlap]


def test_a_factory_that_drags_its_weights_along_is_refused() -> None:
    big = bytearray(65 << 20)

    def factory(options: dict[str, object]) -> object:
        return big

    with pytest.raises(TaskError, match="65 MiB"):
        pack_task(factory)  # type: ignore[arg-type]


def test_more_than_a_mebibyte_is_sent_with_a_warning_that_names_what_is_large(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, small = bytearray(2 << 20), 3

    def factory(options: dict[str, object]) -> object:
        return table, small

    pack_task(factory)  # type: ignore[arg-type]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'table' (bytearray, 2 MiB)" in message and "small" not in message


def test_a_lock_inside_a_captured_partial_is_named() -> None:
    inner_lock = threading.Lock()

    def inner(flag: object) -> object:
        return inner_lock

    bound = functools.partial(inner, 3)

    def factory(options: dict[str, object]) -> object:
        return bound

    with pytest.raises(TaskError, match=r"'bound': 'func': it captures 'inner_lock' \(lock"):
        pack_task(factory)  # type: ignore[arg-type]


def test_a_module_that_a_worker_lacks_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def factory(options):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    packed = pack_task(importlib.import_module("only_here").factory)
    monkeypatch.delitem(sys.modules, "only_here")
    sys.path.remove(str(tmp_path))
    with pytest.raises(TaskError, match=r"'only_here'.*register_pickle_by_value\(only_here\)"):
        resolve_task(packed)


@pytest.mark.parametrize(
    ("name", "words"),
    [("no_colon", "module:name"), ("nowhere.at_all:Task", "cannot import"), ("cluster.task:Nothing", "no 'Nothing'")],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        resolve_task(pack_task(name))
