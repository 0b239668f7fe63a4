"""A checksum as fast as memory, so that every byte can be checked while it is hot and again at any time.

The bytes are read as little-endian 64-bit words in rows of 2048 (the last row padded with zeros), x[i][j]. The checksum
is three sums modulo 2^64: of all words, of (2j+1)*x[i][j], and of (2i+1)*x[i][j]. The factors are odd, hence
invertible: a change of any one word changes all three. Only sums over columns and rows are multiplied, so it costs two
additions a word. It guards against accidents, not against an adversary; identity is a cryptographic hash (see
``sources``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_MASK = (1 << 64) - 1
_WIDTH = 2048
ROW_BYTES = 8 * _WIDTH
"""What is summed apart and added together must begin at a multiple of this."""

_ODD = np.arange(1, 2 * _WIDTH + 1, 2, dtype=np.uint64)


@dataclass(frozen=True)
class Checksum:
    """The three sums of a stretch of bytes, rows counted from its own start."""

    plain: int = 0
    columns: int = 0
    rows: int = 0

    def at(self, start: int) -> Checksum:
        """The same stretch when it begins ``start`` bytes (whole rows) into something larger."""
        if start % ROW_BYTES:
            raise ValueError(f"a stretch cannot begin at byte {start}, which is no multiple of {ROW_BYTES}")
        return Checksum(self.plain, self.columns, (self.rows + 2 * (start // ROW_BYTES) * self.plain) & _MASK)

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum(
            (self.plain + other.plain) & _MASK,
            (self.columns + other.columns) & _MASK,
            (self.rows + other.rows) & _MASK,
        )

    def hex(self) -> str:
        """48 hexadecimal digits."""
        return f"{self.plain:016x}{self.columns:016x}{self.rows:016x}"


def checksum(raw: torch.Tensor) -> Checksum:
    """The checksum of a uint8 host tensor. Releases the interpreter lock for the most part."""
    data = raw.numpy()
    whole = len(data) // ROW_BYTES * ROW_BYTES
    total = _of_rows(data[:whole].view(np.uint64).reshape(-1, _WIDTH)) if whole else Checksum()
    if whole < len(data):
        last = np.zeros(ROW_BYTES, dtype=np.uint8)
        last[: len(data) - whole] = data[whole:]
        total += _of_rows(last.view(np.uint64).reshape(1, _WIDTH)).at(whole)
    return total


def _of_rows(block: np.ndarray) -> Checksum:
    columns = block.sum(axis=0)
    rows = block.sum(axis=1)
    factors = np.arange(1, 2 * len(rows) + 1, 2, dtype=np.uint64)
    return Checksum(int(rows.sum()), int((columns * _ODD).sum()), int((rows * factors).sum()))
