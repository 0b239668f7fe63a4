"""A Wan-14B-shaped video transformer with random weights, made quickly, and the sweep that offloads it compiled.

diffusers keeps a few weights in float32 beside bfloat16; so does this model. 26.67 GiB in all.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import flextensor
from benchmarks.model import BANK_SHIFT, WINDOW_STEP, weight_bytes
from benchmarks.ours import Settings, Sweep
from benchmarks.rows import Row
from benchmarks.stopwatch import back_to_back, link_bandwidth, steps_for, synchronize, warm_up_gpu
from benchmarks.wan_start import RESIDENT, Start, StartClock, graphs_made
from launch.compile_choice import CompileChoice
from launch.meta_model import parameters_on_meta
from launch.wan_checkpoint import cast_parameters

logger = logging.getLogger(__name__)

PATTERN = "blocks.*"
DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC"
"""Inductor's own: reductions are configured without timing, so that two compilations of one graph give one result."""


@dataclass(frozen=True)
class WanShape:
    """The published 14B model's sizes. ``dtype``: of what diffusers casts."""

    blocks: int = 40
    heads: int = 40
    head_width: int = 128
    hidden: int = 13824
    text_width: int = 4096
    dtype: torch.dtype = torch.bfloat16


FULL = WanShape()
TINY = WanShape(blocks=6, heads=4, head_width=24, hidden=512, text_width=64, dtype=torch.float32)


@dataclass(frozen=True)
class Video:
    """A workload: pixels and frames, as a user asks for them."""

    name: str
    height: int
    width: int
    frames: int
    text_tokens: int = 512

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents."""
        return (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8

    @property
    def tokens(self) -> int:
        """What the transformer sees: patches of 1 x 2 x 2 latents."""
        frames, height, width = self.latent
        return frames * (height // 2) * (width // 2)


VIDEOS = {
    "video": Video("video", 480, 832, 17),
    "still": Video("still", 480, 832, 1),
}
TINY_VIDEO = Video("tiny", 64, 64, 9, text_tokens=16)


def build(shape: WanShape, device: torch.device | str, *, seed: int = 0) -> nn.Module:
    """The transformer with its weights on ``device``: windows into one bank of random numbers, the same on each."""
    from diffusers import WanTransformer3DModel

    with parameters_on_meta():
        model: Any = WanTransformer3DModel(
            num_attention_heads=shape.heads,
            attention_head_dim=shape.head_width,
            ffn_dim=shape.hidden,
            num_layers=shape.blocks,
            text_dim=shape.text_width,
        )
    cast_parameters(model, shape.dtype)
    largest = max(parameter.numel() for parameter in model.parameters())
    numbers = torch.Generator().manual_seed(seed)
    bank = torch.randn(largest + BANK_SHIFT, generator=numbers).mul_(0.02).to(device)
    banks = {torch.float32: bank, shape.dtype: bank.to(shape.dtype)}
    at = 0
    for module in model.modules():
        for name, meta in list(module._parameters.items()):
            if meta is None:
                continue
            value = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            if meta.dim() == 1:
                value.fill_(0.0 if name == "bias" else 1.0)
            else:
                start = at * WINDOW_STEP % BANK_SHIFT
                value.view(-1).copy_(banks[meta.dtype][start : start + value.numel()])
            at += 1
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model.eval()


def make_inputs(shape: WanShape, video: Video, device: torch.device | str, *, seed: int = 1) -> dict[str, Any]:
    """One call of the transformer, as the pipeline makes it; the same numbers on every device."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 16, *video.latent, generator=numbers).to(shape.dtype).to(device),
        "timestep": torch.tensor([900]).to(device),
        "encoder_hidden_states": torch.randn(1, video.text_tokens, shape.text_width, generator=numbers)
        .to(shape.dtype)
        .to(device),
        "return_dict": False,
    }


def resident_start(shape: WanShape, video: Video, device: torch.device, choice: CompileChoice) -> Start:
    """The un-offloaded model, compiled block by block: what a cold start costs without us."""
    warm_up_gpu(device)
    inputs = make_inputs(shape, video, device)
    model: Any = build(shape, "cpu")
    clock = StartClock(Start(RESIDENT, video.name), device)
    model.to(device)
    synchronize(device)
    clock.part_done("move to the device")
    CompileChoice("external", choice.backend, choice.mode).compile_modules(model.blocks)
    model(**inputs)
    clock.step_done()
    clock.part_done("first step, compiling")
    model(**inputs)
    clock.step_done()
    clock.part_done("second step")
    clock.planned()
    clock.start.compiled, clock.start.shared = clock.start.graphs, len(model.blocks) - clock.start.graphs
    return clock.start


class WanSweep(Sweep):
    """The offloaded transformer, compiled on one of the two paths, at one workload, under many plans."""

    def __init__(self, choice: CompileChoice, shape: WanShape, video: Video, settings: Settings) -> None:
        self.name, self.tokens, self.settings = f"wan-{choice.how.replace('_', '-')}", video.tokens, settings
        self.compiled = True
        self.choice, self.shape = choice, shape
        config = choice.offload_config(
            flextensor.OffloadConfig(
                include_patterns=(PATTERN,),
                gpu_device=settings.device,
                resident_below_bytes=settings.resident_below_bytes,
                host_link_bytes_per_second=settings.host_link_bytes_per_second,
            )
        )
        self.torch_device = torch.device("cpu" if settings.device == "host" else "cuda")
        warm_up_gpu(self.torch_device)
        self.x = make_inputs(shape, video, self.torch_device)["hidden_states"]
        self.inputs = make_inputs(shape, video, self.torch_device)
        model: Any = build(shape, "cpu")
        self.total = weight_bytes(model)
        self.start = Start(self.name, video.name)
        self._set_up(model, config)
        self._prepare_to_time()

    def _set_up(self, model: Any, config: flextensor.OffloadConfig) -> None:
        clock = StartClock(self.start, self.torch_device)
        self.model = flextensor.offload(model, config, self.choice.compile_fn(), name=self.name)
        self.manager = flextensor.get_offload_manager(self.name)
        synchronize(self.torch_device)
        clock.part_done("offload()")
        store = self.manager.hosting.store.report()
        self.start.parts["of it filling the host store"] = store.fill_seconds
        steps = self.manager.iters_before_inference
        for index in range(steps):
            self.step()
            clock.step_done()
            if index in (0, steps - 1):
                clock.part_done("discovery" if index == 0 else "profiling and plan")
        if self.manager.phase != "inference":
            raise RuntimeError(f"no plan after the set-up's steps; the engine is still in {self.manager.phase}")
        if self.choice.how == "external":
            for _ in range(self.choice.compile_externally(self.manager)):
                self.step()
                clock.step_done()
            self.choice.require_replanned(self.manager)
            clock.part_done("compiling and replan")
        self.step()
        clock.step_done()
        clock.part_done("planned step")
        self.setup_seconds = clock.planned()
        report = self.manager.compile_report()
        self.start.compiled, self.start.shared = report.compiled, report.shared
        self.start.eager = report.eager + report.pending

    def step(self) -> torch.Tensor:
        """One forward, as the denoising loop calls it."""
        y: torch.Tensor = self.model(**self.inputs)[0]
        return y

    def resident_step(self) -> torch.Tensor:
        """One forward of the twin."""
        assert self._twin is not None
        y: torch.Tensor = self._twin(**self.inputs)[0]
        return y

    def add_twin(self) -> None:
        """The un-offloaded model beside it, compiled block by block in the same way, and its output."""
        cuda = self.torch_device.type == "cuda"
        self.start.later_graphs = graphs_made() - self.start.graphs
        self.link = link_bandwidth(self.device, nbytes=(256 << 20) if cuda else 4 << 20)
        twin: Any = build(self.shape, self.torch_device)
        if os.environ.get(DETERMINISTIC) == "1":
            from torch._inductor import config as inductor_config

            # Dynamo ends the mode with each frame that it compiles (pytorch issue 198563).
            inductor_config.deterministic = True
        CompileChoice("external", self.choice.backend, self.choice.mode).compile_modules(twin.blocks)
        self._twin = twin
        first = self.resident_step()
        self.resident_seconds()
        self._expected = self.resident_step()
        if not torch.equal(first, self._expected):  # a kernel was chosen between them
            apart = float((first.float() - self._expected.float()).abs().max())
            logger.warning("the resident model's first output differs from its later ones by %g", apart)
        self._graphs_with_twin = graphs_made()

    def graph_row(self, target: str) -> Row:
        """The whole step under ``target``'s plan as one CUDA graph that streams as it is replayed. CUDA only."""
        plan, budget, _ = self.plan_for(target)
        self.put_in_force(plan)
        for _ in range(2):
            self.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = self.step()
        before = self.resident_seconds()
        once = back_to_back(graph.replay, 2, self.torch_device)
        seconds = back_to_back(graph.replay, steps_for(self.settings.seconds, once), self.torch_device)
        after = self.resident_seconds()
        graph.replay()
        synchronize(self.torch_device)
        assert self._expected is not None
        resident = (before + after) / 2
        floor = max(resident, plan.streamed_bytes / self.link)
        return Row(
            f"{self.name}-graph",
            self.tokens,
            target,
            version="this tree",
            step_seconds=seconds,
            step_samples=(seconds,),
            resident_seconds=resident,
            total_weight_bytes=self.total,
            device_weight_bytes=self.manager.get_gpu_memory_usage()["weights"] + self.manager.hosting.other_bytes,
            budget_bytes=budget,
            streamed_bytes=plan.streamed_bytes,
            link_bytes_per_second=self.link,
            floor_seconds=floor,
            ratio=seconds / floor,
            predicted_seconds=None if plan.prediction is None else plan.prediction.step_seconds,
            identical=bool(torch.equal(y, self._expected)),
            largest_difference=float((y.float() - self._expected.float()).abs().max()),
        )

    def count_later_graphs(self) -> None:
        """Add what was compiled since the twin was: by replans and timed steps."""
        self.start.later_graphs += graphs_made() - self._graphs_with_twin
