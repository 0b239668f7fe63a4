"""The actor that owns one GPU: loads the task, runs leases, and moves to another plan when all workers do.

A plain class; ``cluster.session`` makes a Ray actor of it. Two sorts of calls: those of the default group (``setup``,
``run``, ``verify``, ``close``) run one at a time in one thread, the model's; those of the group ``control`` run beside
them and touch the model through the manager's thread-safe calls and the step gate only.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import ray

from cluster.batch_size import BatchTrial, TrialRequest
from cluster.checkpoints import ItemCheckpoints
from cluster.engines import Engines
from cluster.gate import GateTimeout, StepGate, StepStopped
from cluster.messages import (
    Assignment,
    BatchPoint,
    Budget,
    DeviceSample,
    EngineState,
    Item,
    Joined,
    Lease,
    LeaseResult,
    Measurement,
    Plans,
    Prepared,
    Proposal,
    WorkerPhase,
    WorkerStart,
    WorkerState,
)
from cluster.packing import resolve_task
from cluster.states import budget_settings
from cluster.switching import NotSetUp, Refused, Switching
from cluster.task import Task, TaskContext, TaskError
from cluster.telemetry import DeviceTelemetry, HostTelemetry, cuda_uuid
from flextensor.profile import TransferCurve

logger = logging.getLogger(__name__)

control = ray.method(concurrency_group="control")


class Worker:
    """See the module. ``start`` is kept by Ray, so a restarted worker is made from the same."""

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        self._incarnation = int(time.time() * 1000)
        self._gate = StepGate()
        self._phase: WorkerPhase = "starting"
        self._joined = False
        self._note = ""
        self._lease: int | None = None
        self._task: Task | None = None
        self._manager: Any = None
        self._engines = Engines(start.manager_name, start.budget, self._gate.boundary)
        self._switching = Switching(start.rank, self._gate, self._engines)
        self._host = HostTelemetry()
        self._gpu = DeviceTelemetry(None)
        self._device = "host"
        self._trial: BatchTrial | None = None

    # the model's thread

    def setup(self, sample: tuple[Item, ...] = ()) -> WorkerState:
        """Load the task and run it until it has its first plan; ``sample`` are items to warm up with. Once is enough:
        who was only out of reach for a while, and is asked again, goes on.

        Raises whatever the task raises.
        """
        if self._task is not None:
            return self.state()
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
            gpu_device=device, shm_enabled=True, shm_namespace=start.store_namespace, **budget_settings(start.budget)
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
        self._engines.find()
        self._say("warming up")
        task.warm_up(sample)
        if self._manager.phase != "inference":
            raise TaskError(
                f"task {start.task!r}: after warm_up the manager is still in phase {self._manager.phase!r}; "
                f"run {self._manager.iters_before_inference} steps there"
            )
        self._engines.find()
        self._task = task
        self._phase = "ready"
        self._say("")
        return self.state()

    def try_batch_sizes(self, request: TrialRequest) -> tuple[BatchPoint, ...]:
        """What each size would bring here; see ``cluster.batch_size``. The plan in force stays."""
        if self._task is None:
            raise NotSetUp(f"worker {self._start.rank} is not set up")
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
            self._engines.took(self._trial.settle(size))
            self._trial = None

    def run(self, lease: Lease) -> LeaseResult:
        """Run one lease.

        Raises NotSetUp, and what the task raises; the worker stays usable.
        """
        if self._task is None:
            raise NotSetUp(f"worker {self._start.rank} has been started again and is not set up yet")
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
            raise NotSetUp(f"worker {self._start.rank} is not set up")
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
        self._engines.close()
        if self._manager is not None:
            self._manager = None
            flextensor.release(name=self._start.manager_name, keep_weights=False)
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
            "longest_busy_seconds": self._gate.longest_busy_seconds,
            "lease": self._lease,
            "steps": self._gate.steps,
            "step_index": self._gate.index,
            "agreed": self._switching.agreement,
            "budget": self._engines.budget,
            "host": self._host.sample(),
            "gpu": self._gpu.sample(),
        }
        if (manager := self._manager) is not None:
            state |= _engine_state(self._engines.states())
            state |= {
                "device_free_bytes": manager.device.free_bytes(),
                "device_total_bytes": manager.device.total_bytes(),
                "link_nominal_bytes_per_second": _nominal(manager.device, state["gpu"]),
            }
            state["weights_pss_bytes"] = self._host.weights_pss(manager.hosting.store)
        return WorkerState(**state)

    @control
    def plans(self) -> tuple[Plans, Budget]:
        """The plans in force, or staged to be at the next step, and their budget."""
        self._ready()
        return self._engines.plans, self._engines.budget

    @control
    def measure(self, round_number: int) -> Measurement:
        """Measure the link now, beside the running steps and, called on all at once, beside the other workers."""
        manager = self._ready()
        self._switching.admit(round_number)
        return Measurement(
            rank=self._start.rank,
            node=socket.gethostname(),
            device=self._device,
            transfer=self._engines.measure(),
            alone=manager.profile.transfer,
        )

    @control
    def propose(
        self,
        round_number: int,
        budget: Budget,
        plans: Plans | None,
        transfer: TransferCurve | None,
        wait: float = 0.0,
    ) -> Proposal:
        """Solve plans for ``budget``, and for ``transfer`` in place of the profile's curve (or take ``plans`` as they
        are); check that they fit. wait: seconds a step that this worker waits for its lockstep group.

        Raises BudgetError and what a manager's ``check`` raises; nothing has changed then.
        """
        self._ready()
        return self._switching.propose(round_number, budget, plans, transfer, wait)

    @control
    def hold(self, round_number: int) -> int:
        """Begin no further step until ``prepare``, ``commit`` or ``abort``; the number of the next one.

        Waits for nothing.
        Raises Refused for a round that is over already.
        """
        self._ready()
        return self._switching.hold(round_number)

    @control
    def prepare(
        self,
        round_number: int,
        epoch: int,
        plans: Plans,
        budget: Budget,
        timeout: float,
        stands_at: int | None = None,
    ) -> Prepared:
        """Come to a step boundary, with plans that fit, and so agree to them; steps go on under the old ones until
        ``commit``. stands_at: come to the boundary before this step, and stand there until ``commit`` or ``abort``.

        Raises Refused for a round that is over already, GateTimeout when no step ends within ``timeout`` seconds,
        BudgetError where the plans do not fit.
        """
        self._ready()
        return self._switching.prepare(round_number, epoch, plans, budget, timeout, stands_at)

    @control
    def commit(self, round_number: int) -> float:
        """Take the prepared plans at the next boundary, which is this one where the worker stands; the seconds that it
        stood so far.

        Raises Refused when the worker is not prepared for this round, no longer stands for it, or had to give way to
        activations since.
        """
        self._ready()
        return self._switching.commit(round_number)

    @control
    def abort(self, round_number: int) -> None:
        """Go on with the old plans; this round's number and earlier ones are refused from now on."""
        self._switching.abort(round_number)

    @control
    def join(self, assignment: Assignment) -> Joined:
        """Take what the run has agreed on, before the first lease; where it does not fit, keep the own plans."""
        self._ready()
        joined = self._switching.join(assignment)
        self._joined = True
        return joined

    @control
    def pause(self, on: bool) -> None:
        """Stand at the next step boundary until told to go on (``on=False``). A process that has not joined is told
        when it does: meant was the one before it, and nobody would tell it to go on."""
        if not on:
            self._gate.resume()
        elif self._joined:
            self._gate.pause()

    @control
    def stop(self) -> None:
        """End the running lease at its next step boundary (it raises StepStopped)."""
        self._gate.stop()

    def _ready(self) -> Any:
        if self._phase != "ready" or self._manager is None:
            kind = Refused if self._phase == "closed" else NotSetUp
            raise kind(f"worker {self._start.rank} is {self._phase}, not ready")
        return self._manager


def _engine_state(engines: tuple[EngineState, ...]) -> dict[str, Any]:
    """The worker's own manager's timings, and what all managers have together."""
    main = engines[0]
    refused = [one for one in engines if one.refusal]
    return {
        "engines": engines,
        "epoch": max(one.epoch for one in engines),
        "refusal": "; ".join(f"{one.name}: {one.refusal}" if one is not main else one.refusal for one in refused),
        "refused_epoch": max((one.refused_epoch for one in refused if one.refused_epoch is not None), default=None),
        "own_changes": sum(one.own_changes for one in engines),
        "own_reason": "; ".join(one.own_reason for one in engines if one.own_reason),
        "step_seconds": main.step_seconds,
        "stall_seconds": main.stall_seconds,
        "compute_seconds": main.compute_seconds,
        "transfer_seconds": main.transfer_seconds,
        "link_bytes_per_second": main.link_bytes_per_second,
        "streamed_bytes": main.streamed_bytes,
        "predicted": main.predicted,
        "copied_bytes_total": sum(one.copied_bytes_total for one in engines),
        "total_bytes": sum(one.total_bytes for one in engines),
        "weight_bytes": sum(one.weight_bytes for one in engines),
        "resident_bytes": sum(one.resident_bytes for one in engines),
    }


def _nominal(device: Any, gpu: DeviceSample | None) -> float:
    if gpu is not None:
        return gpu.link_nominal_bytes_per_second or 0.0
    link = getattr(device, "link", None)  # the host device's
    return float(link.bytes_per_second) if link is not None else 0.0


__all__ = ["GateTimeout", "NotSetUp", "Refused", "StepStopped", "Worker"]
