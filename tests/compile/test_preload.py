"""Modules imported beside the filling. That ``offload`` does so with the compiler's: test_correction.py."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flextensor.compile import preload

MODULE = "imported_beside_the_filling"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that has not been imported, in the compiler's place."""
    path = tmp_path / f"{MODULE}.py"
    path.write_text("import time\ntime.sleep(0.2)\nready = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preload, "MODULES", (MODULE,))
    before = sys.getswitchinterval()
    yield path
    assert sys.getswitchinterval() == before and not importing()
    sys.modules.pop(MODULE, None)


def importing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "import-compiler"]


def test_it_is_there_at_the_end_and_imported_meanwhile() -> None:
    usual = sys.getswitchinterval()
    with preload.compiler_imported(gpu=False):
        assert importing() and sys.getswitchinterval() < usual
    assert sys.modules[MODULE].ready
    with preload.compiler_imported(gpu=False):  # nothing is left to do
        assert not importing() and sys.getswitchinterval() == usual


def test_a_switch_interval_that_is_shorter_already_stays() -> None:
    usual, shorter = sys.getswitchinterval(), preload._SWITCH_INTERVAL / 2
    sys.setswitchinterval(shorter)
    try:
        with preload.compiler_imported(gpu=False):
            assert sys.getswitchinterval() == pytest.approx(shorter)
        assert sys.getswitchinterval() == pytest.approx(shorter)
    finally:
        sys.setswitchinterval(usual)


def test_an_error_meanwhile_goes_on_when_the_thread_is_done() -> None:
    with pytest.raises(KeyError), preload.compiler_imported(gpu=False):
        raise KeyError
    assert sys.modules[MODULE].ready


@pytest.mark.parametrize("text", ["raise RuntimeError('broken')", "import no_such_module", "not Python"])
def test_what_cannot_be_imported_is_left_to_the_compilation(module: Path, text: str) -> None:
    module.write_text(text)
    with preload.compiler_imported(gpu=False):
        pass
    assert MODULE not in sys.modules


def test_two_threads_import_once_and_both_find_it() -> None:
    both = threading.Barrier(2)

    def offload() -> tuple[int, bool]:
        both.wait()
        with preload.compiler_imported(gpu=False):
            count = len(importing())
        return count, sys.modules[MODULE].ready

    with ThreadPoolExecutor(2) as pool:
        found = [done.result() for done in [pool.submit(offload) for _ in range(2)]]
    assert max(count for count, _ in found) == 1 and all(ready for _, ready in found)
