"""What the Wan task is told: its options, checked before anything is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flextensor.config import unknown_key_message
from launch.model_files import TaskInputError
from launch.video_files import FORMATS

if TYPE_CHECKING:
    from launch.wan_maker import VideoSettings

DTYPES = ("auto", "float32", "bfloat16")
TINY_LIMITS = {"height": 64, "width": 64, "frames": 9, "steps": 4, "text_tokens": 64}
"""What ``tiny`` cuts the settings of a real run down to."""
TINY_RESIDENT_BELOW = 4096
"""Bytes: a tiny pipeline has no tensor that the usual threshold would stream."""


@dataclass(frozen=True)
class WanOptions:
    """model: a diffusers directory of a Wan text-to-video checkpoint. tiny: a small random pipeline in its place, with
    the sizes cut down to ``TINY_LIMITS``, and tensors of ``TINY_RESIDENT_BELOW`` bytes and more streamed.

    dtype: of transformers and text encoder; ``auto`` is float32 on the host device and bfloat16 on CUDA.
    height, width: pixels, multiples of 16. frames: 4 n + 1. steps: denoising steps. See ``VideoSettings`` for the rest.
    seed: of items that name none, together with their ids.
    output_dir: where videos and previews go. format: auto, mp4, webp or gif.
    keep_latents: also keep each video's latents (they are kept in any case until its video is written).
    compile, compile_backend, compile_mode: see ``CompileChoice``.
    """

    model: str = ""
    tiny: bool = False
    dtype: str = "auto"
    height: int = 480
    width: int = 832
    frames: int = 81
    steps: int = 40
    guidance: float = 5.0
    guidance_2: float | None = None
    flow_shift: float | None = None
    text_tokens: int = 512
    vae_tiling: bool = False
    negative_prompt: str = ""
    seed: int = 0
    output_dir: str = "out/videos"
    format: str = "auto"
    fps: int = 16
    keep_latents: bool = False
    compile: str = "none"
    compile_backend: str = "inductor"
    compile_mode: str = ""

    @staticmethod
    def parse(options: Mapping[str, Any]) -> WanOptions:
        """Checked options. Raises TaskInputError that names the option, its value and what is allowed."""
        fields = {field.name: field for field in dataclasses.fields(WanOptions)}
        for key in options:
            if key not in fields:
                raise TaskInputError(unknown_key_message(key, list(fields), "task option"))
        parsed = WanOptions(**{**options, "model": str(options.get("model") or "")})
        for option, step, rest, what in (
            ("height", 16, 0, "a multiple of 16"),
            ("width", 16, 0, "a multiple of 16"),
            ("frames", 4, 1, "a multiple of 4, plus 1"),
            ("steps", 1, 0, "1 or more"),
            ("text_tokens", 1, 0, "1 or more"),
            ("fps", 1, 0, "1 or more"),
        ):
            value = getattr(parsed, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % step != rest:
                raise TaskInputError(f"task option {option} = {value!r}; use a whole number, {what}")
        for option in ("guidance", "guidance_2", "flow_shift"):
            value = getattr(parsed, option)
            if value is None and option != "guidance":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise TaskInputError(f"task option {option} = {value!r}; use a number, 0 or more")
        for option in ("tiny", "vae_tiling", "keep_latents"):
            if not isinstance(getattr(parsed, option), bool):
                raise TaskInputError(f"task option {option} = {getattr(parsed, option)!r}; use true or false")
        if not isinstance(parsed.seed, int) or isinstance(parsed.seed, bool):
            raise TaskInputError(f"task option seed = {parsed.seed!r}; use a whole number")
        if parsed.dtype not in DTYPES:
            raise TaskInputError(f"task option dtype = {parsed.dtype!r}; use one of {', '.join(DTYPES)}")
        if parsed.format not in FORMATS:
            raise TaskInputError(f"task option format = {parsed.format!r}; use one of {', '.join(FORMATS)}")
        if not isinstance(parsed.negative_prompt, str):
            raise TaskInputError(f"task option negative_prompt = {parsed.negative_prompt!r} is not text")
        if not parsed.tiny and not parsed.model:
            raise TaskInputError(
                "task option 'model' is missing; name a Wan checkpoint in diffusers' form, or set tiny"
            )
        return parsed

    def video_settings(self) -> VideoSettings:
        """The settings of every video, cut down for ``tiny``."""
        from launch.wan_maker import VideoSettings

        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(VideoSettings)}
        if self.tiny:
            found |= {name: min(found[name], most) for name, most in TINY_LIMITS.items()}
        return VideoSettings(**found)
