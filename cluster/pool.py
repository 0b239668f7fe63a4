"""The workers as the driver sees them: started, set up, fed, and started again when they die."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError

from cluster.messages import Item, Lease, WorkerState
from cluster.options import LONGEST_ROUND
from cluster.switching import NotSetUp, OutOfReach

logger = logging.getLogger(__name__)

LIVES_WITHOUT_WORK = 4
"""A worker that dies this often without finishing one lease in between is given up."""

AT_ONCE = 5.0
"""Seconds within which a call fails that Ray has no process for yet (2 s, measured): no other death."""

PATIENCE = 60.0
"""Seconds in which Ray may find a GPU for a worker whose node is gone (another node, or that one again)."""

JOIN_PATIENCE = 20.0
"""Seconds in which a coordinator is asked again whose process is gone, or who does not reach the worker."""

ASK_AGAIN = 1.0
ASK_TIMEOUT = 2.0
GONE_TIMEOUT = 20.0


class NoWorkers(RuntimeError):
    """No worker could start, or none is left; the message has the last one's error. ``cause``: that error itself."""

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass
class Slot:
    """One rank. phase: ``starting``, ``held``, ``joining``, ``ready`` or ``given up``. setup: the answer that it waits
    for before it takes leases: its own while it starts, the coordinator's while it joins. in_flight: its leases in the
    order in which it was given them, by the reference of the answer. process: the one that was set
    up last, where that was on this machine. begun, lost_at, joining_since, ask_at: monotonic seconds."""

    rank: int
    handle: Any
    phase: str = "starting"
    setup: Any = None
    in_flight: dict[Any, Lease] = field(default_factory=dict)
    deaths: int = 0
    process: psutil.Process | None = None
    begun: float = 0.0
    lost_at: float = 0.0
    joining_since: float = 0.0
    ask_at: float = 0.0


class WorkerPool:
    """``make(rank)`` starts a worker's actor; ``sample`` are items that workers warm up with. hold: workers that are
    set up wait for ``release`` before they are admitted."""

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        workers: int,
        coordinator: Any,
        sample: tuple[Item, ...] = (),
        hold: bool = False,
    ) -> None:
        self._make = make
        self._hold = hold
        self._sample = sample
        self._given_up: list[str] = []
        self._dying: list[psutil.Process] = []
        self.coordinator = coordinator
        self.slots = [Slot(rank, make(rank)) for rank in range(workers)]
        for slot in self.slots:
            self._begin(slot)

    def _begin(self, slot: Slot) -> None:
        slot.phase, slot.begun = "starting", time.monotonic()
        self.coordinator.enlist.remote(slot.rank, slot.handle)
        slot.setup = slot.handle.setup.remote(self._sample)

    @property
    def ready(self) -> list[Slot]:
        """Slots whose workers take leases now."""
        return [slot for slot in self.slots if slot.phase == "ready"]

    @property
    def held(self) -> list[Slot]:
        """Slots whose workers are set up and wait for ``release``."""
        return [slot for slot in self.slots if slot.phase == "held"]

    @property
    def starting(self) -> bool:
        """True while any worker is being set up."""
        return any(slot.setup is not None for slot in self.slots)

    def release(self) -> None:
        """Admit the workers that were held, and all later ones at once."""
        self._hold = False
        for slot in self.held:
            self._join(slot)

    def wait(self, timeout: float) -> Any | None:
        """The reference of a set-up, a joining or a lease that has ended; None when none has within ``timeout``
        seconds."""
        now = time.monotonic()
        for slot in self.slots:
            if slot.phase == "joining" and now - slot.joining_since > LONGEST_ROUND:
                self._joined(slot, but="the coordinator does not answer")
            elif slot.phase == "joining" and slot.setup is None and now >= slot.ask_at:
                self._ask_to_join(slot)
        references = [slot.setup for slot in self.slots if slot.setup is not None]
        references += [reference for slot in self.slots for reference in slot.in_flight]
        if not references:
            time.sleep(min(timeout, ASK_AGAIN))
            return None
        done, _ = ray.wait(references, num_returns=1, timeout=timeout)
        return done[0] if done else None

    def slot_of(self, reference: Any) -> Slot:
        """The slot that a reference of ``wait`` belongs to."""
        return next(slot for slot in self.slots if reference is slot.setup or reference in slot.in_flight)

    def lend(self, slot: Slot, lease: Lease) -> None:
        """Give a worker a lease."""
        slot.in_flight[slot.handle.run.remote(lease)] = lease

    def settle_next(self, timeout: float) -> bool:
        """Before any lease is out: wait for the end of a set-up or a joining, and ``settle`` it; False when none has
        ended within ``timeout`` seconds."""
        reference = self.wait(timeout)
        if reference is not None:
            self.settle(self.slot_of(reference))
        return reference is not None

    def settle(self, slot: Slot) -> None:
        """The end of a worker's set-up: it is held, or joins the run, or is tried again, or given up. And the end of
        its joining: it is ready.

        Raises NoWorkers when it was the last one.
        """
        reference, slot.setup = slot.setup, None
        if slot.phase == "joining":
            self._settle_joining(slot, reference)
            return
        try:
            slot.process = _process_here(ray.get(reference))
        except RayActorError as error:
            self.lost(slot, error)
        except RayError as error:
            self._give_up(slot, error)
        else:
            if self._hold:
                slot.phase = "held"
            else:
                self._join(slot)

    def _join(self, slot: Slot) -> None:
        slot.phase, slot.joining_since = "joining", time.monotonic()
        self._ask_to_join(slot)

    def _ask_to_join(self, slot: Slot) -> None:
        """The coordinator tells the worker what the run has agreed on, after the round that it is in; the others work
        meanwhile."""
        slot.setup = self.coordinator.admit.remote(slot.rank, slot.handle)

    def _settle_joining(self, slot: Slot, reference: Any) -> None:
        try:
            ray.get(reference)
        except NotSetUp as error:
            self.lost(slot, error)
        except (ActorUnavailableError, OutOfReach) as error:  # the coordinator's process, or the worker's
            if time.monotonic() - slot.joining_since < JOIN_PATIENCE:
                slot.ask_at = time.monotonic() + ASK_AGAIN
            elif isinstance(error, OutOfReach):
                self.lost(slot, error)
            else:
                self._joined(slot, but=first_line(error))
        except RayError as error:
            self._joined(slot, but=first_line(error))
        else:
            self._joined(slot)

    def _joined(self, slot: Slot, *, but: str = "") -> None:
        slot.phase, slot.setup = "ready", None
        if but:
            logger.warning("worker %d works without the coordinator: %s", slot.rank, but)
        self._warn()

    def lost(self, slot: Slot, error: RayActorError | NotSetUp | OutOfReach) -> None:
        """The worker's process is gone: set up Ray's new one, or make one where Ray has given up."""
        now = time.monotonic()
        if slot.phase == "starting" and slot.setup is not None:
            return
        waits = slot.phase == "starting" and now - slot.begun < AT_ONCE and isinstance(error, ActorUnavailableError)
        if not waits:
            slot.deaths += 1
        if not waits or not slot.lost_at:
            slot.lost_at = now
        self.coordinator.lose.remote(slot.rank, first_line(error))
        logger.warning("worker %d is gone (%s)", slot.rank, first_line(error))
        if (waits and now - slot.lost_at >= PATIENCE) or slot.deaths >= LIVES_WITHOUT_WORK:
            self._give_up(slot, error)
            return
        if not isinstance(error, ActorUnavailableError | NotSetUp | OutOfReach) or isinstance(error, ActorDiedError):
            self._dying += _known([slot])
            ray.kill(slot.handle)  # so that its name is free, whatever Ray still thinks of it
            slot.handle = self._make(slot.rank)
        self._begin(slot)

    def worked(self, slot: Slot) -> None:
        """The worker has finished a lease; earlier deaths are forgiven."""
        slot.deaths = 0

    def _give_up(self, slot: Slot, error: Exception) -> None:
        slot.phase, slot.setup = "given up", None
        self._given_up.append(f"worker {slot.rank} is given up: {first_line(error)}")
        self.coordinator.dismiss.remote(slot.rank)
        self.coordinator.event.remote("worker_given_up", {"rank": slot.rank, "error": first_line(error)})
        self._dying += _processes([slot])
        ray.kill(slot.handle)
        if all(other.phase == "given up" for other in self.slots):
            cause = getattr(error, "cause", None) or error
            raise NoWorkers(f"no worker is left; the last one failed with: {first_line(error)}", cause)
        if self.ready:
            self._warn()

    def _warn(self) -> None:
        """Who was given up, once it is known that the others go on: where none does, NoWorkers says it."""
        for message in self._given_up:
            logger.warning(message)
        self._given_up.clear()

    def close(self, *, timeout: float) -> None:
        """Workers end their leases at the next step boundary and release the model; what does not within ``timeout``
        seconds is killed, and so is at once who still loads: nothing of it can be ended in between. It returns when
        the processes on this machine are gone, or after GONE_TIMEOUT seconds."""
        alive = [slot for slot in self.slots if slot.phase != "given up"]
        running = [slot for slot in alive if slot.phase != "starting"]
        processes = _processes(alive)
        stops = [slot.handle.stop.remote() for slot in running]
        closes = [slot.handle.close.remote() for slot in running]
        if closes:
            ray.wait([*stops, *closes], num_returns=len(stops) + len(closes), timeout=timeout)
        for slot in alive:
            ray.kill(slot.handle)
            slot.phase = "given up"
        _wait_until_gone(processes + self._dying)


def _processes(slots: list[Slot]) -> list[psutil.Process]:
    """The workers' processes on this machine: those that were set up, and those that answer at once."""
    found = _known(slots)
    asked = [slot.handle.state.remote() for slot in slots]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ASK_TIMEOUT) if asked else ([], [])
    for reference in answered:
        with contextlib.suppress(RayError):
            if (process := _process_here(ray.get(reference))) is not None:
                found.append(process)
    return found


def _known(slots: list[Slot]) -> list[psutil.Process]:
    """Those that were set up, whether they answer or not."""
    return [slot.process for slot in slots if slot.process is not None]


def _process_here(state: WorkerState) -> psutil.Process | None:
    if state.node == socket.gethostname():
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(state.pid)
    return None


def _wait_until_gone(processes: list[psutil.Process]) -> None:
    """Ray kills without waiting, and a store is in use until the last process that holds it is gone."""
    end = time.monotonic() + GONE_TIMEOUT
    while time.monotonic() < end and any(process.is_running() for process in processes):
        time.sleep(0.02)


def first_line(error: BaseException) -> str:
    """One line that says why a call to a worker failed."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RayActorError):
        return f"its process is gone ({type(cause).__name__})"
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"
