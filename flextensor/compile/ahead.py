"""The compiler's own import, which takes seconds, while a host store is filled."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

MODULES = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.cudagraph_trees")
"""What the first compiled step imports."""

TURNS_SECONDS = 1e-4
"""How long the import may keep the interpreter lock from threads that wait for it, which need it for moments only."""


@contextlib.contextmanager
def compiler_imported_beside(wanted: bool = True) -> Iterator[None]:
    """Import ``MODULES`` in a thread while the block runs; they are there at its end. The block must import none of
    them itself. wanted: False does nothing. An import that fails is left to whoever needs it."""
    if not wanted or all(name in sys.modules for name in MODULES):
        yield
        return
    importing = threading.Thread(target=_import_all, name="compiler-import", daemon=True)
    turns = sys.getswitchinterval()
    sys.setswitchinterval(min(turns, TURNS_SECONDS))
    importing.start()
    try:
        yield
        importing.join()
    finally:
        sys.setswitchinterval(turns)


def _import_all() -> None:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            logger.info("%s cannot be imported: %s", name, error)
