"""Weights that change while a model is offloaded: seen at the next step, or made through the documented way.

Each weight's tensor object and version are known. A parameter that was replaced by one of the same form is taken under
management; anything else that would be lost at the next fetch is refused with the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flextensor.units import OffloadError, Weight

REMEDY = "change weights through `with manager.edit_weights(name) as tensors:`"


@dataclass
class WatchedWeight:
    """One place of a weight, and the tensor and version last seen there."""

    weight: Weight
    owner: nn.Module
    registry: Mapping[str, torch.Tensor | None]
    attribute: str
    tensor: torch.Tensor
    version: int


class WeightWatch:
    """Knows the tensors of the managed weights and sees at a step's start what the caller did to them."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._entries: list[WatchedWeight] = []
        for weight in weights:
            self._watch(weight)

    def _watch(self, weight: Weight) -> None:
        for owner, attribute in weight.places:
            registry: Mapping[str, torch.Tensor | None] = (
                owner._buffers if attribute in owner._buffers else owner._parameters
            )
            version = weight.tensor._version
            self._entries.append(WatchedWeight(weight, owner, registry, attribute, weight.tensor, version))

    def changed(self) -> list[WatchedWeight]:
        """Entries whose tensor is another object or was written in place since it was last looked at."""
        return [
            entry
            for entry in self._entries
            if entry.registry.get(entry.attribute) is not entry.tensor or entry.tensor._version != entry.version
        ]

    def replacement(self, entry: WatchedWeight) -> torch.Tensor | None:
        """The tensor that the caller put in the entry's place; None when it was only written in place.

        Raises OffloadError when it is of another form.
        """
        new = entry.registry.get(entry.attribute)
        if new is entry.tensor:
            return None
        old = entry.weight.tensor
        others = {id(other.registry.get(other.attribute)) for other in self._entries if other.weight is entry.weight}
        if len(others) > 1:
            raise OffloadError(
                f"weight {entry.weight.name!r} was replaced under one of its names ({', '.join(entry.weight.names)}) "
                "only, which unties it; put the same parameter in all its places, or call flextensor.release(), change "
                "the model, and offload it again"
            )
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            found = "nothing" if new is None else f"{tuple(new.shape)} {new.dtype}"
            raise OffloadError(
                f"weight {entry.weight.name!r} was replaced by {found}, but its place in the plan is for "
                f"{tuple(old.shape)} {old.dtype}; call flextensor.release(), change the model, and offload it again"
            )
        return new

    def adopt(self, entry: WatchedWeight, new: torch.Tensor) -> None:
        """Put ``new`` in every place of the weight and watch it from now on."""
        weight = entry.weight
        weight.tensor = new
        for owner, attribute in weight.places:
            registry: dict[str, Any] = owner._buffers if attribute in owner._buffers else owner._parameters
            registry[attribute] = new
        self._entries = [other for other in self._entries if other.weight is not weight]
        self._watch(weight)

    def accept(self, weight: Weight) -> None:
        """What was written to the weight is known."""
        for entry in self._entries:
            if entry.weight is weight:
                entry.version = entry.tensor._version
