"""The optimiser in a process of its own, for plans that are made while a model runs in this one.

A search is a second of Python. In a thread beside the model's it would hold the interpreter lock for 5 ms at each of
the model's calls into torch, which let go of it: on a GPU a step of a few hundred calls then takes a second. The
planner needs no torch, so that the process is there in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
from typing import Any

from flextensor.planner.plan import BudgetError, Plan
from flextensor.planner.search import search
from flextensor.profile import Profile

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 100.0
"""Less than a coordinator waits for a proposal."""
_CHILD = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from flextensor.planner.apart import answer; answer()"
)


def search_apart(profile: Profile, **limits: Any) -> Plan:
    """``search``, run by another process with a lower priority; by this one where none can be started.

    Raises BudgetError as ``search`` does, RuntimeError when it takes longer than ``LIMIT_SECONDS``.
    """
    question = pickle.dumps(sys.path) + pickle.dumps((profile, limits))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD], input=question, capture_output=True, timeout=LIMIT_SECONDS, check=True
        )
        found: Plan | BudgetError = pickle.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"planning took more than {LIMIT_SECONDS:.0f} s; is the machine overloaded?") from None
    except Exception as error:  # no process, a killed one, another Python's start-up that prints: a plan all the same
        told = getattr(error, "stderr", None) or b""
        logger.warning("planning in this process: %s %s", error, told.decode(errors="replace")[-500:])
        return search(profile, **limits)
    if isinstance(found, BudgetError):
        raise found
    return found


def answer() -> None:
    """The other process: a question from stdin, the plan or the BudgetError to stdout."""
    with contextlib.suppress(OSError):
        os.nice(5)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    profile, limits = pickle.load(sys.stdin.buffer)
    found: Plan | BudgetError
    try:
        found = search(profile, **limits)
    except BudgetError as error:
        found = error
    with answers:
        answers.write(pickle.dumps(found))
