"""The checkpoint of the store benchmark: the engine benchmark's stack of blocks in another size, a file a block."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.model import Shape, Stack, build
from flextensor.store import SafetensorsSource, UnitSpec, WeightSpec

BLOCKS = 24
_PARAMETERS_OF_A_BLOCK = 4 + 3 * 3.5
"""In squares of the width: attention, and a feed-forward that is 3.5 times as wide."""


def shape_of(nbytes: int) -> Shape:
    """The stack of bfloat16 weights that takes about ``nbytes``; of 10.9 GiB it is the engine benchmark's."""
    width = math.sqrt(nbytes / (BLOCKS * _PARAMETERS_OF_A_BLOCK * 2))
    width = max(128, round(width / 128) * 128)
    return Shape(blocks=BLOCKS, width=width, hidden=width * 7 // 2, heads=width // 128, dtype=torch.bfloat16)


def meta_stack(shape: Shape) -> Stack:
    """The stack without weights."""
    with torch.device("meta"):
        return Stack(shape).eval().requires_grad_(False)


def write_checkpoint(directory: Path, shape: Shape) -> int:
    """A shard a block, and the index; the bytes of the weights."""
    model = build(shape)
    weight_map: dict[str, str] = {}
    total = 0
    for number, layer in enumerate(model.layers):
        tensors = {f"layers.{number}.{name}": tensor for name, tensor in layer.state_dict().items()}
        file = f"model-{number + 1:05}-of-{shape.blocks:05}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def units_of(source: SafetensorsSource) -> tuple[UnitSpec, ...]:
    """A unit a block, from the headers alone."""
    units: dict[str, list[WeightSpec]] = {}
    for key, entry in source.entries.items():
        weight = torch.empty(entry.shape, dtype=torch.bfloat16, device="meta")
        units.setdefault(".".join(key.split(".")[:2]), []).append(WeightSpec.of(key, weight))
    return tuple(UnitSpec(name, tuple(weights)) for name, weights in units.items())
