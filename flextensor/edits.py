"""Weights that change while a model is offloaded: seen at the next step, or made through the documented way.

Each weight's tensor object and version are known. A parameter that was replaced by one of the same form is taken under
management; anything else that would be lost at the next fetch is refused with the remedy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flextensor.execution import Execution
from flextensor.hosting import Hosting, out_of_inference_mode
from flextensor.runtime.device import Device
from flextensor.store import HostStore
from flextensor.units import CHANGED_BY_FORWARD, OffloadError, Unit, Weight

logger = logging.getLogger(__name__)

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
        return _ordinary(new) if new.is_inference() else new

    def adopt(self, entry: WatchedWeight, new: torch.Tensor) -> None:
        """Put ``new`` in every place of the weight and watch it from now on."""
        weight = entry.weight
        weight.tensor, weight.in_slot = new, False
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
                # Its bytes first: a tensor that is known already would not be looked at again after an error.
                on_device = weight.resident_reason == CHANGED_BY_FORWARD and new.device == self._device
                if not on_device:
                    self._store.make_private(weight.name).copy_(new.detach())
                self._adopt(entry, new)
                if on_device:
                    continue
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

    def unseen(self, traced: Set[int]) -> str:
        """The name of a weight that ``look`` would take up or refuse; empty when there is none. Changes nothing."""
        for entry in self._watch.changed():
            weight = entry.weight
            replaced = entry.registry.get(entry.attribute) is not entry.tensor
            known = weight.resident_reason == CHANGED_BY_FORWARD or (
                not replaced and any(weight in self._pieces[unit].weights for unit in traced)
            )
            if not known:
                return weight.name
        return ""

    def keep_what_forward_changed(self, unit: int) -> None:
        """A weight that the unit's forward writes to or replaces is state: it stays on the device from now on."""
        for entry in self._watch.changed():
            weight = entry.weight
            if weight not in self._pieces[unit].weights:
                continue
            new = self._watch.replacement(entry)
            self._store.make_private(weight.name).copy_((weight.tensor if new is None else new).detach())
            if new is not None:
                self._adopt(entry, new)
            weight.resident_reason = weight.resident_reason or CHANGED_BY_FORWARD
            self._watch.accept(weight)

    def save_state(self) -> None:
        """What the forward itself changes has its truth on the device; the host copy follows."""
        for weight in self._weights:
            if weight.true_on_device:
                self._store.make_private(weight.name).copy_(weight.tensor.detach())

    def _adopt(self, entry: WatchedWeight, new: torch.Tensor) -> None:
        """The weight's tensor object is ``new`` from now on."""
        index = self._index_by_id.pop(id(entry.weight.tensor), None)
        self._watch.adopt(entry, new)
        if index is not None:
            self._index_by_id[id(new)] = index


class Editing:
    """The part of a manager through which weights are changed."""

    device: Device
    hosting: Hosting
    _execution: Execution
    _edits: WeightEdits
    _weights: Sequence[Weight]
    _lock: threading.RLock
    _unloaded: set[int]
    """Weights whose host bytes have changed, and which are not known to be bound anew."""
    _in_root: bool
    _open_units: list[int]
    _traced: set[int]

    def _take_up_edits(self) -> None:
        edited = sorted(self._unloaded)
        try:
            self._edits.look(edited, self._execution.loader.plan.resident, self._traced)
        finally:  # what was taken up before an error is in force all the same
            if edited:
                self._reload(edited)

    def _reload(self, indexes: Sequence[int]) -> None:
        """Sources have changed: bind anew, copy resident ones again; at the next step, if a Ctrl-C comes in between."""
        self._unloaded.update(indexes)
        self._execution.reload(sorted(self._unloaded))
        self._unloaded.clear()
        logger.info("took up %d edited weights", len(indexes))

    @contextlib.contextmanager
    def edit_weights(self, *names: str) -> Iterator[dict[str, torch.Tensor]]:
        """Change weights: ``with manager.edit_weights("layers.0.up.weight") as tensors:`` and write to
        ``tensors[name]`` (host memory, private to this process) in place. In force from the next call on; what was
        written before an exception inside the block is, too.

        Raises OffloadError for a name that is not managed, and inside a forward.
        """
        with self._lock:
            indexes = self._editable(names)
            self._unloaded.update(indexes)
            try:
                yield {
                    name: self.hosting.store.make_private(self._weights[at].name)
                    for name, at in zip(names, indexes, strict=True)
                }
            finally:
                self._reload(indexes)

    def restore_weights(self, *names: str) -> None:
        """Undo all edits of these weights: the store's values are in force from the next call on."""
        with self._lock:
            indexes = self._editable(names)
            self._unloaded.update(indexes)
            for at in indexes:
                self.hosting.store.discard_private(self._weights[at].name)
            self._reload(indexes)

    def _refuse_edits_in_a_capture(self) -> None:
        changed = self._edits.unseen(self._traced)
        if changed:
            raise OffloadError(
                f"weight {changed!r} was changed since the last call, and what a CUDA graph captures must not change "
                "while it is captured: call the model once after the change, then capture"
            )

    def _editable(self, names: Sequence[str]) -> list[int]:
        """Indexes of the weights of these names, with everything done to them so far in the host store."""
        if self._in_root or self._open_units:
            raise OffloadError("weights cannot be edited inside a forward: edit them between two calls of the model")
        if self.device.is_capturing():
            raise OffloadError(
                f"weights cannot be edited while a CUDA graph is captured ({', '.join(names)}): edit them before the "
                "capture; a graph captured before an edit is refused at its replay"
            )
        indexes = [self._edits.index_of(name) for name in names]
        self._take_up_edits()
        self.device.synchronize()
        self._edits.save_state()
        return indexes


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor, or parameter, that has a version to watch: one made in inference mode has none."""
    ordinary = out_of_inference_mode(tensor)
    return nn.Parameter(ordinary, requires_grad=False) if isinstance(tensor, nn.Parameter) else ordinary
