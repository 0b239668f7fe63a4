"""A video's latents on disk: minutes of denoising that a failure behind it shall not cost."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptLatents:
    """key: what the latents depend on (request, sizes, model). A file with another key is not taken."""

    path: Path
    key: str

    def save(self, latents: torch.Tensor) -> None:
        """Whole when it appears under its name. Raises OSError."""
        from safetensors.torch import save_file

        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")
        try:
            save_file({"latents": latents.cpu().contiguous()}, part, metadata={"key": self.key})
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)

    def load(self) -> torch.Tensor | None:
        """The latents, on the CPU; None when there are none of this key."""
        from safetensors import SafetensorError, safe_open

        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                if (file.metadata() or {}).get("key") != self.key:
                    return None
                latents: torch.Tensor = file.get_tensor("latents").clone()
        except SafetensorError as error:
            logger.warning("%s is not used: %s", self.path, error)
            return None
        logger.info("%s: denoised before, decoded now", self.path)
        return latents
