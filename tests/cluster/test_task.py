"""How a task travels: by name, or packed, with a clear word on what cannot be packed."""

from __future__ import annotations

import threading

import pytest

from cluster.task import TaskError, pack_task, resolve_task


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


@pytest.mark.parametrize(
    ("name", "words"),
    [("no_colon", "module:name"), ("nowhere.at_all:Task", "cannot import"), ("cluster.task:Nothing", "no 'Nothing'")],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        resolve_task(pack_task(name))
