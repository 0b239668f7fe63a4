"""A batch of answers that goes on where another process left it.

[Note: the same tokens] What is kept are the new tokens of all rows of the batch; the key-value cache is made again by
one prefill over prompt and tokens. In float32 with eager kernels that gives the tokens that the unbroken run gives: a
row's numbers differ in the last bits at most, since a matrix product over many positions may add in another order than
one over a single position. In bfloat16 and float16 such bits can tip a close choice between two tokens, so an answer
that was taken up again may then differ from an unbroken one behind that point (it is the model's all the same).
Compiled models with a static cache compile once more for the length of that prefill.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
from transformers import StoppingCriteria

from cluster.checkpoints import ItemCheckpoint

logger = logging.getLogger(__name__)


class KeptTokens(StoppingCriteria):
    """Watches ``generate`` token by token, and saves when the checkpoint says that it is time.

    ``prompts``: (rows, positions) as they are given to the model. ``rows``: new tokens of an earlier try, all rows of
    one length; empty where there was none.
    """

    def __init__(self, checkpoint: ItemCheckpoint, prompts: torch.Tensor, ends: frozenset[int]) -> None:
        self._checkpoint = checkpoint
        self._length = prompts.shape[1]
        self._ends = ends
        self.rows = self._load(len(prompts))
        self._mask: torch.Tensor | None = None
        self._done = [bool(ends.intersection(row)) for row in self.rows]

    def _load(self, rows: int) -> list[list[int]]:
        data = self._checkpoint.load()
        if data is None:
            return []
        try:
            found = json.loads(data)["tokens"]
        except (ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, list) or len(found) != rows or len({len(row) for row in found}) != 1:
            logger.warning("kept tokens are not used: they are not those of this batch")
            return []
        logger.info("%d rows go on behind %d kept tokens", rows, len(found[0]))
        return found

    def complete(self, count: int) -> bool:
        """Nothing is left to generate."""
        return bool(self.rows) and (all(self._done) or len(self.rows[0]) >= count)

    def continued(self, prompts: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts and attention mask with the kept tokens behind them, as ``generate`` had them at that point."""
        if not self.rows:
            return prompts, mask
        tokens = torch.tensor(self.rows, dtype=prompts.dtype, device=prompts.device)
        return torch.cat([prompts, tokens], 1), torch.cat([mask, torch.ones_like(tokens, dtype=mask.dtype)], 1)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
        """Which rows are done already; ``generate`` finds the new ones itself."""
        if self._checkpoint.due:
            self._checkpoint.save(json.dumps({"tokens": input_ids[:, self._length :].tolist()}).encode())
        if self._mask is None:  # once: a copy to the device a step would make the host wait each time
            self._mask = torch.tensor(self._done or [False] * len(input_ids), device=input_ids.device)
        return self._mask
