"""A process that holds a store: what the tests start, talk to and kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from flextensor.store import TensorSource, election, shared_store
from flextensor.store.election import StoreProgress
from flextensor.store.filling import Reader
from flextensor.store.layout import StoredTensor
from tests.store.small_models import same, small_weights, units_of

# A server process that has imported torch once forks the holders: a start takes milliseconds, and no holder inherits
# another one's lock.
_CONTEXT = multiprocessing.get_context("forkserver")

PATIENCE = 120.0
"""Seconds after which a holder that does not answer is stuck."""

T = TypeVar("T")


class SlowSource(TensorSource):
    """Waits before it opens each tensor, so that a filling takes a while."""

    def __init__(self, tensors: dict[str, torch.Tensor], delay: float) -> None:
        super().__init__(tensors)
        self._delay = delay

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        time.sleep(self._delay)
        return super().open(tensor)


class _Teller:
    """Tells the test how far the store is; one that ``stands`` waits in the middle of its filling until told to go on.

    "next": to the next progress, and stand there too. "go on": to the end.
    """

    def __init__(self, pipe: Connection, stands: bool) -> None:
        self._pipe = pipe
        self._stands = stands

    def __call__(self, progress: StoreProgress) -> None:
        self._pipe.send(("progress", progress))
        if self._stands and progress.phase == "filling" and 0 < progress.done < progress.total:
            self._stands = self._pipe.recv() == "next"


def hold(
    pipe: Connection, directory: str, seed: int, delay: float, rows: int, stands: bool, options: dict[str, Any]
) -> None:
    """Get the store of ``small_weights(seed)``, say so, then obey: check, edit, scribble, close, exit."""
    try:
        _hold(pipe, directory, seed, delay, rows, stands, options)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (EOFError, ConnectionResetError):
        return  # the test is gone


def _hold(
    pipe: Connection, directory: str, seed: int, delay: float, rows: int, stands: bool, options: dict[str, Any]
) -> None:
    tensors = small_weights(seed, rows=rows)
    if stands:
        election._INTERVAL = 0.0  # each tensor is told of, however soon after the one before
    store = shared_store(
        units_of(tensors),
        SlowSource(tensors, delay),
        namespace="t",
        directory=directory,
        progress=_Teller(pipe, stands),
        **options,
    )

    def wrong() -> list[str]:
        return [name for name, tensor in tensors.items() if not same(store.tensor(name), tensor)] + [
            name for name in tensors if not torch.equal(store.source(name), store._parameter_bytes(store._find(name)))
        ]

    pipe.send(("ready", {"created": store.report().created_by_us, "wrong": wrong()}))
    while True:
        command = pipe.recv()
        if command == "check":
            pipe.send(("checked", wrong()))
        elif command == "edit":
            for name in tensors:
                store.make_private(name).zero_()
                store.tensor(name)
            store.keep_edits()
            pipe.send(("edited", store.report().private_bytes))
        elif command == "scribble":
            for name in tensors:
                store.tensor(name).zero_()
            pipe.send(("scribbled", store.edited_in_place()))
        elif command == "close":
            store.close()
            pipe.send(("closed", None))
            return
        elif command == "exit":
            return


@dataclass
class Holder:
    """The test's end of one holder. progress: what it has told so far."""

    process: BaseProcess
    pipe: Connection
    progress: list[StoreProgress] = field(default_factory=list)
    _said: deque[tuple[str, Any]] = field(default_factory=deque)

    @staticmethod
    def start(
        directory: str, seed: int = 0, *, delay: float = 0.0, rows: int = 500, stands: bool = False, **options: Any
    ) -> Holder:
        """A new process on its way to the store of ``small_weights(seed)``. stands: when it is to fill the store, it
        stands in the middle of that until ``go_on``."""
        process, pipe = _begin(hold, directory, seed, delay, rows, stands, options)
        return Holder(process, pipe)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, event: str, timeout: float = PATIENCE) -> Any:
        """What comes with the next ``event``; progress on the way is kept. Fails the test when it does not come."""
        deadline = time.monotonic() + timeout
        while self._said or self.pipe.poll(max(0.0, deadline - time.monotonic())):
            kind, value = self._said.popleft() if self._said else self._hear()
            if kind == event:
                return value
            assert kind == "progress", f"{kind} while waiting for {event}"
        raise AssertionError(f"process {self.pid} did not say {event!r} within {timeout} s")

    def wait_for_progress(self, so_far: Callable[[StoreProgress], bool]) -> StoreProgress:
        """The next progress that is ``so_far``."""
        deadline = time.monotonic() + PATIENCE
        while not so_far(told := self.wait("progress")):
            assert time.monotonic() < deadline, told
        progress: StoreProgress = told
        return progress

    def wait_in_filling(self) -> StoreProgress:
        """Until it stands in the middle of its filling."""
        return self.wait_for_progress(lambda told: told.phase == "filling" and 0 < told.done < told.total)

    def told(self) -> tuple[StoreProgress, ...]:
        """All progress that has arrived up to now."""
        while self.pipe.poll():
            self._said.append(self._hear())
        return tuple(self.progress)

    def _hear(self) -> tuple[str, Any]:
        kind, value = self.pipe.recv()
        if kind == "progress":
            self.progress.append(value)
        return kind, value

    def go_on(self, *, to_next: bool = False) -> None:
        """Let one that stands in its filling go on to the end, or to the next progress only."""
        self.pipe.send("next" if to_next else "go on")

    def ask(self, command: str, answer: str) -> Any:
        """Send a command and wait for its answer."""
        self.pipe.send(command)
        return self.wait(answer)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal and wait until it is gone."""
        os.kill(self.pid, number)
        self.process.join(PATIENCE if number == signal.SIGKILL else 3)
        if self.process.exitcode is None:  # Python drops a KeyboardInterrupt that arrives in some of its callbacks
            self.process.kill()
            self.process.join(PATIENCE)
        assert self.process.exitcode is not None

    def close(self) -> None:
        """Let it close its store and end."""
        self.ask("close", "closed")
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0


def in_a_process_of_its_own(work: Callable[..., T], *arguments: Any) -> T:
    """What ``work``, a function of a module, gives in a process in which nothing else runs."""
    process, pipe = _begin(_work, work, arguments)
    assert pipe.poll(PATIENCE), f"process {process.pid} does not answer"
    found: T = pipe.recv()
    process.join(PATIENCE)
    assert process.exitcode == 0
    return found


def _work(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send(work(*arguments))


def _begin(target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """A process that runs ``target(pipe, *arguments)``, and our end of the pipe."""
    _CONTEXT.set_forkserver_preload(["tests.store.holder"])
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True, name="holder")
    process.start()
    theirs.close()
    return process, ours
