"""Text to video with diffusers' Wan pipeline: a task that ``flextensor generate`` runs in each worker.

[Note: managers] The first transformer has the worker's own manager; the second one (``NAME-2``) has the same budget.
The text encoder (``NAME-text``) runs once a prompt: its blocks stream through room for two of them, a budget of its
own, and are never compiled. A run's replans reach all three by their names (``cluster.engines``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.checkpoints import ItemCheckpoints
from cluster.messages import Item
from cluster.task import TaskContext
from cluster.whole_files import file_stem
from flextensor.checkpoint_files import files_stamp
from flextensor.config import OffloadConfig
from launch.compile_choice import CompileChoice
from launch.model_files import TaskInputError
from launch.video_files import available_format, has_module, write_preview, write_video
from launch.wan_files import read_index
from launch.wan_latents import KeptLatents
from launch.wan_options import TINY_RESIDENT_BELOW, WanOptions

if TYPE_CHECKING:
    import torch

    from flextensor.manager import OffloadManager
    from launch.wan_checkpoint import WanParts
    from launch.wan_maker import Request, VideoMaker

logger = logging.getLogger(__name__)

WARM_UP_ITEM: Item = {"id": "warm-up", "prompt": "Waves roll over a pebble beach at dusk."}
_MOST_WARM_UP_STEPS = 64
_TEXT_SLOTS = 2


class WanT2VTask:
    """One video an item. See ``cluster.task.Task`` and the note above.

    Raises TaskInputError for wrong options, for a checkpoint that cannot be used and where diffusers is not installed.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        if missing := [name for name in ("diffusers", "PIL") if not has_module(name)]:
            raise TaskInputError(f"videos need {' and '.join(missing)}: pip install 'flextensor-ray[diffusers]'")
        self.options = WanOptions.parse(options)
        self.choice = CompileChoice.parse(options)
        try:
            self._suffix = "." + available_format(self.options.format)
        except ValueError as error:
            raise TaskInputError(f"task option format: {error}") from None
        self.index = None if self.options.tiny else read_index(self.options.model)
        self.output = Path.cwd() / self.options.output_dir
        self.settings = self.options.video_settings()
        self.sent_options = {**options, "output_dir": str(self.output)}
        """What workers are given: their current directory is another one."""
        self._checkpoints = ItemCheckpoints()
        self._managers: list[OffloadManager] = []
        self._text_manager: OffloadManager | None = None
        self._maker: VideoMaker | None = None
        self._whole: VideoMaker | None = None
        self._dtype: torch.dtype | None = None
        self._parameters: dict[str, int] = {}
        self._files = ""

    # ---- load and warm up

    def load(self, context: TaskContext) -> None:
        """Build the parts; offload the text encoder and the transformers, their weights straight from safetensors."""
        import flextensor
        from launch.wan_maker import VideoMaker

        self._checkpoints = context.checkpoints
        if self.index is not None:
            self._files = files_stamp(self.index.directory)  # as they are when they are read
        if self.options.tiny:
            small = min(context.config.resident_below_bytes, TINY_RESIDENT_BELOW)
            context = dataclasses.replace(context, config=context.config.updated(resident_below_bytes=small))
        context.progress("building the pipeline")
        device = flextensor.make_device(context.config)
        where = device.torch_device
        device.close()
        self._dtype = self._resolve_dtype(where)
        parts = self._parts()
        self._parameters = {
            name: sum(parameter.numel() for parameter in model.parameters())
            for name, model in {"text_encoder": parts.text_encoder, "vae": parts.vae, **parts.transformers}.items()
        }
        parts.vae.to(where)
        context.progress("loading the text encoder")
        self._text_manager = self._offload_text_encoder(parts, context, where)
        for at, (name, model) in enumerate(parts.transformers.items()):
            context.progress(f"loading {name}")
            manager_name = context.manager_name if at == 0 else f"{context.manager_name}-{at + 1}"
            config = self.choice.offload_config(context.config)
            if not config.include_patterns:
                config = config.updated(include_patterns=("blocks.*",))
            flextensor.offload(
                model,
                config,
                self.choice.compile_fn(),
                name=manager_name,
                source=parts.sources.get(name),
                progress=lambda progress: context.progress(str(progress)),
            )
            self._managers.append(flextensor.get_offload_manager(manager_name))
        self._maker = VideoMaker(parts, where, self.settings)

    def warm_up(self, items: Sequence[Item]) -> None:
        """Encode and denoise at the run's own size until every transformer in use has its plan, compiled where it is.

        Raises OffloadError when one has none, or when the plan from compiled times could not be put in force.
        """
        import flextensor

        maker = self._ready()
        request = self._request((items or [WARM_UP_ITEM])[0])
        assert self._text_manager is not None
        while self._text_manager.phase != "inference":
            maker.embed(request.prompt)
        schedule, used = self._warm_up_schedule(max(manager.iters_before_inference for manager in self._managers))
        self._denoise_until(request, schedule, lambda: all(manager.phase == "inference" for manager in used))
        for manager in used:
            if manager.phase != "inference":
                raise flextensor.OffloadError(f"{manager.name}: no plan after {schedule} steps of warm-up")
        self._measure_compiled(request, used)

    def _measure_compiled(self, request: Request, used: Sequence[OffloadManager]) -> None:
        steps = [self.choice.compile_externally(manager) for manager in used]
        if max(steps) == 0:
            return
        schedule, _ = self._warm_up_schedule(max(steps))
        self._denoise_until(
            request, schedule, lambda: all(m.strategy_replan_status.state != "in_progress" for m in used)
        )
        for manager in used:
            self.choice.require_replanned(manager)

    def _warm_up_schedule(self, calls: int) -> tuple[int, list[OffloadManager]]:
        """(denoising steps, managers that run in them): the shortest schedule that calls each transformer ``calls``
        times. One that no schedule reaches is left out: it is not in use."""
        per_step = 2 if self.settings.guidance > 1 else 1
        maker = self._ready()
        for steps in range(2, _MOST_WARM_UP_STEPS + 1):
            each = maker.steps_of_each(steps)
            if all(count * per_step >= calls for count in each):
                return steps, self._managers
        each = maker.steps_of_each(_MOST_WARM_UP_STEPS)
        used = [manager for manager, count in zip(self._managers, each, strict=False) if count * per_step >= calls]
        logger.warning("not in use at this boundary: %s", [m.name for m in self._managers if m not in used])
        return _MOST_WARM_UP_STEPS, used

    def _denoise_until(self, request: Request, schedule: int, done: Callable[[], bool]) -> None:
        self._ready().denoise(request, steps=schedule, on_step=lambda _: not done())

    # ---- videos

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """A video, a preview and a result an item: ``{"id", "prompt", "seed", "video", "preview", "frames", "seconds",
        "latents_sha256", "frames_sha256"}``, or ``error`` in place of what could not be made.

        The latents are on disk before they are decoded: an item whose decoding or writing failed starts there when it
        is run again. While it is denoised its state is kept from time to time: whoever takes the item up after a death
        goes on there, to the same bits.
        """
        return [self._make(item) for item in items]

    def _make(self, item: Item) -> dict[str, Any]:
        from launch.wan_maker import digest

        maker = self._ready()
        try:
            request = self._request(item)
        except TaskInputError as error:
            return {"id": item["id"], "prompt": item.get("prompt"), "error": str(error)}
        stem = file_stem(str(item["id"]))
        started = time.monotonic()
        result: dict[str, Any] = {"id": item["id"], "prompt": request.prompt, "seed": request.seed}
        try:
            kept = KeptLatents(self.output / (stem + ".latents.safetensors"), self._key(request))
            latents = kept.load()
            if latents is None:
                begun = self._checkpoints.of(self._key(request))
                latents = maker.denoise(request, kept=begun)
                kept.save(latents)
                begun.remove()
            frames = maker.decode(latents)
            video, preview = self.output / (stem + self._suffix), self.output / (stem + ".png")
            write_video(frames, video, fps=self.options.fps)
            write_preview(frames, preview)
        except OSError as error:  # a full disk is not this item's fault, but no reason to denoise it three times
            return {**result, "error": f"cannot write to {self.output}: {error}"}
        if not self.options.keep_latents:
            kept.path.unlink(missing_ok=True)
        return {
            **result,
            "video": str(video),
            "preview": str(preview),
            "frames": len(frames),
            "seconds": round(time.monotonic() - started, 3),
            "latents_sha256": digest(latents),
            "frames_sha256": digest(frames),
        }

    def verify(self, items: Sequence[Item], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make the items' videos again on a whole pipeline, compiled in the same way, and compare latents and frames
        bit for bit. Takes memory for all parts, from the first call until the task ends."""
        from launch.wan_maker import digest

        given = {str(result["id"]): result for result in results}
        whole = self._whole_maker()
        different: list[str] = []
        checked = 0
        for item in items:
            result = given[str(item["id"])]
            if "latents_sha256" not in result:
                continue
            latents = whole.denoise(self._request(item))
            same = digest(latents) == result["latents_sha256"]
            checked += 1
            if not same or digest(whole.decode(latents)) != result["frames_sha256"]:
                different.append(str(item["id"]))
        return {"checked": checked, "identical": checked - len(different), "different": different}

    def describe(self) -> dict[str, Any]:
        """The pipeline, its parts (numbers of parameters), and what each manager says of itself; sizes in bytes."""
        described: dict[str, Any] = {
            "model": "tiny Wan pipeline" if self.index is None else self.index.directory.name,
            "settings": dataclasses.asdict(self.settings),
            "compile": dataclasses.asdict(self.choice),
            "output_dir": str(self.output),
            "format": self._suffix.removeprefix("."),
        }
        if self._maker is not None:
            described |= {
                "class": "WanPipeline",
                "dtype": str(self._dtype).removeprefix("torch."),
                "parameters": sum(self._parameters.values()),
                "parts": self._parameters,
                "managers": {
                    manager.name: _summary(manager)
                    for manager in (self._text_manager, *self._managers)
                    if manager is not None
                },
            }
        return described

    def close(self) -> None:
        """Release every part but the worker's own manager, which the worker releases."""
        import flextensor

        for manager in (self._text_manager, *self._managers[1:]):
            if manager is not None:
                flextensor.release(name=manager.name, keep_weights=False)
        self._maker = self._whole = self._text_manager = None

    # ---- parts

    def _parts(self) -> WanParts:
        assert self._dtype is not None
        if self.index is None:
            from launch.wan_tiny import tiny_parts

            return tiny_parts(self._dtype)
        from launch.wan_checkpoint import read_parts

        with _quiet():
            return read_parts(self.index, self._dtype)

    def _whole_maker(self) -> VideoMaker:
        if self._whole is None:
            from launch.wan_checkpoint import parts_of, read_whole
            from launch.wan_maker import VideoMaker

            maker = self._ready()
            assert self._dtype is not None
            if self.index is None:
                parts = self._parts()
            else:
                with _quiet():
                    parts = parts_of(read_whole(self.index, self._dtype))
            for model in (parts.text_encoder, parts.vae, *parts.transformers.values()):
                model.to(maker.device)
            for model in parts.transformers.values():
                self.choice.compile_modules(getattr(model, "blocks"))  # noqa: B009 (nn.Module has no such attribute)
            self._whole = VideoMaker(parts, maker.device, self.settings)
        return self._whole

    def _offload_text_encoder(self, parts: WanParts, context: TaskContext, where: torch.device) -> OffloadManager:
        import flextensor
        from launch.wan_checkpoint import HostLookup, replace_table

        encoder: Any = parts.text_encoder
        lookup = encoder.get_input_embeddings()
        if not isinstance(lookup, HostLookup):
            lookup = replace_table(encoder, lookup.weight, lookup.weight.dtype)
        lookup.device = where
        config = context.config.updated(
            include_patterns=("encoder.block.*",),
            exclude_patterns=(),  # those given are of the transformers
            external_compile=False,
            max_gpu_mem_fraction=None,
            budget_bytes=_room_for_blocks(encoder, encoder.encoder.block, context.config),
        )
        name = f"{context.manager_name}-text"
        flextensor.offload(
            encoder,
            config,
            name=name,
            source=parts.sources.get("text_encoder"),
            progress=lambda progress: context.progress(str(progress)),
        )
        return flextensor.get_offload_manager(name)

    def _resolve_dtype(self, device: torch.device) -> torch.dtype:
        import torch

        if self.options.dtype != "auto":
            dtype: torch.dtype = getattr(torch, self.options.dtype)
            return dtype
        return torch.bfloat16 if device.type == "cuda" else torch.float32

    # ---- items

    def _request(self, item: Item) -> Request:
        """Raises TaskInputError for an item that is none."""
        from launch.wan_maker import Request, seed_of

        if "prompt" not in item:
            raise TaskInputError("a video needs a 'prompt', not 'messages'")
        negative = item.get("negative_prompt", self.options.negative_prompt)
        seed = item.get("seed", None)
        if seed is None:
            seed = seed_of(self.options.seed, str(item["id"]))
        if not isinstance(negative, str):
            raise TaskInputError(f"negative_prompt = {negative!r} is not text")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise TaskInputError(f"seed = {seed!r}; use a whole number, 0 or more")
        return Request(str(item["prompt"]), negative, seed)

    def _key(self, request: Request) -> str:
        from launch.wan_maker import text_digest

        model = "tiny" if self.index is None else f"{self.index.directory.resolve()} {self._files}"
        return text_digest(model, self._dtype, self.settings, request, self.choice)

    def _ready(self) -> VideoMaker:
        if self._maker is None:
            raise RuntimeError("the task is not loaded")
        return self._maker


def _room_for_blocks(encoder: Any, blocks: Any, config: OffloadConfig) -> int:
    """Bytes that ``_TEXT_SLOTS`` blocks take beside what is resident anyway: one computes, the next comes in."""

    def aligned(tensors: Iterator[Any]) -> list[int]:
        return [-(-t.numel() * t.element_size() // 256) * 256 for t in tensors]

    sizes = [aligned(block.parameters()) for block in blocks]
    small = sum(size for block in sizes for size in block if size < config.resident_below_bytes)
    outside = sum(aligned(encoder.parameters())) - sum(map(sum, sizes))
    return _TEXT_SLOTS * max(map(sum, sizes)) + small + outside


def _summary(manager: OffloadManager) -> dict[str, Any]:
    report = manager.report()
    keys = ("phase", "epoch", "units", "weights_bytes", "device_weight_bytes", "streamed_bytes_a_step", "compile")
    return {key: report[key] for key in keys}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A worker has no terminal for progress bars, and ``torch_dtype`` is what all versions of diffusers know."""
    import diffusers.utils.logging as diffusers_logging
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    diffusers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch_dtype.* is deprecated", category=FutureWarning)
        yield
