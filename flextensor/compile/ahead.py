"""The compiler's own import, which takes seconds, while a thread fills the host store.

Not the other way round: the compiler starts processes when it is imported, which end with the thread that did it.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

MODULES = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.cudagraph_trees")
"""What the first compiled step imports."""

TURNS_SECONDS = 5e-4
"""How long the import may keep the interpreter lock from threads that wait for it, which need it for moments only.
With Python's own 5 ms the filling waits for the import most of the time."""


class ImportStopped(Exception):
    """Raised in the work beside an import that was interrupted."""


def beside_compiler_import(work: Callable[[Callable[[], None]], T]) -> T:
    """What ``work`` returns: it runs in a thread while this one imports ``MODULES``; at once here when they are there.

    work: takes a function, to be called now and then, that raises ImportStopped when the import was interrupted (by
        Ctrl-C). It must import none of ``MODULES``.

    Raises what ``work`` raises. An import that fails is left to whoever needs it.
    """
    if all(name in sys.modules for name in MODULES):
        return work(lambda: None)
    stopped = threading.Event()

    def go_on() -> None:
        if stopped.is_set():
            raise ImportStopped

    turns = sys.getswitchinterval()
    with ThreadPoolExecutor(1, thread_name_prefix="beside-import") as pool:
        sys.setswitchinterval(min(turns, TURNS_SECONDS))
        try:
            found = pool.submit(work, go_on)
            _import_all()
            return found.result()
        except BaseException:
            stopped.set()
            raise
        finally:
            sys.setswitchinterval(turns)


def _import_all() -> None:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            logger.info("%s cannot be imported: %s", name, error)
