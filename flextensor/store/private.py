"""Stores of one process: packed into one mapping, or adopted where the tensors lie."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from flextensor.store.errors import MissingWeightError, StoreSpaceError
from flextensor.store.filling import Reader, fill, move
from flextensor.store.host_store import AdoptedStore, HostStore, MappedStore
from flextensor.store.layout import Layout, StoredTensor, UnitSpec, WeightSpec, make_layout, make_scattered_layout
from flextensor.store.limits import memory_limits
from flextensor.store.mapping import map_anonymous, storage_bytes
from flextensor.store.numa import place_private, read_topology
from flextensor.store.pin_beside import PinBesideFilling
from flextensor.store.registrar import Registrar


def private_store(
    units: Iterable[UnitSpec],
    tensors: Mapping[str, torch.Tensor],
    *,
    consume: Callable[[str, torch.Tensor], None] | None = None,
    checksums: bool = False,
    numa_node: int | None = None,
    registrar: Registrar | None = None,
) -> HostStore:
    """Pack the tensors (on the CPU or a GPU) of these units into one mapping of this process.

    consume(name, view): called in this thread after each tensor is in, so that the caller can point his parameter at
        the store's view and drop the original. Then host memory never holds more than one copy of the weights and
        about 256 MiB. The mapping ``tensors`` is asked for each tensor once, late.

    checksums: take them while filling, for ``HostStore.verify``.
    numa_node: prefer memory of this node (the GPU's, see ``numa.gpu_node``) where there are several; None: spread.
    registrar: pin the store with it, chunk by chunk beside the filling; done when this returns, as ``HostStore.pin``
        does it. None: it stays pageable until that is called.

    Raises ValueError (see ``make_layout``), MissingWeightError, StoreSpaceError when memory cannot hold the weights.
    """
    layout = make_layout(units)
    check_tensors(layout, tensors)
    on_host = sum(t.nbytes for t in layout.tensors if tensors[t.name].device.type == "cpu")
    limits = memory_limits()
    extra = layout.nbytes - (on_host if consume else 0)
    if extra > limits.available:
        raise StoreSpaceError(
            f"the host store needs {extra} bytes of memory, {limits.source} has {limits.available} free; "
            "free memory, use a smaller dtype, or raw_block_transfer, which makes no packed copy",
            extra,
            limits.available,
        )
    memory = map_anonymous(layout.nbytes)
    placed = place_private(memory, numa_node, read_topology())
    pinning = PinBesideFilling(layout, memory, registrar, read_only=False) if registrar is not None else None
    store = MappedStore(layout, f"private-{layout.fingerprint}", memory, pinning=pinning)
    started = time.perf_counter()
    synchronize_sources(tensors)
    found: dict[str, str] = {}
    try:
        # Closed, so that no thread writes any more when an error of ours leaves here.
        filling = fill(_open_all(layout, tensors), memory, checksums=checksums, map_pages=False)
        with contextlib.closing(filling) as filled:
            for tensor, value in filled:
                found[tensor.name] = value.hex()
                if pinning is not None:
                    pinning.filled(tensor)
                if consume is not None:
                    consume(tensor.name, store.tensor(tensor.name))
        store.numa = placed
        store.checksums = found if checksums else None
        store.times.fill = time.perf_counter() - started
        if registrar is not None:
            store.pin_with(registrar)
    except BaseException:
        store.close()
        raise
    return store


def adopt_store(units: Iterable[UnitSpec], tensors: Mapping[str, torch.Tensor]) -> HostStore:
    """A store of host tensors that stay as they lie: no copy is made, ``pin`` registers each in place.

    Offsets are virtual: no run of bytes spans two tensors. The store keeps the tensors alive.

    Raises ValueError for tensors on a GPU and as ``make_layout`` does, MissingWeightError.
    """
    layout = make_scattered_layout(units)
    check_tensors(layout, tensors)
    for tensor in layout.tensors:
        if tensors[tensor.name].device.type != "cpu":
            raise ValueError(
                f"weight {tensor.name!r} is on {tensors[tensor.name].device}; a store can adopt host tensors only: "
                "move it to the CPU or use allocation_block_transfer"
            )
    raw = {tensor.name: storage_bytes(tensors[tensor.name]) for tensor in layout.tensors}
    return AdoptedStore(layout, f"adopted-{layout.fingerprint}", raw)


def check_tensors(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise MissingWeightError unless each weight is there with its dtype, shape and stride."""
    for stored in layout.tensors:
        if stored.name not in tensors:
            raise MissingWeightError(f"weight {stored.name!r} of unit {stored.unit!r} is not among the tensors given")
        found = WeightSpec.of(stored.name, tensors[stored.name])
        wanted = WeightSpec(stored.name, stored.dtype, stored.shape, stored.stride)
        if found != wanted:
            raise MissingWeightError(f"weight {stored.name!r} is {found}, the units say {wanted}")


def synchronize_sources(tensors: Mapping[str, torch.Tensor]) -> None:
    """Wait for the work that produces GPU tensors: threads that read them use other streams."""
    for device in {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def tensor_reader(source: torch.Tensor) -> Reader:
    """A reader of a dense tensor's bytes as they lie."""
    raw = storage_bytes(source)

    def read(target: torch.Tensor, start: int) -> None:
        move(target, raw[start : start + target.numel()])

    return read


def _open_all(
    layout: Layout, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[StoredTensor, Callable[[], tuple[Reader, bool]]]]:
    for stored in layout.tensors:

        def open_source(name: str = stored.name) -> tuple[Reader, bool]:
            return tensor_reader(tensors[name]), True

        yield stored, open_source
