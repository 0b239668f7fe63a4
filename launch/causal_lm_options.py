"""What the causal LM task is told: its options, checked before anything is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flextensor.config import unknown_key_message
from launch.compile_choice import CompileChoice
from launch.model_files import TaskInputError

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
CACHES = ("dynamic", "static")


@dataclass(frozen=True)
class CausalLMOptions:
    """model: a local Hugging Face directory with safetensors.

    dtype: ``auto`` is float32 on the host device and the checkpoint's own on CUDA.
    max_new_tokens: the most tokens that an answer has.
    batch_size: the most items that go through the model at once; 0 takes all that ``run`` is given.
    system_prompt: put before each conversation that has no system message of its own; empty: the chat template's own.
    attention: transformers' attention implementation.
    cache: ``dynamic`` grows with the text, ``static`` has a fixed size (see ``launch.static_cache``).
    compile, compile_backend, compile_mode: see ``CompileChoice``; they need the static cache, since a growing one
        would be compiled again and again.
    """

    model: str
    dtype: str = "auto"
    max_new_tokens: int = 128
    batch_size: int = 0
    system_prompt: str = ""
    attention: str = "sdpa"
    cache: str = "dynamic"
    compile: str = "none"
    compile_backend: str = "inductor"
    compile_mode: str = ""

    @staticmethod
    def parse(options: Mapping[str, Any]) -> CausalLMOptions:
        """Checked options.

        Raises TaskInputError that names the option, its value and what is allowed, or the nearest known option.
        """
        known = [field.name for field in dataclasses.fields(CausalLMOptions)]
        for key in options:
            if key not in known:
                raise TaskInputError(unknown_key_message(key, known, "task option"))
        if not isinstance(options.get("model"), str | Path) or not str(options["model"]):
            raise TaskInputError("task option 'model' is missing; name a Hugging Face model directory")
        parsed = CausalLMOptions(**{**options, "model": str(options["model"])})
        _one_of("dtype", parsed.dtype, DTYPES)
        _one_of("attention", parsed.attention, ATTENTION)
        _one_of("cache", parsed.cache, CACHES)
        if CompileChoice.parse(options).compiles and parsed.cache != "static":
            raise TaskInputError(f"task option compile = {parsed.compile!r} needs cache = 'static'")
        _whole("max_new_tokens", parsed.max_new_tokens, 1)
        _whole("batch_size", parsed.batch_size, 0)
        if not isinstance(parsed.system_prompt, str):
            raise TaskInputError(f"task option system_prompt = {parsed.system_prompt!r} is not text")
        return parsed


def _one_of(option: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise TaskInputError(f"task option {option} = {value!r}; use one of {', '.join(allowed)}")


def _whole(option: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TaskInputError(f"task option {option} = {value!r}; use a whole number, {least} or more")
