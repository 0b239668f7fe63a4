"""Weights that change while a model is offloaded: seen at the next step, or made through the documented way.

Each weight's tensor object and version are known. A parameter that was replaced by one of the same form is taken under
management; anything else that would be lost at the next fetch is refused with the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flextensor.store import HostStore
from flextensor.units import CHANGED_BY_FORWARD, OffloadError, Unit, Weight

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


class WeightEdits:
    """Takes up what was done to the weights. ``index_by_id``: id(tensor) -> weight index, kept right."""

    def __init__(
        self,
        weights: Sequence[Weight],
        pieces: Sequence[Unit],
        store: HostStore,
        device: torch.device,
        index_by_id: dict[int, int],
    ) -> None:
        self._weights, self._pieces, self._store, self._device = weights, pieces, store, device
        self._index_by_id = index_by_id
        self._watch = WeightWatch(weights)

    def index_of(self, name: str) -> int:
        """The index of the weight that has this name among its names. Raises OffloadError when none has."""
        for at, weight in enumerate(self._weights):
            if name in weight.names:
                return at
        raise OffloadError(f"no managed weight named {name!r}")

    def look(self, edited: list[int], resident: Set[int], traced: Set[int]) -> None:
        """Add to ``edited`` the indexes of weights whose host bytes have changed since the last look.

        ``resident``: weights on the device for good. ``traced``: units that ran inside somebody's graph, whose boundary
        ops say that they write to the weights, which they do not.
        Raises OffloadError for a change that is lost or of another form; what was found before it is in ``edited``.
        """
        for entry in self._watch.changed():
            weight = entry.weight
            at = self.index_of(weight.name)
            new = self._watch.replacement(entry)
            if new is not None:
                self._adopt(entry, new)
                if weight.resident_reason == CHANGED_BY_FORWARD and new.device == self._device:
                    continue
                self._store.make_private(weight.name).copy_(new.detach())
            elif weight.resident_reason == CHANGED_BY_FORWARD or any(
                weight in self._pieces[unit].weights for unit in traced
            ):
                self._watch.accept(weight)
                continue
            elif at in resident:
                self._store.make_private(weight.name).copy_(weight.tensor.detach())
                self._watch.accept(weight)
            else:
                self._watch.accept(weight)
                edited.append(at)  # the slot it went to may hold another weight's bytes
                raise OffloadError(
                    f"weight {weight.name!r} is streamed and was written in place; the change went to a slot and is "
                    f"lost: {REMEDY}"
                )
            edited.append(at)

    def keep_what_forward_changed(self, unit: int) -> None:
        """A weight that the unit's forward writes to or replaces is state: it stays on the device from now on."""
        for entry in self._watch.changed():
            weight = entry.weight
            if weight not in self._pieces[unit].weights:
                continue
            new = self._watch.replacement(entry)
            if new is not None:
                self._adopt(entry, new)
            self._store.make_private(weight.name).copy_(weight.tensor.detach())
            weight.resident_reason = weight.resident_reason or CHANGED_BY_FORWARD
            self._watch.accept(weight)

    def save_state(self) -> None:
        """What the forward itself changes has its truth on the device; the host copy follows."""
        for weight in self._weights:
            if weight.resident_reason == CHANGED_BY_FORWARD:
                self._store.make_private(weight.name).copy_(weight.tensor.detach())

    def _adopt(self, entry: WatchedWeight, new: torch.Tensor) -> None:
        """The weight's tensor object is ``new`` from now on."""
        index = self._index_by_id.pop(id(entry.weight.tensor), None)
        self._watch.adopt(entry, new)
        if index is not None:
            self._index_by_id[id(new)] = index
