"""Decoding with a key-value cache of fixed size: every decode step has the same shapes, so compiled code is made once.

Prompts are padded to multiples of ``BUCKET`` tokens and batches to the most rows seen, so that prefills share shapes,
too. A cache is made anew only when a longer prompt or a larger batch comes.

[Note: one graph for all layers] A transformers decoder layer finds its part of the cache by its own index, and a graph
that reads an index is of that layer only: 32 layers, 64 compilations. Where the index serves for nothing else, each
layer is given a cache that holds its part alone, and the index 0. What a layer computes is the same.
"""

from __future__ import annotations

import inspect
import logging
import re
from typing import Any

from torch import nn

from launch.meta_model import repeated_block_pattern

logger = logging.getLogger(__name__)

BUCKET = 64
GRAPHS_A_UNIT = 8
"""Prefills of several lengths and the decode step: what Dynamo's limits leave room for."""
_VIEW = "_cache_of_this_layer"
_CACHE_USE = re.compile(r"\b(?:cache|past_key_values?)\.(\w+)")
_INDEX_USE = re.compile(r"\.layer_idx\b")
_INDEX_IN_UPDATE = re.compile(r"\.update\(\s*\w+,\s*\w+,\s*self\.layer_idx\b")


class StaticCaches:
    """The cache of one transformers model, kept from one ``generate`` to the next.

    one_graph: make the layers alike where that can be (see the note); before the model is compiled or called. Not for
    modes that capture CUDA graphs: these take the cache's addresses for constants.
    """

    def __init__(self, model: Any, device: Any, *, one_graph: bool = False) -> None:
        self._model, self._device = model, device
        self._cache: Any = None
        self._rows = 0
        self._positions = 0
        parameters = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"  # transformers 5.2x renamed it
        self._layers = _alike_layers(model) if one_graph else []
        for layer in self._layers:
            _make_alike(layer, self._argument)

    @property
    def layers_alike(self) -> int:
        """How many layers share their graphs by the note."""
        return len(self._layers)

    @property
    def padding(self) -> dict[str, Any]:
        """What the tokenizer is given, so that prompts come in few lengths."""
        return {"pad_to_multiple_of": BUCKET}

    def take(self, rows: int, positions: int) -> dict[str, Any]:
        """What ``generate`` is given: an empty cache for ``rows`` sequences of at most ``positions`` tokens."""
        positions = -(-positions // BUCKET) * BUCKET
        if self._cache is None or rows != self._rows or positions > self._positions:
            if self._cache is not None:
                logger.info("a new cache for %d rows of %d tokens; compiled code is made anew", rows, positions)
            self._rows, self._positions = rows, max(positions, self._positions)
            self._cache = self._make()
        self._cache.reset()
        return {self._argument: self._cache}

    def forget(self) -> None:
        """Give the cache's memory back; the next batch sets how many rows there are."""
        self._cache, self._rows, self._positions = None, 0, 0
        for layer in self._layers:
            layer.__dict__.pop(_VIEW, None)

    @property
    def rows(self) -> int:
        """Rows of the cache; smaller batches are padded to it."""
        return self._rows

    def _make(self) -> Any:
        from transformers import StaticCache
        from transformers.cache_utils import Cache

        config = self._model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        cache = StaticCache(config=self._model.config, max_cache_len=self._positions)
        # Not lazily: the first prefill would be compiled with the allocation in it, and once more without.
        cache.early_initialization(
            batch_size=self._rows,
            num_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=self._model.dtype,
            device=self._device,
        )
        for module, part in zip(self._layers, cache.layers if self._layers else (), strict=True):
            module.__dict__[_VIEW] = Cache(layers=[part])
            for tensor in vars(part).values():
                # A tensor so marked is guarded by its identity: one graph a layer again.
                if hasattr(tensor, "_dynamo_static_input_type"):
                    del tensor._dynamo_static_input_type
        return cache


def _alike_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order, if all that tells them apart is the index of their part of the cache; else none."""
    pattern = repeated_block_pattern(model)
    layers = list(model.get_submodule(pattern.removesuffix(".*")).children()) if pattern else []
    for position, layer in enumerate(layers):
        indexes = {module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")}
        if indexes != {position} or not all(_only_updates(cls) for cls in {type(m) for m in layer.modules()}):
            logger.info("%s: layers read their index or the cache elsewhere; each has graphs of its own", pattern)
            return []
    return layers


def _only_updates(cls: type[nn.Module]) -> bool:
    """True when no ``forward`` of the class or its bases does anything with cache and index but
    ``cache.update(keys, values, self.layer_idx)``."""
    for base in cls.__mro__:
        if base is nn.Module or "forward" not in vars(base):
            continue
        forward: Any = vars(base)["forward"]
        try:
            source = inspect.getsource(inspect.unwrap(forward))
        except (OSError, TypeError):
            return False
        reads_index = len(_INDEX_USE.findall(source))
        if not set(_CACHE_USE.findall(source)) <= {"update"} or reads_index != len(_INDEX_IN_UPDATE.findall(source)):
            return False
    return True


def _make_alike(layer: nn.Module, argument: str) -> None:
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.__dict__["layer_idx"] = 0
    # One function and one key for all layers: both are guarded.
    layer._forward_pre_hooks[-1] = _with_own_cache if argument == "cache" else _with_own_past
    layer._forward_pre_hooks_with_kwargs[-1] = True


def _with_own_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "cache": getattr(module, _VIEW)}


def _with_own_past(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "past_key_values": getattr(module, _VIEW)}
