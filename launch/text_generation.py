"""The tokenizer of a model directory, and how its answers are decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.model_files import TaskInputError


def load_tokenizer(directory: Path) -> Any:
    """Padding on the left, so that the last token of each row is the prompt's last.

    Raises TaskInputError when the directory has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), padding_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise TaskInputError(f"{directory} has no usable tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def greedy(directory: Path, config: Any, tokenizer: Any, max_new_tokens: int) -> Any:
    """Plain arg-max decoding: nothing of the checkpoint's sampling settings but its end tokens."""
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        stored = GenerationConfig.from_pretrained(str(directory))
    else:
        stored = GenerationConfig.from_model_config(config)
    own = stored.eos_token_id
    ends = [own] if isinstance(own, int) else list(own or ())
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=stored.bos_token_id,
        disable_compile=True,  # of the whole model, which generate() would do by itself with a static cache on a GPU
    )
