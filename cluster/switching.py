"""A worker's part in a replan: what it proposes, what it is prepared for, which plans it takes.

A worker of a lockstep group stands at the group's step from ``prepare`` to ``commit``. Any other has agreed when it has
come to a step boundary, in time, with plans that fit; it runs on under the old plans, and takes the new ones at the
first boundary after ``commit``: it stands no longer than its own change takes.

Called by any of the worker's control threads, beside the model's thread; the step gate and the managers' thread-safe
calls are all that both share. The rounds' numbers decide between calls that arrive late or out of order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from cluster.engines import Engines
from cluster.gate import StepGate
from cluster.messages import Agreement, Assignment, Budget, Joined, Plans, Prepared, Proposal
from flextensor.profile import TransferCurve

STANDS_LONGER = 60.0
"""Seconds that a worker goes on standing after the time that all have to come to their boundaries."""


class Refused(RuntimeError):
    """A worker will not take part in a round; the message says why. The old plan stays in force."""


class NotSetUp(Refused):
    """The worker's process is new: the one that was set up has died, and nobody has set up this one."""


class OutOfReach(Refused):
    """The worker does not answer just now: it is being started again, or its node is not reached."""


@dataclass(frozen=True)
class _Staged:
    """What a worker is prepared for. stands: at a boundary, until it is told. own_changes: of its plans, so far."""

    round_number: int
    epoch: int
    plans: Plans
    budget: Budget
    stands: bool
    own_changes: int


class Switching:
    """See the module. ``rank``: the worker's, for its messages."""

    def __init__(self, rank: int, gate: StepGate, engines: Engines) -> None:
        self._rank = rank
        self._gate = gate
        self._engines = engines
        self._lock = threading.Lock()
        self._round = self._decided = 0
        self._prepared: _Staged | None = None
        self._gave_way = False
        """Memory did not suffice between this worker's agreement and the decision."""

    @property
    def agreement(self) -> Agreement:
        """What the worker has agreed on."""
        prepared = self._prepared
        return Agreement(
            epoch=self._engines.agreed_epoch,
            decided=self._decided,
            prepared=0 if prepared is None else prepared.round_number,
            latest=self._round,
        )

    def admit(self, round_number: int) -> None:
        """Raise Refused for a round that is over."""
        if round_number < self._round:
            raise Refused(f"round {round_number} is over; worker {self._rank} is at round {self._round}")

    def propose(
        self, round_number: int, budget: Budget, plans: Plans | None, transfer: TransferCurve | None, wait: float
    ) -> Proposal:
        """See ``Worker.propose``."""
        self.admit(round_number)
        engines = self._engines
        engines.find()
        if plans is None:
            plans = engines.solve(budget, transfer, wait)
        engines.check(plans)
        return Proposal(
            rank=self._rank,
            plans=plans,
            other_bytes=engines.other_bytes,
            before_step_seconds=engines.main.live().step_seconds,
            moved_bytes=engines.moved_bytes(plans),
        )

    def hold(self, round_number: int) -> int:
        """See ``Worker.hold``."""
        with self._lock:
            self.admit(round_number)
            self._round = round_number
            return self._gate.hold(round_number)

    def prepare(
        self, round_number: int, epoch: int, plans: Plans, budget: Budget, timeout: float, stands_at: int | None
    ) -> Prepared:
        """See ``Worker.prepare``."""
        with self._lock:
            self.admit(round_number)
            self._round, self._gave_way = round_number, False
        own_changes = self._engines.own_changes
        self._engines.check(plans)
        if stands_at is None:
            self._gate.pass_boundary(round_number, timeout)
        else:
            self._gate.close(round_number, timeout, stands_at=stands_at, then=STANDS_LONGER)
        with self._lock:
            if self._round != round_number:
                self._gate.open(round_number)
                raise Refused(f"round {round_number} was ended while worker {self._rank} came to its boundary")
            if own_changes != self._engines.own_changes:
                self._gate.open(round_number)
                raise Refused(f"worker {self._rank} has fewer weights since it planned: memory did not suffice")
            self._prepared = _Staged(round_number, epoch, plans, budget, stands_at is not None, own_changes)
        return Prepared(self._rank, self._gate.index)

    def commit(self, round_number: int) -> float:
        """See ``Worker.commit``."""
        with self._lock:
            staged = self._prepared
            if staged is None or staged.round_number != round_number:
                raise Refused(f"worker {self._rank} is not prepared for round {round_number}")
            if staged.stands and not self._gate.is_closed_by(round_number):
                raise Refused(f"worker {self._rank} no longer stands for round {round_number}")
            if staged.own_changes != self._engines.own_changes:
                self._prepared, self._gave_way = None, True
                raise Refused(f"worker {self._rank} has fewer weights since it agreed: memory did not suffice")
            self._engines.stage(staged.plans, staged.budget, staged.epoch)
            self._prepared, self._decided = None, round_number
        stood = self._gate.parked_seconds() if staged.stands else 0.0
        self._gate.open(round_number)
        return stood

    def abort(self, round_number: int) -> None:
        """See ``Worker.abort``."""
        with self._lock:
            self._round = max(self._round, round_number + 1)
            if self._prepared is not None and self._prepared.round_number <= round_number:
                self._prepared = None
        self._gate.open(round_number)

    def join(self, assignment: Assignment) -> Joined:
        """See ``Worker.join``."""
        engines = self._engines
        engines.find()
        (self._gate.pause if assignment.paused else self._gate.resume)()
        if assignment.step_index is not None:
            self._gate.align(assignment.step_index)
        plans, budget, refused = assignment.plans, assignment.budget, ""
        with self._lock:
            gave_way, self._gave_way = self._gave_way, False
        try:
            if gave_way:
                engines.take_up_own()
                plans, refused = None, "memory did not suffice for what was agreed on"
            elif plans is None and assignment.solve:
                plans = engines.solve(budget, None)
            if plans is not None:
                engines.check(plans)
        except (RuntimeError, ValueError) as error:
            plans, refused = None, str(error)
        if plans is None:
            plans, budget = engines.plans, engines.budget
        with self._lock:
            if assignment.epoch < engines.agreed_epoch:  # it took long to plan, and was overtaken
                return Joined(engines.plans, engines.budget, f"epoch {assignment.epoch} is over")
            if assignment.epoch != engines.agreed_epoch:
                self._decided = 0
            engines.stage(plans, budget, assignment.epoch)
            self._prepared, number = None, self._round
        # No round runs while a worker joins: a gate that is closed waits for a commit that never got here.
        self._gate.open(number)
        return Joined(plans, budget, refused)
