"""Family `divergence`: distillation losses, from the student's hidden states x LM head and a teacher to one scalar.

Definition (generalised Jensen-Shannon divergence, GKD, arXiv 2306.13649, eq. 1), p student, q teacher, each after its
own scale, softcap and the common temperature:

    beta = 0: KL(q‖p)    beta = 1: KL(p‖q)    between: beta·KL(q‖M) + (1 - beta)·KL(p‖M),  M = (1 - beta)·p + beta·q

so beta is the teacher's weight, in TRL 1.16's GKD, GOLD, distillation and server distillation trainers and in
Liger-Kernel 0.8's chunked and Triton JSD alike. 0·log 0 = 0: a token that both exclude (logit -inf) contributes
nothing. Summed over the vocabulary; the sum over label positions ≠ -100 is divided by their number, or by
num_items_in_batch. With a hard loss h (Hinton et al., arXiv 1503.02531, section 2) it is (1 - h)·divergence +
h·Σ -log p₁[label] over the same number, p₁ the student at temperature 1. A sparse teacher gives log-probs of a few tokens
(the others -inf): both distributions are then completed by a tail bucket log(1 - Σ exp), or renormalised (TRL's server
distillation). Inputs: `divergence_inputs`.
"""

import functools
import math
from typing import Any

import torch

from parity.case import layouts
from parity.case.case import Case
from parity.case.family import Family, Relation
from parity.case.inputs import Inputs, product_dtype
from parity.families import divergence_inputs as inputs_of
from parity.families import head
from parity.families.head import IGNORE_INDEX
from parity.judge.recipe import LARGEST
from parity.judge.stages import in_dtype, of_teacher, stored

LARGEST_LOG_MASS = -1e-7
"""Ceiling of log Σ exp before the tail is taken, so that the tail stays a probability (TRL's `_add_tail_bucket`)."""


def oracle(x: Inputs) -> dict[str, torch.Tensor]:
    """The loss, (…); `_logps` (…, B·T, V) and `_terms` (…, n, V or K) are what it sums over the n label positions."""
    return _loss(x, divergence)


def _loss(x: Inputs, measure: Any, zero_padded: bool = False) -> dict[str, torch.Tensor]:
    s = x.settings
    ignored = (x.ids == IGNORE_INDEX).flatten()
    raw = head.of_model(x)
    z = (stored(raw, "operand") if s.hard_loss else raw) / s.temperature
    if zero_padded:
        z = torch.cat([z, torch.zeros_like(z[..., :1]).expand(*z.shape[:-1], s.extra_vocabulary)], -1)
    logps = stored(torch.log_softmax(z, -1) if zero_padded else head.log_softmax(x, z), "log-probs")
    if s.sparse != "none":
        rows = (~ignored).nonzero().squeeze(-1)
        lp, lq, gone = sparse(x, logps[..., rows, :], rows)
        terms = measure(lp, lq, gone, gone, s.beta)
    else:  # every position: where one overflows in a narrow dtype, so does its gradient, label or not
        with of_teacher("softmax"):
            w = teacher_logits(x, logps.shape[-1])
            lq = torch.log_softmax(w, -1)
        gone_p = inputs_of.excluded(x.bias, s.softcap, logps)
        gone_p = torch.nn.functional.pad(gone_p, (0, logps.shape[-1] - gone_p.shape[-1]))
        terms = measure(logps, lq, gone_p, inputs_of.excluded_by_teacher(x, lq), s.beta)
        terms = terms.masked_fill(ignored.unsqueeze(-1), 0.0)
        if s.beta != 0.0:
            terms = _of_student(terms, z, logps, w, lq, s.beta)
    if s.hard_loss:
        with in_dtype("fp32"):
            own = torch.log_softmax(stored(raw, "operand"), -1)
        label = x.ids.long().clamp(min=0).reshape(-1, 1).expand(*own.shape[:-1], 1)
        hard = -own.gather(-1, label).masked_fill(ignored.unsqueeze(-1), 0.0)
        terms = torch.cat([(1 - s.hard_loss) * terms, s.hard_loss * hard], -1)
    labels = (~ignored).sum().clamp(min=1) if x.num_items_in_batch is None else x.num_items_in_batch
    terms = terms / float(labels)
    return {"loss": terms.sum((-2, -1)), "_logps": logps, "_terms": terms}


def _of_student(
    terms: torch.Tensor, z: torch.Tensor, lp: torch.Tensor, w: torch.Tensor, lq: torch.Tensor, beta: float
) -> torch.Tensor:
    """`terms`, where a replica rounds KL(p‖·) as Σ p·(z - w) - log Z_p + log Z_q, which a kernel sums in one pass. The
    gradient p·(log p - log q - KL(p‖q)) then takes the rounding of the KL as it is: along p, the gradient of log Z_p."""
    weight = 1.0 if beta == 1.0 else 1 - beta

    def size() -> torch.Tensor:
        return weight * (head.log_partition(z, lp).detach().abs() + head.log_partition(w, lq).abs())

    nothing = torch.zeros_like(terms[..., 0]).requires_grad_(z.requires_grad)
    rounding = stored(nothing, "divergence", size, lambda: head.log_partition(z, lp))
    return torch.cat([terms[..., :1] + rounding.unsqueeze(-1), terms[..., 1:]], -1)


def teacher_logits(x: Inputs, vocabulary: int) -> torch.Tensor:
    """The teacher's z, (…, B·T, vocabulary); rows of its head beyond the vocabulary are padding and left out. That is
    what TRL's GKD trainer makes of a larger teacher head (`resize_token_embeddings` to the student's size)."""
    s = x.settings
    if x.teacher_logits is not None:
        return x.teacher_logits.flatten(-3, -2)[..., :vocabulary] / s.temperature
    own = head.teacher(x, s, temperature=s.temperature)
    own.weight = own.weight[..., :vocabulary, :]
    own.bias = None if own.bias is None else own.bias[..., :vocabulary]
    return head.logits(own, of_teacher=True)


def sparse(x: Inputs, lp: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student's and teacher's completed log-probs on the support, (…, n, K or K+1), and where neither has an entry."""
    ids = x.support_ids.flatten(0, 1)[rows]
    lq = x.support_logps.flatten(-3, -2)[..., rows, :]
    gone = lq == -torch.inf
    lp = lp.gather(-1, ids.expand(*lp.shape[:-1], ids.shape[-1]))
    tail = x.settings.tail
    lp, lq = completed(lp, gone, tail), completed(lq, gone, tail)
    if tail:
        gone = torch.cat([gone, torch.zeros_like(gone[..., :1])], -1)
    return lp, lq, gone


def completed(logps: torch.Tensor, gone: torch.Tensor, tail: bool) -> torch.Tensor:
    """logps followed by log(1 - Σ exp) over the entries that are not gone, or minus log Σ exp."""
    kept = logps.masked_fill(gone, -torch.inf)
    mass = torch.logsumexp(kept, -1, keepdim=True)
    if not tail:
        return kept - mass
    return torch.cat([kept, torch.log(-torch.expm1(mass.clamp(max=LARGEST_LOG_MASS)))], -1)


def divergence(
    lp: torch.Tensor, lq: torch.Tensor, gone_p: torch.Tensor, gone_q: torch.Tensor, beta: float, exchanged: bool = False
) -> torch.Tensor:
    """Terms of the divergence between student log-probs `lp` and teacher log-probs `lq`, summed over nothing. `gone_p`
    and `gone_q` mark what a distribution excludes by definition; a log-prob that overflowed is not among it. `exchanged`
    gives the mixture the other weights, M = beta·p + (1 - beta)·q."""
    p = lp.exp()
    with of_teacher("elementwise"):
        q = lq.exp()
    log_p, log_q = lp.masked_fill(gone_p, 0.0), lq.masked_fill(gone_q, 0.0)
    if beta == 0.0:
        return (q * (log_q - log_p)).masked_fill(gone_q, 0.0)
    if beta == 1.0:
        return (p * (log_p - log_q)).masked_fill(gone_p, 0.0)
    weight_q = 1 - beta if exchanged else beta
    nothing = gone_p & gone_q
    a = (lp * _grid(lp) + math.log(1 - weight_q) * _grid(lp)).masked_fill(nothing, 0.0)
    with of_teacher("elementwise"):
        b = (lq * _grid(lq) + math.log(weight_q) * _grid(lq)).masked_fill(nothing, 0.0)
    top = torch.maximum(a, b).detach()
    log_m = top + ((a - top).exp() + (b - top).exp()).log()
    teacher = (q * (log_q - log_m)).masked_fill(gone_q, 0.0)
    student = (p * (log_p - log_m)).masked_fill(gone_p, 0.0)
    return beta * teacher + (1 - beta) * student


def _grid(logps: torch.Tensor) -> torch.Tensor:
    """1, rounded once in each replica: close log-probs lie on one grid, and a constant is the same for every token."""
    one = torch.ones_like(logps[..., :1, :1].detach())
    return one * one


def exchanged_mixture(x: Inputs) -> dict[str, torch.Tensor]:
    """M = beta·p + (1 - beta)·q under the same weights, so KL(p‖q) at 0 and KL(q‖p) at 1: TRL's GKD up to 0.15."""
    beta = x.settings.beta
    if beta in (0.0, 1.0):
        return _loss(x, lambda lp, lq, gone_p, gone_q, _: divergence(lp, lq, gone_p, gone_q, 1 - beta))
    return _loss(x, functools.partial(divergence, exchanged=True))


def zero_padded(x: Inputs) -> dict[str, torch.Tensor]:
    """A student with logits of 0 for the tokens that only the teacher's head has, as Liger's chunked loss makes it."""
    if x.settings.sparse != "none" or not x.settings.extra_vocabulary:
        return oracle(x)
    return _loss(x, divergence, zero_padded=True)


def features(case: Case) -> dict[str, Any]:
    """Facts for coverage and ledger scopes besides the settings themselves."""
    s = FAMILY.full_settings(case)
    student, teacher = inputs_of.bans(s)
    dense = s.sparse == "none"
    caps = ((s.softcap, s.bias), (s.teacher_softcap, s.teacher_bias))
    # the size of the log-probs of student and teacher, whichever is larger; a softcap c makes a logit of -inf -c
    nats = max(s.peak * abs(s.logit_scale), s.teacher_peak * abs(s.teacher_logit_scale)) / s.temperature
    nats = max([nats, *(c / s.temperature for c, b in caps if c and b == "banned")])
    apart = s.teacher_peak if s.gap == "apart" else s.peak
    teachers = head.nearly_equal(apart * s.teacher_logit_scale, s.teacher_softcap, s)
    found = head.features(case, s)
    return found | {
        "nearly equal": found["nearly equal"] or teachers,
        "one token": s.B * s.T == 1,
        "divergence": "forward" if s.beta == 0.0 else "reverse" if s.beta == 1.0 else "jsd",
        "student excludes": dense and student,
        "teacher excludes": dense and teacher,
        "both exclude": dense and student and teacher,
        "anything excluded": dense and (student or teacher),
        "fp16 sum": product_dtype(case, s) == "fp16" and 5 * nats * s.B * s.T > 65504,
    }


def parameters(x: Inputs) -> set[str]:
    """The tensors, and what moves the value: beta, temperature, softcaps, scales, biases, normaliser, the teacher's kind and
    vocabulary; labels, where some are ignored or have a loss of their own."""
    names = {"beta", "temperature", "softcap", "logit_scale", "extra_vocabulary", "hard_loss"}
    names |= {"teacher_softcap", "teacher_logit_scale"} if x.teacher_hidden is not None else set()
    optional = ("bias", "teacher_hidden", "teacher_bias", "teacher_logits", "support_logps", "num_items_in_batch")
    labelled = x.settings.ignored != "none" or x.settings.hard_loss
    return head.needed(x, inputs_of.SETTINGS, names, optional) - (set() if labelled else {"ids"})


def _double_items(x: Inputs) -> Inputs | None:
    return None if x.num_items_in_batch is None else x.replace(num_items_in_batch=x.num_items_in_batch * 2)


def _garbage(x: Inputs) -> Inputs | None:
    """Other hidden states of student and teacher wherever the label is -100; none whose logits float16 would not hold."""
    ignored = (x.ids == IGNORE_INDEX).unsqueeze(-1)
    if not ignored.any():
        return None
    names = ("hidden", "teacher_hidden", "teacher_logits")
    given = {n: t for n in names if (t := x.tensors.get(n)) is not None}
    out = x.replace(**{n: layouts.like(torch.where(ignored, t.roll(1, -1) + 0.5, t), t) for n, t in given.items()})
    largest = float((out.hidden.double() @ x.weight.double().T).abs().max())
    reach = largest * x.settings.logit_scale / x.settings.temperature
    return None if x.product_dtype == "fp16" and reach > LARGEST["fp16"] / 2 else out


FAMILY: Family = Family(
    name="divergence",
    settings=inputs_of.SETTINGS,
    build=lambda case: inputs_of.build(FAMILY, case),
    oracle=oracle,
    outputs={"loss": "required"},
    zeros=head.unlabelled,
    features=features,
    variants={"exchanged mixture": exchanged_mixture, "zero-padded student": zero_padded},
    parameters=parameters,
    draw=inputs_of.draw,
    canonical=inputs_of.canonical,
    stored=inputs_of.STORED,
    derived=lambda tensors, where: inputs_of.derived(FAMILY, tensors, where),
    relations={
        "cotangent x2": head.LINEAR,
        "items x2": Relation(_double_items, dict.fromkeys(("loss", *head.GRADIENTS), 0.5), "it divides the loss"),
        "ignored garbage": Relation(_garbage, {}, "what stands at label -100 changes nothing"),
    },
)
