"""Decoding with a key-value cache of fixed size: every decode step has the same shapes, so compiled code is made once.

Prompts are padded to multiples of ``BUCKET`` tokens and batches to the most rows seen, so that prefills share shapes,
too. A cache is made anew only when a longer prompt or a larger batch comes.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

logger = logging.getLogger(__name__)

BUCKET = 64
GRAPHS_A_UNIT = 8
"""Prefills of several lengths and the decode step: what Dynamo's limits leave room for."""


class StaticCaches:
    """The cache of one transformers model, kept from one ``generate`` to the next."""

    def __init__(self, model: Any, device: Any) -> None:
        self._model, self._device = model, device
        self._cache: Any = None
        self._rows = 0
        self._positions = 0
        parameters = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"  # transformers 5.2x renamed it

    def take(self, rows: int, positions: int) -> dict[str, Any]:
        """What ``generate`` is given: an empty cache for ``rows`` sequences of at most ``positions`` tokens."""
        positions = _up(positions)
        if self._cache is None or rows != self._rows or positions > self._positions:
            if self._cache is not None:
                logger.info("a new cache for %d rows of %d tokens; compiled code is made anew", rows, positions)
            self._rows, self._positions = rows, max(positions, self._positions)
            self._cache = self._make()
        self._cache.reset()
        return {self._argument: self._cache}

    @property
    def rows(self) -> int:
        """Rows of the cache; smaller batches are padded to it."""
        return self._rows

    def _make(self) -> Any:
        from transformers import StaticCache

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
        return cache


def _up(tokens: int) -> int:
    return -(-tokens // BUCKET) * BUCKET
