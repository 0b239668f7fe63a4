"""Where the denoising of one video is, so that another process goes on there and ends with the same bits.

That is everything that the next step reads: the latents, what the multistep scheduler remembers of the steps before,
and the state of the generator that the first noise came from. Some 30 MB at 480 x 832 x 81.
"""

from __future__ import annotations

import io
import logging
import pickle
from dataclasses import asdict, dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PLAIN = (int, float, bool, str, torch.Tensor, type(None))


@dataclass(frozen=True)
class DenoisingState:
    """After ``steps`` denoising steps; tensors on the device on which they were."""

    steps: int
    latents: torch.Tensor
    scheduler: dict[str, Any]
    generator: torch.Tensor

    @staticmethod
    def of(steps: int, latents: torch.Tensor, scheduler: Any, generator: torch.Generator) -> DenoisingState:
        """The state now."""
        return DenoisingState(steps, latents, scheduler_state(scheduler), generator.get_state())

    def to_bytes(self) -> bytes:
        """For ``from_bytes``; waits for the device."""
        buffer = io.BytesIO()
        torch.save(asdict(self), buffer)
        return buffer.getvalue()

    @staticmethod
    def from_bytes(data: bytes | None) -> DenoisingState | None:
        """None where there is nothing, or nothing that can be used here; the video is then begun anew."""
        if data is None:
            return None
        try:
            return DenoisingState(**torch.load(io.BytesIO(data), weights_only=True))
        except (RuntimeError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
            logger.warning("a denoising state is not used: %s", error)
            return None


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """The attributes of a diffusers scheduler that are plain data, its configuration left out."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(scheduler).items()
        if isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(one, _PLAIN) for one in value))
    }


def restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Undo what has happened to a scheduler of the same kind since ``scheduler_state``."""
    for name, value in state.items():
        setattr(scheduler, name, list(value) if isinstance(value, list) else value)
