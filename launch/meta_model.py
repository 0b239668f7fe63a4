"""A transformers causal LM with its parameters on meta and its buffers real, and where its weights lie.

So a process that only attaches to the node's host store never holds a copy of the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launch.model_files import StoredTensor, TaskInputError, stored_tensors

logger = logging.getLogger(__name__)

_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class MetaModel:
    """names: for each parameter (its first name in the model) its name in the checkpoint."""

    model: nn.Module
    names: dict[str, str]


class NeedsTransformers(Exception):
    """The checkpoint's tensors are not the model's as they lie; only transformers' own loader can convert them."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it a module's parameters go to the meta device when they are registered; buffers are made as usual.

    Unlike ``torch.device("meta")`` this leaves computed buffers (rotary frequencies) with their values. It changes
    ``nn.Module`` for all threads meanwhile.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_on_meta(directory: Path, dtype: torch.dtype, attention: str) -> MetaModel:
    """The model of ``directory`` in ``dtype``, parameters on meta, buffers with their values, ready for inference.

    Raises TaskInputError when the config is no causal LM's or the checkpoint is quantised, NeedsTransformers when the
    checkpoint must be converted on the way.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(directory)
    try:
        with parameters_on_meta():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (ValueError, ImportError) as error:
        raise TaskInputError(f"{directory}: cannot build the model: {str(error).strip().splitlines()[0]}") from error
    model.requires_grad_(False)
    model.eval()
    if dtype != torch.float32 and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):
        raise NeedsTransformers(f"{type(model).__name__} keeps some weights in float32 beside {dtype}")
    if _conversions(model):
        raise NeedsTransformers(f"transformers rearranges the checkpoint of {type(model).__name__} when it loads it")
    stored = stored_tensors(directory)
    names = map_names(model, stored)
    _load_buffers(model, stored)
    return MetaModel(model, names)


def read_config(directory: Path) -> Any:
    """The directory's transformers config.

    Raises TaskInputError when transformers cannot read it, or when it is a quantised model's.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError) as error:
        raise TaskInputError(f"{directory}: config.json cannot be used: {str(error).splitlines()[0]}") from error
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise TaskInputError(f"{directory} is quantised ({method}); name a checkpoint of plain floats")
    return config


def map_names(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Where each parameter lies in the checkpoint: under one of its names (tied weights have several), or without or
    with the base model's prefix, as checkpoints of the base model alone have them.

    Raises NeedsTransformers when a parameter is not there so, or a stored tensor would be left over.
    """
    aliases: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
        shapes[id(parameter)] = tuple(parameter.shape)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    used: set[str] = set()
    names: dict[str, str] = {}
    for key, own in aliases.items():
        candidates = [c for name in own for c in (name, name.removeprefix(prefix), prefix + name) if c in stored]
        fitting = [c for c in candidates if stored[c].shape == shapes[key] and stored[c].dtype in _FLOATS]
        if not fitting:
            found = f"{stored[candidates[0]].dtype} {stored[candidates[0]].shape}" if candidates else "nothing"
            raise NeedsTransformers(f"the checkpoint has {found} for {own[0]} {shapes[key]}")
        names[own[0]] = fitting[0]
        used.update(candidates)
    left = _left_over(model, set(stored) - used, prefix)
    if left:
        raise NeedsTransformers(f"the checkpoint has {len(left)} tensors that the model has not, first {min(left)}")
    return names


def _left_over(model: nn.Module, unused: set[str], prefix: str) -> set[str]:
    """Stored tensors that mean something to nobody: neither a buffer of the model nor one that old versions stored."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    buffers |= {name.removeprefix(prefix) for name in buffers}
    return {name for name in unused if name not in buffers and not name.endswith((".inv_freq", ".masked_bias"))}


def _load_buffers(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Persistent buffers have no place in the host store's source; they are small and read here."""
    from safetensors import safe_open

    persistent = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, buffer in model.named_buffers():
        if name in persistent and name in stored:
            with safe_open(stored[name].file, framework="pt") as file:
                buffer.copy_(file.get_tensor(name))


def _conversions(model: nn.Module) -> list[Any]:
    """The changes (merging experts, permuting heads ...) that transformers makes to this model's checkpoint tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    return [change for change in mapping if not isinstance(change, WeightRenaming)]


def repeated_block_pattern(model: nn.Module) -> str | None:
    """``model.layers.*`` for the longest list of modules of one class, the model's repeated block; None without one."""
    best: tuple[int, str] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            has_weights = any(True for _ in module.parameters())
            if has_weights and (best is None or len(module) > best[0]):
                best = (len(module), f"{name}.*")
    return best[1] if best is not None else None
