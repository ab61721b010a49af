"""Unsloth's log-probs, GRPO loss and distillation loss, from unsloth-zoo.

It patches libraries at import, so it wants a process of its own: `parity run --with unsloth-zoo==2026.10.9`. Its licence
is (L)GPL: an optional extra, never a requirement. Its compiled regions run eagerly here (UNSLOTH_COMPILE_DISABLE is set
for its environment): each shape would compile for seconds.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.head import IGNORE_INDEX
from parity.families.policy_losses import OF_LOSS, WINDOW_NORMALISED, epsilon_high
from parity.implementations import plain
from parity.implementations.implementation import Outputs, by_token, implementation
from parity.implementations.limits import ONE_WEIGHT, accepted, fitting, only, taking
from parity.implementations.trl import UNIGNORED
from parity.implementations.trl_divergence import HEADS, ONE_VOCABULARY, two_heads
from parity.judge.recipe import Recipe

JSD_CHUNK = 256
"""Default of `distillation_chunked_jsd`."""
LOG_PROBS = "unsloth_zoo.rl_replacements:chunked_hidden_states_selective_log_softmax"
EFFICIENT_LOSS = "unsloth_zoo.rl_replacements:UnslothEfficientGRPO"
BIASED = fitting(LOG_PROBS, lambda s: {"lm_head_bias": (s.bias, "none")})


def _chunked(x: Inputs) -> Recipe:
    """A chunk of logits in the dtype of the hidden states, to which the head is cast, and of their gradient likewise."""
    return Recipe(logits="input", dlogits="input", inputs=None if x.weight.dtype == x.hidden.dtype else "input")


def _log_probs(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """`chunked_hidden_states_selective_log_softmax`; 0 means no scale and no softcap there."""
    s, function = x.settings, accepted(LOG_PROBS)
    options = {"logit_scale_multiply": 0.0 if s.logit_scale == 1.0 else s.logit_scale, "temperature": s.temperature}
    options |= {"logit_softcapping": s.softcap or 0.0} | taking(function, {"lm_head_bias": (x.bias, None)})
    return by_token(function(hidden, x.weight, x.ids.long(), **options), x)


@implementation(
    "unsloth.chunked_selective_log_softmax",
    family="logprobs",
    library="unsloth-zoo",
    recipe=_chunked,
    sources=("unsloth_zoo.rl_replacements.chunked_hidden_states_selective_log_softmax",),
    limits=(UNIGNORED, BIASED),
)
def chunked_selective_log_softmax(x: Inputs) -> Outputs:
    """`chunked_hidden_states_selective_log_softmax(hidden, head, ids, …)`."""
    return {"logps": _log_probs(x, x.hidden)}


def _options(x: Inputs) -> dict[str, Any]:
    s = x.settings
    same = {"temperature", "off_policy_mask_threshold", "entropy_coef", "steps_per_generation"}
    out = {name: getattr(s, name) for name in OF_LOSS if name not in same}
    out |= {"epsilon_low": s.epsilon, "epsilon_high": epsilon_high(s)}
    out |= {"current_gradient_accumulation_steps": s.accumulation}
    if s.loss_type in WINDOW_NORMALISED:
        out |= {"num_items_in_batch": x.num_items_in_batch, "steps_per_generation": s.steps_per_generation}
    if s.loss_type == "vespo":
        out["get_gamma_weights"] = accepted("trl:GRPOTrainer.get_gamma_weights")
    return out


FACTOR = fitting(f"{EFFICIENT_LOSS}.forward", lambda s: {"upstream_scale": (s.cotangent, "ones")})
"""Its backward ignores the upstream gradient unless told a factor for it, which the trainer does under DeepSpeed."""
GRPO: dict[str, Any] = {
    "family": "policy",
    "library": "unsloth-zoo",
    "recipe": _chunked,
    "limits": (
        only("the evaluation's normaliser is the caller's", lambda s: s.mode == "train"),
        only("the off-policy mask is TRL's, handed in by the trainer", lambda s: s.off_policy_mask_threshold is None),
        only("entropy is the trainer's, around this loss", lambda s: not s.entropy_quantile and s.entropy_coef == 0.0),
        only("forms the sampler's ratio itself, from old and sampling log-probs", lambda s: s.ratio == "none"),
        ONE_WEIGHT,
        BIASED,
    ),
}


@implementation("unsloth.grpo_compute_loss", sources=("unsloth_zoo.rl_replacements.grpo_compute_loss",), **GRPO)
def grpo_compute_loss(x: Inputs) -> Outputs:
    """`grpo_compute_loss` under autograd, on Unsloth's own log-probs."""
    function, options = accepted("unsloth_zoo.rl_replacements:grpo_compute_loss"), _options(x)
    new = _log_probs(x, plain.states(x))
    tensors = (x.ref_logps, new, x.old_logps, None, x.ids.long(), x.mask)
    return {"loss": function(*tensors, x.settings.beta, x.advantages, **options)[0]}


def _efficient(x: Inputs, chunks: int) -> Outputs:
    function, options = accepted(EFFICIENT_LOSS), _options(x)
    arguments = [x.weight, x.ids.long(), x.mask, x.advantages, x.settings.beta, None, chunks, options]
    if x.settings.cotangent != "ones":
        arguments.append(1.0)
    new = _log_probs(x, plain.states(x))
    return {"loss": function.apply(new, x.old_logps, x.ref_logps, None, *arguments)[0]}


EFFICIENT = GRPO | {
    "sources": ("unsloth_zoo.rl_replacements.UnslothEfficientGRPO",),
    "limits": (*GRPO["limits"], only("ignores the upstream gradient", lambda s: not FACTOR(s))),
}
# one chunk, as Unsloth's trainer calls it since `unsloth_num_chunks` is ignored; four; one a sequence
implementation("unsloth.UnslothEfficientGRPO", **EFFICIENT)(lambda x: _efficient(x, 1))
implementation("unsloth.UnslothEfficientGRPO.chunks_4", **EFFICIENT)(lambda x: _efficient(x, 4))
implementation("unsloth.UnslothEfficientGRPO.chunks_B", **EFFICIENT)(lambda x: _efficient(x, x.settings.B))


def _jsd_chunks(x: Inputs) -> Recipe:
    """Logits leave the product in the dtype of the head and are float32 from there; head gradients sum in its dtype. The
    teacher's head has a dtype of its own, that of the case, whatever the student's is."""
    chunks = math.ceil(x.settings.B * x.settings.T / (x.settings.chunk_size or JSD_CHUNK))
    dtype = plain.head_dtype(x)
    stored: dict[str, Any] = {"logits": dtype, "dlogits": dtype, "accumulate": dtype, "teacher": "input"}
    return Recipe(**stored, partials=max(1, chunks), upstream=plain.upstream(x), output="fp32")


@implementation(
    "unsloth.distillation_chunked_jsd",
    family="divergence",
    library="unsloth-zoo",
    recipe=_jsd_chunks,
    sources=("unsloth_zoo.rl_replacements.distillation_chunked_jsd",),
    limits=(*HEADS, ONE_VOCABULARY),
)
def distillation_chunked_jsd(x: Inputs) -> Outputs:
    """`distillation_chunked_jsd`, chunks of valid positions, gradients taken in the forward pass."""
    s, function = x.settings, accepted("unsloth_zoo.rl_replacements:distillation_chunked_jsd")
    # It takes its gradients in the forward pass, in the dtype of the head, and asks the GradScaler, so that they do not
    # underflow there: the largest power of two that the upstream gradient holds. A release that takes none goes without.
    upstream = abs(float(x.cotangents["loss"])) if s.cotangent == "scaled" else 0.0
    scale = 2.0 ** math.floor(math.log2(upstream)) if upstream else 0.0
    scaler = SimpleNamespace(get_scale=lambda: scale) if upstream else None
    options = taking(function, {"scaler": (scaler, scaler)})
    options |= {"beta": s.beta, "chunk_size": s.chunk_size or JSD_CHUNK}
    heads = (x.hidden, x.teacher_hidden, x.weight, x.teacher_weight)
    return {"loss": function(*heads, x.ids != IGNORE_INDEX, **two_heads(x, uncapped=0.0), **options)[0]}
