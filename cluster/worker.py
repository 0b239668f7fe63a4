"""The actor that owns one GPU: loads the task, runs leases, and moves to another plan when all workers do.

A plain class; ``cluster.session`` makes a Ray actor of it. Two sorts of calls: those of the default group (``setup``,
``run``, ``verify``, ``close``) run one at a time in one thread, the model's; those of the group ``control`` run beside
them and touch the model through the manager's thread-safe calls and the step gate only.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import ray

from cluster.batch_size import BatchTrial, TrialRequest
from cluster.checkpoints import ItemCheckpoints
from cluster.gate import GateTimeout, StepGate, StepStopped
from cluster.messages import (
    Assignment,
    BatchPoint,
    Budget,
    Item,
    Joined,
    Lease,
    LeaseResult,
    Measurement,
    Prepared,
    Proposal,
    WorkerPhase,
    WorkerStart,
    WorkerState,
)
from cluster.packing import resolve_task
from cluster.task import Task, TaskContext, TaskError
from cluster.telemetry import DeviceTelemetry, HostTelemetry, cuda_uuid
from flextensor.planner.plan import Plan
from flextensor.profile import TransferCurve

logger = logging.getLogger(__name__)

control = ray.method(concurrency_group="control")


class Refused(RuntimeError):
    """A worker will not take part in a round; the message says why. The old plan stays in force."""


class Worker:
    """See the module. ``start`` is kept by Ray, so a restarted worker is made from the same."""

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        self._incarnation = int(time.time() * 1000)
        self._gate = StepGate()
        self._phase: WorkerPhase = "starting"
        self._note = ""
        self._budget: Budget = start.budget
        self._lease: int | None = None
        self._task: Task | None = None
        self._manager: Any = None
        self._plan: Plan | None = None
        self._round = 0
        self._prepared: tuple[int, int, Plan, Budget] | None = None
        self._round_lock = threading.Lock()
        self._host = HostTelemetry()
        self._gpu = DeviceTelemetry(None)
        self._device = "host"
        self._trial: BatchTrial | None = None

    # the model's thread

    def setup(self, sample: tuple[Item, ...] = ()) -> WorkerState:
        """Load the task and run it until it has its first plan; ``sample`` are items to warm up with.

        Raises whatever the task raises.
        """
        import torch

        import flextensor

        start = self._start
        self._phase = "loading"
        if start.threads > 0:
            torch.set_num_threads(start.threads)
        device = "cuda:0" if start.device == "cuda" else "host"
        if start.device == "cuda":
            uuid = cuda_uuid(0)
            self._gpu = DeviceTelemetry(uuid)
            self._device = self._gpu.uuid or f"cuda:0 of pid {os.getpid()}"
        config = start.config.updated(
            gpu_device=device, shm_enabled=True, shm_namespace=start.store_namespace, **_budget_settings(start.budget)
        )
        task = resolve_task(start.task)(dict(start.task_options))
        task.load(
            TaskContext(
                config=config,
                manager_name=start.manager_name,
                store_namespace=start.store_namespace,
                progress=self._say,
                checkpoints=ItemCheckpoints(
                    Path(start.checkpoint_dir) if start.checkpoint_dir else None, start.checkpoint_seconds
                ),
            )
        )
        self._manager = flextensor.get_offload_manager(start.manager_name)
        self._manager.on_step_boundary(self._gate.boundary)
        self._say("warming up")
        task.warm_up(sample)
        if self._manager.phase != "inference":
            raise TaskError(
                f"task {start.task!r}: after warm_up the manager is still in phase {self._manager.phase!r}; "
                f"run {self._manager.iters_before_inference} steps there"
            )
        self._plan = self._manager.plan
        self._task = task
        self._phase = "ready"
        self._say("")
        return self.state()

    def try_batch_sizes(self, request: TrialRequest) -> tuple[BatchPoint, ...]:
        """What each size would bring here; see ``cluster.batch_size``. The plan in force stays."""
        if self._task is None:
            raise Refused(f"worker {self._start.rank} is not set up")
        self._trial = BatchTrial(self._task, self._manager)
        self._gate.enter()
        try:
            return self._trial.run(request, self._say)
        finally:
            self._gate.leave()
            self._say("")

    def settle_batch_size(self, size: int) -> None:
        """Take the plan that was solved for this size from the next step on."""
        if self._trial is not None:
            self._plan = self._trial.settle(size)
            self._trial = None

    def run(self, lease: Lease) -> LeaseResult:
        """Run one lease. Raises what the task raises; the worker stays usable."""
        if self._task is None:
            raise Refused(f"worker {self._start.rank} has been started again and is not set up yet")
        began = time.monotonic()
        self._lease = lease.number
        self._gate.enter()
        try:
            results = tuple(self._task.run(lease.items))
        finally:
            self._gate.leave()
            self._lease = None
        want, got = {str(item["id"]) for item in lease.items}, {str(result["id"]) for result in results}
        if want != got:
            raise TaskError(f"the task's results have the ids {sorted(got)}, expected {sorted(want)}")
        return LeaseResult(lease.number, self._start.rank, results, time.monotonic() - began, self._manager.epoch)

    def verify(self, items: tuple[Item, ...], results: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        """Compare results with those of an un-offloaded copy (``Task.verify``)."""
        if self._task is None:
            raise Refused(f"worker {self._start.rank} is not set up")
        return self._task.verify(items, results)

    def report(self) -> dict[str, Any]:
        """The task's description, the manager's report, and ``weights_pss_bytes``: memory of this node for the weights,
        over all processes that hold the store. JSON-able."""
        from flextensor.store.memory import weights_pss  # brings torch, which asking a run does not need

        if self._task is None:
            return {}
        store = self._manager.hosting.store
        holders = {os.getpid(), *(store.report().holders or ())}
        return {
            "task": self._task.describe(),
            "engine": self._manager.report(),
            "node": socket.gethostname(),
            "store_bytes": store.report().weight_bytes,
            "weights_pss_bytes": weights_pss(holders, store),
        }

    def close(self) -> None:
        """Release the model and its share of the host store."""
        import flextensor

        self._phase = "closed"
        task, self._task = self._task, None
        if task is not None and hasattr(task, "close"):
            task.close()
        if self._manager is not None:
            self._manager = None
            flextensor.release(name=self._start.manager_name)
        self._gpu.close()

    def _say(self, note: str) -> None:
        self._note = note

    # control

    @control
    def state(self) -> WorkerState:
        """The worker now. Never waits for the model's thread."""
        state: dict[str, Any] = {
            "rank": self._start.rank,
            "incarnation": self._incarnation,
            "pid": os.getpid(),
            "node": socket.gethostname(),
            "device": self._device,
            "phase": self._phase,
            "note": self._note,
            "paused": self._gate.paused,
            "parked": self._gate.parked,
            "busy": self._gate.busy,
            "busy_seconds": self._gate.busy_seconds(),
            "lease": self._lease,
            "steps": self._gate.steps,
            "budget": self._budget,
            "host": self._host.sample(),
            "gpu": self._gpu.sample(),
        }
        if (manager := self._manager) is not None:
            state |= _engine_state(manager)
            state["weights_pss_bytes"] = self._host.weights_pss(manager.hosting.store)
        return WorkerState(**state)

    @control
    def plan(self) -> tuple[Plan, Budget]:
        """The plan in force, or staged to be at the next step, and its budget."""
        self._ready()
        assert self._plan is not None
        return self._plan, self._budget

    @control
    def measure(self, round_number: int) -> Measurement:
        """Measure the link now, beside the running steps and, called on all at once, beside the other workers."""
        manager = self._ready()
        self._admit(round_number)
        transfer: TransferCurve = manager.measure_transfer()
        return Measurement(self._start.rank, socket.gethostname(), self._device, transfer)

    @control
    def propose(self, round_number: int, budget: Budget, plan: Plan | None, transfer: TransferCurve | None) -> Proposal:
        """Solve for ``budget`` on a link with the curve ``transfer`` (or take ``plan`` as it is); check that it fits.

        Raises BudgetError and what the manager's ``check`` raises; nothing has changed then.
        """
        manager = self._ready()
        self._admit(round_number)
        if plan is None:
            plan = self._solved(budget, transfer)
        manager.check(plan)
        return Proposal(
            rank=self._start.rank,
            plan=plan,
            other_bytes=manager.profile.other_bytes,
            before_step_seconds=manager.live().step_seconds,
        )

    @control
    def prepare(self, round_number: int, epoch: int, plan: Plan, budget: Budget, timeout: float) -> Prepared:
        """Come to a step boundary and stand there until ``commit`` or ``abort``.

        Raises Refused for a round that is over already, GateTimeout when no step ends within ``timeout`` seconds.
        """
        manager = self._ready()
        with self._round_lock:
            self._admit(round_number)
            self._round = round_number
        manager.check(plan)
        waited = self._gate.close(round_number, timeout)
        with self._round_lock:
            if self._round != round_number:
                self._gate.open(round_number)
                raise Refused(f"round {round_number} was ended while worker {self._start.rank} came to its boundary")
            self._prepared = (round_number, epoch, plan, budget)
        return Prepared(self._start.rank, self._gate.steps, waited)

    @control
    def commit(self, round_number: int) -> float:
        """Take the prepared plan at this boundary and go on; the seconds that the worker stood so far.

        Raises Refused when the worker no longer stands for this round.
        """
        with self._round_lock:
            prepared = self._prepared
            if prepared is None or prepared[0] != round_number or not self._gate.is_closed_by(round_number):
                raise Refused(f"worker {self._start.rank} does not stand prepared for round {round_number}")
            _, epoch, plan, budget = prepared
            self._ready().stage(plan, epoch=epoch)
            self._plan, self._budget = plan, budget
            self._prepared = None
        stood = self._gate.parked_seconds()
        self._gate.open(round_number)
        return stood

    @control
    def abort(self, round_number: int) -> None:
        """Go on with the old plan; this round's number and earlier ones are refused from now on."""
        with self._round_lock:
            self._round = max(self._round, round_number + 1)
            self._prepared = None
        self._gate.open(round_number)

    @control
    def join(self, assignment: Assignment) -> Joined:
        """Take what the run has agreed on, before the first lease; where it does not fit, keep the own plan."""
        manager = self._ready()
        if assignment.paused:
            self._gate.pause()
        plan, refused = assignment.plan, ""
        try:
            if plan is None and assignment.solve:
                plan = self._solved(assignment.budget, None)
            if plan is not None:
                manager.check(plan)
                self._budget = assignment.budget
        except (RuntimeError, ValueError) as error:
            plan, refused = None, str(error)
        self._plan = plan or self._plan
        assert self._plan is not None
        with self._round_lock:
            manager.stage(self._plan, epoch=assignment.epoch)
            self._prepared, number = None, self._round
        # No round runs while a worker joins: a gate that is closed waits for a commit that never got here.
        self._gate.open(number)
        return Joined(self._plan, self._budget, refused)

    @control
    def pause(self, on: bool) -> None:
        """Stand at the next step boundary until told to go on (``on=False``)."""
        if on:
            self._gate.pause()
        else:
            self._gate.resume()

    @control
    def stop(self) -> None:
        """End the running lease at its next step boundary (it raises StepStopped)."""
        self._gate.stop()

    def _ready(self) -> Any:
        if self._phase != "ready" or self._manager is None:
            raise Refused(f"worker {self._start.rank} is {self._phase}, not ready")
        return self._manager

    def _admit(self, round_number: int) -> None:
        if round_number < self._round:
            raise Refused(f"round {round_number} is over; worker {self._start.rank} is at round {self._round}")

    def _solved(self, budget: Budget, transfer: TransferCurve | None) -> Plan:
        profile = self._manager.current_profile(transfer)
        plan: Plan = self._manager.solve(budget, profile)
        return plan


def _budget_settings(budget: Budget) -> dict[str, Any]:
    if budget is None:
        return {}
    return {"budget_bytes": budget} if isinstance(budget, int) else {"budget_fraction": budget}


def _engine_state(manager: Any) -> dict[str, Any]:
    plan, live = manager.plan, manager.live()
    state: dict[str, Any] = {
        "epoch": manager.epoch,
        "refusal": manager.refusal,
        "copied_bytes_total": live.copied_bytes_total,
        "step_seconds": live.step_seconds,
        "stall_seconds": live.stall_seconds,
        "compute_seconds": live.compute_seconds,
        "transfer_seconds": live.transfer_seconds,
        "link_bytes_per_second": live.link_bytes_per_second,
    }
    if manager.profile is not None and plan is not None:
        other = manager.profile.other_bytes
        state |= {
            "total_bytes": manager.profile.total_bytes + other,
            "weight_bytes": plan.weight_bytes + other,
            "resident_bytes": plan.resident_bytes + other,
            "streamed_bytes": plan.streamed_bytes,
            "predicted": plan.prediction,
        }
    return state


__all__ = ["GateTimeout", "Refused", "StepStopped", "Worker"]
