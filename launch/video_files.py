"""Frames to files: a video with whatever encoder is installed, and one frame as a picture."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.whole_files import whole_file

logger = logging.getLogger(__name__)

Frames = NDArray[np.uint8]
"""(frames, height, width, 3)."""

FORMATS = ("auto", "mp4", "webp", "gif")


def available_format(wanted: str) -> str:
    """``wanted``, or for ``auto``: mp4 with PyAV or imageio-ffmpeg, else an animated WebP, else a GIF.

    Raises ValueError when ``wanted`` has no encoder here.
    """
    mp4 = has_module("av") or (has_module("imageio") and has_module("imageio_ffmpeg"))
    if wanted == "auto":
        return "mp4" if mp4 else "webp" if _webp() else "gif"
    if wanted == "mp4" and not mp4:
        raise ValueError("video format 'mp4' needs an encoder: pip install av, or choose webp or gif")
    if wanted == "webp" and not _webp():
        raise ValueError("video format 'webp': this Pillow was built without WebP; choose gif")
    return wanted


def write_video(frames: Frames, path: Path, *, fps: int) -> None:
    """Write ``path``, in the format that its suffix names; whole when it appears under its name."""
    with whole_file(path) as part:
        if path.suffix == ".mp4":
            (_write_with_av if has_module("av") else _write_with_imageio)(frames, part, fps)
        else:
            _write_animation(frames, part, fps)


def write_preview(frames: Frames, path: Path) -> None:
    """The middle frame as a PNG."""
    from PIL import Image

    with whole_file(path) as part:
        Image.fromarray(frames[len(frames) // 2]).save(part, format="PNG")


def _write_animation(frames: Frames, path: Path, fps: int) -> None:
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    settings: dict[str, Any] = {"quality": 90, "method": 2} if path.suffix == ".webp" else {}
    images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, **settings)


def _write_with_av(frames: Frames, path: Path, fps: int) -> None:
    import av  # type: ignore[import-not-found]

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "17"})
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def _write_with_imageio(frames: Frames, path: Path, fps: int) -> None:
    import imageio.v2 as imageio  # type: ignore[import-not-found]

    imageio.mimwrite(str(path), list(frames), fps=fps, codec="libx264", quality=9, macro_block_size=1)


def has_module(module: str) -> bool:
    """True where it is installed; it is not imported."""
    return importlib.util.find_spec(module) is not None


def _webp() -> bool:
    from PIL import features

    return bool(features.check("webp"))
