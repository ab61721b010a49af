"""The definition of a case's loss as lines of plain torch, for the settings of that case alone.

`DEFINITIONS[family](inputs, names)` returns lines that assign every quantity in `names` from the leaves and the tensors
of the case; they say what the family's oracle says, and a selftest holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from parity.case.inputs import Inputs
from parity.families.policy import CLIPPED, WINDOW_NORMALISED

Lines = list[str]

PAPERS = {
    "grpo": "arXiv 2402.03300",
    "dr_grpo": "arXiv 2503.20783",
    "dapo": "arXiv 2503.14476",
    "cispo": "arXiv 2506.13585",
    "sapo": "arXiv 2511.20347",
    "luspo": "arXiv 2602.05261",
    "vespo": "arXiv 2602.10693",
}


def described(x: Inputs) -> str:
    """One phrase: what the float64 column evaluates, and who defined it."""
    if x.case.family == "logprobs":
        return "log-softmax of the LM head's logits at the token ids"
    loss = x.settings.loss_type
    return f"the {loss} loss" + (f" ({PAPERS[loss]})" if loss in PAPERS else "")


def _logits(x: Inputs) -> Lines:
    """z = softcap(scale·(h Wᵀ + b))/τ."""
    s = x.settings
    out = []
    if getattr(s, "head", "plain") == "tied":
        out.append("hidden = hidden + weight[previous_ids]")
    z = "hidden @ weight.T"
    z += " + hidden @ lora_a.T @ lora_b.T" if x.tensors.get("lora_a") is not None else ""
    z += " + bias" if x.bias is not None else ""
    out.append(f"z = {z}" if s.logit_scale == 1.0 else f"z = ({z}) * {s.logit_scale}")
    if s.softcap is not None:
        out.append(f"z = {s.softcap} * torch.tanh(z / {s.softcap})")
    tail = "" if s.temperature == 1.0 else f" / {s.temperature}"
    return [*out, f"p = torch.log_softmax(z{tail}, -1)"]


def _selected(x: Inputs, index: str, keep: bool) -> Lines:
    """logps = p[id]; z and p are written into one expression where nothing else asks for them."""
    *out, last = _logits(x)
    if x.settings.softcap is None and x.settings.logit_scale == 1.0:
        z = out.pop().removeprefix("z = ")
        last = last.replace("(z", f"(({z})" if " / " in last else f"({z}")
    if keep:
        return [*out, last, f"logps = p.gather(-1, {index}[..., None])[..., 0]"]
    return [*out, f"logps = {last.removeprefix('p = ')}.gather(-1, {index}[..., None])[..., 0]"]


ENTROPY = "entropy = -(p.exp() * p.masked_fill(p == -inf, 0)).sum(-1)"


def logprobs(x: Inputs, names: Sequence[str]) -> Lines:
    """logps = z[id] - logsumexp(z), entropy = -Σ p log p; both 0 at ignored positions."""
    ids = "ids.long()" if x.ids.dtype.itemsize < 8 else "ids"
    some = x.settings.ignored != "none"
    index, fill = (f"{ids}.clamp(min=0)", ".masked_fill(ids < 0, 0)") if some else (ids, "")
    out = _selected(x, index, "entropy" in names)
    out[-1] += fill
    if "entropy" in names:
        out.append(ENTROPY + fill)
    return out


def policy(x: Inputs, names: Sequence[str]) -> Lines:
    """The loss of one micro-batch and the metrics asked for."""
    s = x.settings
    ids = "ids.long()" if x.ids.dtype.itemsize < 8 else "ids"
    entropic = bool(s.entropy_coef) or x.top_entropy_quantile is not None or "entropy" in names
    out = _selected(x, ids, entropic)
    advantages = "advantages[:, None]" if x.advantages.dim() == 1 else "advantages"
    out.append(f"A, m = {advantages}, mask.double()")
    if entropic:
        out.append(ENTROPY.replace("entropy", "H", 1))
    sequence = s.importance_sampling_level == "sequence"
    if sequence or s.off_policy_mask_threshold is not None:
        out.append("def mean(v): return (v * m).sum(-1, keepdim=True) / m.sum(-1, keepdim=True).clamp(min=1)")
    d = "logps - " + ("logps.detach()" if x.old_logps is None else "old_logps")
    if s.loss_type == "vespo":
        out.append(f"d = {d}")
    if s.loss_type != "vespo" or (s.beta and s.use_bias_correction_kl):
        w = f"mean({d}).exp()" if sequence else f"({d}).exp()"
        if out[-1].startswith("A, m = ") and not sequence:
            out[-1] = f"A, m, w = {advantages}, mask.double(), {w}"
        else:
            out.append(f"w = {w}")
    out += _surrogate(x) + _masks(x)
    if s.beta != 0.0:
        out.append("k = (ref_logps - logps).exp() - (ref_logps - logps) - 1")
        if s.use_bias_correction_kl:
            out.append("k = k * w")
        out.append(f"loss = loss + {s.beta} * k")
    out.append(_aggregate(x))
    if s.entropy_coef:
        accumulation = s.accumulation if s.mode == "train" else 1
        keep = "keep" if x.top_entropy_quantile is not None else "m"
        out.append(f"loss = loss - {s.entropy_coef} * (H * {keep}).sum() / {keep}.sum().clamp(min=1) / {accumulation}")
    return out + _metrics(x, names)


def _high(x: Inputs) -> float:
    s = x.settings
    return s.epsilon if s.epsilon_high is None else s.epsilon_high


def _by_sign(above: str, positive: float, negative: float) -> str:
    """A number by the sign of the advantages, in float64: `torch.where` of two Python numbers would be float32."""
    return f"{negative} + {positive - negative!r} * (A {above} 0).double()"


def _surrogate(x: Inputs) -> Lines:
    """The policy term of each token, in `loss`."""
    s = x.settings
    if s.loss_type in CLIPPED:
        capped = "w" if s.delta is None else f"w.clamp(max={s.delta})"
        return [f"loss = -torch.minimum({capped} * A, w.clamp({1 - s.epsilon}, {1 + _high(x)}) * A)"]
    if s.loss_type == "cispo":
        return [f"loss = -w.clamp(max={_high(x)}).detach() * A * logps"]
    if s.loss_type == "sapo":
        tau = f"tau = {_by_sign('>', s.sapo_temperature_pos, s.sapo_temperature_neg)}"
        return [tau, "loss = -torch.sigmoid(tau * (w - 1)) * 4 / tau * A"]
    low = math.log(1e-8)
    out = ["W = (d.detach().clamp(-20, 20) * m).sum(-1, keepdim=True)"]
    if x.importance_sampling_ratio is not None:
        out.append(f"W = W + importance_sampling_ratio.double().log().clamp({low}, 20).sum(-1, keepdim=True)")
    return [
        *out,
        f"W, shape = W.clamp({low}, 20), {_by_sign('>=', s.vespo_k_pos, s.vespo_k_neg)}",
        f"rate = {_by_sign('>=', s.vespo_lambda_pos, s.vespo_lambda_neg)}",
        "loss = -torch.exp(rate + shape * W - rate * W.exp()) * A * logps",
    ]


def _masks(x: Inputs) -> Lines:
    """Off-policy sequence mask, entropy mask and sampler ratio."""
    s = x.settings
    out = []
    if s.off_policy_mask_threshold is not None:
        sampled = next((n for n in ("sampling_logps", "old_logps") if x.tensors.get(n) is not None), "logps")
        gap = f"mean(({sampled} - logps.detach()).nan_to_num(nan=0.0))"
        out.append(f"loss = loss * ((A >= 0) | ({gap} <= {s.off_policy_mask_threshold}))")
    if x.top_entropy_quantile is not None:
        quantile = 1 - float(x.top_entropy_quantile)
        out.append(f"keep = m * (H.detach() * m >= torch.quantile(H.detach()[m.bool()], {quantile}))")
        out.append("loss = loss * (keep + 1 - m)")
    if x.importance_sampling_ratio is not None and s.loss_type != "vespo":
        out.append("loss = loss * importance_sampling_ratio")
    return out


def _aggregate(x: Inputs) -> str:
    """The loss of the micro-batch from its tokens."""
    s = x.settings
    training = s.mode == "train"
    steps = f" / {s.accumulation}" if training and s.accumulation != 1 else ""
    if s.loss_type in ("grpo", "sapo"):
        return f"loss = ((loss * m).sum(-1) / m.sum(-1).clamp(min=1)).mean(){steps}"
    if s.loss_type == "bnpo":
        return f"loss = (loss * m).sum() / m.sum().clamp(min=1){steps}"
    if s.loss_type == "dr_grpo":
        return f"loss = (loss * m).sum() / {s.B * s.max_completion_length}{steps}"
    if s.loss_type == "luspo":
        return f"loss = (loss * m).sum(-1).mean(){steps}"
    assert s.loss_type in WINDOW_NORMALISED
    window = s.accumulation / s.steps_per_generation if training else 1.0
    return f"loss = (loss * m).sum() / {max(float(x.num_items_in_batch), 1.0) * window}"


def _metrics(x: Inputs, names: Sequence[str]) -> Lines:
    s = x.settings
    clip = {"clip_low": f"(w < {1 - s.epsilon}) & (A < 0)", "clip_high": f"(w > {1 + _high(x)}) & (A > 0)"}
    clip["clip_ratio"] = f"{clip['clip_low']} | {clip['clip_high']}"
    if s.loss_type == "cispo":
        clip["clip_ratio"] = f"(w > {_high(x)}) & (A > 0)"
    values = {"kl": "k", "entropy": "H"} | clip
    per_sequence = s.importance_sampling_level == "sequence" and x.advantages.dim() == 1 and s.T != 1
    out = []
    for name in names:
        if name in clip and per_sequence:
            out.append(f"{name} = ({values[name]}).double().mean()")
        elif name in values:
            out.append(f"{name} = (({values[name]}) * m).sum() / m.sum().clamp(min=1)")
    return out


DEFINITIONS: dict[str, Callable[[Inputs, Sequence[str]], Lines]] = {"logprobs": logprobs, "policy": policy}
