"""The parts of a Wan text-to-video pipeline from a diffusers directory, big ones on meta with a source of weights.

[Note: where the parts go] The transformers and the text encoder's blocks are streamed from the node's host store. The
text encoder's token table (2 GB in the published models) needs neither device nor store: a prompt looks up some 500
rows of it, which are read from the checkpoint's file where it lies. The VAE is small (0.5 GB) beside its activations
and is called by chunks through ``decode``, not as a module; it stays on the device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from flextensor.store import SafetensorsSource, WeightSource
from flextensor.store.filling import Reader
from flextensor.store.layout import Layout, StoredTensor
from launch.meta_model import parameters_on_meta
from launch.wan_files import WanIndex

if TYPE_CHECKING:
    from diffusers import WanPipeline

logger = logging.getLogger(__name__)

TABLE_NAMES = ("shared.weight", "encoder.embed_tokens.weight")


@dataclass
class WanParts:
    """transformers: ``transformer`` and, where there is one, ``transformer_2``. sources: where the weights of
    ``text_encoder`` and of each transformer come from; a part without one has its weights with it."""

    tokenizer: Any
    text_encoder: nn.Module
    vae: Any
    scheduler: Any
    transformers: dict[str, nn.Module]
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    sources: dict[str, WeightSource] = dataclasses.field(default_factory=dict)


class HostLookup(nn.Module):
    """An embedding whose table stays in host memory and is no parameter. Ids of any device and shape -> rows of
    ``dtype`` on ``device``."""

    def __init__(self, table: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._table = (table.detach(),)  # in a tuple: no parameter, no buffer, not moved
        self.dtype = dtype
        self.device = torch.device("cpu")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids.to("cpu"), self._table[0])
        return rows.to(self.dtype).to(self.device)


class CastingSource:
    """The safetensors of one folder, each weight cast to the dtype that the model has for it.

    diffusers keeps some weights in float32 beside bfloat16 ones, whatever the checkpoint stores.
    """

    def __init__(self, folder: Path, names: Mapping[str, str] | None = None) -> None:
        self._folder, self._names = folder, dict(names or {})
        self._sources: dict[torch.dtype, SafetensorsSource] = {}

    def check(self, layout: Layout) -> None:
        for dtype, part in self._split(layout).items():
            self._sources.setdefault(dtype, SafetensorsSource(self._folder, self._names, dtype)).check(part)

    def identity(self, layout: Layout) -> str:
        self.check(layout)
        found = [(str(dtype), self._sources[dtype].identity(part)) for dtype, part in self._split(layout).items()]
        return hashlib.sha256(json.dumps(["casting", sorted(found)]).encode()).hexdigest()

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        return self._sources[tensor.dtype].open(tensor)

    def check_unchanged(self) -> None:
        for source in self._sources.values():
            source.check_unchanged()

    @staticmethod
    def _split(layout: Layout) -> dict[torch.dtype, Layout]:
        dtypes = sorted({tensor.dtype for tensor in layout.tensors}, key=str)
        return {
            dtype: Layout(tuple(tensor for tensor in layout.tensors if tensor.dtype == dtype), layout.nbytes)
            for dtype in dtypes
        }


def read_parts(index: WanIndex, dtype: torch.dtype) -> WanParts:
    """All parts of the directory, ready to be offloaded. ``dtype``: of transformers and text encoder; the VAE is in
    float32, as its authors run it."""
    from diffusers import AutoencoderKLWan
    from transformers import AutoTokenizer

    folder = index.directory
    encoder = _text_encoder_on_meta(folder / "text_encoder", dtype)
    parts = WanParts(
        tokenizer=AutoTokenizer.from_pretrained(str(folder / "tokenizer")),
        text_encoder=encoder,
        vae=AutoencoderKLWan.from_pretrained(str(folder / "vae"), torch_dtype=torch.float32).eval(),
        scheduler=_scheduler(index),
        transformers={name: _transformer_on_meta(folder / name, dtype) for name in index.transformers},
        boundary_ratio=index.boundary_ratio,
        expand_timesteps=index.expand_timesteps,
    )
    for name in ("text_encoder", *index.transformers):
        parts.sources[name] = CastingSource(folder / name)
    parts.vae.requires_grad_(False)
    return parts


def read_whole(index: WanIndex, dtype: torch.dtype) -> WanPipeline:
    """The pipeline as diffusers itself loads it, in host memory."""
    from diffusers import AutoencoderKLWan, WanPipeline

    vae = AutoencoderKLWan.from_pretrained(str(index.directory / "vae"), torch_dtype=torch.float32)
    pipeline: WanPipeline = WanPipeline.from_pretrained(str(index.directory), vae=vae, torch_dtype=dtype)
    return pipeline


def parts_of(pipeline: WanPipeline) -> WanParts:
    """A whole pipeline's parts, their weights with them."""
    models = {"transformer": pipeline.transformer, "transformer_2": pipeline.transformer_2}
    return WanParts(
        tokenizer=pipeline.tokenizer,
        text_encoder=pipeline.text_encoder,
        vae=pipeline.vae,
        scheduler=pipeline.scheduler,
        transformers={name: model for name, model in models.items() if model is not None},
        boundary_ratio=pipeline.config.boundary_ratio,
        expand_timesteps=pipeline.config.expand_timesteps,
    )


def replace_table(encoder: nn.Module, table: torch.Tensor, dtype: torch.dtype) -> HostLookup:
    """Look tokens up in host memory from now on; returns the lookup, whose ``device`` is to be set."""
    lookup = HostLookup(table, dtype)
    encoder.set_input_embeddings(lookup)  # type: ignore[operator]
    return lookup


def _transformer_on_meta(folder: Path, dtype: torch.dtype) -> nn.Module:
    from diffusers import WanTransformer3DModel

    with parameters_on_meta():
        model: Any = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(str(folder)))
    cast_parameters(model, dtype)
    return model.requires_grad_(False).eval()


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """As diffusers' ``from_pretrained(torch_dtype=...)``: all but what the model's class keeps in float32."""
    kept = model._keep_in_fp32_modules or []
    for module_name, module in model.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            path = [*module_name.split("."), attribute]
            if parameter is not None and not any(name in path for name in kept):
                module._parameters[attribute] = nn.Parameter(parameter.to(dtype), requires_grad=False)


def _text_encoder_on_meta(folder: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config.from_pretrained(str(folder))
    with parameters_on_meta():
        model: Any = UMT5EncoderModel._from_config(config, dtype=dtype)
    replace_table(model, _stored_table(folder), dtype)
    return model.requires_grad_(False).eval()


def _stored_table(folder: Path) -> torch.Tensor:
    """The token table as a view of the checkpoint's file: its pages are read when a row is, and shared by processes."""
    from safetensors import safe_open

    from launch.model_files import TaskInputError, stored_tensors

    stored = stored_tensors(folder)
    name = next((name for name in TABLE_NAMES if name in stored), None)
    if name is None:
        raise TaskInputError(f"{folder} has no token table ({' or '.join(TABLE_NAMES)}); is it a UMT5 encoder?")
    with safe_open(stored[name].file, framework="pt") as file:
        table: torch.Tensor = file.get_tensor(name)
    return table


def _scheduler(index: WanIndex) -> Any:
    import diffusers

    return getattr(diffusers, index.scheduler).from_pretrained(str(index.directory / "scheduler"))
