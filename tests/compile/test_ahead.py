"""The compiler's import beside other work: in processes of their own, which have imported none of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import sys, threading, time
import torch
from flextensor.compile.ahead import MODULES, ImportStopped, beside_compiler_import
from flextensor.compile import ahead
turns = sys.getswitchinterval()
"""


def told(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_work_runs_in_a_thread_while_this_one_imports_and_both_are_done_at_the_end() -> None:
    program = """
main = threading.get_ident()
def work(go_on):
    print(threading.get_ident() != main, sys.getswitchinterval() < turns)
    while "torch._dynamo" not in sys.modules:  # beside it, or this lasts for ever
        go_on()
    return "made"
print(beside_compiler_import(work), all(name in sys.modules for name in MODULES), sys.getswitchinterval() == turns)
print(beside_compiler_import(lambda go_on: threading.get_ident() == main))
"""
    assert told(program) == ["True", "True", "made", "True", "True", "True"]


def test_what_work_raises_is_raised_and_an_interrupted_import_stops_the_work() -> None:
    program = """
ahead._import_all = lambda: None
def fail(go_on):
    raise KeyError("of the work")
try:
    beside_compiler_import(fail)
except KeyError as error:
    print(sys.getswitchinterval() == turns)
begun = threading.Event()
def interrupt():
    assert begun.wait(30)
    raise KeyboardInterrupt
def work(go_on):
    begun.set()
    try:
        while True:
            go_on()
            time.sleep(0.01)
    except ImportStopped:
        print("stopped")
        raise
ahead._import_all = interrupt
try:
    beside_compiler_import(work)
except KeyboardInterrupt:
    print([thread.name for thread in threading.enumerate()] == ["MainThread"] or threading.enumerate())
"""
    assert told(program)[:2] == ["True", "stopped"]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["compile_fn=lambda module: module", "", "external"])
def test_a_model_that_will_be_compiled_finds_the_compiler_imported(compiled: str) -> None:
    program = f"""
import flextensor as ft
from tests.engine.models import Blocks
external = {compiled == "external"}
config = ft.OffloadConfig(include_patterns=("layers.*",), gpu_device="cuda", external_compile=external)
ft.offload(Blocks(), config, {"" if compiled == "external" else compiled})
print(ft.get_offload_manager().hosting.store.report().pin.complete)
print(sorted(name for name in MODULES if name in sys.modules) == sorted(MODULES))
ft.release()
"""
    assert told(program) == ["True", str(bool(compiled))]
