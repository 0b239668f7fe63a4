"""``flextensor plan``: what to expect of a model on a device, before anything is bought or started."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flextensor.config import ConfigError, OffloadConfig, parse_budget, parse_bytes
from flextensor.planner import BudgetError, Plan, search
from flextensor.planner.mix import kinds_of, resident_seconds
from flextensor.profile import Profile, ProfileMismatch
from launch.errors import clear_errors
from launch.estimate import Machine, estimate_profile, parse_flops
from launch.model_files import TaskInputError
from launch.words import milliseconds, size, table

POINTS = 9
BAR = 30
LINK = "25GB/s"


@dataclass(frozen=True)
class Outlook:
    """What a plan promises. Bytes and seconds.

    device_bytes: weights, and what the step needs beside them. host_bytes: the pinned weights, one copy a node.
    """

    name: str
    budget_bytes: int | None
    weight_bytes: int
    resident_bytes: int
    arena_bytes: int
    streamed_bytes: int
    step_seconds: float
    floor_seconds: float
    stall_seconds: float
    transfer_seconds: float
    device_bytes: int
    host_bytes: int


def plan(
    model: Annotated[Path | None, typer.Option(help="A Hugging Face model directory; only headers are read.")] = None,
    device_memory: Annotated[str, typer.Option(help="The device's memory: 24GiB.")] = "24GiB",
    link: Annotated[str | None, typer.Option(help=f"Host to device, as reached: 25GB/s (default {LINK}).")] = None,
    flops: Annotated[str, typer.Option(help="What matmuls reach on the device.")] = "150TFLOPS",
    memory_bandwidth: Annotated[str, typer.Option(help="The device's own memory, as reached.")] = "1TB/s",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step: 1 a decode, thousands a prefill.")] = 4096,
    dtype: Annotated[str | None, typer.Option(help="Load weights as bfloat16, float16, float32.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A saved profile: measured times instead of estimates.")] = None,
    budget: Annotated[str | None, typer.Option(help="Weights on the device: 6GiB, or 40% of the model's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw step time over budgets into this file.")] = None,
) -> None:
    """Say what step time, stall and memory to expect, before anything is started."""
    with clear_errors():
        known = _profile(model, profile, link, flops, memory_bandwidth, tokens, dtype)
        memory = parse_bytes(device_memory)
        beside = known.activation_bytes + known.other_bytes
        room = _room(known, memory, budget)
        chosen = outlooks(known, room)
        points = curve(known)
        if png is not None:
            draw(png, known, points, room)
        if as_json:
            print(json.dumps(_as_json(known, memory, room, chosen, points), indent=1))
            return
        console = Console() if sys.stdout.isatty() else Console(width=120)
        _show(console, known, memory, beside, room, chosen, points, measured=profile is not None)


def _profile(
    model: Path | None,
    saved: Path | None,
    link: str | None,
    flops: str,
    memory_bandwidth: str,
    tokens: int,
    dtype: str | None,
) -> Profile:
    if saved is not None:
        if not saved.is_file():
            raise TaskInputError(f"profile {saved} does not exist; a run with profile_storage_dir saves one")
        try:
            known = Profile.load(saved)
        except ProfileMismatch as error:
            raise ConfigError(str(error)) from error
        # Another link than the one measured: its curve, as many times slower or faster.
        return known if link is None else _on_link(known, _rate("--link", link))
    if model is None:
        raise ConfigError("name a model with --model DIR, or a saved profile with --profile FILE")
    machine = Machine(parse_flops(flops), _rate("--link", link or LINK), _rate("--memory-bandwidth", memory_bandwidth))
    return estimate_profile(model, machine, tokens=tokens, dtype=dtype)


def _on_link(profile: Profile, bytes_per_second: float) -> Profile:
    return replace(profile, transfer=profile.transfer.scaled(profile.transfer.bandwidth / bytes_per_second))


def _rate(option: str, text: str) -> float:
    rate = float(parse_bytes(text.strip().removesuffix("/s")))
    if rate <= 0:
        raise ConfigError(f"{option} {text!r} must be above 0; write, for example, '25GB/s'")
    return rate


def _room(profile: Profile, memory: int, budget: str | None) -> int:
    """Bytes for weights: what the device has beside the step's own, and no more than the budget.

    Raises BudgetError when the step alone does not fit the device.
    """
    beside = profile.activation_bytes + profile.other_bytes
    if beside >= memory:
        raise BudgetError(
            f"a step needs {size(beside)} beside the weights, but the device has {size(memory)}; take fewer --tokens "
            f"or more --device-memory",
            beside,
        )
    if budget is None:
        return memory - beside
    asked = parse_budget(budget)
    return min(memory - beside, int(asked * profile.total_bytes) if isinstance(asked, float) else asked)


def outlook(name: str, profile: Profile, made: Plan) -> Outlook:
    """The figures of one plan."""
    predicted = made.prediction
    assert predicted is not None, "search predicts every plan"
    return Outlook(
        name=name,
        budget_bytes=made.budget_bytes,
        weight_bytes=made.weight_bytes,
        resident_bytes=made.resident_bytes,
        arena_bytes=made.arena_bytes,
        streamed_bytes=made.streamed_bytes,
        step_seconds=predicted.step_seconds,
        floor_seconds=predicted.floor_seconds,
        stall_seconds=predicted.stall_seconds,
        transfer_seconds=predicted.transfer_seconds,
        device_bytes=made.weight_bytes + profile.activation_bytes + profile.other_bytes,
        host_bytes=profile.total_bytes,
    )


def outlooks(profile: Profile, room: int) -> list[Outlook]:
    """The fastest plan in ``room``, and latency mode's where it fits. Raises BudgetError when none fits."""
    found = [outlook("fastest that fits", profile, search(profile, budget_bytes=room))]
    latency = search(profile, transfer_budget_scale=OffloadConfig().transfer_budget_scale)
    if latency.weight_bytes <= room:
        found.append(outlook("least memory, no time lost", profile, latency))
    return found


def curve(profile: Profile) -> list[Outlook]:
    """Plans for budgets from the least that works to the whole model."""
    total = search(profile, budget_bytes=2 * profile.total_bytes + (1 << 20)).weight_bytes
    try:
        least = search(profile, budget_bytes=0).weight_bytes
    except BudgetError as error:
        least = error.needed
    budgets = sorted({least + (total - least) * i // (POINTS - 1) for i in range(POINTS)})
    return [outlook("", profile, search(profile, budget_bytes=nbytes)) for nbytes in budgets]


def bound_by(profile: Profile, known: Outlook) -> str:
    """What the step waits for."""
    if known.step_seconds > 1.02 * known.floor_seconds:
        return "waiting"
    if known.transfer_seconds >= 0.98 * known.step_seconds:
        return "link"
    kind = kinds_of(profile)[0]
    return "host" if sum(kind.host) > sum(kind.compute) + sum(kind.gap) else "compute"


def _show(
    console: Console,
    profile: Profile,
    memory: int,
    beside: int,
    room: int,
    chosen: Sequence[Outlook],
    points: Sequence[Outlook],
    *,
    measured: bool,
) -> None:
    kinds = kinds_of(profile)
    how = "measured" if measured else "estimated from FLOPs and memory bandwidth; attention left out"
    console.print(
        f"{len(profile.units)} units, {size(profile.total_bytes)} of weights; steps: {', '.join(k.name for k in kinds)}"
    )
    console.print(f"compute {how}; link {size(profile.transfer.bandwidth)}/s")
    console.print(
        f"device {size(memory)}: {size(beside)} for activations and caches ({'measured' if measured else 'a guess'}), "
        f"{size(room)} for weights"
    )
    rows = table("plan", *(known.name for known in chosen), title="")
    figures = {
        "step": lambda o: milliseconds(o.step_seconds),
        "  of that stalled": lambda o: milliseconds(o.stall_seconds),
        "  bound by": lambda o: bound_by(profile, o),
        "weights on the device": lambda o: size(o.weight_bytes),
        "  resident": lambda o: f"{size(o.resident_bytes)} ({o.resident_bytes / max(profile.total_bytes, 1):.0%})",
        "  slots": lambda o: size(o.arena_bytes),
        "streamed a step": lambda o: size(o.streamed_bytes),
        "device memory in all": lambda o: size(o.device_bytes),
        "host memory, pinned": lambda o: size(o.host_bytes),
    }
    for label, figure in figures.items():
        rows.add_row(label, *(figure(known) for known in chosen))
    console.print(rows)
    ways = table("budget", "streamed", "step", "stalled", "", title="Over budgets of weights on the device")
    ways.columns[-1].justify = "left"
    slowest = max(point.step_seconds for point in points)
    for point in points:
        moving = round(BAR * (point.step_seconds - point.stall_seconds) / slowest) if slowest > 0 else 0
        waiting = round(BAR * point.step_seconds / slowest) - moving if slowest > 0 else 0
        ways.add_row(
            size(point.budget_bytes or point.weight_bytes),
            size(point.streamed_bytes),
            milliseconds(point.step_seconds),
            milliseconds(point.stall_seconds),
            "█" * moving + "░" * waiting,
        )
    console.print(ways)
    console.print("█ computing  ░ stalled")


def _as_json(
    profile: Profile, memory: int, room: int, chosen: Sequence[Outlook], points: Sequence[Outlook]
) -> dict[str, Any]:
    resident = [resident_seconds(kind) for kind in kinds_of(profile)]
    return {
        "weights_bytes": profile.total_bytes,
        "units": len(profile.units),
        "device_memory_bytes": memory,
        "beside_weights_bytes": profile.activation_bytes + profile.other_bytes,
        "room_bytes": room,
        "link_bytes_per_second": profile.transfer.bandwidth,
        "compute": "estimated" if profile.device == "estimated" else "measured",
        "resident_step_seconds": dict(zip((k.name for k in kinds_of(profile)), resident, strict=True)),
        "plans": [{**vars(known), "bound_by": bound_by(profile, known)} for known in chosen],
        "curve": [vars(point) for point in points],
    }


def draw(file: Path, profile: Profile, points: Sequence[Outlook], room: int) -> None:
    """Step time over weights on the device, the floor as a line. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--png needs matplotlib; pip install matplotlib, or leave --png out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    weights = [point.weight_bytes / 1e9 for point in points]
    axes.plot(weights, [1e3 * point.floor_seconds for point in points], "-", color="0.6", label="floor")
    axes.plot(weights, [1e3 * point.step_seconds for point in points], "o", label="predicted step")
    if room < profile.total_bytes:
        axes.axvline(room / 1e9, linestyle=":", color="0.3", label="room on this device")
    axes.set(xlabel="weights on the device (GB)", ylabel="step (ms)", ylim=(0, None))
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
