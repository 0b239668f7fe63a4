"""Weights to store: few, but of every kind that a store must keep bit for bit."""

from __future__ import annotations

import torch

from flextensor.store import UnitSpec, WeightSpec


def small_weights(seed: int = 0, units: int = 3, rows: int = 500) -> dict[str, torch.Tensor]:
    """About ``units * rows`` KiB of weights: several dtypes, transposed, channels-last, a scalar, odd sizes."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for index in range(units):
        unit = f"layers.{index}"
        tensors[f"{unit}.up"] = torch.randn(rows, 300, generator=generator).to(torch.bfloat16)
        tensors[f"{unit}.down"] = torch.randn(rows, 101, generator=generator).t()
        tensors[f"{unit}.norm"] = torch.randn(33, generator=generator)
    conv = torch.randn(8, 3, 5, 5, generator=generator, dtype=torch.float64)
    tensors["layers.0.conv"] = conv.contiguous(memory_format=torch.channels_last)
    tensors["layers.0.mask"] = torch.rand(7, generator=generator) > 0.5
    tensors["layers.1.count"] = torch.tensor(seed + 5)
    tensors["layers.1.eight"] = torch.randn(65, generator=generator).to(torch.float8_e4m3fn)
    tensors["layers.1.table"] = torch.randint(-9, 9, (3, 1, 7), generator=generator, dtype=torch.int8)
    return tensors


def units_of(tensors: dict[str, torch.Tensor]) -> tuple[UnitSpec, ...]:
    """Units by the first two parts of the weights' names."""
    names: dict[str, list[str]] = {}
    for name in tensors:
        names.setdefault(name.rpartition(".")[0], []).append(name)
    return tuple(
        UnitSpec(unit, tuple(WeightSpec.of(name, tensors[name]) for name in members)) for unit, members in names.items()
    )


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit, with the same dtype, shape and stride."""
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and found.stride() == wanted.stride()
        and torch.equal(_bits(found), _bits(wanted))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
