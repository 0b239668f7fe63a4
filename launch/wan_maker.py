"""One Wan pipeline on one device, offloaded or whole: prompt and seed -> latents -> frames."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cluster.checkpoints import ItemCheckpoint
from launch.video_files import Frames
from launch.wan_checkpoint import WanParts
from launch.wan_state import DenoisingState, restore_scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VideoSettings:
    """What every video of a run has in common. Pixels, frames, denoising steps, tokens of the prompt.

    guidance above 1 runs the transformer twice a step, with and without the prompt. guidance_2: the second
    transformer's (None: the same). flow_shift: the scheduler's; None: the checkpoint's.
    """

    height: int
    width: int
    frames: int
    steps: int
    guidance: float
    guidance_2: float | None = None
    flow_shift: float | None = None
    text_tokens: int = 512
    vae_tiling: bool = False


@dataclass(frozen=True)
class Request:
    """One video. The same request on the same weights gives the same latents, whatever else is run."""

    prompt: str
    negative_prompt: str
    seed: int


class VideoMaker:
    """``parts`` on ``device``: transformers and text encoder run there by whatever means, the VAE lies there."""

    def __init__(self, parts: WanParts, device: torch.device, settings: VideoSettings) -> None:
        self.settings = settings
        self.device = device
        self._tokenizer = parts.tokenizer
        self._text_encoder = parts.text_encoder
        self._vae: Any = parts.vae
        if settings.vae_tiling:
            self._vae.enable_tiling()
        self._pipeline = _pipeline(parts, device, settings)
        self._negative: tuple[str, torch.Tensor] | None = None

    @torch.no_grad()
    def embed(self, text: str) -> torch.Tensor:
        """(1, text_tokens, width): the text encoder's output, zero behind the text's end."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        inputs = self._tokenizer(
            [prompt_clean(text)],
            padding="max_length",
            max_length=self.settings.text_tokens,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = inputs.attention_mask
        hidden = self._text_encoder(inputs.input_ids.to(self.device), mask.to(self.device)).last_hidden_state
        used = int(mask.sum())
        padded = torch.zeros_like(hidden)
        padded[:, :used] = hidden[:, :used]
        return padded

    @torch.no_grad()
    def denoise(
        self,
        request: Request,
        *,
        steps: int | None = None,
        on_step: Callable[[int], bool] | None = None,
        kept: ItemCheckpoint | None = None,
    ) -> torch.Tensor:
        """The video's latents: (1, channels, latent frames, height / 8, width / 8) in float32.

        steps: of the schedule, the settings' where None. on_step(index) after each; False ends the denoising there.
        kept: is given the state when it is due; denoising goes on at the state that it has.
        """
        settings = self.settings
        generator = torch.Generator().manual_seed(request.seed)  # on the CPU: the same noise on every device
        state = DenoisingState.from_bytes(kept.load()) if kept is not None else None
        if state is not None:
            generator.set_state(state.generator)
            logger.info("seed %d goes on at step %d", request.seed, state.steps)
        self._pipeline.begin_at(state)

        def after(pipeline: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if kept is not None and kept.due:
                now = DenoisingState.of(index + 1, tensors["latents"], pipeline.scheduler, generator)
                kept.save(now.to_bytes())
            if on_step is not None and not on_step(index):
                pipeline._interrupt = True
            return tensors

        result = self._pipeline(
            prompt_embeds=self.embed(request.prompt),
            negative_prompt_embeds=self._embed_negative(request.negative_prompt) if settings.guidance > 1 else None,
            height=settings.height,
            width=settings.width,
            num_frames=settings.frames,
            num_inference_steps=steps or settings.steps,
            guidance_scale=settings.guidance,
            guidance_scale_2=settings.guidance_2 if self.two_stages else None,
            generator=generator,
            latents=None if state is None else state.latents,
            output_type="latent",
            callback_on_step_end=after,
        )
        latents: torch.Tensor = result.frames
        return latents

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> Frames:
        """The frames of latents, (frames, height, width, 3), 8 bits a colour."""
        vae = self._vae
        latents = latents.to(self.device, vae.dtype)
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
        inverse = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
        video = vae.decode(latents / inverse + mean, return_dict=False)[0]
        frames = self._pipeline.video_processor.postprocess_video(video, output_type="np")[0]
        return np.rint(frames * 255).astype(np.uint8)

    @property
    def two_stages(self) -> bool:
        """True when the second transformer takes over below the boundary."""
        return self._pipeline.config.boundary_ratio is not None

    def steps_of_each(self, steps: int) -> list[int]:
        """How many of ``steps`` denoising steps each transformer runs."""
        pipeline = self._pipeline
        if not self.two_stages:
            return [steps]
        pipeline.scheduler.set_timesteps(steps, device="cpu")
        boundary = pipeline.config.boundary_ratio * pipeline.scheduler.config.num_train_timesteps
        high = sum(1 for t in pipeline.scheduler.timesteps.tolist() if t >= boundary)
        return [high, len(pipeline.scheduler.timesteps) - high]

    def _embed_negative(self, text: str) -> torch.Tensor:
        if self._negative is None or self._negative[0] != text:
            self._negative = text, self.embed(text)
        return self._negative[1]


def digest(values: torch.Tensor | Frames) -> str:
    """SHA-256 of dtype, shape and every bit."""
    array = values.detach().cpu().contiguous().numpy() if isinstance(values, torch.Tensor) else values
    head = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def text_digest(*values: object) -> str:
    """SHA-256 of what the values look like: settings and requests are plain data classes."""
    return hashlib.sha256("\n".join(map(repr, values)).encode()).hexdigest()


def seed_of(run_seed: int, key: str) -> int:
    """The seed of an item that names none: its own, the same in every run with ``run_seed``."""
    return int.from_bytes(hashlib.sha256(f"{run_seed} {key}".encode()).digest()[:4], "little")


def _pipeline(parts: WanParts, device: torch.device, settings: VideoSettings) -> Any:
    """diffusers' own denoising loop over the parts. The text encoder is called by us and no part of it."""
    from diffusers import WanPipeline

    class PlacedWanPipeline(WanPipeline):
        """diffusers guesses the device from the first weight it finds; an offloaded model's weights lie anywhere."""

        _execution_device = device
        _state: DenoisingState | None = None
        _skipped = 0

        def begin_at(self, state: DenoisingState | None) -> None:
            """The next call begins at ``state``: it is given its latents, and leaves out the steps before."""
            self._state, self._skipped = state, 0

        @property
        def interrupt(self) -> bool:
            # The denoising loop looks once before each step and leaves the step out when this is true.
            if self._state is not None:
                if self._skipped < self._state.steps:
                    self._skipped += 1
                    return True
                restore_scheduler(self.scheduler, self._state.scheduler)
                self._state = None
            return bool(self._interrupt)

    scheduler = parts.scheduler
    if settings.flow_shift is not None:
        scheduler = type(scheduler).from_config(scheduler.config, flow_shift=settings.flow_shift)
    pipeline = PlacedWanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=parts.vae,
        scheduler=scheduler,
        transformer=parts.transformers["transformer"],
        transformer_2=parts.transformers.get("transformer_2"),
        boundary_ratio=parts.boundary_ratio,
        expand_timesteps=parts.expand_timesteps,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
