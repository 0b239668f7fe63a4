"""Small models of the kinds that offloaders trip over. Weights are random, so that no two units' are alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F


class Linears(nn.Module):
    """Linear units of the given widths; ``sizes[i]`` to ``sizes[i + 1]``."""

    def __init__(self, sizes: Sequence[int], *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Alternating(nn.Module):
    """Linear, LayerNorm, Linear, LayerNorm ..."""

    def __init__(self, pairs: int = 4, width: int = 64) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(pairs))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(pairs))
        for norm in self.norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(linear(x))
        return x


class Block(nn.Module):
    """A residual block of an odd width inside, so that sizes are no round numbers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks and a head that no pattern ``layers.*`` matches. ``repeats``: how often all blocks are run."""

    def __init__(self, count: int = 6, width: int = 48, inner: int | Sequence[int] = 131, repeats: int = 1) -> None:
        super().__init__()
        inners = [inner] * count if isinstance(inner, int) else list(inner)
        self.layers = nn.ModuleList(Block(width, size) for size in inners)
        self.head = nn.Linear(width, 10)
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class Routed(nn.Module):
    """Runs its blocks in the order that the caller names: skipped, repeated, backwards."""

    def __init__(self, count: int = 6, width: int = 32, inner: int | Sequence[int] = 65) -> None:
        super().__init__()
        inners = [inner] * count if isinstance(inner, int) else list(inner)
        self.layers = nn.ModuleList(Block(width, size) for size in inners)

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        for at in range(len(self.layers)) if order is None else order:
            x = self.layers[at](x)
        return x


class TiedLM(nn.Module):
    """Tokens to logits; embedding and head share one weight, both are units. A cache makes decode steps cheap."""

    def __init__(self, vocabulary: int = 300, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(CachedAttention(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for at, layer in enumerate(self.layers):
            x = layer(x, cache, at)
        return self.head(x)

    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Greedy: one prefill, then one token a step."""
        cache = [torch.empty(len(tokens), 0, self.embed.embedding_dim, device=tokens.device) for _ in self.layers]
        logits = self(tokens, cache)
        for _ in range(count):
            new = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, new], 1)
            logits = self(new, cache)
        return tokens


class CachedAttention(nn.Module):
    """Attention over all that was seen, the cache being a list of the caller's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None, at: int) -> torch.Tensor:
        seen = self.kv(x)
        if cache is not None:
            cache[at] = seen = torch.cat([cache[at], seen], 1)
        scores = self.q(x) @ seen.transpose(1, 2)
        return x + self.out(torch.softmax(scores, -1) @ seen)


class Experts(nn.Module):
    """A mixture of experts: each input row goes to one of them, so some are not run on some inputs."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        result = torch.zeros_like(x)
        for at in sorted({int(number) for number in chosen}):
            rows = chosen == at
            result[rows] = self.experts[at](x[rows])
        return x + result


class MixtureOfExperts(nn.Module):
    """Blocks of experts behind one another."""

    def __init__(self, blocks: int = 3, experts: int = 6, width: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Dtypes(nn.Module):
    """One unit with weights of five dtypes, the 64-bit ones behind a 1-byte one of an odd size."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.f16 = nn.Parameter(torch.randn(width, width, dtype=torch.float16))
        self.i8 = nn.Parameter(torch.randint(-99, 99, (width, width), dtype=torch.int8), requires_grad=False)
        self.bf16 = nn.Parameter(torch.randn(width, width, dtype=torch.bfloat16))
        self.f64 = nn.Parameter(torch.randn(width, width, dtype=torch.float64))
        self.f32 = nn.Parameter(torch.randn(width, width))
        self.register_buffer("index", torch.randperm(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.f32 + x @ self.f16.float() + x @ (self.i8.float() / 64)
        x = x + (x.double() @ self.f64).float() + (x.bfloat16() @ self.bf16).float()
        return torch.tanh(x[..., self.index])


class MixedDtypes(nn.Module):
    """Units of mixed dtypes."""

    def __init__(self, units: int = 4, width: int = 33) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dtypes(width) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Slow(nn.Module):
    """Wraps a unit's module: the compute stream is busy before its weights are read, and after."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner = inner
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delay_compute(x, self.seconds)
        first = self.inner(x)
        delay_compute(x, self.seconds)
        again = self.inner(x)
        # The weights are the same ones from the visit's start to its end, or the difference shows.
        return first + (again - first) * 3


def delay_compute(x: torch.Tensor, seconds: float) -> None:
    """Keep the stream that computes on ``x`` busy (about) so long."""
    if x.is_cuda:
        torch.cuda._sleep(int(seconds * 1.7e9))
    else:
        time.sleep(seconds)


class Convolutions(nn.Module):
    """Channels-last, transposed, strided, expanded and empty weights, one kind a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.channels_last = nn.Conv2d(8, 32, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = Weighted(torch.randn(48, 32).t())
        self.strided = Weighted(torch.randn(40, 48)[3:35:4, :])
        self.expanded = Weighted(torch.randn(8, 1).expand(8, 8))
        self.empty = Weighted(torch.empty(0, 12))
        self.plain = Weighted(torch.randn(8, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.channels_last(x).relu().mean((2, 3))
        x = self.transposed(x)
        return self.plain(self.expanded(self.strided.mirrored(x))) + self.empty.weight.sum()


class Weighted(nn.Module):
    """A unit of one raw parameter, whatever its strides."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.weight.data = weight

    def forward(self, x: torch.Tensor, transpose: bool = False) -> torch.Tensor:
        return F.linear(x, self.weight) if transpose else x @ self.weight

    def mirrored(self, x: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return self(x, transpose=True)


class Counting(nn.Module):
    """Buffers of every kind; forward counts its calls in one and moves an average in another."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(width, width // 2))
        self.register_buffer("offsets", torch.arange(width), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("missing", None)
        self.register_buffer("replaced", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.average.mul_(0.5).add_(x.detach().mean() * torch.ones_like(self.average))
        self.replaced = self.replaced + x.detach().mean()
        return self.lin(x) + self.offsets.float() + self.average.sum(1) * self.replaced + self.nothing.sum()


class Counters(nn.Module):
    """Units with state."""

    def __init__(self, units: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting(width) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
