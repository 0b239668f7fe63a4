"""When a run asks for another plan by itself, and with which reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.drift import FEWEST_STEPS, TriggerWatch
from cluster.messages import CoordinatorOptions, DeviceSample, EngineState, HostSample, WorkerState
from cluster.states import Pace
from flextensor.planner.plan import Prediction

OPTIONS = CoordinatorOptions(namespace="unit")


def state(
    *,
    rank: int = 3,
    step: float = 0.1,
    stall: float = 0.0,
    transfer: float = 0.05,
    predicted_stall: float = 0.0,
    steps: int = 100,
    throttle: str = "",
    pcie: tuple[int, int] = (5, 16),
    pace: Pace | None = None,
    **more: Any,
) -> WorkerState:
    prediction = Prediction(0.1, 0.1 - predicted_stall, predicted_stall, 0.05, 0.1, {})
    engine = EngineState(
        name=f"worker-{rank}",
        phase="inference",
        steps=steps,
        step_seconds=step,
        stall_seconds=stall,
        transfer_seconds=transfer,
        weight_bytes=6 << 30,
        streamed_bytes=1 << 30,
        predicted=prediction,
        pace=pace,
    )
    sample = DeviceSample("GPU-1", "x", *pcie, throttle=(throttle,) if throttle else ())
    settings = {"incarnation": 1, "weight_bytes": 6 << 30, "busy": True, "engines": (engine,), "gpu": sample} | more
    return WorkerState(rank=rank, pid=1, node="a", device="GPU-1", phase="ready", **settings)


def look(now: WorkerState, before: WorkerState | None = None, **options: Any) -> tuple[str, str]:
    """(kind, reason) of a worker whose plan came in force at ``before``."""
    watch = TriggerWatch(replace(OPTIONS, **options))
    watch.planned([before or state(steps=0)])
    found = watch.look([now], complete=True)
    return (found.kind, found.reason) if found is not None else ("", "")


def test_a_run_as_predicted_asks_for_nothing() -> None:
    assert look(state(stall=0.01)) == ("", "")


def test_stalls_beyond_the_prediction_are_a_reason_that_names_the_worker() -> None:
    kind, reason = look(state(step=0.16, stall=0.06))
    assert kind == "drift" and "worker 3" in reason and "60.0 ms" in reason


@pytest.mark.parametrize(
    ("pace", "words"), [(Pace(0.1, 0.2, 0.21), "200.0 ms, more"), (Pace(0.1, 0.05, 0.06), "60.0 ms, less")]
)
def test_steps_that_leave_their_prediction_through_compute_alone_are_a_reason(pace: Pace, words: str) -> None:
    kind, reason = look(state(step=0.2, pace=pace))
    assert kind == "drift" and f"worker 3's steps take {words} than the predicted 100.0 ms" in reason
    assert look(state(step=0.2, pace=pace), drift=2.0) == ("", "")


def test_a_noisy_host_is_no_reason() -> None:
    assert look(state(step=0.4, pace=Pace(0.1, 0.11, 0.9))) == ("", ""), "most steps are slow, but not all"
    assert look(state(step=0.4)) == ("", ""), "too few of them were timed"


def test_a_step_of_another_mix_is_compared_with_the_prediction_for_that_mix() -> None:
    assert look(state(step=0.5, pace=Pace(0.5, 0.48, 0.55))) == ("", ""), "the plan's own mix takes 0.1 s"


def test_what_stalls_less_or_waits_for_its_group_between_steps_is_not_called_quicker() -> None:
    quicker = state(pace=Pace(0.1, 0.07, 0.07), predicted_stall=0.02)
    assert look(quicker) == ("", "")
    of_a_group = state(pace=Pace(0.1, 0.05, 0.06))
    assert look(of_a_group)[0] == "drift"
    assert look(of_a_group, lockstep=((2, 3),)) == ("", "")
    assert look(state(pace=Pace(0.1, 0.2, 0.2)), lockstep=((2, 3),))[0] == "drift"


def test_throttling_is_a_reason() -> None:
    kind, reason = look(state(step=0.2, throttle="power cap"))
    assert kind == "throttle" and "power cap" in reason
    assert look(state(step=0.11, throttle="power cap")) == ("", ""), "it throttles, and steps are as predicted"


def test_a_step_that_waits_less_than_predicted_is_a_reason() -> None:
    assert look(state(predicted_stall=0.05))[0] == "drift"


@pytest.mark.parametrize(("seconds", "rate"), [(0.1, "10.7 GB/s"), (0.02, "53.7 GB/s")])
def test_a_link_that_became_slower_or_faster_is_a_reason_without_any_stall(seconds: float, rate: str) -> None:
    kind, reason = look(state(transfer=seconds))
    assert kind == "link" and rate in reason and "made for 21.5" in reason


def test_a_slot_that_lost_its_lanes_is_a_reason_unless_the_gpu_idles() -> None:
    kind, reason = look(state(pcie=(5, 8)), state(steps=0))
    assert kind == "link" and "PCIe 5 x8" in reason and "PCIe 5 x16" in reason
    assert look(state(pcie=(1, 16), busy=False), state(steps=0)) == ("", "")
    assert look(state(), state(steps=0, pcie=(1, 16), busy=False)) == ("", ""), "it idled when the plan came in force"


def test_a_device_with_little_memory_left_asks_for_fewer_weights_on_it() -> None:
    watch = TriggerWatch(OPTIONS)
    watch.planned([state(steps=0)])
    now = state(device_free_bytes=1 << 28, device_total_bytes=80 << 30)
    found = watch.look([now], complete=True)
    assert found is not None and found.kind == "memory" and "worker 3's device" in found.reason
    keep = int(0.02 * (80 << 30))
    assert found.budget is not None and (6 << 30) - found.budget + (1 << 28) == 2 * keep
    (engine,) = now.engines
    twins = replace(now, weight_bytes=12 << 30, engines=(engine, replace(engine, name="worker-3-2")))
    shared = watch.look([twins], complete=True)
    assert shared is not None and shared.budget is not None
    assert 2 * ((6 << 30) - shared.budget) + (1 << 28) == pytest.approx(2 * keep, abs=2), "a budget is for each manager"


def test_a_node_with_little_memory_left_is_a_reason() -> None:
    kind, reason = look(state(host=HostSample(0, 0, 1 << 30, 100 << 30)))
    assert kind == "memory" and "node a" in reason


def test_who_joins_and_who_leaves_is_a_reason_once_all_are_there() -> None:
    watch = TriggerWatch(OPTIONS)
    watch.planned([state(rank=0), state(rank=1)])
    again = [state(rank=0), state(rank=1, incarnation=2)]
    assert watch.look(again, complete=False) is None, "a round now would be refused"
    joined = watch.look(again, complete=True)
    assert joined is not None and joined.reason == "worker 1 joined"
    watch.planned(again)
    left = watch.look([state(rank=0)], complete=True)
    assert left is not None and left.reason == "worker 1 left"
    alone = TriggerWatch(OPTIONS)
    assert alone.look([state()], complete=True) is None, "the first plan of a worker alone is a joint one"
    assert alone.look(again, complete=True) is not None


@pytest.mark.parametrize(
    ("kind", "now"),
    [
        ("drift", state(step=0.16, stall=0.06)),
        ("drift", state(step=0.2, pace=Pace(0.1, 0.2, 0.2))),
        ("throttle", state(step=0.2, throttle="hardware thermal")),
        ("link", state(transfer=0.1)),
        ("memory", state(device_free_bytes=0, device_total_bytes=1 << 30)),
        ("members", state(incarnation=7)),
    ],
)
def test_each_trigger_can_be_left_out(kind: str, now: WorkerState) -> None:
    assert look(now)[0] == kind
    others = tuple(one for one in OPTIONS.triggers if one != kind)
    assert look(now, triggers=others) == ("", "")


def test_too_few_steps_under_a_plan_say_nothing() -> None:
    assert look(state(step=0.16, stall=0.06, steps=FEWEST_STEPS - 1)) == ("", "")
    before = state(steps=100)
    assert look(state(step=0.16, stall=0.06, steps=100 + FEWEST_STEPS - 1), before) == ("", "")
    assert look(state(step=0.16, stall=0.06, steps=100 + FEWEST_STEPS), before)[0] == "drift"
