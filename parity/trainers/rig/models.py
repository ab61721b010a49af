"""Tiny real models of the architectures that went wrong, and a tokenizer to go with them: no download, no random state.

Each is the installed transformers' own class, built from a config of two layers. Weights are a function of the parameter's
name alone, so that every version and every order of construction gives the same model; the head is scaled until logits pass
the softcap. TRL loads a reference model from the policy's path, so models are saved once a process and loaded from there.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from parity.errors import Unsupported
from parity.trainers.rig import drawn
from parity.upstream import trl

VOCABULARY, PAD, EOS, BOS, END = 64, 0, 1, 2, 63
"""`END`: a second token that ends a completion, of a model that is told so by `two_ends`."""
SOFTCAP, LOGIT_SCALE = 3.0, 0.25
LOGITS = 4.0
"""Root mean square of the logits before a softcap: beyond it often enough that losing it changes every log-prob."""

_SIZES = (
    {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    | {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
    | {"attention_dropout": 0.0, "tie_word_embeddings": False}
)
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
PROJECTIONS = ("q_proj", "v_proj")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A tiny model: transformers' classes, the config's values away from default, and what changes its logits."""

    model: str  # name of the model class in transformers
    config: str  # name of the config class
    options: Mapping[str, Any]  # config values; a nested table is a sub-config
    # the values between hidden states and logits that the model's own forward applies
    changes_logits: tuple[str, ...] = ()


def _text(family: str, changes: tuple[str, ...] = (), config: str = "", **options: Any) -> Architecture:
    return Architecture(f"{family}ForCausalLM", config or f"{family}Config", {**_SIZES, **options}, changes)


def _classes(family: str, count: int, **options: Any) -> Architecture:
    options = {**_SIZES, "num_labels": count, **options}
    return Architecture(f"{family}ForSequenceClassification", f"{family}Config", options)


def _of_images(family: str, changes: tuple[str, ...], text: Mapping[str, Any], **options: Any) -> Architecture:
    text = {**_SIZES, "head_dim": 16, "sliding_window": 64, "layer_types": _LAYERS, **_TIED, **text}
    options = {"text_config": text, **options, **_TIED}
    return Architecture(f"{family}ForConditionalGeneration", f"{family}Config", options, changes)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _text("Llama"),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {n: _SIZES[n] for n in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
        | {"max_position_embeddings": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        | {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS, **_TIED},
        ("tied head",),
    ),
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
            "num_hidden_layers": 3,
            "layer_types": [*_LAYERS, "full_attention"],
            "num_kv_shared_layers": 1,  # the last takes keys and values of the one before it
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "final_logit_softcapping": SOFTCAP,
        },
        vision_config=_VISION | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        audio_config=None,
        **dict(zip(_GEMMA4_TOKENS, (60, 61, 62, 59, 58, 57, 56), strict=True)),
    ),
    "deepseek_v4": _text(
        "DeepseekV4",
        head_dim=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        n_routed_experts=4,
        layer_types=["compressed_sparse_attention"] * 2,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        router_aux_loss_coef=0.0,
        **_EXPERTS,
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
    "gpt_oss": _text(
        "GptOss",
        head_dim=16,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=1.0,
        router_aux_loss_coef=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
        rope_scaling=None,  # older releases
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
GROUPED = "llama_grouped"
"""Two heads to each key and value: with one key for all, in which order keys are repeated changes nothing."""
_CLIP = {**_VISION, "image_size": 8, "model_type": "clip_vision_model"}
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
MORE = {
    "llama_relu": _text("Llama", hidden_act="relu"),
    "falcon_h1": _text(
        "FalconH1", mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8, mlp_multipliers=[0.5, 0.7]
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": {**_SIZES, "model_type": "llama"}, "vision_config": _CLIP, "image_token_id": 60},
    ),
    "glm4v": Architecture(
        "Glm4vForConditionalGeneration",
        "Glm4vConfig",
        {
            "text_config": {**_SIZES, "rope_parameters": _ROTARY},
            "vision_config": {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "image_size": 8},
            "image_token_id": 60,
            "video_token_id": 61,
        },
    ),
    "classifier": _classes("Qwen2", 3),
}
"""Models that only transformers' own trainer is given."""
VISION = {
    "granite_vision": Architecture(
        "LlavaNextForConditionalGeneration",
        "LlavaNextConfig",
        {"text_config": {**_SIZES, "model_type": "granite", "logits_scaling": 4.0}, "vision_config": _CLIP}
        | {"image_token_index": 60, "image_grid_pinpoints": [[8, 8]]},
    ),
    "cohere2_vision": Architecture(
        "Cohere2VisionForConditionalGeneration",
        "Cohere2VisionConfig",
        {
            "text_config": {
                **_SIZES,
                "model_type": "cohere2",
                "logit_scale": LOGIT_SCALE,
                "head_dim": 16,
                "sliding_window": 64,
            }
            | {"layer_types": _LAYERS, **_TIED},
            "vision_config": _CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_id": 60,
            **_TIED,
        },
    ),
}
"""Models of images whose text models scale their logits."""
_EVERY = {**ARCHITECTURES, **MORE, **VISION, GROUPED: _text("Llama", num_attention_heads=4, num_key_value_heads=2)}
_EVERY |= {"llama_scores": _classes("Llama", 1), "qwen2_scores": _classes("Qwen2", 1, **_TIED)}


def config(name: str) -> Any:
    """A fresh config of the architecture. Raises Unsupported when the installed transformers has no such class."""
    import transformers

    wanted = _EVERY[name]
    found = getattr(transformers, wanted.config, None)
    if found is None or getattr(transformers, wanted.model, None) is None:
        raise Unsupported(f"transformers {transformers.__version__} has no {wanted.model}")
    made = found(**{k: dict(v) if isinstance(v, dict) else v for k, v in wanted.options.items()})
    made.architectures = [wanted.model]
    return made


@drawn.once
def saved(name: str) -> Path:
    """The folder of this process in which the model lies, weights and tokenizer, made on first use."""
    folder = Path(trl.output_dir()) / "models" / f"{name}{drawn.seed() or ''}"
    write(config(name), folder)  # unsupported where transformers lacks the architecture
    return folder


def write(given: Any, folder: Path) -> None:
    """Makes the model of a config with weights by parameter name, and saves it with the tokenizer."""
    import transformers

    with trl.quiet():
        model = getattr(transformers, given.architectures[0])(given)
        fill(model)
        if model.get_output_embeddings() is not None:
            _scale_head(model)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)


def model(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """A copy of the model that is loaded from `saved(name)` once, as a trainer loads its reference, with written-out
    attention or another of transformers'. Whatever float64 or rounding mode is in force does not reach it: its constants are
    those of every other model. Attention is not the subject here, and the fused one leaves out Gemma-2's softcap on attention
    scores in some releases."""
    with outside():
        return copy.deepcopy(_loaded(name, dtype, attention))


@drawn.once
def _loaded(name: str, dtype: torch.dtype, attention: str) -> Any:
    import transformers

    folder = saved(name)
    kind = getattr(transformers, _EVERY[name].model)
    with trl.quiet():
        out = kind.from_pretrained(folder, torch_dtype=dtype, attn_implementation=attention)
    if hasattr(out, "set_experts_implementation"):  # transformers' grouped product knows no float64, vmap no loop
        out.set_experts_implementation("batched_mm" if dtype == torch.float64 else "eager")
    return out


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Without the modes in force: what is built once must not remember in which of them it was asked for first."""
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


def fill(model: Any) -> None:
    """Weights by parameter name: normal with root mean square 1/√fan-in, norms near 1, biases small; finite everywhere."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = drawn.normal(0, name, parameter.shape).to(parameter)
            if parameter.dim() >= 2:
                parameter.copy_(value / parameter.shape[-1] ** 0.5)
            elif ("norm" in name or ".ln_" in name) and name.endswith("weight") and float(parameter.abs().max()) > 0.5:
                parameter.copy_(1.0 + 0.1 * value)
            else:
                parameter.copy_(0.1 * value)


def _scale_head(model: Any) -> None:
    """Multiply the head (of a tied model: the final norm) so that the logits before a softcap have rms `LOGITS`."""
    size = _uncapped(model)
    head = model.get_output_embeddings()
    with torch.no_grad():
        if head.weight is not model.get_input_embeddings().weight:
            for parameter in head.parameters():
                parameter.mul_(LOGITS / size)
            return
        norms = ("norm", "final_norm", "final_layernorm", "ln_f")
        norm = [m for n, m in model.named_modules() if n.rpartition(".")[2] in norms][-1]
        for parameter in norm.parameters():
            parameter.mul_(LOGITS / size)
        if abs(_uncapped(model) / LOGITS - 1) > 0.01:  # Gemma's norms multiply by 1 + weight
            norm.weight.mul_(size / LOGITS).add_(1.0).mul_(LOGITS / size).sub_(1.0)


def _uncapped(model: Any) -> float:
    """Root mean square of the logits on fixed ids, without a softcap."""
    cfg = model.config.get_text_config()
    capped = [n for n in ("final_logit_softcapping", "logits_soft_cap") if getattr(cfg, n, None)]
    ids = torch.arange(3, 59).remainder(53).add(3).view(2, 28)
    with mock.patch.dict(vars(cfg), dict.fromkeys(capped, 1e30)), torch.no_grad():
        return float(model.eval()(input_ids=ids).logits.square().mean().sqrt())


def own_tokenizer(pad: str = "<pad>") -> Any:
    """A copy of `tokenizer` for one trainer, which may change it."""
    return copy.deepcopy(tokenizer(pad))


@functools.cache
def tokenizer(pad: str = "<pad>") -> Any:
    """Words w3 … w63 besides <pad>, <eos> and <bos>, split at spaces, with a chat template; `pad` fills rows up. Any
    other word has the id of `<pad>`."""
    words = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    out = trl.tokenizer(words, pad_token=pad, bos_token="<bos>", padding_side="left")
    out.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return out


def targets(name: str) -> str:
    """The modules that a LoRA goes on: a pattern for `target_modules`, the language model's alone."""
    others = {"recurrent_gemma": "linear_x|linear_y|q_proj|v_proj", "gpt2": "c_attn"}
    parts = others.get(name, "q_proj|v_proj")
    return rf"^(?!.*vision).*\.({parts})$"


def ids(seed: int, name: str, length: int) -> list[int]:
    """The token ids of `words`."""
    return [3 + n for n in drawn.words(seed, name, length)]


def two_ends(model: Any) -> None:
    model.generation_config.eos_token_id = [EOS, END]


def words(seed: int, name: str, length: int) -> str:
    return " ".join(f"w{n}" for n in ids(seed, name, length))
