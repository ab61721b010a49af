"""TRL's distillation losses: the plain divergence, the chunked kernel and its wiring, and the sparse server paths."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from parity.case.inputs import Inputs
from parity.families import head
from parity.families.divergence_inputs import bans
from parity.families.head import IGNORE_INDEX
from parity.implementations import plain
from parity.implementations.implementation import EVERY_CONTEXT, KERNEL, Outputs, implementation
from parity.implementations.limits import Limit, accepted, fitting, found_at, only, taking
from parity.implementations.trl import softcap
from parity.judge.recipe import Recipe
from parity.process import installed
from parity.upstream import trl

offer = functools.partial(implementation, family="divergence", library="trl")
"""The decorator of this file."""
_A_DENSE_TEACHER = only("takes a dense teacher", lambda s: s.sparse == "none")
DENSE = (_A_DENSE_TEACHER, only("one vocabulary: the trainer resizes the teacher", lambda s: s.extra_vocabulary == 0))
"""Of a loss on whole logits of student and teacher."""
HEADS = (
    _A_DENSE_TEACHER,
    only("takes the teacher's hidden states and head, not its logits", lambda s: s.teacher == "head"),
)
"""Of a loss that takes the teacher as hidden states and a head."""
ONE_VOCABULARY = only("one vocabulary: both heads have V rows", lambda s: s.extra_vocabulary == 0)
OWN_COUNT = only("no num_items_in_batch: divides by its own label positions", lambda s: s.num_items == "none")
CHUNK = 256
"""Of `_chunked_divergence_loss` in TRL 1.10 to 1.14, which walk in chunks of valid positions: `distillation_chunk_size`."""
GOLD = "trl.experimental.gold.gold_trainer:GOLDTrainer.generalized_jsd_loss"
SERVER = "trl.experimental.server_distillation.server_distillation_trainer"


SDFT = "trl.experimental.sdft.loss_utils"


def teacher_biased(s: Any) -> bool:
    """Whether the teacher's head has a bias: asked for, or because it must exclude what the student excludes."""
    return bool(s.sparse == "none" and s.teacher == "head" and (s.teacher_bias != "none" or bans(s)[1]))


def _with_items(path: str) -> Limit:
    """`generalized_jsd_loss` of a trainer takes a number of items since it has a parameter for it."""
    return fitting(path, lambda s: {"num_items_in_batch": (s.num_items, "none")})


def teacher_logits(x: Inputs) -> torch.Tensor:
    """The teacher's logits (B, T, V) as its model makes them, in its own dtype and without gradient."""
    if x.teacher_logits is not None:
        return x.teacher_logits
    s = x.settings
    with torch.no_grad():
        return plain.logits(head.teacher(x, s, context=s.context))


def materialised(x: Inputs) -> Recipe:
    """Everything in the dtype of the logits, the log-softmax included; beside a float32 head the teacher alone."""
    if x.autocast:
        return dataclasses.replace(plain.narrow(x), output="any")
    teacher = None if x.settings.sparse != "none" else "input"  # its head has the dtype of the case, a support float32
    of_teacher = dict.fromkeys(("teacher", "teacher_softmax", "teacher_elementwise"), teacher)
    return plain.stored(x, "softmax", **of_teacher, output="any")


def _generalized_jsd(function: Any, x: Inputs) -> Outputs:
    s = x.settings
    options = taking(function, {"num_items_in_batch": (x.num_items_in_batch, None)})
    teacher = teacher_logits(x)
    return {"loss": function(plain.logits(x), teacher, labels=x.ids, beta=s.beta, temperature=s.temperature, **options)}


@offer(
    "trl.generalized_jsd_loss",
    role="reference",
    recipe=materialised,
    contexts=EVERY_CONTEXT,
    sources=("trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss",),
    limits=(
        *DENSE,
        plain.TWO_DTYPES,
        _with_items("trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss"),
        _with_items("trl.trainer.gkd_trainer:GKDTrainer.generalized_jsd_loss"),
    ),
)
def generalized_jsd_loss(x: Inputs) -> Outputs:
    """`GKDTrainer.generalized_jsd_loss` on materialised logits."""
    kind: Any = trl.class_named("GKDTrainer")
    return _generalized_jsd(kind.generalized_jsd_loss, x)


@offer(
    "trl.gold_jsd_loss",
    recipe=materialised,
    contexts=EVERY_CONTEXT,
    every=4,
    sources=("trl.experimental.gold.gold_trainer.GOLDTrainer.generalized_jsd_loss",),
    limits=(
        *DENSE,
        plain.TWO_DTYPES,
        _with_items(GOLD),
    ),
)
def gold_jsd_loss(x: Inputs) -> Outputs:
    """`GOLDTrainer.generalized_jsd_loss`, GKD's with a path for probabilities."""
    return _generalized_jsd(accepted(GOLD), x)


def _tiles(x: Inputs) -> Recipe:
    """float32 tiles of logits, their gradient stored in the dtype of the hidden states, to which the weight is cast. The
    gradients of head and bias are summed in float32 and take their dtypes from there; the bias stays as it is."""
    return Recipe(dlogits="input", bias="fp32", tanh=softcap(x, "trl.kernels.chunked_divergence"), **plain.cast_head(x))


@offer(
    "trl.ChunkedDivergenceFunction",
    recipe=_tiles,
    contexts=EVERY_CONTEXT,
    interpreted=trl.chunks_are_triton(),
    sources=("trl.kernels.chunked_divergence.ChunkedDivergenceFunction",),
    limits=HEADS,
)
def _chunked(x: Inputs) -> Outputs:
    """`ChunkedDivergenceFunction`, masked and averaged here: torch on the CPU, Triton on CUDA."""
    s, function = x.settings, accepted("trl.kernels.chunked_divergence:ChunkedDivergenceFunction")
    student, teacher = (x.hidden, x.weight, x.bias), (x.teacher_hidden, x.teacher_weight, x.teacher_bias)
    logits = (s.logit_scale, s.softcap, s.teacher_logit_scale, s.teacher_softcap)
    both = [t if t is None or t.dim() < 3 else t.flatten(0, 1) for t in (*student, *teacher)]
    per_token, _ = function.apply(*both, s.beta, s.temperature, *logits)
    labelled = (x.ids != IGNORE_INDEX).flatten()
    count = labelled.sum().clamp(min=1) if x.num_items_in_batch is None else x.num_items_in_batch
    return {"loss": per_token.masked_fill(~labelled, 0).sum() / count}


def two_heads(x: Inputs, uncapped: float | None = None) -> dict[str, Any]:
    """What a loss of two heads is told by name; `uncapped`: how no softcap is said."""
    out = {"num_items_in_batch": x.num_items_in_batch, "temperature": x.settings.temperature}
    for side, prefix in (("student", ""), ("teacher", "teacher_")):
        cap = getattr(x.settings, f"{prefix}softcap")
        out |= {f"{side}_lm_head_bias": x.tensors[f"{prefix}bias"]}
        out |= {f"{side}_logit_scale": getattr(x.settings, f"{prefix}logit_scale")}
        out |= {f"{side}_final_logit_softcapping": uncapped if cap is None else cap}
    return out


def _walked(x: Inputs) -> Recipe:
    """`_tiles`, or where the release walks in chunks: logits leave the product narrow, and head gradients sum in its
    dtype. Up to 1.12 nothing takes autocast's logits back to float32, and all that follows is plain torch."""
    if plain.installed("trl.kernels.chunked_divergence"):
        return _tiles(x)
    if x.autocast and Version(installed("trl") or "2") < Version("1.13"):
        return materialised(x)
    partials = max(1, math.ceil(x.settings.B * x.settings.T / (x.settings.chunk_size or CHUNK)))
    narrow: dict[str, Any] = dict.fromkeys(("logits", "teacher", "accumulate"), "input")
    return dataclasses.replace(_tiles(x), **narrow, dinputs=None, partials=partials, tanh="ieee")


@offer(
    "trl.distillation_loss",
    recipe=_walked,
    contexts=EVERY_CONTEXT,
    interpreted=trl.chunks_are_triton(),
    sources=("trl.trainer.distillation_trainer._chunked_divergence_loss",),
    limits=HEADS,
)
@offer(
    "trl.distillation_loss_kernel",
    recipe=lambda x: dataclasses.replace(_tiles(x), tanh="sigmoid"),
    around=functools.partial(trl.triton_taken, "trl.kernels.chunked_divergence", "trl.trainer.distillation_trainer"),
    sources=("trl.kernels.chunked_divergence._stats_kernel", "trl.kernels.chunked_divergence._backward_kernel"),
    limits=HEADS,
    **KERNEL,
)
def _wired(x: Inputs) -> Outputs:
    """`_chunked_divergence_loss`, as DistillationTrainer wires it: mask, normaliser, scales, softcaps; and its Triton kernels
    also where the device would take the path in torch."""
    s, function = x.settings, accepted("trl.trainer.distillation_trainer:_chunked_divergence_loss")
    walks = {} if plain.installed("trl.kernels.chunked_divergence") else {"chunk_size": s.chunk_size or CHUNK}
    heads, labelled = (x.hidden, x.teacher_hidden, x.weight, x.teacher_weight), (x.ids != IGNORE_INDEX).long()
    loss, _, _ = function(*heads, labelled, s.beta, **two_heads(x), **walks)
    return {"loss": loss}


def _student_logps(x: Inputs) -> torch.Tensor:
    return torch.log_softmax(plain.logits(x) / x.settings.temperature, dim=-1)


def _server(x: Inputs) -> tuple[Any, Any]:
    """The trainer that holds the server path, and an object with the attributes that its methods read."""
    older = "trl.experimental.distillation.distillation_trainer:DistillationTrainer"  # up to TRL 1.3 it had its methods
    trainer = found_at(f"{SERVER}:ServerDistillationTrainer") or accepted(older)
    holder = SimpleNamespace(beta=x.settings.beta, loss_add_tail=x.settings.tail, reverse_kl_top_1_mode="sampled")
    holder._reduce_divergence_loss = trainer._reduce_divergence_loss
    for name in ("_get_reverse_kl_top_1_tokens", "_compute_sparse_top_1_divergence_loss"):
        setattr(holder, name, getattr(trainer, name).__get__(holder))
    return trainer, holder


def _sparse(x: Inputs) -> Recipe:
    return plain.stored(x, "softmax", output="any")


@offer(
    "trl.server_forward_kl",
    recipe=_sparse,
    contexts=EVERY_CONTEXT,
    sources=(f"{SERVER}.ServerDistillationTrainer._compute_server_forward_kl_loss",),
    limits=(only("takes a sparse teacher at beta 0", lambda s: s.sparse == "topk" and s.beta == 0.0), OWN_COUNT),
)
def server_forward_kl(x: Inputs) -> Outputs:
    """`ServerDistillationTrainer._compute_server_forward_kl_loss` on the teacher's top k."""
    trainer, holder = _server(x)
    result = {"topk_logprobs": x.support_logps, "topk_token_ids": x.support_ids}
    return {"loss": trainer._compute_server_forward_kl_loss(holder, result, _student_logps(x), x.ids)}


@offer(
    "trl.server_sparse_top_1",
    recipe=_sparse,
    contexts=EVERY_CONTEXT,
    sources=(f"{SERVER}.ServerDistillationTrainer._compute_server_sparse_top_1_divergence_loss",),
    limits=(
        only("takes the mixed support of a sparse teacher, at beta above 0", lambda s: s.sparse == "mixed"),
        OWN_COUNT,
    ),
)
def server_sparse_top_1(x: Inputs) -> Outputs:
    """`ServerDistillationTrainer._compute_server_sparse_top_1_divergence_loss` on the teacher's top 1 and the label."""
    trainer, holder = _server(x)
    result = {"topk_logprobs": x.top1_logps.unsqueeze(-1), "topk_token_ids": x.top1_ids.unsqueeze(-1)}
    result |= {"actual_logprobs": x.label_logps}
    tokens = x.ids.long().clamp(min=0)  # the collator hands the tokens themselves, -100 stands in the labels alone
    function = trainer._compute_server_sparse_top_1_divergence_loss
    return {"loss": function(holder, result, _student_logps(x), tokens, x.ids)}


@offer(
    "trl.self_distillation",
    recipe=materialised,
    contexts=EVERY_CONTEXT,
    every=4,
    sources=(f"{SDFT}.compute_divergence", f"{SDFT}.add_tail_bucket"),
    limits=(
        only("no padding inside a support", lambda s: s.sparse == "none" or (s.sparse == "topk" and not s.ragged)),
        DENSE[1],
        plain.TWO_DTYPES,
    ),
)
def self_distillation(x: Inputs) -> Outputs:
    """SDFT's `compute_full_logit_self_distillation_loss`, or its divergence on a completed top k, averaged here."""
    s = x.settings
    labelled = x.ids != IGNORE_INDEX
    if s.sparse == "none":
        teacher = teacher_logits(x) / s.temperature
        function = accepted(f"{SDFT}:compute_full_logit_self_distillation_loss")
        per_token = function(plain.logits(x) / s.temperature, teacher, distillation_alpha=s.beta)[labelled]
    else:
        add_tail = accepted(f"{SDFT}:add_tail_bucket")
        complete = add_tail if s.tail else lambda logps: logps - torch.logsumexp(logps, dim=-1, keepdim=True)
        student = complete(_student_logps(x)[labelled].gather(-1, x.support_ids[labelled]))
        per_token = accepted(f"{SDFT}:compute_divergence")(student, complete(x.support_logps[labelled]), s.beta)
    count = labelled.sum().clamp(min=1) if x.num_items_in_batch is None else x.num_items_in_batch
    return {"loss": per_token.float().sum() / count}
