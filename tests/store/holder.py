"""A process that holds a store: what the tests start, talk to and kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from flextensor.store import TensorSource, shared_store
from flextensor.store.filling import Reader
from flextensor.store.layout import StoredTensor
from tests.store.small_models import same, small_weights, units_of

# A server process that has imported torch once forks the holders: a start takes milliseconds, and no holder inherits
# another one's lock.
_CONTEXT = multiprocessing.get_context("forkserver")


class SlowSource(TensorSource):
    """Waits before it opens each tensor, so that a test can act in the middle of a filling."""

    def __init__(self, tensors: dict[str, torch.Tensor], delay: float) -> None:
        super().__init__(tensors)
        self._delay = delay

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        time.sleep(self._delay)
        return super().open(tensor)


def hold(pipe: Connection, directory: str, seed: int, delay: float, rows: int, options: dict[str, Any]) -> None:
    """Get the store of ``small_weights(seed)``, say so, then obey: check, edit, scribble, close, exit."""
    try:
        _hold(pipe, directory, seed, delay, rows, options)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _hold(pipe: Connection, directory: str, seed: int, delay: float, rows: int, options: dict[str, Any]) -> None:
    tensors = small_weights(seed, rows=rows)

    def tell(progress: object) -> None:
        pipe.send(("progress", progress))

    store = shared_store(
        units_of(tensors), SlowSource(tensors, delay), namespace="t", directory=directory, progress=tell, **options
    )

    def wrong() -> list[str]:
        return [name for name, tensor in tensors.items() if not same(store.tensor(name), tensor)] + [
            name for name in tensors if not torch.equal(store.source(name), store._parameter_bytes(store._find(name)))
        ]

    pipe.send(("ready", {"created": store.report().created_by_us, "wrong": wrong()}))
    while True:
        try:
            command = pipe.recv()
        except (EOFError, ConnectionResetError):
            return  # the test is gone
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
    """The test's end of one holder."""

    process: BaseProcess
    pipe: Connection
    progress: list[Any] = field(default_factory=list)

    @staticmethod
    def start(directory: str, seed: int = 0, *, delay: float = 0.0, rows: int = 500, **options: Any) -> Holder:
        """A new process on its way to the store of ``small_weights(seed)``."""
        _CONTEXT.set_forkserver_preload(["tests.store.holder"])
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(
            target=hold, args=(theirs, directory, seed, delay, rows, options), daemon=True, name="holder"
        )
        process.start()
        theirs.close()
        return Holder(process, ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, event: str, timeout: float = 30.0) -> Any:
        """What comes with the next ``event``; progress on the way is kept. Fails the test when it does not come."""
        deadline = time.monotonic() + timeout
        while self.pipe.poll(max(0.0, deadline - time.monotonic())):
            kind, value = self.pipe.recv()
            if kind == event:
                return value
            assert kind == "progress", f"{kind} while waiting for {event}"
            self.progress.append(value)
        raise AssertionError(f"process {self.pid} did not say {event!r} within {timeout} s")

    def ask(self, command: str, answer: str) -> Any:
        """Send a command and wait for its answer."""
        self.pipe.send(command)
        return self.wait(answer)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal and wait until it is gone."""
        os.kill(self.pid, number)
        self.process.join(30 if number == signal.SIGKILL else 3)
        if self.process.exitcode is None:  # Python drops a KeyboardInterrupt that arrives in some of its callbacks
            self.process.kill()
            self.process.join(30)
        assert self.process.exitcode is not None

    def close(self) -> None:
        """Let it close its store and end."""
        self.ask("close", "closed")
        self.process.join(30)
        assert self.process.exitcode == 0
