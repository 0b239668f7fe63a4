"""``flextensor trace``: run a model a few steps, and show one of them as Chrome trace JSON and as a picture."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flextensor.config import OffloadConfig
    from flextensor.manager import OffloadManager
    from flextensor.runtime.timing import StepTimes
    from flextensor.runtime.trace import Timeline

logger = logging.getLogger(__name__)

MANAGER = "trace"
DEFAULT_TASK = "launch.causal_lm:CausalLMTask"
DEMO_TOKENS = 4096
DEMO_HOST_TOKENS = 256


def trace(
    config: Annotated[Path | None, typer.Option(help="A YAML file, for example configs/demo.yaml.")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face model directory.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="The benchmark's 24-block model; a small one on a CPU.")] = False,
    budget: Annotated[str | None, typer.Option(help="Weights on the device: 6GiB, or 40% of the model's.")] = None,
    device: Annotated[str, typer.Option(help="cuda, host or auto.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Steps run under the plan before one is shown.")] = 12,
    kind: Annotated[
        str | None, typer.Option(help="The kind of step to show, as it is listed; default: the last.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="With --demo: tokens of a step.")] = None,
    output: Annotated[Path, typer.Option(help="Written with .json and .png behind it.")] = Path("out/trace"),
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Only the JSON.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other key: --set offload.stream_granularity=piece")
    ] = None,
) -> None:
    """Show one step: what computed, what was on the link, what lay where in device memory, and who waited."""
    from launch.errors import clear_errors

    with clear_errors():
        from rich.console import Console

        from flextensor.config import parse_budget

        wanted = None if budget in (None, "latency") else parse_budget(str(budget))
        request = TraceRequest(config, model, demo, wanted, budget is not None, device, steps, tokens, settings or [])
        run_trace(request, output, kind=kind, picture=not no_picture, console=Console())


@dataclass(frozen=True)
class TraceRequest:
    """What is to be run. ``budget``: bytes, a share of the weights, or None for latency mode; ``budget_given``: it
    stands over the configuration's."""

    config: Path | None
    model: Path | None
    demo: bool
    budget: int | float | None
    budget_given: bool
    device: str
    steps: int
    tokens: int | None
    settings: list[str]


def run_trace(
    request: TraceRequest, output: Path, *, kind: str | None = None, picture: bool = True, console: Any
) -> list[Path]:
    """Run the model, write the files, say where they are. Returns their paths.

    Raises ConfigError for a request that cannot be used, OffloadError when no step could be sampled.
    """
    from launch.words import milliseconds, size

    with _model_that_ran(request) as (manager, title):
        step = newest_step(manager, kind=kind)
        written = write_timeline(step, output, title=title, picture=picture)
        kinds = sorted({times.kind for times in manager.sampled_steps() if times.kind})
    console.print(
        f"step of kind {step.kind!r}: {milliseconds(step.period)}, {size(step.streamed_bytes)} streamed, "
        f"stalled {milliseconds(step.stall_seconds)}",
        highlight=False,
    )
    if len(kinds) > 1:
        console.print(f"kinds seen: {', '.join(kinds)} (choose with --kind)", highlight=False)
    for path in written:
        how = " (open it at https://ui.perfetto.dev)" if path.suffix == ".json" else ""
        console.print(f"{path}{how}", highlight=False, soft_wrap=True)
    return written


# ---- from a manager to files


def newest_step(manager: OffloadManager, *, kind: str | None = None, period: float | None = None) -> Timeline:
    """The last step that was timed under the plan in force (of ``kind``), joined with the plan.

    period: seconds of a step, back to back, where it was measured; else the manager's live figure.
    Raises OffloadError when none was timed: ``OffloadConfig(offload_timing="eager")`` times every step.
    """
    from flextensor.runtime.trace import timeline
    from flextensor.units import OffloadError

    manager.collect_offload_timing()
    plan, profile = manager.plan, manager.profile
    samples = manager.sampled_steps()
    fitting = [times for times in samples if plan is not None and len(times.end) == len(plan.visits)]
    chosen = [times for times in fitting if kind is None or times.kind == kind]
    if not chosen or plan is None or profile is None:
        seen = sorted({times.kind for times in fitting})
        why = f"none of kind {kind!r}; seen: {', '.join(seen)}" if seen else "run the model under a plan first"
        raise OffloadError(f"no step was timed ({why}); OffloadConfig(offload_timing='eager') times every one")
    times = chosen[-1]
    alike = len({sample.kind for sample in fitting}) == 1
    known = period or (manager.live().step_seconds if alike else None)
    return timeline(times, plan, profile.units, profile.tensors, period=_believable(known, times))


def _believable(period: float | None, times: StepTimes) -> float | None:
    """A period much longer than the step says that somebody paused between steps; the step's own length then."""
    return period if period is not None and period < 1.2 * times.end[-1] else None


def write_timeline(step: Timeline, stem: Path, *, title: str = "", picture: bool = True) -> list[Path]:
    """``STEM.json`` and, with ``picture``, ``STEM.png``; returns their paths."""
    from flextensor.runtime.chrome import write_chrome_trace

    paths = [stem.with_name(stem.name + ".json")]
    write_chrome_trace(step, paths[0], title=title or "offloaded step")
    if picture:
        from launch.trace_picture import draw

        paths.append(stem.with_name(stem.name + ".png"))
        draw(step, paths[1], title=title)
    return paths


def write_step(manager: OffloadManager, stem: Path, *, title: str = "", period: float | None = None) -> list[Path]:
    """``newest_step`` as files: what a benchmark calls."""
    return write_timeline(newest_step(manager, period=period), stem, title=title)


# ---- models that run


@contextmanager
def _model_that_ran(request: TraceRequest) -> Iterator[tuple[OffloadManager, str]]:
    """The manager of a model that has just run ``steps`` timed steps, and a title; released at the end."""
    from flextensor import registry
    from flextensor.config import ConfigError

    if request.demo == (request.config is not None or request.model is not None):
        raise ConfigError("name a model: --config FILE, --model DIRECTORY, or --demo alone")
    try:
        if request.demo:
            yield _run_demo(request)
        else:
            yield _run_task(request)
    finally:
        if MANAGER in registry.names():
            registry.get_offload_manager(MANAGER).release()


def _run_demo(request: TraceRequest) -> tuple[OffloadManager, str]:
    import torch

    import flextensor
    from flextensor.config import ConfigError
    from launch.run_config import parse_assignments

    try:
        from benchmarks.model import FULL, TINY, build, make_input
    except ImportError:
        raise ConfigError("--demo runs benchmarks/model.py: start it in the project's folder") from None
    given = {key.removeprefix("offload."): value for key, value in parse_assignments(request.settings).items()}
    asked = {"include_patterns": ("layers.*",), "gpu_device": request.device, "offload_timing": "eager"}
    offload = flextensor.OffloadConfig(**(asked | flextensor.load_config_from_env() | given))
    on_host = flextensor.make_device(offload).torch_device.type == "cpu"
    if on_host:
        offload = offload.updated(**({"resident_below_bytes": 4096, "host_link_bytes_per_second": 1e9} | given))
    shape = TINY if on_host else FULL
    where = torch.device("cpu" if on_host else "cuda")
    tokens = request.tokens or (DEMO_HOST_TOKENS if on_host else DEMO_TOKENS)
    with torch.no_grad():
        model = flextensor.offload(build(shape), offload, name=MANAGER)
        manager = flextensor.get_offload_manager(MANAGER)
        x = make_input(shape, tokens, where)
        for _ in range(manager.iters_before_inference):
            model(x)
        _ask_for(manager, request, default=0.5)
        for _ in range(request.steps):
            model(x)
        manager.device.synchronize()
    return manager, f"{shape.blocks} blocks, {tokens} tokens"


def _run_task(request: TraceRequest) -> tuple[OffloadManager, str]:
    import flextensor
    from cluster.packing import resolve_task
    from cluster.task import TaskContext

    name, options, offload, budget = _task_settings(request)
    offload = offload.updated(
        gpu_device=request.device if request.device != "auto" else offload.gpu_device,
        offload_timing="eager",
        shm_namespace=f"trace-{os.getpid()}",
        **({"budget_bytes": budget} if isinstance(budget, int) else {}),
    )
    if name == DEFAULT_TASK:
        options = {**options, "max_new_tokens": request.steps}
    task = resolve_task(name)(options)
    task.load(TaskContext(offload, MANAGER, offload.shm_namespace, lambda text: logger.info("%s", text)))
    task.warm_up([])
    manager = flextensor.get_offload_manager(MANAGER)
    if request.budget_given or budget is not None:
        manager.replan(budget)
    from launch.causal_lm import WARM_UP_ITEM

    task.run([WARM_UP_ITEM])
    manager.device.synchronize()
    return manager, str(task.describe().get("model", "model"))


def _task_settings(request: TraceRequest) -> tuple[str, dict[str, Any], OffloadConfig, int | float | None]:
    """(task, its options, offload settings, budget) of a run's YAML file, or of a model directory alone."""
    import flextensor
    from launch.run_config import load_run_config, parse_assignments

    changes = parse_assignments(request.settings)
    if request.config is not None:
        if request.model is not None:
            changes["model"] = request.model
        run = load_run_config(request.config, changes)
        budget = request.budget if request.budget_given else run.budget
        return run.task, run.task_settings(), run.offload_config(), budget
    options: dict[str, Any] = {"model": str(request.model)}
    offload: dict[str, Any] = {}
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        if section == "task_options" and rest:
            options[rest] = value
        else:
            offload[rest if section == "offload" and rest else key] = value
    return DEFAULT_TASK, options, flextensor.load_config(**offload), request.budget


def _ask_for(manager: OffloadManager, request: TraceRequest, *, default: float) -> None:
    """Put the request's budget in force, or ``default`` (a share of the weights) where it names none."""
    manager.replan(request.budget if request.budget_given else default)
