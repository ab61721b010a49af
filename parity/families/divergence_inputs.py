"""Inputs of the divergence family: settings, how they are drawn, and the tensors of a case."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.case import Case, rounded
from parity.case.family import Family
from parity.case.inputs import Inputs, Setting
from parity.case.layouts import arranged
from parity.case.stored import sizes
from parity.errors import UsageError
from parity.families import head, stored_tensors
from parity.families.head import IGNORE_INDEX
from parity.judge.recipe import DTYPES
from parity.judge.values import normal, uniform

SETTINGS = head.SETTINGS | {
    "beta": Setting(
        0.5,
        "0 forward KL(q‖p), 1 reverse KL(p‖q), between JSD; the teacher's weight in the mixture, not that of a KL term",
        within="[0, 1]",
    ),
    "teacher": Setting("head", "the teacher's hidden states and head, or its logits as data", ("head", "logits")),
    "teacher_H": Setting(5, "hidden size of the teacher; the student's unless gap is 'apart'", within="[1, inf)"),
    "gap": Setting("apart", "teacher beside student: independent, close, the same tensors", ("apart", "near", "equal")),
    "teacher_peak": Setting(1.0, "standard deviation of the teacher's raw logits, where the gap is 'apart'"),
    "teacher_softcap": Setting(None, "the teacher's softcap, or none"),
    "teacher_logit_scale": Setting(1.0, "the teacher's logit scale"),
    "teacher_bias": Setting("none", "bias of its head; 'banned' has -inf entries", ("none", "random", "banned")),
    "extra_vocabulary": Setting(
        0, "rows of the teacher's head beyond the student's, whose logits are 0 there", within="[0, inf)"
    ),
    "sparse": Setting(
        "none", "teacher's support: all, top k, or top 1 and the label (at beta 1 the label)", ("none", "topk", "mixed")
    ),
    "k": Setting(2, "tokens that the teacher names at a position", within="[1, inf)"),
    "ragged": Setting(False, "some positions have fewer tokens, the rest is padded with -inf", (False, True)),
    "tail": Setting(True, "complete a sparse support by a tail bucket, else renormalise it", (False, True)),
    "ignored": Setting("none", "positions with label -100", ("none", "some", "row", "all")),
    "num_items": Setting("none", "divide by the label positions, or by num_items_in_batch", ("none", "given")),
    "other_tokens": Setting(0, "label positions in the other micro-batches of the window", within="[0, inf)"),
    "hard_loss": Setting(
        0.0,
        "weight h of the labels' cross entropy at temperature 1; the divergence has 1 - h",
        within="[0, 1]",
        few=(0.5, 0.25, 0.9, 1.0),
    ),
    "chunk_size": Setting(None, "tokens a chunk, for implementations that chunk; none: their default"),
}

WIRING = ("softcap", "logit_scale", "teacher_softcap", "teacher_logit_scale", "num_items", "extra_vocabulary")
"""Settings that bare losses have no parameter for."""

STORED = stored_tensors.HEAD | {
    "teacher_hidden": "BTG",
    "teacher_weight": "WG",
    "teacher_bias": "W",
    "teacher_logits": "BTW",
    "support_ids": "BTK",
    "support_logps": "BTK",
    "top1_ids": "BT",
    "top1_logps": "BT",
    "label_logps": "BT",
    "num_items_in_batch": "",
}


def derived(family: Family, tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, Any]:
    """The settings that stored tensors decide. Raises UsageError where there is no teacher, or more than one kind of it."""
    kinds = [n for n in ("teacher_weight", "teacher_logits", "support_logps") if n in tensors]
    if len(kinds) != 1:
        raise UsageError(f"{where}: one of teacher_weight, teacher_logits or support_logps, it has {len(kinds)}")
    found = sizes(family, tensors, where, head.REQUIRED)
    out = stored_tensors.of_labels(family, tensors, where) | {
        "teacher": "logits" if "teacher_logits" in tensors else "head",
        "teacher_bias": stored_tensors.of_bias(tensors.get("teacher_bias")),
        "sparse": "none" if "support_logps" not in tensors else "mixed" if "top1_logps" in tensors else "topk",
        "num_items": "given" if "num_items_in_batch" in tensors else "none",
        "extra_vocabulary": found.get("W", found["V"]) - found["V"],
    }
    out |= {"teacher_H": found["G"]} if "G" in found else {}
    return out | ({"k": found["K"]} if out["sparse"] == "topk" else {})


def draw(draw: Any, st: Any, dtype: str, profile: str, contexts: tuple[str, ...]) -> dict[str, Any]:
    """Settings of one case; every dimension independently, so that they combine."""
    pick = head.picking(draw, st)
    out = head.draw_head(draw, st, dtype, profile=profile, contexts=contexts)
    out["cotangent"] = pick("ones", "ones", "ones", "random", "fine", "zero", "scaled", "small")
    width = draw(st.one_of(st.integers(1, 16), st.integers(1, 16), st.sampled_from([31, 64, 100]), st.just(0)))
    width = width or head.size(draw, st, 65, head.HIDDEN)
    out |= {
        "beta": pick(0.5, 0.0, 1.0, 0.0, 1.0, 0.1, 0.75, 0.9),
        "teacher": pick("head", "head", "logits"),
        "teacher_H": min(width, max(1, 4 * head.ENTRIES // out["V"])),
        "gap": pick("apart", "apart", "near", "near", "equal"),
        "teacher_peak": pick(1.0, 0.05, 4.0, 12.0),
        "teacher_softcap": draw(st.one_of(st.none(), st.none(), head.number(st, 0.5, 500.0, 30.0, 3.0))),
        "teacher_logit_scale": draw(st.one_of(*[st.just(1.0)] * 3, head.number(st, 0.01, 16.0, 0.3, 2.5))),
        "teacher_bias": pick("none", "none", "none", "random", "random", "banned"),
        "extra_vocabulary": pick(0, 0, 0, 0, 0, 0, 1, 9, 128),
        "sparse": pick("none", "none", "none", "none", "topk", "mixed"),
        "k": pick(1, 2, 3, 8, 20, 100),
        "ragged": pick(False, True),
        "tail": pick(True, True, False),
        "ignored": pick("none", "none", "none", "some", "some", "row", "all"),
        "num_items": pick("none", "given"),
        "other_tokens": pick(0, 7, 100, 20000),
        "chunk_size": pick(None, 1, 3),
    }
    if pick(True, True, False):  # an excluded token makes every released loss NaN, which hides what else a case shows
        out["teacher_bias"] = "random" if out["teacher_bias"] == "banned" else out["teacher_bias"]
        out["bias"] = "random" if out["bias"] == "banned" and out["softcap"] is None else out["bias"]
    if draw(st.booleans()):  # half of the cases leave what bare losses cannot say at its default
        out |= {n: SETTINGS[n].default for n in WIRING}
    return canonical(dtype, out)


def canonical(dtype: str, out: dict[str, Any]) -> dict[str, Any]:
    """Settings of a case, with those at their defaults that say nothing beside the others: a sparse teacher has no logits of
    its own."""
    if out["sparse"] != "none":
        out |= {"extra_vocabulary": 0, "teacher": "head", "num_items": "none", "hard_loss": 0.0}
        out["sparse"] = "topk" if out["beta"] == 0.0 else out["sparse"]
    silent = {"other_tokens"} if out["num_items"] == "none" else set()
    silent |= {"k", "ragged"} if out["sparse"] != "topk" else set()
    silent |= {"tail"} if out["sparse"] == "none" else set()
    silent |= {"teacher_H", "teacher_peak"} if out["gap"] != "apart" else set()
    out |= {n: SETTINGS[n].default for n in silent}
    return head.canonical(dtype, out)


def bans(s: SimpleNamespace) -> tuple[bool, bool]:
    """Whether the student and the teacher exclude tokens (-inf logits).

    Bans that would make the divergence infinite are lifted: KL(q‖p) needs a student that allows what the teacher
    allows, KL(p‖q) the reverse. A softcap makes -inf finite. A sparse teacher names tokens that the student must allow.
    """
    capped = s.teacher_softcap is not None
    student = s.bias == "banned" and s.softcap is None and s.sparse == "none" and not (s.beta == 0.0 and capped)
    wanted = s.teacher_bias == "banned" or (s.beta == 0.0 and student)
    teacher = wanted and not capped and (s.beta != 1.0 or student)
    return student, teacher


def build(family: Family, case: Case) -> Inputs:
    """The inputs of a case, on the CPU.

    Tensors besides those of `head.build`: teacher_hidden (B, T, H_t), teacher_weight (V + extra, H_t), teacher_bias
    (V + extra,) or None, or teacher_logits (B, T, V + extra), after scale and softcap; support_ids int64 and
    support_logps (B, T, K) float32, -inf where a position names fewer tokens and where the label is -100; top1_ids,
    top1_logps, label_logps (B, T) for the mixed support; num_items_in_batch (0-dim) or None. A sparse case returns no
    dense teacher. Raises UsageError for settings outside their range.
    """
    s = family.full_settings(case)
    head.check(s, case)
    if s.sparse == "mixed" and s.beta == 0.0:
        raise UsageError(f"case {case.id}: sparse='mixed' needs beta above 0")
    if s.sparse != "none" and (s.extra_vocabulary or s.hard_loss or s.teacher != "head"):
        raise UsageError(f"case {case.id}: sparse={s.sparse!r} needs teacher='head', extra_vocabulary=0, hard_loss=0")
    if case.tensors:
        return stored_tensors.inputs(family, case, scalar=True)
    tensors: dict[str, Any] = dict.fromkeys(STORED) | head.build(case, s)
    if s.bias != "none" and s.softcap is None and not bans(s)[0]:
        tensors["bias"] = tensors["bias"].masked_fill(tensors["bias"] == -torch.inf, 0.0)
    tensors |= _teacher(case, s, tensors)
    ignored = head.ignored(case, s)
    if s.sparse != "none":
        tensors |= _support(case, s, tensors, ignored)
        tensors |= dict.fromkeys(("teacher_hidden", "teacher_weight", "teacher_bias", "teacher_logits"))
    tensors["ids"] = tensors["ids"].masked_fill(ignored, IGNORE_INDEX)
    if s.num_items == "given":
        tensors["num_items_in_batch"] = torch.tensor(max(int((~ignored).sum()) + s.other_tokens, 1))
    inputs = head.inputs(case, s, tensors, head.leaves(s), {"loss": head.of_a_loss(case, s)})
    return arranged(head.shared(inputs, "teacher_"))


def _teacher(case: Case, s: SimpleNamespace, tensors: dict[str, Any]) -> dict[str, Any]:
    dtype, total = DTYPES[case.dtype], s.V + s.extra_vocabulary
    width = s.teacher_H if s.gap == "apart" else s.H
    hidden, weight = head.beside(case, s, tensors, "teacher", width, total, s.teacher_peak)
    banned = _banned(case, s, tensors, total)
    bias = normal(case.seed, "teacher_bias", (total,)) if s.teacher_bias != "none" else None
    if banned is not None:
        bias = (torch.zeros(total, dtype=torch.float64) if bias is None else bias).masked_fill(banned, -torch.inf)
    teacher = {
        "teacher_hidden": hidden.to(dtype),
        "teacher_weight": weight.to(dtype),
        "teacher_bias": None if bias is None else bias.to(dtype),
        "teacher_logits": None,
    }
    if s.teacher == "logits":
        z = raw_logits(s, teacher)
        return dict.fromkeys(teacher) | {"teacher_logits": rounded(z).to(dtype).view(s.B, s.T, total)}
    return teacher


def _banned(case: Case, s: SimpleNamespace, tensors: dict[str, Any], total: int) -> torch.Tensor | None:
    """The tokens that the teacher excludes, at least one left, or None."""
    by_student, by_teacher = bans(s)
    if not by_teacher:
        return None
    banned = uniform(case.seed, "teacher_banned", (total,)) < 0.3
    if s.teacher_bias != "banned":
        banned[:] = False
    banned[int(uniform(case.seed, "allowed", ()) * s.V)] = False
    bias = tensors["bias"]
    if by_student:
        banned[: s.V] = (banned[: s.V] | (bias == -torch.inf)) if s.beta == 0.0 else banned[: s.V]
        banned[: s.V] = (banned[: s.V] & (bias == -torch.inf)) if s.beta == 1.0 else banned[: s.V]
    banned[tensors["ids"].long().unique()] = False  # the student allows its labels too, so one token is always common
    return banned


def raw_logits(s: SimpleNamespace, teacher: dict[str, Any]) -> torch.Tensor:
    """The teacher's logits before the temperature, (B·T, V + extra), float64."""
    double = {name: None if x is None else x.double() for name, x in teacher.items()}
    return head.logits(head.teacher(SimpleNamespace(**double), s, temperature=1.0))


def _support(case: Case, s: SimpleNamespace, tensors: dict[str, Any], ignored: torch.Tensor) -> dict[str, Any]:
    """Log-probs of a few tokens, as a server sends them: float32, -inf for padding."""
    lq = torch.log_softmax(raw_logits(s, tensors) / s.temperature, -1).view(s.B, s.T, s.V)
    labels = tensors["ids"]
    label_logps = rounded(lq.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1))
    top, ids = lq.topk(min(s.k if s.sparse == "topk" else 1, max(s.V - 1, 1)), dim=-1)
    top = rounded(top).clamp(max=-(2.0**-10))  # a server's rounded log-probs; a certain token is the tail's business
    extra: dict[str, Any] = {}
    if s.sparse == "mixed":
        out = {"top1_ids": ids[..., 0], "top1_logps": top[..., 0], "label_logps": label_logps.clamp(max=-(2.0**-10))}
        extra = {k: v.masked_fill(ignored, 0 if k == "top1_ids" else -torch.inf) for k, v in out.items()}
        label = labels.long().unsqueeze(-1)
        of_label = out["label_logps"].unsqueeze(-1)
        if s.beta == 1.0:
            top, ids = of_label, label
        else:
            same = label == ids
            top = torch.cat([top, of_label.masked_fill(same, -torch.inf)], -1)
            ids = torch.cat([ids, label.masked_fill(same, 0)], -1)
    elif s.ragged:
        drop = uniform(case.seed, "ragged", top.shape) < 0.4
        drop[..., 0] = False
        top = top.masked_fill(drop, -torch.inf)
    top = top.masked_fill(ignored.unsqueeze(-1), -torch.inf)
    found = extra | {"support_ids": ids.masked_fill(top == -torch.inf, 0), "support_logps": top}
    return {k: v.float() if v is not None and v.is_floating_point() else v for k, v in found.items()}


def excluded(bias: torch.Tensor | None, softcap: float | None, like: torch.Tensor) -> torch.Tensor:
    """(V,) boolean: tokens whose logit is -inf by their bias; a softcap leaves none."""
    if bias is None or softcap is not None:
        return torch.zeros(like.shape[-1], dtype=torch.bool, device=like.device)
    return bias[(0,) * (bias.dim() - 1)].detach() == -torch.inf


def excluded_by_teacher(x: Inputs, like: torch.Tensor) -> torch.Tensor:
    """Tokens whose teacher logit is -inf, (V,) or (B·T, V)."""
    size = like.shape[-1]
    if x.teacher_logits is not None:
        data = x.teacher_logits[(0,) * (x.teacher_logits.dim() - 3)]
        return data.flatten(0, 1)[:, :size] == -torch.inf
    bias = None if x.teacher_bias is None else x.teacher_bias[..., :size]
    return excluded(bias, x.settings.teacher_softcap, like)
