"""Where weights come from when a shared store is filled. ``checkpoint`` has the source that reads safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from flextensor.store.filling import Reader, thread_count
from flextensor.store.layout import Layout, StoredTensor
from flextensor.store.mapping import buffer_of, storage_bytes
from flextensor.store.private import check_tensors, synchronize_sources, tensor_reader

_HASH_PIECE = 16 << 20


class WeightSource(Protocol):
    """Bytes of weights, and an identity that is the same exactly when the bytes are."""

    def check(self, layout: Layout) -> None:
        """Raise MissingWeightError unless the source has every weight; reads no weights."""

    def identity(self, layout: Layout) -> str:
        """A hash that two sources share only when they give the same bytes for this layout."""

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        """A reader of the tensor's bytes as they shall lie, and whether pieces of it may be read apart."""

    def check_unchanged(self) -> None:
        """Raise StoreError when what was read is no longer what ``identity`` described."""


class TensorSource:
    """A model in memory, on the CPU or a GPU. Identity is a hash of every byte."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def check(self, layout: Layout) -> None:
        check_tensors(layout, self._tensors)
        synchronize_sources(self._tensors)

    def identity(self, layout: Layout) -> str:
        rows = []
        with ThreadPoolExecutor(thread_count(), thread_name_prefix="store-hash") as pool:
            for stored in layout.tensors:
                raw = storage_bytes(self._tensors[stored.name])
                rows.append((stored.name, tree_hash(raw.numel(), _reader_of(raw), pool)))
        return hashlib.sha256(json.dumps(["tensors", rows]).encode()).hexdigest()

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        return tensor_reader(self._tensors[tensor.name]), True

    def check_unchanged(self) -> None:
        """Nothing to check: a change of a tensor in memory while we read it is the caller's own."""


def tree_hash(nbytes: int, read: Callable[[int, int], memoryview], pool: ThreadPoolExecutor) -> str:
    """SHA-256 over the SHA-256 of each 16 MiB, so that many cores hash one file. ``read(start, end)`` gives bytes."""

    def piece(start: int) -> bytes:
        return hashlib.sha256(read(start, min(start + _HASH_PIECE, nbytes))).digest()

    digests = b"".join(pool.map(piece, range(0, nbytes, _HASH_PIECE)))
    return hashlib.sha256(nbytes.to_bytes(8, "little") + digests).hexdigest()


def _reader_of(raw: torch.Tensor) -> Callable[[int, int], memoryview]:
    return lambda start, end: buffer_of(raw[start:end].cpu())
