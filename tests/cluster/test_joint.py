"""Which link a plan is made for, and when a run asks for another plan by itself."""

from __future__ import annotations

from cluster.drift import FEWEST_STEPS, reason_to_replan
from cluster.joint import shared_curves
from cluster.messages import DeviceSample, Measurement, WorkerState
from flextensor.planner.plan import Prediction
from flextensor.profile import TransferCurve


def measured(rank: int, device: str, rate: float, node: str = "a") -> Measurement:
    return Measurement(rank, node, device, TransferCurve.from_bandwidth(rate))


def test_workers_on_one_gpu_plan_for_the_slowest_share_and_others_for_their_own() -> None:
    curves = shared_curves(
        [
            measured(0, "GPU-1", 30e9),
            measured(1, "GPU-1", 27e9),
            measured(2, "GPU-2", 55e9),
            measured(3, "GPU-1", 50e9, node="b"),
        ]
    )
    rates = [round(curves[rank].bandwidth / 1e9) for rank in range(4)]
    assert rates == [27, 27, 55, 50]


def test_host_devices_have_a_link_each() -> None:
    curves = shared_curves([measured(0, "host", 4e9), measured(1, "host", 2e9)])
    assert curves[0].bandwidth > curves[1].bandwidth


def state(
    *, step: float, stall: float, predicted_stall: float = 0.0, steps: int = 100, throttle: str = ""
) -> WorkerState:
    prediction = Prediction(0.1, 0.1 - predicted_stall, predicted_stall, 0.05, 0.1, {})
    gpu = DeviceSample(uuid="GPU-1", name="x", throttle=(throttle,)) if throttle else None
    return WorkerState(
        rank=3,
        incarnation=1,
        pid=1,
        node="a",
        device="GPU-1",
        phase="ready",
        steps=steps,
        step_seconds=step,
        stall_seconds=stall,
        predicted=prediction,
        gpu=gpu,
    )


def test_a_run_as_predicted_asks_for_nothing() -> None:
    assert reason_to_replan([state(step=0.1, stall=0.01)], drift=0.25) == ""


def test_stalls_beyond_the_prediction_are_a_reason_that_names_the_worker() -> None:
    reason = reason_to_replan([state(step=0.1, stall=0.0), state(step=0.16, stall=0.06)], drift=0.25)
    assert "worker 3" in reason and "60.0 ms" in reason


def test_slower_compute_alone_is_none_but_throttling_is() -> None:
    assert reason_to_replan([state(step=0.2, stall=0.0)], drift=0.25) == ""
    assert "power cap" in reason_to_replan([state(step=0.2, stall=0.0, throttle="power cap")], drift=0.25)


def test_a_link_that_became_faster_is_a_reason() -> None:
    assert "faster" in reason_to_replan([state(step=0.1, stall=0.0, predicted_stall=0.05)], drift=0.25)


def test_too_few_steps_say_nothing() -> None:
    assert reason_to_replan([state(step=0.16, stall=0.06, steps=FEWEST_STEPS - 1)], drift=0.25) == ""
