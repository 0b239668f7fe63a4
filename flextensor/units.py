"""Which modules are units, which weights each owns, and what cannot be streamed.

A *weight* is a parameter or a large buffer, under its first qualified name; tied weights are one weight with several
places. Selection is static; what a unit reads beyond its own weights is found by ``discovery``.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from flextensor.config import OffloadConfig

logger = logging.getLogger(__name__)

ROOT_UNIT = "(unmatched)"
"""The store's unit for weights that no pattern matches."""


LOOSE_UNIT = "(manual regions)"
"""The store's unit for weights that manual regions read."""

CHANGED_BY_FORWARD = "changed by forward"
"""The resident reason of weights whose device memory is the truth, once they are resident."""


class OffloadError(RuntimeError):
    """The model cannot be offloaded as asked, or is used in a way that offload does not support."""


@dataclass(eq=False)
class Weight:
    """One tensor of the model.

    places: every (module, attribute) under which it is registered. resident_reason: why it may not be streamed;
    empty when it may. in_slot: its device memory is a slot, which other weights are copied to, too.
    """

    name: str
    tensor: torch.Tensor
    is_buffer: bool
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    resident_reason: str = ""
    in_slot: bool = False

    @property
    def true_on_device(self) -> bool:
        """The forward changes it, and what it has made of it is where ``tensor`` points, not in the host store."""
        return self.resident_reason == CHANGED_BY_FORWARD and not self.in_slot

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(eq=False)
class Unit:
    """A module that is offloaded as a whole and compiled as one graph."""

    name: str
    module: nn.Module
    weights: list[Weight]


@dataclass
class Selection:
    """units: in registration order. unmatched: weights of no unit. buffers: (module, attribute, name) of what is moved
    to the device as it is. loose: without patterns, the weights that manual regions (``offload_block``) may turn out
    to read."""

    units: list[Unit]
    unmatched: list[Weight]
    buffers: list[tuple[nn.Module, str, str]]
    loose: list[Weight] = field(default_factory=list)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True when the elements fill one stretch of memory, each byte once, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def select(model: nn.Module, config: OffloadConfig) -> Selection:
    """Find units and weights of ``model``.

    Raises OffloadError when a pattern, of either kind, matches nothing (naming the nearest names) and when a module
    keeps a view of a weight as a plain attribute (naming module and attribute).
    """
    modules = dict(model.named_modules())
    _refuse_idle_exclusions(model, modules, config)
    excluded = [n for n, m in modules.items() if n and any(_matches(p, n, m) for p in config.exclude_patterns)]
    units = _matched_modules(model, modules, config, excluded)
    weights = _collect_weights(model, config, excluded)
    _refuse_hidden_views(modules, weights)
    return _assign(modules, units, weights, config)


def _matched_modules(
    model: nn.Module, modules: dict[str, nn.Module], config: OffloadConfig, excluded: Sequence[str]
) -> dict[str, set[str] | None]:
    """Unit module name -> the parameter names to stream (None: all of them)."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, set[str] | None] = {}
    for pattern in config.include_patterns:
        hits = [name for name, module in modules.items() if name and _matches(pattern, name, module)]
        direct = [] if hits else [name for name in parameters if _matches(pattern, name, None)]
        if not hits and not direct:
            raise OffloadError(_no_match("include_patterns", pattern, modules, parameters))
        for name in hits:
            for unit in _callable_units(name, modules):
                found[unit] = None
        for name in direct:
            owner = name.rpartition(".")[0]
            known = found.setdefault(owner, set())
            if known is not None:
                known.add(name)
    return {
        name: only
        for name, only in found.items()
        if name and not _inside(name, excluded) and not any(found.get(parent, "") is None for parent in _parents(name))
    }


def _refuse_idle_exclusions(model: nn.Module, modules: dict[str, nn.Module], config: OffloadConfig) -> None:
    """A misspelt exclusion would stream what the caller wants to keep on the device."""
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    for pattern in config.exclude_patterns:
        of_modules = any(name and _matches(pattern, name, module) for name, module in modules.items())
        if not of_modules and not any(_matches(pattern, name, None) for name in tensors):
            raise OffloadError(_no_match("exclude_patterns", pattern, modules, tensors))


def _inside(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def _matches(pattern: str, name: str, module: nn.Module | None) -> bool:
    if pattern.startswith("class:"):
        if module is None:
            return False
        cls = type(module)
        glob = pattern.removeprefix("class:")
        full = f"{cls.__module__}.{cls.__qualname__}"
        return fnmatch.fnmatchcase(cls.__name__, glob) or fnmatch.fnmatchcase(full, glob)
    return fnmatch.fnmatchcase(name, pattern.removeprefix("name:"))


def _callable_units(name: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """A list or dict of modules is never called itself: its members are the units."""
    if isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
        for child, _ in modules[name].named_children():
            yield from _callable_units(f"{name}.{child}", modules)
    else:
        yield name


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _no_match(setting: str, pattern: str, modules: dict[str, nn.Module], tensors: Sequence[str]) -> str:
    wanted = pattern.removeprefix("name:").removeprefix("class:").strip(".*")
    if pattern.startswith("class:"):
        classes = dict.fromkeys(type(module) for name, module in modules.items() if name)
        names = [f"{cls.__module__}.{cls.__qualname__}" if "." in wanted else cls.__name__ for cls in classes]
    else:
        names = [*filter(None, modules), *tensors]
    names = list(dict.fromkeys(names))
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or names[:3]
    return f"{setting}: {pattern!r} matches nothing in the model; nearest names: {', '.join(near) or 'none'}"


def _collect_weights(model: nn.Module, config: OffloadConfig, excluded: Sequence[str]) -> dict[int, Weight]:
    """id(tensor) -> Weight, for parameters and for buffers large enough to stream."""
    weights: dict[int, Weight] = {}
    for prefix, module in model.named_modules():
        for attribute, tensor in module._parameters.items():
            if tensor is not None:
                _add_place(weights, prefix, module, attribute, tensor, is_buffer=False)
        for attribute, tensor in module._buffers.items():
            large = tensor is not None and tensor.numel() * tensor.element_size() >= config.resident_below_bytes
            if tensor is not None and (id(tensor) in weights or (large and not tensor.is_meta)):
                _add_place(weights, prefix, module, attribute, tensor, is_buffer=True)
    for weight in weights.values():
        weight.resident_reason = _resident_reason(weight, config, excluded)
    _mark_shared_storage(weights)
    return weights


def _add_place(
    weights: dict[int, Weight], prefix: str, module: nn.Module, attribute: str, tensor: torch.Tensor, *, is_buffer: bool
) -> None:
    name = f"{prefix}.{attribute}" if prefix else attribute
    weight = weights.setdefault(id(tensor), Weight(name, tensor, is_buffer))
    weight.places.append((module, attribute))
    weight.names.append(name)


def _resident_reason(weight: Weight, config: OffloadConfig, excluded: Sequence[str]) -> str:
    tensor = weight.tensor
    if any(_inside(n, excluded) or any(_matches(p, n, None) for p in config.exclude_patterns) for n in weight.names):
        return "excluded"
    if type(tensor) not in (nn.Parameter, torch.Tensor):
        return f"a {type(tensor).__name__} cannot be streamed"
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return "not a plain strided tensor"
    if weight.nbytes < config.resident_below_bytes or weight.nbytes == 0:
        return f"smaller than {config.resident_below_bytes} bytes"
    if not is_dense(tensor.shape, tensor.stride()):
        return "its elements have holes or overlap in memory"
    return ""


def _mark_shared_storage(weights: dict[int, Weight]) -> None:
    """Two weights in one storage would part ways when one moves: both stay resident, together."""
    by_storage: dict[int, list[Weight]] = {}
    for weight in weights.values():
        if not weight.tensor.is_meta and weight.nbytes:
            by_storage.setdefault(weight.tensor.untyped_storage().data_ptr(), []).append(weight)
    for group in by_storage.values():
        spans = sorted(
            (w.tensor.storage_offset() * w.tensor.element_size(), w.nbytes, index) for index, w in enumerate(group)
        )
        overlap = any(a[0] + a[1] > b[0] for a, b in itertools.pairwise(spans))
        if overlap:
            for weight in group:
                weight.resident_reason = "shares memory with another weight"


def _refuse_hidden_views(modules: dict[str, nn.Module], weights: dict[int, Weight]) -> None:
    owners = {w.tensor.untyped_storage().data_ptr(): w for w in weights.values() if not w.tensor.is_meta and w.nbytes}
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            for tensor in _tensors_in(value):
                if id(tensor) in weights or tensor.is_meta or tensor.numel() == 0:
                    continue
                owner = owners.get(tensor.untyped_storage().data_ptr())
                if owner is not None:
                    raise OffloadError(
                        f"module {name or '(root)'} ({type(module).__name__}) keeps a view of weight {owner.name!r} in "
                        f"its attribute {attribute!r}, which would not follow the weight to the device; make the view "
                        f"in forward(), or exclude the module"
                    )


def refuse_kept_views(model: nn.Module, weights: Sequence[Weight], spans: Sequence[tuple[int, int]]) -> None:
    """Raise OffloadError when a module has kept a view of a weight since it was offloaded (a cache filled by its first
    forward). ``spans``: addresses (from, to) of the device memory that weights take turns in."""
    known = {id(weight.tensor) for weight in weights}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            for tensor in _tensors_in(value):
                if id(tensor) in known or tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
                    continue
                if any(start <= tensor.data_ptr() < end for start, end in spans):
                    raise OffloadError(
                        f"module {name or '(root)'} ({type(module).__name__}) keeps a view of a weight in its "
                        f"attribute {attribute!r} since its first forward; other weights will lie there: make the view "
                        "anew in each forward(), keep a clone() of it, or exclude the module"
                    )


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
    elif isinstance(value, dict):
        for item in value.values():
            if isinstance(item, torch.Tensor):
                yield item


def _assign(
    modules: dict[str, nn.Module],
    matched: dict[str, set[str] | None],
    weights: dict[int, Weight],
    config: OffloadConfig,
) -> Selection:
    unit_of_module = {id(module): unit for unit in matched for module in modules[unit].modules()}
    members: dict[str, list[Weight]] = {unit: [] for unit in matched}
    unmatched: list[Weight] = []
    for weight in weights.values():
        homes = [unit_of_module.get(id(module)) for module, _ in weight.places]
        for unit in dict.fromkeys(home for home in homes if home is not None):
            members[unit].append(weight)
            only = matched[unit]
            if only is not None and not only.intersection(weight.names):
                weight.resident_reason = weight.resident_reason or "not matched by a pattern"
        if None in homes:
            if any(home is not None for home in homes):
                weight.resident_reason = weight.resident_reason or "also used outside every unit"
            else:
                unmatched.append(weight)
    taken = {id(w.tensor) for w in weights.values()}
    buffers = [
        (module, attribute, f"{name}.{attribute}" if name else attribute)
        for name, module in modules.items()
        for attribute, tensor in module._buffers.items()
        if tensor is not None and id(tensor) not in taken
    ]
    empty = [unit for unit, owned in members.items() if not owned]
    if empty:
        logger.info("%d matched modules own no weights and are left alone: %s", len(empty), ", ".join(empty[:5]))
    units = [Unit(name, modules[name], owned) for name, owned in members.items() if owned]
    order = {name: at for at, name in enumerate(modules)}
    units.sort(key=lambda unit: order[unit.name])
    if config.include_patterns:
        return Selection(units, unmatched, buffers)
    loose = [weight for weight in unmatched if not weight.resident_reason]
    return Selection(units, [weight for weight in unmatched if weight.resident_reason], buffers, loose)


def pieces_of(units: Sequence[Unit]) -> list[Unit]:
    """The leaf modules of ``units`` that own weights to stream, each to be waited for and released on its own.

    Weights of a module around such leaves would have to be there for as long as all of them together: they stay
    resident.
    """
    pieces: list[Unit] = []
    for unit in units:
        owned: dict[nn.Module, list[Weight]] = {}
        names = {module: name for name, module in unit.module.named_modules(prefix=unit.name)}
        for weight in unit.weights:
            for owner in dict.fromkeys(owner for owner, _ in weight.places if owner in names):
                if not weight.resident_reason:
                    owned.setdefault(owner, []).append(weight)
        for module, name in names.items():
            if module not in owned:
                continue
            if any(other in owned for other in module.modules() if other is not module):
                for weight in owned[module]:
                    weight.resident_reason = "its module encloses other pieces"
            else:
                pieces.append(Unit(name, module, owned[module]))
    return pieces
