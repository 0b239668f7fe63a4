"""A checksum as fast as memory, so that every byte can be checked while it is hot and again at any time.

The bytes are read as little-endian 64-bit words x[0], x[1], ... (the last one padded with zeros). The checksum is
the pair (sum of x[i], sum of (2i+1)*x[i]), both modulo 2^64. The factors are odd, hence invertible: a change of any
one word is always found. It guards against accidents, not against an adversary; identity is a cryptographic hash
(see ``sources``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_MASK = (1 << 64) - 1
_ROW = 32768
"""Words a row: with its factors it stays in a core's second-level cache."""

_FACTORS = np.arange(1, 2 * _ROW + 1, 2, dtype=np.uint64)


@dataclass(frozen=True)
class Checksum:
    """Both sums of a stretch of words, counted from the stretch's own start."""

    plain: int = 0
    weighted: int = 0

    def at(self, word: int) -> Checksum:
        """The same stretch when it begins ``word`` words into something larger."""
        return Checksum(self.plain, (self.weighted + 2 * word * self.plain) & _MASK)

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum((self.plain + other.plain) & _MASK, (self.weighted + other.weighted) & _MASK)

    def hex(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.plain:016x}{self.weighted:016x}"


def checksum(raw: torch.Tensor) -> Checksum:
    """The checksum of a uint8 host tensor. Releases the interpreter lock for the most part."""
    data = raw.numpy()
    words = data[: len(data) // 8 * 8].view(np.uint64)
    total = Checksum()
    rows = len(words) // _ROW
    if rows:
        block = words[: rows * _ROW].reshape(rows, _ROW)
        plain = block.sum(axis=1)
        weighted = block @ _FACTORS
        for row in range(rows):
            total += Checksum(int(plain[row]), int(weighted[row])).at(row * _ROW)
    rest = words[rows * _ROW :]
    if len(rest):
        weighted_rest = int(np.dot(rest, _FACTORS[: len(rest)]))
        total += Checksum(int(rest.sum()), weighted_rest).at(rows * _ROW)
    tail = data[len(words) * 8 :]
    if len(tail):
        last = int.from_bytes(tail.tobytes(), "little")
        total += Checksum(last, last).at(len(words))
    return total
