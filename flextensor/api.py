"""The functions of ``import flextensor``: one call each to the named manager, and the way in, ``offload``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flextensor import registry
from flextensor.compile.detect import first_compiled
from flextensor.config import ConfigError, OffloadConfig, load_config, load_config_from_env
from flextensor.hosting import Hosting
from flextensor.manager import OffloadManager
from flextensor.modules import is_offloaded, restore_module
from flextensor.profile import ProfileMismatch
from flextensor.registry import DEFAULT_NAME, get_offload_manager
from flextensor.runtime.device import Device
from flextensor.runtime.timing import VisitSummary
from flextensor.store import StoreProgress, WeightSource
from flextensor.units import OffloadError, Selection, select

logger = logging.getLogger(__name__)


def make_device(config: OffloadConfig) -> Device:
    """The device that ``config.gpu_device`` names. Raises ConfigError when it does not exist here."""
    wanted = config.gpu_device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "host"
    if wanted == "host":
        from flextensor.runtime.host import HostDevice

        return HostDevice(
            memory_bytes=config.host_memory_bytes, link_bytes_per_second=config.host_link_bytes_per_second
        )
    from flextensor.runtime.cuda import CudaDevice

    text = str(wanted)
    index = text.removeprefix("cuda").removeprefix(":")
    if not (text.isdigit() or text == "cuda" or (text.startswith("cuda:") and index.isdigit())):
        raise ConfigError(f"gpu_device = {wanted!r}: expected 'auto', 'host', 'cuda', 'cuda:N' or an index")
    try:
        return CudaDevice(int(index) if index else None, external_events=config.offload_timing == "cuda_graph")
    except RuntimeError as error:
        raise ConfigError(f"gpu_device = {wanted!r}: {error}") from None


def offload(
    model: nn.Module,
    config: OffloadConfig | None = None,
    compile_fn: Callable[[nn.Module], nn.Module] | None = None,
    *,
    name: str = DEFAULT_NAME,
    source: WeightSource | None = None,
    progress: Callable[[StoreProgress], None] | None = None,
) -> nn.Module:
    """Make ``model`` run on a device that holds only part of its weights; returns the same object.

    config: None: ``load_config()``. One made in code still takes ``FT_EXTERNAL_COMPILE`` where it leaves that open.
    compile_fn: applied to each unit, which are ``offload_units()`` and ``resident_units()`` together since replans move
        them from one to the other (``torch.compile`` or any module -> module callable).
    name: of the manager; several models can be offloaded at once under different names.
    source: where the weights come from when the model's parameters are on the meta device.
    progress: told how far the shared store is while it is filled, by this process or another.

    Raises OffloadError for a compiled or already offloaded model, patterns that match nothing and weights that cannot
    follow; ConfigError for settings that cannot be used; BudgetError when the budget is below the least that works.
    """
    config = load_config() if config is None else _with_environment(config)
    _refuse_compiled(model)
    if any(is_offloaded(module) for module in model.modules()):
        raise OffloadError("the model is offloaded already; call flextensor.release() first")
    device = make_device(config)
    if not config.enabled:
        return model.to(device.torch_device)
    if name in registry.names():
        raise OffloadError(f"there is an offload manager named {name!r} already; pass another name=, or release() it")
    if compile_fn is not None and config.external_compile:
        raise ConfigError("external_compile = True and compile_fn exclude each other: who compiles?")
    if config.stream_granularity == "piece" and (compile_fn is not None or config.external_compile):
        raise ConfigError(
            "stream_granularity = 'piece' releases weights inside a unit and works eagerly only: leave out "
            "compilation, or set 'unit'"
        )
    selection = select(model, config)
    if not selection.units and not selection.loose:
        raise OffloadError(
            f"include_patterns = {list(config.include_patterns)} names no module with weights of its own to stream: "
            "name the modules to offload, for example ['model.layers.*'], or mark regions with offload_block()"
        )
    _refuse_weights_of_others(selection)
    hosting: Hosting | None = None
    try:
        hosting = Hosting(
            model,
            selection,
            config,
            device,
            source=source,
            progress=progress,
            compiled=compile_fn is not None or config.external_compile,
        )
        manager = OffloadManager(model, selection, hosting, device, config, name=name, compile_fn=compile_fn)
    except BaseException:
        for module in model.modules():
            restore_module(module)
        if hosting is not None:
            hosting.give_back(device)
        device.close()
        raise
    registry.add(manager)
    _load_stored_profile(manager)
    if selection.unmatched:
        nbytes = sum(weight.nbytes for weight in selection.unmatched)
        logger.info("%d weights (%d bytes) are in no unit and stay on the device", len(selection.unmatched), nbytes)
    return model


def _with_environment(config: OffloadConfig) -> OffloadConfig:
    """A configuration made in code takes ``FT_EXTERNAL_COMPILE`` where it leaves that open; other variables were for
    ``load_config``, and are told of."""
    given = {key: value for key, value in load_config_from_env().items() if key not in config.model_fields_set}
    if "external_compile" in given:
        config = config.updated(external_compile=given.pop("external_compile"))
    if given:
        logger.warning(
            "not used, since offload() was given a configuration: %s; make that with flextensor.load_config(...), "
            "which reads the environment",
            ", ".join(f"FT_{key.upper()}={value}" for key, value in sorted(given.items())),
        )
    return config


def _refuse_weights_of_others(selection: Selection) -> None:
    owned = [weight for unit in selection.units for weight in unit.weights]
    weights = [*owned, *selection.unmatched, *selection.loose]
    for other in map(get_offload_manager, registry.names()):
        taken = {id(weight.tensor) for weight in (*other.hosting.managed, *other.hosting.others)}
        for weight in weights:
            if id(weight.tensor) in taken:
                raise OffloadError(
                    f"weight {weight.name!r} belongs to the model offloaded as {other.name!r}, too, and cannot be in "
                    "two places: offload the two models as one (a module that holds both), or copy the weight"
                )


def _load_stored_profile(manager: OffloadManager) -> None:
    """Start from what ``profile_storage_dir`` has; a file that does not fit is replaced by a new profile."""
    stored = manager.storage_path()
    if stored is None or not stored.exists():
        return
    try:
        manager.load_profile(stored)
    except ProfileMismatch as error:
        logger.warning("the stored profile is not used, the model is profiled again: %s", error)
    except BaseException:
        manager.release()
        raise


def _refuse_compiled(model: nn.Module) -> None:
    name = first_compiled(model)
    if name is not None:
        raise OffloadError(
            f"module {name or '(root)'} is compiled already (a decorator on its forward counts too): offload first, "
            "then compile, with offload(..., compile_fn=...) or OffloadConfig(external_compile=True)"
        )


def init(
    model: nn.Module, config: OffloadConfig | None = None, *, name: str = DEFAULT_NAME, **settings: Any
) -> OffloadManager:
    """Offload ``model`` by manual regions alone: its forward marks them with ``offload_block``. Returns the manager.

    Raises ConfigError when the configuration has include_patterns, which ``offload`` is for.
    """
    config = load_config() if config is None else config
    if config.include_patterns:
        raise ConfigError("init() is for manual regions; with include_patterns call offload()")
    offload(model, config, name=name, **settings)
    return get_offload_manager(name)


@contextlib.contextmanager
def offload_block(block: str, *, name: str = DEFAULT_NAME) -> Iterator[None]:
    """Inside the forward: ``with offload_block("head"): ...``. The weights read in the region are a unit of that name.

    The weights are found while the model runs in discovery; a region that appears later raises OffloadError.
    """
    with get_offload_manager(name).block(block):
        yield


def offload_from_profile(
    model: nn.Module, path: str | Path, config: OffloadConfig | None = None, **settings: Any
) -> nn.Module:
    """``offload`` with a saved profile: the first call already streams by a plan. Raises ProfileMismatch as well."""
    model = offload(model, config, **settings)
    manager = get_offload_manager(settings.get("name", DEFAULT_NAME))
    try:
        manager.load_profile(path)
    except BaseException:
        manager.release()
        raise
    return model


def release(name: str = DEFAULT_NAME, *, keep_weights: bool = True) -> None:
    """Make the model of that manager plain again and give all memory back; see ``OffloadManager.release``."""
    get_offload_manager(name).release(keep_weights=keep_weights)


def offload_units(name: str = DEFAULT_NAME) -> list[tuple[str, nn.Module]]:
    """(name, module) of the units that stream."""
    return get_offload_manager(name).offload_units()


def resident_units(name: str = DEFAULT_NAME) -> list[tuple[str, nn.Module]]:
    """(name, module) of the units that stay on the device."""
    return get_offload_manager(name).resident_units()


def request_strategy_replan(manual_update_state: bool = False, name: str = DEFAULT_NAME) -> int:
    """Ask for a plan from compiled compute times; see ``OffloadManager.request_strategy_replan``."""
    return get_offload_manager(name).request_strategy_replan(manual_update_state)


def update_state(name: str = DEFAULT_NAME) -> None:
    """After each replay of a captured forward; see ``OffloadManager.update_state``."""
    get_offload_manager(name).update_state()


def reset_offload_timing(name: str = DEFAULT_NAME) -> None:
    """Forget timing samples."""
    get_offload_manager(name).reset_offload_timing()


def update_offload_timing(name: str = DEFAULT_NAME) -> bool:
    """After a CUDA graph's replay: take its times."""
    return get_offload_manager(name).update_offload_timing()


def collect_offload_timing(name: str = DEFAULT_NAME) -> list[VisitSummary]:
    """Transfer, compute and wait of each visit."""
    return get_offload_manager(name).collect_offload_timing()


def save_profile(path: str | Path, name: str = DEFAULT_NAME) -> None:
    """Write the manager's profile."""
    get_offload_manager(name).save_profile(path)


def load_profile(path: str | Path, name: str = DEFAULT_NAME) -> None:
    """Take a saved profile; raises ProfileMismatch when it does not fit."""
    get_offload_manager(name).load_profile(path)


def clear_profiling_durations(name: str = DEFAULT_NAME) -> None:
    """Forget what was profiled so far."""
    get_offload_manager(name).clear_profiling_durations()


def resume_profiling(name: str = DEFAULT_NAME) -> None:
    """Undo ``pause_profiling``."""
    get_offload_manager(name).resume_profiling()


def pause_profiling(name: str = DEFAULT_NAME) -> None:
    """Steps are no samples until ``resume_profiling``."""
    get_offload_manager(name).suspend_profiling()


@contextlib.contextmanager
def suspend_profiling(name: str = DEFAULT_NAME) -> Iterator[None]:
    """``with suspend_profiling(): ...``: steps inside are no samples and do not advance the life cycle."""
    manager = get_offload_manager(name)
    manager.suspend_profiling()
    try:
        yield
    finally:
        manager.resume_profiling()


def get_gpu_memory_usage(name: str = DEFAULT_NAME) -> dict[str, int]:
    """Bytes on the device; see ``OffloadManager.get_gpu_memory_usage``."""
    return get_offload_manager(name).get_gpu_memory_usage()
