"""Small models with blocks worth compiling."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import flextensor as ft

DIM = 64
GPU_DEVICE = "auto"
"""What configurations say, unless the test's device does."""


class Block(nn.Module):
    """Norm, two linears, residual."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class IndexedBlock(Block):
    """A block whose forward reads its index: a graph of its own each."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + 0.01 * self.index)


class LabelledBlock(Block):
    """A block that carries an index which its forward does not read."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


class Int8Block(nn.Module):
    """Dequantises its weight first thing: work that needs no activation, which a compiler could move."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (dim, dim), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(dim, 1) / 100, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(x, self.weight.float() * self.scale)


class TwoOutputs(nn.Module):
    """Returns two tensors; only the second depends on the last weight that is read."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.last = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.last(x).sum(-1)


class InPlace(nn.Module):
    """Writes its result into its input and returns nothing."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> None:
        x.add_(self.down(torch.relu(self.up(x))))


class Cache:
    """A tensor that units find in an object."""

    def __init__(self, device: torch.device) -> None:
        self.keys = torch.zeros(2, 16, DIM, device=device)


class Writes(nn.Module):
    """Returns a tensor and, with another weight's help, writes something else."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.rand(dim) + 1)

    def forward(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> torch.Tensor:
        self.write(x, cache, given)
        return self.out(x)

    def write(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        """Writes into ``given``."""
        given.add_(x * self.scale)


class WritesRows(Writes):
    """As key-value caches are written: some rows of an argument."""

    def write(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        given[:, 4:12].copy_(self.key(x)[:, 4:12] * self.scale)


class WritesByIndex(Writes):
    """The same, by an index that is a tensor."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.register_buffer("at", torch.arange(3, 11))

    def write(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        given.index_copy_(1, self.at, self.key(x)[:, :8])


class WritesIntoAnObject(Writes):
    """What it writes is not among its arguments' tensors."""

    def write(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        cache.keys.mul_(0.5).add_(x * self.scale)


class WritesABuffer(Writes):
    """Keeps a state of its own."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.register_buffer("state", torch.zeros(dim))

    def write(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        self.state.copy_(x[0, 0] * self.scale)


class Keeps(Writes):
    """Leaves a tensor for whoever runs next."""

    def write(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        cache.keys = x * self.scale


class MyModel(nn.Module):
    """``layers`` in order; a block's first output goes on, or its input where it returns nothing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [Block() for _ in range(6)])
        self.head = nn.Linear(DIM, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            before = x = x.clone() if isinstance(layer, InPlace) else x
            out = layer(x)
            out = before if out is None else out
            x = out if isinstance(out, torch.Tensor) else out[0] + out[1].unsqueeze(-1)
        return self.head(x)


def pair(*layers: nn.Module) -> tuple[MyModel, MyModel]:
    """A model and its twin, frozen."""
    torch.manual_seed(0)
    model = MyModel(*layers).eval().requires_grad_(False)
    return model, copy.deepcopy(model)


def streaming(model: nn.Module, share: float = 0.6, **settings: Any) -> ft.OffloadConfig:
    """A configuration under which about ``1 - share`` of the weights stream."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    defaults: dict[str, Any] = {
        "include_patterns": ["layers.*"],
        "gpu_device": GPU_DEVICE,
        "budget_bytes": int(total * share),
        "resident_below_bytes": 1024,
        "host_link_bytes_per_second": 4e9,
    }
    return ft.OffloadConfig(**{**defaults, **settings})


def inputs(device: torch.device, rows: int = 16) -> torch.Tensor:
    """A fresh input on the device."""
    return torch.randn(2, rows, DIM).to(device)
