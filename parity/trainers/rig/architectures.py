"""The architectures of the tiny models: transformers' own classes at a few hundred bytes a layer, and what changes logits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

VOCABULARY, PAD, EOS, BOS = 64, 0, 1, 2
SOFTCAP, LOGIT_SCALE = 3.0, 0.25
LOGITS = 4.0
"""Root mean square of the logits before a softcap: beyond it often enough that losing it changes every log-prob."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LAYERS = ["sliding_attention", "full_attention"]
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA4_TOKENS = (
    "image_token_id boi_token_id eoi_token_id video_token_id audio_token_id boa_token_id eoa_token_index"
).split()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A tiny model: transformers' classes, the config's values away from default, and what changes its logits.

    Attributes:
        model: name of the model class in transformers.
        config: name of the config class.
        options: config values; a nested table is a sub-config.
        changes_logits: the values between hidden states and logits that the model's own forward applies.
        nested: whether those are in a nested text config.
    """

    model: str
    config: str
    options: Mapping[str, Any]
    changes_logits: tuple[str, ...] = ()
    nested: bool = False


def _text(family: str, changes: tuple[str, ...] = (), config: str = "", **options: Any) -> Architecture:
    return Architecture(f"{family}ForCausalLM", config or f"{family}Config", {**_SIZES, **options}, changes)


def _of_images(family: str, changes: tuple[str, ...], text: Mapping[str, Any], **options: Any) -> Architecture:
    text = {**_SIZES, "head_dim": 16, "sliding_window": 64, "layer_types": _LAYERS, **_TIED, **text}
    options = {"text_config": text, **options, **_TIED}
    return Architecture(f"{family}ForConditionalGeneration", f"{family}Config", options, changes, nested=True)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _text("Llama"),
    "qwen2": _text("Qwen2", ("tied head",), **_TIED),
    "qwen3": _text("Qwen3", head_dim=16),
    "gemma2": _text(
        "Gemma2",
        ("final_logit_softcapping", "tied head"),
        final_logit_softcapping=SOFTCAP,
        attn_logit_softcapping=5.0,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
        **_TIED,
    ),
    "gemma3": _of_images(
        "Gemma3",
        ("tied head",),
        {"query_pre_attn_scalar": 16},
        vision_config=_VISION | {"image_size": 8, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=60,
        image_token_id=60,
        boi_token_index=61,
        eoi_token_index=62,
    ),
    "gemma4": _of_images(
        "Gemma4",
        ("final_logit_softcapping", "tied head"),
        {
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "final_logit_softcapping": SOFTCAP,
        },
        vision_config=_VISION | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        audio_config=None,
        **dict(zip(_GEMMA4_TOKENS, (60, 61, 62, 59, 58, 57, 56), strict=True)),
    ),
    "cohere": _text("Cohere", ("logit_scale", "tied head"), logit_scale=LOGIT_SCALE, **_TIED),
    "granite": _text("Granite", ("logits_scaling",), logits_scaling=4.0),
    "phi": _text("Phi", ("lm_head.bias",), resid_pdrop=0.0, partial_rotary_factor=0.5),
    "qwen3_moe": _text(
        "Qwen3Moe",
        head_dim=16,
        decoder_sparse_step=1,
        num_experts=4,
        router_aux_loss_coef=0.0,
        output_router_logits=False,
        **_EXPERTS,
    ),
    "recurrent_gemma": _text(
        "RecurrentGemma",
        ("logits_soft_cap", "tied head"),
        logits_soft_cap=SOFTCAP,
        head_dim=16,
        lru_width=32,
        conv1d_width=4,
        attention_window_size=64,
        block_types=["recurrent", "attention"],
        **_TIED,
    ),
    "modernbert_decoder": _text(
        "ModernBertDecoder",
        ("prediction head", "tied head"),
        local_attention=64,
        cls_token_id=BOS,
        sep_token_id=EOS,
        layer_types=_LAYERS,
        **_TIED,
    ),
    "inkling": _text(
        "Inkling",
        ("logits_mup_width_multiplier",),
        "InklingTextConfig",
        logits_mup_width_multiplier=4.0,
        head_dim=16,
        swa_head_dim=16,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=1,
        rel_extent=64,
        sliding_window=64,
        n_routed_experts=4,
        **_EXPERTS,
    ),
}
"""Name, as in cases -> what it is."""
