"""The compiler's import beside the filling of a store: in processes of their own, which have imported none of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys, threading
import torch
from flextensor.compile.ahead import MODULES, compiler_imported_beside
there = lambda: [name for name in MODULES if name in sys.modules]
turns = sys.getswitchinterval()
"""
OFFLOADED = """
import sys
import torch
import flextensor as ft
from tests.engine.models import Blocks
from flextensor.compile.ahead import MODULES
model = Blocks()
config = ft.OffloadConfig(include_patterns=("layers.*",), gpu_device="host", external_compile={external})
ft.offload(model, config)
print(sorted(name for name in MODULES if name in sys.modules) == sorted(MODULES))
ft.release()
"""


def told(program: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    ).stdout.split()


def test_the_modules_are_there_when_the_block_ends_and_the_threads_take_turns_as_before() -> None:
    program = """
with compiler_imported_beside():
    print(len(there()) == len(MODULES), sys.getswitchinterval() < turns)
print(len(there()) == len(MODULES), sys.getswitchinterval() == turns)
print(any(thread.name == "compiler-import" for thread in threading.enumerate()))
"""
    assert told(BLOCK + program) == ["False", "True", "True", "True", "False"]


def test_nothing_is_imported_where_nothing_is_compiled_and_an_error_leaves_as_it_came() -> None:
    program = """
with compiler_imported_beside(False):
    print(sys.getswitchinterval() == turns)
print(there())
try:
    with compiler_imported_beside():
        raise KeyError("of the block")
except KeyError:
    print(sys.getswitchinterval() == turns)
"""
    assert told(BLOCK + program) == ["True", "[]", "True"]


@pytest.mark.parametrize("external", [True, False])
def test_a_model_that_will_be_compiled_finds_the_compiler_imported(external: bool) -> None:
    assert told(OFFLOADED.format(external=external)) == [str(external)]
