"""The warm-up trap: which weights a unit really reads, seen as the forward runs.

A TorchFunctionMode looks at the arguments of every torch function. A weight that is read inside a unit that does not
own it joins that unit; one that is read outside every unit, or changed by the forward, has to stay resident. While the
trap is set such reads get a copy on the device, so that the first forward is right already.

It works by tensor identity and therefore eagerly only: under torch.compile tensors are fakes, with other identities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WarmupTrap(TorchFunctionMode):
    """``index_of``: id(tensor) -> weight index. ``open_unit``: the unit being run, None outside. ``there``: whether a
    weight's bytes are on the device for it. ``fetch``: a copy of a weight on the device.

    reads: unit (None: outside every unit) -> weights read there, in the order of first reads.
    """

    def __init__(
        self,
        index_of: Mapping[int, int],
        open_unit: Callable[[], int | None],
        there: Callable[[int, int | None], bool],
        fetch: Callable[[int], torch.Tensor],
    ) -> None:
        super().__init__()
        self.reads: dict[int | None, dict[int, None]] = {}
        self._index_of = index_of
        self._open_unit = open_unit
        self._there = there
        self._fetch = fetch

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if _only_looks(func):
            return func(*args, **(kwargs or {}))
        args = tuple(self._seen(arg) for arg in args)
        kwargs = {key: self._seen(value) for key, value in kwargs.items()} if kwargs else {}
        return func(*args, **kwargs)

    def _seen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            index = self._index_of.get(id(value))
            if index is None:
                return value
            unit = self._open_unit()
            self.reads.setdefault(unit, {})[index] = None
            return value if self._there(index, unit) else self._fetch(index)
        if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)(self._seen(item) for item in value)
        return value


def _only_looks(func: Callable[..., Any]) -> bool:
    """True for what reads no element: sizes, places, attributes that are no views."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    return name == "__set__" or func in _LOOKS_ONLY


_VIEWS = {"T", "H", "mT", "mH", "real", "imag", "data"}

_LOOKS_ONLY = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.element_size,
    torch.Tensor.data_ptr,
    torch.Tensor.is_floating_point,
    torch.Tensor.storage_offset,
    torch.Tensor.is_contiguous,
    torch.Tensor.untyped_storage,
    torch.is_floating_point,
}
