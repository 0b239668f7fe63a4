"""A small Wan text-to-video pipeline with seeded random weights: every part and path of the real one, in seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launch.wan_checkpoint import WanParts, cast_parameters

BLOCKS = 8
BOUNDARY_RATIO = 0.875
_SEED = 20


def tiny_parts(dtype: torch.dtype = torch.float32) -> WanParts:
    """Two transformers of ``BLOCKS`` blocks (4.4 MB each in float32), a text encoder of 3, a VAE that makes 4 frames
    of 8 x 8 pixels a latent one. The same numbers on every call; the caller's random state is left alone."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=64,
                d_kv=16,
                num_heads=4,
                d_ff=128,
                num_layers=3,
                feed_forward_proj="gated-gelu",
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )
        transformers = {name: _transformer() for name in ("transformer", "transformer_2")}
    for part in (encoder, vae, *transformers.values()):
        part.requires_grad_(False).eval()
    for model in transformers.values():
        cast_parameters(model, dtype)
    return WanParts(
        tokenizer=tokenizer,
        text_encoder=encoder.to(dtype),
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            num_train_timesteps=1000, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformers=transformers,
        boundary_ratio=BOUNDARY_RATIO,
    )


def whole_pipeline(parts: WanParts) -> Any:
    """diffusers' own pipeline of parts that have their weights with them."""
    from diffusers import WanPipeline

    return WanPipeline(
        tokenizer=parts.tokenizer,
        text_encoder=parts.text_encoder,
        vae=parts.vae,
        scheduler=parts.scheduler,
        transformer=parts.transformers["transformer"],
        transformer_2=parts.transformers.get("transformer_2"),
        boundary_ratio=parts.boundary_ratio,
        expand_timesteps=parts.expand_timesteps,
    )


def byte_tokenizer() -> Any:
    """One token a byte, and the end token behind them, as T5's tokenizer has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "</s>": 1, **{letter: at + 2 for at, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def _transformer() -> nn.Module:
    from diffusers import WanTransformer3DModel

    model: nn.Module = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        text_dim=64,
        freq_dim=64,
        ffn_dim=256,
        num_layers=BLOCKS,
        rope_max_seq_len=64,
    )
    # The default initialisation scales so small a model to nothing: prompts and seeds should show in the frames.
    for name, parameter in model.named_parameters():
        if name == "proj_out.weight":
            nn.init.normal_(parameter, std=0.1)
    return model
