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
    "image_size": 8,
    "patch_size": 4,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "tie_word_embeddings": True}
_IMAGE_TOKENS = {"image_token_index": 60, "image_token_id": 60, "boi_token_index": 61, "eoi_token_index": 62}


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


def _text(model: str, config: str, changes: tuple[str, ...] = (), **options: Any) -> Architecture:
    return Architecture(model, config, {**_SIZES, **options}, changes)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _text("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", ("tied head",), tie_word_embeddings=True),
    "qwen3": _text("Qwen3ForCausalLM", "Qwen3Config", head_dim=16),
    "gemma2": _text(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        ("final_logit_softcapping", "tied head"),
        final_logit_softcapping=SOFTCAP,
        attn_logit_softcapping=5.0,
        **_GEMMA,
    ),
    "gemma3": Architecture(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**_SIZES, **_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
            **_IMAGE_TOKENS,
        },
        ("tied head",),
        nested=True,
    ),
    "gemma4": Architecture(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        {
            "text_config": {
                **_SIZES,
                "head_dim": 16,
                "global_head_dim": 16,
                "sliding_window": 64,
                "tie_word_embeddings": True,
                "layer_types": ["sliding_attention", "full_attention"],
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCABULARY,
                "final_logit_softcapping": SOFTCAP,
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 16,
            },
            "audio_config": None,
            "image_token_id": 60,
            "boi_token_id": 61,
            "eoi_token_id": 62,
            "video_token_id": 59,
            "audio_token_id": 58,
            "boa_token_id": 57,
            "eoa_token_index": 56,
            "tie_word_embeddings": True,
        },
        ("final_logit_softcapping", "tied head"),
        nested=True,
    ),
    "cohere": _text(
        "CohereForCausalLM",
        "CohereConfig",
        ("logit_scale", "tied head"),
        logit_scale=LOGIT_SCALE,
        tie_word_embeddings=True,
    ),
    "granite": _text("GraniteForCausalLM", "GraniteConfig", ("logits_scaling",), logits_scaling=4.0),
    "phi": _text("PhiForCausalLM", "PhiConfig", ("lm_head.bias",), resid_pdrop=0.0, partial_rotary_factor=0.5),
    "qwen3_moe": _text(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
        router_aux_loss_coef=0.0,
        output_router_logits=False,
    ),
    "recurrent_gemma": _text(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        ("logits_soft_cap", "tied head"),
        logits_soft_cap=SOFTCAP,
        head_dim=16,
        lru_width=32,
        conv1d_width=4,
        attention_window_size=64,
        block_types=["recurrent", "attention"],
        tie_word_embeddings=True,
    ),
    "modernbert_decoder": _text(
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderConfig",
        ("prediction head", "tied head"),
        local_attention=64,
        cls_token_id=BOS,
        sep_token_id=EOS,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
    "inkling": _text(
        "InklingForCausalLM",
        "InklingTextConfig",
        ("logits_mup_width_multiplier",),
        logits_mup_width_multiplier=4.0,
        head_dim=16,
        swa_head_dim=16,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=1,
        rel_extent=64,
        sliding_window=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
}
"""Name, as in cases -> what it is."""
