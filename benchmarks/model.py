"""The model that benchmarks run: a pre-norm transformer stack, 24 blocks of 243 M parameters, 10.88 GiB in bf16.

The weights depend on the shape and the seed only, not on the device, so that the model and its resident twin are equal
bit for bit however each was built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

BANK_SHIFT = 1 << 20
"""Each weight is a window into one bank of random numbers; windows start within so many of its first entries."""
WINDOW_STEP = 9973


@dataclass(frozen=True)
class Shape:
    """Sizes of the stack: blocks, model width, feed-forward width, attention heads."""

    blocks: int = 24
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    dtype: torch.dtype = torch.bfloat16


FULL = Shape()
TINY = Shape(blocks=6, width=128, hidden=448, heads=4, dtype=torch.float32)
"""Runs on a CPU in milliseconds: 6 blocks of 0.95 MB."""


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind an RMS norm and beside a residual path."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden, dtype = shape.width, shape.hidden, shape.dtype
        self.heads = shape.heads
        self.norm_attention = nn.RMSNorm(width, dtype=dtype)
        self.qkv = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, dtype=dtype)
        self.norm_feed = nn.RMSNorm(width, dtype=dtype)
        self.gate = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.up = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=False, dtype=dtype)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) -> the same: all tokens see all tokens."""
        batch, tokens, width = x.shape
        projected = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_attention(x))
        y = self.norm_feed(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    """``layers.0`` ... ``layers.N``, one after the other. (batch, tokens, width) -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(shape: Shape = FULL, device: torch.device | str = "cpu", *, seed: int = 0) -> Stack:
    """The stack with its weights on ``device``, for inference."""
    with torch.device("meta"):
        model = Stack(shape)
    model.to_empty(device=device)
    numbers = torch.Generator().manual_seed(seed)
    largest = max(parameter.numel() for parameter in model.parameters())
    bank = torch.randn(largest + BANK_SHIFT, generator=numbers).mul_(0.02).to(shape.dtype).to(device)
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                start = at * WINDOW_STEP % BANK_SHIFT
                parameter.view(-1).copy_(bank[start : start + parameter.numel()])
    return model.eval().requires_grad_(False)


def make_input(shape: Shape, tokens: int, device: torch.device | str, *, seed: int = 1) -> torch.Tensor:
    """(1, tokens, width), the same numbers on every device."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, shape.width, generator=numbers).to(shape.dtype).to(device)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
