"""The contenders: the un-offloaded model, and other offloaders where they are installed. None of ours is imported."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.model import Shape, build, make_input, weight_bytes
from benchmarks.rows import GIB, Row, median
from benchmarks.stopwatch import back_to_back, peak_of, steps_for, sustain, synchronize, warm_up_gpu

PUBLIC_VARIABLE = "PUBLIC_FLEXTENSOR"
"""The directory that the public flextensor wheel was installed to (pip install --target)."""


class NotInstalled(Exception):
    """The contender is not here; the message says what is missing."""


@dataclasses.dataclass
class Contender:
    """A model that runs on the GPU. ``resident_units``: of how many blocks it says that they stay there."""

    model: nn.Module
    version: str
    warm_steps: int = 3


Setup = Callable[[nn.Module, torch.device, torch.Tensor, str], Contender]


def resident(model: nn.Module, device: torch.device, x: torch.Tensor, target: str) -> Contender:
    """Everything on the GPU."""
    return Contender(model.to(device), torch.__version__)


def resident_compiled(model: nn.Module, device: torch.device, x: torch.Tensor, target: str) -> Contender:
    """Everything on the GPU, each block compiled."""
    moved: Any = model.to(device)
    for block in moved.layers:
        block.compile(fullgraph=True)
    return Contender(moved, torch.__version__)


def accelerate(model: nn.Module, device: torch.device, x: torch.Tensor, target: str) -> Contender:
    """accelerate's cpu_offload: each module's weights copied, waited for and dropped."""
    version = _version("accelerate")
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=device)
    return Contender(model, version, warm_steps=1)


def diffusers_block(model: nn.Module, device: torch.device, x: torch.Tensor, target: str) -> Contender:
    """diffusers' group offload, a block a group, on a stream."""
    return _diffusers(model, device, offload_type="block_level", num_blocks_per_group=1, use_stream=True)


def diffusers_leaf(model: nn.Module, device: torch.device, x: torch.Tensor, target: str) -> Contender:
    """diffusers' group offload, a leaf module a group, on a stream."""
    return _diffusers(model, device, offload_type="leaf_level", use_stream=True, record_stream=True)


def _diffusers(model: nn.Module, device: torch.device, **settings: Any) -> Contender:
    version = _version("diffusers")
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(model, onload_device=device, offload_device=torch.device("cpu"), **settings)
    return Contender(model, version)


def public_flextensor(model: nn.Module, device: torch.device, x: torch.Tensor, target: str) -> Contender:
    """The public wheel: its default mode, or with a budget of ``target`` GiB."""
    directory = os.environ.get(PUBLIC_VARIABLE)
    if not directory:
        raise NotInstalled(f"not installed: {PUBLIC_VARIABLE} names no directory with the public flextensor wheel")
    import flextensor

    origin = Path(flextensor.__file__).resolve()
    if not origin.is_relative_to(Path(directory).resolve()):
        raise NotInstalled(f"not installed: flextensor was found at {origin}, not in {directory}")
    version = next((d.version for d in importlib.metadata.distributions(path=[directory], name="flextensor")), "?")
    settings: dict[str, Any] = {"include_patterns": ["layers.*"]}
    if target:
        settings["max_gpu_mem_fraction"] = float(target) * GIB / torch.cuda.get_device_properties(0).total_memory
    offloaded = flextensor.offload(model, flextensor.OffloadConfig(**settings))
    manager: Any = flextensor.get_offload_manager()
    for _ in range(manager.iters_before_inference):
        offloaded(x)
    return Contender(offloaded, version)


SETUPS: dict[str, Setup] = {
    "resident": resident,
    "resident-compiled": resident_compiled,
    "accelerate": accelerate,
    "diffusers-block": diffusers_block,
    "diffusers-leaf": diffusers_leaf,
    "public-flextensor": public_flextensor,
}


def run(
    name: str, tokens: Sequence[int], target: str, shape: Shape, device: torch.device, repeats: int, seconds: float
) -> Iterator[Row]:
    """The rows of one contender: set up once, then each token count between blocks of the resident twin.

    Raises NotInstalled when it is not here.
    """
    warm_up_gpu(device)
    x = make_input(shape, tokens[0], device)
    model = build(shape)
    total = weight_bytes(model)
    synchronize(device)
    start = time.perf_counter()
    contender = SETUPS[name](model, device, x, target)
    contender.model(x)
    synchronize(device)
    setup_seconds = time.perf_counter() - start
    gc.collect()
    inputs = {count: make_input(shape, count, device) for count in tokens}
    peaks = {}
    for count, given in inputs.items():
        others = sum(v.numel() * v.element_size() for v in inputs.values()) - given.numel() * given.element_size()
        for _ in range(contender.warm_steps):
            contender.model(given)
        peak = peak_of(_step(contender.model, given), device)
        peaks[count] = None if peak is None else peak - others
    twin = build(shape, device)
    for count, given in inputs.items():
        row = Row(name, count, target, version=contender.version, total_weight_bytes=total)
        row = dataclasses.replace(row, setup_seconds=setup_seconds, peak_bytes=peaks[count])
        if name.startswith("resident"):
            row = dataclasses.replace(row, device_weight_bytes=total, streamed_bytes=0)
        yield _timed(row, contender.model, twin, given, device, repeats, seconds)


def _timed(
    row: Row, model: nn.Module, twin: nn.Module, x: torch.Tensor, device: torch.device, repeats: int, seconds: float
) -> Row:
    step, resident_step = _step(model, x), _step(twin, x)
    expected = resident_step()
    differences = []
    steps: list[float] = []
    residents: list[float] = []
    for _ in range(repeats):
        residents.append(_block(resident_step, device, seconds / 2))
        steps.append(_block(step, device, seconds))
        y = step()
        differences.append((bool(torch.equal(y, expected)), float((y.float() - expected.float()).abs().max())))
    residents.append(_block(resident_step, device, seconds / 2))
    own = row.contender == "resident"
    return dataclasses.replace(
        row,
        step_seconds=median(steps),
        step_samples=tuple(steps),
        resident_seconds=median(steps if own else residents),
        identical=all(same for same, _ in differences),
        largest_difference=max(difference for _, difference in differences),
    )


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y

    return step


def _block(step: Callable[[], object], device: torch.device, seconds: float) -> float:
    sustain(step, 2 * seconds, device)
    once = back_to_back(step, 1, device)
    return back_to_back(step, steps_for(seconds, once, least=2), device)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise NotInstalled(f"not installed: pip install {package}") from None
