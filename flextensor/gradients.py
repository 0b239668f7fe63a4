"""Gradients through offloaded units are refused: by the time of a backward pass the weights have left the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from flextensor.units import OffloadError, Unit

_PLAIN = (type(None), bool, int, float, str)


def refuse_gradients(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise OffloadError when a call of the unit, with gradients enabled, would record one. On the path of every visit:
    it looks into containers only."""
    tracked = [weight.name for weight in unit.weights if weight.tensor.requires_grad]
    if tracked or _any_requires_grad(args) or (kwargs and _any_requires_grad(kwargs.values())):
        what = f"weight {tracked[0]!r}" if tracked else "an input"
        raise OffloadError(
            f"unit {unit.name!r} was called with gradients enabled and {what} requires one; weights are gone from the "
            "device by the time of a backward pass: use torch.no_grad(), or model.requires_grad_(False)"
        )


def _any_requires_grad(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            leaves: Iterable[Any] = (value,)
        elif isinstance(value, _PLAIN):
            continue
        else:
            leaves = tree_leaves(value)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                return True
    return False
