"""A Profile of a model that has not run: weights from safetensors headers, compute from FLOPs. No torch, no weights.

Estimated: a block's time is the larger of its FLOPs over the device's rate (2 a parameter and token; attention's own
are left out) and its weights over the device's memory bandwidth. Real kernels reach a part of both rates, so give what
is reached, not the data sheet's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flextensor.config import ConfigError, OffloadConfig
from flextensor.planner import align
from flextensor.profile import Profile, StepKind, TensorInfo, TransferCurve, UnitInfo
from launch.model_files import StoredTensor, TaskInputError, stored_tensors

_BLOCK = re.compile(r"^(.*?\.)?(\d+)\.")
_RATE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([KMGTPE]?)FLOP(?:S|/S)?\s*$", re.IGNORECASE)
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_HOST_SECONDS = 200e-6
"""What the host needs to issue one block in eager mode, about."""


@dataclass(frozen=True)
class Machine:
    """flops, link, memory_bandwidth: a second, as reached."""

    flops: float
    link: float
    memory_bandwidth: float


def parse_flops(text: str) -> float:
    """FLOPs a second of ``"150TFLOPS"``. Raises ConfigError for anything else."""
    found = _RATE.match(text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"{text!r} is not a compute rate; write, for example, '150TFLOPS'")
    return float(found[1]) * 1000.0 ** " KMGTPE".index(found[2].upper() or " ")


def estimate_profile(directory: Path, machine: Machine, *, tokens: int, dtype: str | None = None) -> Profile:
    """The profile of a step of ``tokens`` tokens of the Hugging Face model in ``directory``.

    dtype: what floating-point weights are loaded as; None: as they are stored.
    Raises TaskInputError when the directory is no such model or has no repeated blocks, ConfigError for the dtype.
    """
    if dtype is not None and dtype not in _ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not known; use one of {', '.join(_ITEM_BYTES)}")
    stored = stored_tensors(directory)
    config = read_config(directory)
    blocks = _blocks(stored)
    if not blocks:
        raise TaskInputError(f"{directory} has no repeated blocks (names like model.layers.0.); nothing to offload by")
    place = {name: block for block, names in blocks.items() for name in names}
    outside = [name for name in stored if name not in place]
    tensors: list[TensorInfo] = []
    units: list[UnitInfo] = []
    offset = 0
    least = OffloadConfig().resident_below_bytes
    for names in [*blocks.values(), outside]:
        first = len(tensors)
        for name in names:
            nbytes = _loaded_bytes(stored[name], dtype)
            reason = "" if name in place and nbytes >= least else "small" if name in place else "in no repeated block"
            tensors.append(TensorInfo(name, nbytes, offset, bool(reason), reason))
            offset += align(nbytes)
        if names is not outside:
            units.append(UnitInfo(place[names[0]], tuple(range(first, len(tensors)))))
    compute = [_seconds([stored[n] for n in names], config, machine, tokens, dtype) for names in blocks.values()]
    head = _seconds(_heads(stored, outside, config), config, machine, tokens, dtype)
    gap = (head, *(0.0 for _ in compute[1:]))
    kind = StepKind(
        f"{tokens} token{'s' if tokens > 1 else ''} (estimated)", tuple(compute), gap, (_HOST_SECONDS,) * len(compute)
    )
    return Profile(
        tensors=tuple(tensors),
        units=tuple(units),
        visits=tuple(range(len(units))),
        kinds=(kind,),
        transfer=TransferCurve.from_bandwidth(machine.link),
        activation_bytes=_activations(config, tokens, dtype),
        device="estimated",
    )


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json``; a multi-modal model's text part laid over it.

    Raises TaskInputError when it is not JSON.
    """
    file = directory / "config.json"
    try:
        data = json.loads(file.read_text())
        return {**data, **data["text_config"]} if isinstance(data.get("text_config"), dict) else dict(data)
    except (OSError, ValueError, AttributeError) as error:
        raise TaskInputError(f"{file} is not a model's configuration ({error}); copy the model again") from error


def _blocks(stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """Block name -> its tensors' names, blocks in the order in which they run: by stack, then by number."""
    found: dict[str, dict[int, list[str]]] = {}
    for name in stored:
        if match := _BLOCK.match(name):
            found.setdefault(match[1] or "", {}).setdefault(int(match[2]), []).append(name)
    return {
        f"{prefix}{index}": numbered[index]
        for prefix, numbered in found.items()
        if len(numbered) > 1
        for index in sorted(numbered)
    }


def _loaded_bytes(tensor: StoredTensor, dtype: str | None) -> int:
    floating = tensor.dtype in ("F64", "F32", "F16", "BF16")
    return math.prod(tensor.shape) * _ITEM_BYTES[dtype] if dtype and floating else tensor.nbytes


def _heads(stored: Mapping[str, StoredTensor], outside: Sequence[str], config: Mapping[str, Any]) -> list[StoredTensor]:
    """Matrices outside the blocks that are multiplied with; an embedding only where the head is tied to it."""
    tied = bool(config.get("tie_word_embeddings"))
    embeddings = [n for n in outside if re.search(r"embed|wte|wpe", n)]
    heads = [stored[n] for n in outside if n not in embeddings and len(stored[n].shape) > 1]
    if tied and not heads and embeddings:
        heads = [max((stored[n] for n in embeddings), key=lambda t: t.nbytes)]
    return heads


def _seconds(
    tensors: Sequence[StoredTensor], config: Mapping[str, Any], machine: Machine, tokens: int, dtype: str | None
) -> float:
    flops, nbytes = 0.0, 0.0
    for tensor in tensors:
        share = _active_share(tensor.name, config)
        if len(tensor.shape) > 1:
            flops += 2.0 * math.prod(tensor.shape) * tokens * share
        # With few tokens an expert that none of them takes is not read either.
        nbytes += _loaded_bytes(tensor, dtype) * min(1.0, share * tokens)
    return max(flops / machine.flops, nbytes / machine.memory_bandwidth)


def _active_share(name: str, config: Mapping[str, Any]) -> float:
    """The share of experts that a token takes; 1 for everything else."""
    if ".experts." not in name:
        return 1.0
    counts = (config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = next((count for count in counts if count), 1)
    return float(min(1.0, (config.get("num_experts_per_tok") or experts) / experts))


def _activations(config: Mapping[str, Any], tokens: int, dtype: str | None) -> int:
    """Bytes of a step beside the weights, roughly: a block's activations, the KV cache, the logits of all tokens."""
    item = _ITEM_BYTES.get(str(dtype or config.get("dtype") or config.get("torch_dtype") or "float32"), 4)
    hidden = int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)
    inner = int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    kv = int(config.get("num_key_value_heads") or heads) * int(config.get("head_dim") or hidden // max(heads, 1))
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    vocabulary = int(config.get("vocab_size") or 0)
    return tokens * (item * (6 * hidden + 3 * inner + 2 * layers * kv + vocabulary))
