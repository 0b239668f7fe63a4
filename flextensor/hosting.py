"""Where each of a model's tensors lives: units' weights in the host store, everything else on the device.

``Hosting`` opens the store (private, adopted in place, or the node's shared one), points the weights at it, moves
unmatched weights and buffers to the device, and undoes all that at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flextensor.compile.ahead import beside_compiler_import
from flextensor.config import ConfigError, OffloadConfig
from flextensor.planner.plan import BudgetError
from flextensor.runtime.device import Device
from flextensor.store import (
    HostStore,
    Scrubber,
    StoreProgress,
    TensorSource,
    UnitSpec,
    WeightSource,
    WeightSpec,
    adopt_store,
    is_dense,
    private_store,
    shared_store,
)
from flextensor.store.numa import gpu_node
from flextensor.store.registrar import CudaRegistrar
from flextensor.units import LOOSE_UNIT, ROOT_UNIT, OffloadError, Selection, Weight

logger = logging.getLogger(__name__)


class Hosting:
    """managed: the units' weights, in the store's order. other_bytes: device memory of everything else of the model.
    compiled: units will be compiled."""

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        config: OffloadConfig,
        device: Device,
        *,
        source: WeightSource | None = None,
        progress: Callable[[StoreProgress], None] | None = None,
        compiled: bool = False,
    ) -> None:
        self.other_bytes = 0
        self._selection = selection
        self._device = device
        owned = [w for unit in selection.units for w in unit.weights]
        stored = list(dict.fromkeys(w for w in (*owned, *selection.loose) if _storable(w)))
        in_store = set(stored)
        self.unstored = list(dict.fromkeys(w for w in (*owned, *selection.loose) if w not in in_store))
        """Weights of units that no store can hold as they are (holes, overlaps, tensor subclasses): resident."""
        self.unmatched = selection.unmatched
        """Weights of no unit."""
        self.others = [*self.unstored, *selection.unmatched]
        """All weights that lie on the device whatever the plan."""
        for weight in (*stored, *self.others):
            if weight.tensor.is_inference():
                _put_in_place(weight, out_of_inference_mode(weight.tensor))
        for module, attribute, _ in selection.buffers:
            buffer = module._buffers[attribute]
            if buffer is not None and buffer.is_inference():
                module._buffers[attribute] = out_of_inference_mode(buffer)
        for unit in selection.units:
            unit.weights = [weight for weight in unit.weights if _storable(weight)]
        units = [UnitSpec(unit.name, tuple(_spec(w) for w in unit.weights)) for unit in selection.units if unit.weights]
        if selection.loose:
            units.append(UnitSpec(LOOSE_UNIT, tuple(_spec(w) for w in selection.loose if w in in_store)))
        if source is not None:
            from_source = [w for w in self.others if w.tensor.is_meta and w.nbytes]
            units.append(UnitSpec(ROOT_UNIT, tuple(_spec(w) for w in from_source)))
        _check_settings(config, source)
        self.store = _open_store(units, stored, config, device, source=source, progress=progress, compiled=compiled)
        self._scrubber = Scrubber(self.store, share=config.shm_scrub_share) if config.shm_scrub_share else None
        by_name = {weight.name: weight for weight in stored}
        self.managed = [by_name[t.name] for t in self.store.layout.tensors if t.name in by_name]
        self._store_storages: set[int] = set()
        if source is not None:
            for weight in (*stored, *self.others):
                _leave_meta(weight, self.store)
            self._store_storages = {
                self.store.tensor(t.name).untyped_storage().data_ptr() for t in self.store.layout.tensors
            }
        elif config.shm_enabled:
            for weight in stored:
                weight.tensor.data = self.store.tensor(weight.name)
        self._move_others()
        if self._scrubber is not None:
            self._scrubber.start()

    def streams(self, weights: Iterable[str]) -> None:
        """The plan in force streams these: with ``shm_scrub_share`` they are what is checked all the while."""
        if self._scrubber is not None:
            self._scrubber.follow(weights)

    # ---- what is not streamed

    def _move_others(self) -> None:
        """Unmatched weights and buffers to the device; tensors in one storage stay in one."""
        moved: dict[int, torch.Tensor] = {}
        try:
            for tensor in self._other_tensors():
                tensor.data = self._to_device(tensor, moved)
        except torch.OutOfMemoryError as error:
            total = sum(_storage_bytes(self._other_tensors()).values())
            self.give_back(self._device)
            raise BudgetError(
                f"weights of no unit take {total} bytes, more than {self._device.name} has free: match more modules "
                f"with include_patterns ({error})",
                total,
            ) from None

    def _other_tensors(self) -> list[torch.Tensor]:
        weights = [weight.tensor for weight in self.others]
        buffers = [module._buffers[attribute] for module, attribute, _ in self._selection.buffers]
        return [*weights, *(buffer for buffer in buffers if buffer is not None)]

    def _to_device(self, tensor: torch.Tensor, moved: dict[int, torch.Tensor]) -> torch.Tensor:
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            return tensor.detach().to(self._device.torch_device)
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if not storage.nbytes():
            return tensor.detach().to(self._device.torch_device)
        if storage.data_ptr() in self._store_storages:
            return self._out_of_store(tensor)
        if key not in moved:
            with torch.inference_mode(False):
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                moved[key] = self._device.allocate(storage.nbytes())
                moved[key].copy_(whole)
            self.other_bytes += storage.nbytes()
        with torch.inference_mode(False):
            typed = moved[key][: storage.nbytes() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
            return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _out_of_store(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's own bytes alone: its storage is the whole store."""
        with torch.inference_mode(False):
            source = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)
            own = self._device.allocate(source.numel())
            own.copy_(source)
            self.other_bytes += source.numel()
            return own.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    # ---- state_dict and the end

    def install_state_dict_hooks(self) -> list[Callable[[], None]]:
        """``state_dict()`` gives real weights, ``load_state_dict()`` is refused; returns what removes the hooks."""
        by_owner: dict[nn.Module, dict[str, Weight]] = {}
        for weight in self.managed:
            for owner, attribute in weight.places:
                by_owner.setdefault(owner, {})[attribute] = weight
        removers = []
        for owner, weights in by_owner.items():
            removers.append(owner.register_state_dict_post_hook(self._fill_state_dict(weights)).remove)
            removers.append(owner.register_load_state_dict_pre_hook(_refuse_load).remove)
        return removers

    def _fill_state_dict(self, weights: Mapping[str, Weight]) -> Callable[..., None]:
        def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for attribute, weight in weights.items():
                now = module._buffers.get(attribute, module._parameters.get(attribute))
                if prefix + attribute in state and now is weight.tensor:  # else it was replaced: by a real tensor
                    state[prefix + attribute] = self.current_value(weight)

        return hook

    def current_value(self, weight: Weight) -> torch.Tensor:
        """A copy of the weight in host memory, as the model would read it now."""
        if weight.true_on_device:
            return weight.tensor.detach().to("cpu", copy=True)
        return self.store.tensor(weight.name).detach().clone()

    def give_back(self, device: Device, *, keep_weights: bool = True) -> None:
        """All tensors to plain host memory, the store closed. Waits for the device, which may still read the store.

        Without ``keep_weights`` the managed ones end empty: a copy of a shared store's weights in each process is more
        host memory than the machine may have.
        """
        device.synchronize()
        if self._scrubber is not None:
            self._scrubber.stop()  # before the weights are copied: they are many bytes to read
        for weight in self.managed:
            if not keep_weights:
                with torch.inference_mode(False):
                    weight.tensor.data = torch.empty(0, dtype=weight.tensor.dtype)
                continue
            value = self.store.tensor(weight.name)
            weight.tensor.data = value.clone() if self.store.shared else value
        moved: dict[int, torch.Tensor] = {}
        for tensor in self._other_tensors():
            tensor.data = _to_plain_host(tensor, moved)
        self.other_bytes = 0
        self.store.close()
        device.release_cached()


def _check_settings(config: OffloadConfig, source: WeightSource | None) -> None:
    if config.shm_keep and config.shm_backing == "memfd":
        raise ConfigError("shm_keep = True needs shm_backing = 'file': a memfd goes with its last user")
    if not config.shm_enabled and source is None:
        for setting, value in (("shm_keep", config.shm_keep), ("shm_scrub_share", config.shm_scrub_share)):
            if value:
                raise ConfigError(f"{setting} = {value} is of the shared store: set shm_enabled = True")


def _open_store(
    units: Sequence[UnitSpec],
    stored: Iterable[Weight],
    config: OffloadConfig,
    device: Device,
    *,
    source: WeightSource | None,
    progress: Callable[[StoreProgress], None] | None,
    compiled: bool,
) -> HostStore:
    tensors = {weight.name: weight.tensor for weight in stored}
    on_gpu = device.torch_device.type == "cuda"
    # Beside the filling and done with it, not beside the first steps: what they measure would be slower, and a CUDA
    # graph of another model must not be captured meanwhile. It takes 0.03 s a GiB.
    registrar = CudaRegistrar(device.torch_device) if config.pinned_memory and on_gpu else None
    if config.shm_enabled or source is not None:
        return shared_store(
            units,
            source or TensorSource(tensors),
            namespace=config.shm_namespace,
            directory=config.shm_dir,
            wait_timeout=config.shm_wait_timeout,
            keep=config.shm_keep,
            backing=config.shm_backing,
            progress=progress,
            registrar=registrar,
        )
    if config.transfer_mode == "raw_block_transfer":
        adopted = adopt_store(units, {name: _on_host(tensor) for name, tensor in tensors.items()})
        if registrar is not None:
            adopted.pin_with(registrar)
        return adopted

    node = gpu_node(device.torch_device) if on_gpu else None

    def pack(go_on: Callable[[], None]) -> HostStore:
        def consume(name: str, view: torch.Tensor) -> None:
            go_on()
            tensors[name].data = view

        return private_store(units, tensors, consume=consume, numa_node=node, registrar=registrar)

    return beside_compiler_import(pack) if compiled and on_gpu else pack(lambda: None)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        tensor.data = tensor.data.cpu()
    return tensor


def _storable(weight: Weight) -> bool:
    tensor = weight.tensor
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and weight.nbytes > 0
        and not tensor.is_conj()
        and not tensor.is_neg()
        and is_dense(tuple(tensor.shape), tuple(tensor.stride()))
        and weight.resident_reason != "shares memory with another weight"
    )


def _spec(weight: Weight) -> WeightSpec:
    tensor = weight.tensor
    return WeightSpec(weight.name, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _leave_meta(weight: Weight, store: HostStore) -> None:
    """A real parameter in every place of one that was on the meta device."""
    if not weight.tensor.is_meta:
        return
    with torch.inference_mode(False):
        data = (
            store.tensor(weight.name) if weight.nbytes else torch.empty(weight.tensor.shape, dtype=weight.tensor.dtype)
        )
    _put_in_place(weight, data)


def out_of_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor over the same memory as one made in inference mode, which has no version to watch."""
    with torch.inference_mode(False):
        ordinary = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return ordinary.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _put_in_place(weight: Weight, data: torch.Tensor) -> None:
    with torch.inference_mode(False):
        weight.tensor = data if weight.is_buffer else nn.Parameter(data, requires_grad=False)
    for owner, attribute in weight.places:
        registry: dict[str, Any] = owner._buffers if attribute in owner._buffers else owner._parameters
        registry[attribute] = weight.tensor


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _to_plain_host(tensor: torch.Tensor, moved: dict[int, torch.Tensor]) -> torch.Tensor:
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return tensor.detach().cpu()
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        if storage.data_ptr() not in moved:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            moved[storage.data_ptr()] = torch.empty(storage.nbytes(), dtype=torch.uint8).copy_(whole)
        whole = moved[storage.data_ptr()]
        typed = whole[: storage.nbytes() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _refuse_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    raise OffloadError(
        f"load_state_dict() on an offloaded model would write to slots (at {prefix or 'the root'}); change weights "
        "through manager.edit_weights(), or release(), load, and offload again"
    )
