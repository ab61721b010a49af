"""Mutants of family `logprobs`: one step of a correct head exchanged for a wrong one."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, log_softmax, pad

from parity.case.inputs import Inputs
from parity.implementations import plain
from parity.implementations.implementation import Adapter
from parity.selftest.controls import logprobs as right
from parity.selftest.controls.logprobs import Pair, Steps, capped, cooled, scaled, targets
from parity.selftest.mutants import Edited, steps
from parity.selftest.mutants.conduct import MISCONDUCT, misread, misread_upstream
from parity.selftest.mutants.steps import BLOCK, Fused, blocks, through, with_gradient

MUTANTS: dict[str, tuple[str, Adapter]] = {
    name: (mistake, wrong(Steps().call))
    for name, (mistake, wrong) in (MISCONDUCT | misread("hidden", "weight", "bias", "ids")).items()
}
"""Name -> the mistake in one line, and the adapter that makes it."""

MUTANTS["strides-of-upstream"] = ("strides of the upstream gradient ignored", misread_upstream(Steps().call))

CORRECT: dict[str, Adapter] = {
    "steps": Steps().call,
    "fused": Steps(pair=Fused().pair).call,
    "summed": Steps(product=steps.summed(torch.float32)).call,
}
"""What the mutants are edits of: controls."""


def _wrong(name: str, mistake: str, **edits: Any) -> None:
    MUTANTS[name] = (mistake, Steps(**edits).call)


def _fused(name: str, mistake: str, **edits: Any) -> None:
    MUTANTS[name] = (mistake, Steps(pair=Fused(**edits).pair).call)


def _factor(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda g: g * (1 + size)


for _label, _times in (("1e-2", _factor(1e-2)), ("1e-3", _factor(1e-3))):
    _wrong(f"logps-scaled-{_label}", f"log-probs × (1 + {_label})", logps=lambda x, v, f=_times: f(v))
    _wrong(f"entropy-scaled-{_label}", f"entropy × (1 + {_label})", entropy=lambda x, v, f=_times: f(v))
    for _leaf in ("hidden", "weight", "bias"):
        _wrong(
            f"grad-{_leaf}-scaled-{_label}",
            f"gradient of {_leaf} × (1 + {_label})",
            read=with_gradient(_times, _leaf),
        )

_wrong("ignored-scored", "mask ignored: tokens with id -100 scored as id 0", kept=lambda x, v: v)
_wrong("ignored-inverted", "mask inverted: only tokens with id -100 scored", kept=lambda x, v: v * (x.ids < 0))
_wrong(
    "ignored-gradient",
    "value of ignored tokens 0, their gradient not",
    kept=lambda x, v: v - (v * (x.ids < 0)).detach(),
)
_wrong("shifted", "shift by one: the log-prob of the next position", logps=lambda x, v: v.roll(1, 1))
_wrong("last-dropped", "last token dropped", logps=lambda x, v: pad(v[:, :-1], (0, 1)))
_wrong("sequences-swapped", "sequences in reverse order", logps=lambda x, v: v.flip(0))

_wrong("temperature-forgotten", "temperature forgotten", finish=lambda x, z: capped(x, scaled(x, z)))
_wrong(
    "temperature-twice", "temperature applied twice", finish=lambda x, z: cooled(x, cooled(x, capped(x, scaled(x, z))))
)
_wrong(
    "temperature-before-softcap",
    "temperature applied before the softcap",
    finish=lambda x, z: capped(x, cooled(x, scaled(x, z))),
)
_wrong("softcap-forgotten", "softcap forgotten", finish=lambda x, z: cooled(x, scaled(x, z)))
_wrong("scale-forgotten", "logit scale forgotten", finish=lambda x, z: cooled(x, capped(x, z)))
_wrong(
    "scale-after-softcap",
    "logit scale applied after the softcap",
    finish=lambda x, z: cooled(x, scaled(x, capped(x, z))),
)


def _straight(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    z = scaled(x, z)
    return cooled(x, z + (capped(x, z) - z).nan_to_num(0.0).detach() if x.settings.bias != "banned" else capped(x, z))


def _padded(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    return right.finish(x, pad(z, (0, -z.shape[-1] % BLOCK), value=-torch.inf))


_wrong("softcap-gradient-forgotten", "gradient of the softcap forgotten", finish=_straight)
_wrong("softcap-on-padding", "softcap applied to the padding of the vocabulary, whose -inf becomes -c", finish=_padded)
_wrong("bias-forgotten", "bias forgotten", read=lambda x: x.replace(bias=None))
_wrong(
    "bias-after-softcap",
    "bias added after the softcap",
    product=lambda x, h: linear(h, x.weight.float()).float(),
    finish=lambda x, z: cooled(x, capped(x, scaled(x, z)) + (0.0 if x.bias is None else x.bias.float())),
)
_wrong("bias-gradient-missing", "silent None gradient of the bias", read=with_gradient(lambda g: None, "bias"))
_wrong("bias-gradient-zero", "gradient of the bias left at zero", read=with_gradient(torch.zeros_like, "bias"))
_wrong("weight-gradient-missing", "silent None gradient of the head", read=with_gradient(lambda g: None, "weight"))
_wrong(
    "hidden-gradient-missing", "silent None gradient of the hidden states", states=lambda x: x.hidden.detach().float()
)
_wrong("entropy-gradient-missing", "gradient of the entropy missing", entropy=lambda x, v: v.detach())
_wrong("entropy-in-bits", "entropy in bits", entropy=lambda x, v: v / math.log(2))


def _entropy_of_raw(x: Inputs, z: torch.Tensor) -> Pair:
    return right.pair(x, z)[0], right.pair(x, z * x.settings.temperature)[1]


_wrong("entropy-without-temperature", "entropy of the logits before the temperature", pair=_entropy_of_raw)


def _stride_ignored(g: torch.Tensor) -> torch.Tensor:
    """What a kernel finds that walks a stride-0 gradient as if it were contiguous: one value, then memory of others."""
    if any(g.stride()) or g.numel() < 2:
        return g
    return torch.cat([g.flatten()[:1], g.new_zeros(g.numel() - 1)]).view(g.shape)


def _rounded(g: torch.Tensor) -> torch.Tensor:
    return g.bfloat16().to(g)


def _flushed(g: torch.Tensor) -> torch.Tensor:
    return g.clamp(-65504, 65504).half().to(g)


_fused("upstream-ignored", "upstream gradient ignored: backward assumes 1", upstream=lambda a, b: (a.ne(0).to(a), b))
_fused(
    "upstream-scale-lost",
    "the scale of the upstream gradient lost",
    upstream=lambda a, b: (a / a.abs().amax().clamp(min=1e-30), b),
)
_fused("upstream-in-bf16", "upstream gradients rounded to bfloat16", upstream=lambda a, b: (_rounded(a), _rounded(b)))
_fused("upstream-in-fp16", "upstream gradients rounded to float16", upstream=lambda a, b: (_flushed(a), _flushed(b)))
_fused("upstream-mixed", "upstream gradient of the entropy taken for the log-probs'", upstream=lambda a, b: (a + b, b))
_wrong(
    "stride-zero-misread",
    "a stride-0 upstream gradient read as contiguous",
    logps=lambda x, v: through(v, _stride_ignored),
)
_wrong(
    "upstream-averaged",
    "one upstream gradient for all tokens",
    logps=lambda x, v: through(v, lambda g: g.mean().expand_as(g)),
)


def _overlapping(z: torch.Tensor) -> list[torch.Tensor]:
    return [z[..., max(i - 1, 0) : i + BLOCK] for i in range(0, z.shape[-1], BLOCK)]


def _gapped(z: torch.Tensor) -> list[torch.Tensor]:
    return [z[..., i + (i > 0) : i + BLOCK] for i in range(0, z.shape[-1], BLOCK)]


def _zero_padded(z: torch.Tensor) -> list[torch.Tensor]:
    return blocks(pad(z, (0, -z.shape[-1] % BLOCK)))


def _whole_only(z: torch.Tensor) -> list[torch.Tensor]:
    return blocks(z[..., : max(z.shape[-1] // BLOCK * BLOCK, BLOCK)])


def _last_block_first(z: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    start = (z.shape[-1] - 1) // BLOCK * BLOCK
    return z.gather(-1, torch.where(index >= start, index - start, index).unsqueeze(-1)).squeeze(-1)


_fused("chunk-boundary-overlaps", "chunk boundary off by one: its entry counts twice", blocks=_overlapping)
_fused("chunk-boundary-gaps", "chunk boundary off by one: its entry is lost", blocks=_gapped)
_fused("partial-block-padded", "last partial block of the vocabulary padded with logits of 0", blocks=_zero_padded)
_fused("partial-block-dropped", "last partial block of the vocabulary dropped", blocks=_whole_only)
_fused("target-in-last-block", "a target in the last block looked up in the first", select=_last_block_first)


def _no_maximum(x: Inputs, z: torch.Tensor) -> Pair:
    return z.gather(-1, targets(x).unsqueeze(-1)).squeeze(-1) - z.exp().sum(-1).log(), right.pair(x, z)[1]


def _maximum_from_zero(x: Inputs, z: torch.Tensor) -> Pair:
    top = z.amax(-1, keepdim=True).detach().clamp(min=0.0)
    lse = top.squeeze(-1) + (z - top).exp().sum(-1).log()
    return z.gather(-1, targets(x).unsqueeze(-1)).squeeze(-1) - lse, right.pair(x, z)[1]


def _target_by_value(x: Inputs, z: torch.Tensor) -> Pair:
    logps, entropy = right.pair(x, z)
    chosen = z.gather(-1, targets(x).unsqueeze(-1))
    return logps * (z == chosen).sum(-1), entropy


def _hidden_nan(x: Inputs, z: torch.Tensor) -> Pair:
    logp = log_softmax(z, -1)
    return right.pair(x, z)[0], -(logp.exp() * logp).nan_to_num(0.0).sum(-1)


def _log_of_softmax(x: Inputs, z: torch.Tensor) -> Pair:
    p = torch.softmax(z, -1).gather(-1, targets(x).unsqueeze(-1)).squeeze(-1)
    return (p + 1e-10).log(), right.pair(x, z)[1]


_wrong("no-maximum", "log-sum-exp without the maximum", pair=_no_maximum)
_wrong("maximum-from-zero", "log-sum-exp with a running maximum that starts at 0", pair=_maximum_from_zero)
_wrong("target-by-value", "the target found by its logit: equal logits count as well", pair=_target_by_value)
_wrong("nan-hidden", "NaN of 0·log 0 hidden by nan_to_num, its gradient still NaN", pair=_hidden_nan)
_wrong("log-of-softmax", "log(softmax + 1e-10)", pair=_log_of_softmax)
_wrong("summed-in-bf16", "gradient of the head accumulated in bfloat16", product=steps.summed(torch.bfloat16))
_wrong(
    "logits-in-bf16",
    "logits stored in bfloat16, declared float32",
    product=lambda x, h: right.product(x, h).bfloat16().float(),
)
_wrong("logps-in-bf16", "log-probs handed out in bfloat16", logps=lambda x, v: v.bfloat16())
_wrong("logps-rounded", "log-probs rounded to bfloat16 on the way", logps=lambda x, v: v.bfloat16().float())
_wrong(
    "head-narrowed",
    "a float32 head rounded to the dtype of the hidden states",
    read=lambda x: x.replace(weight=x.weight.to(x.hidden.dtype)),
)
_wrong(
    "strides-ignored",
    "hidden states read as if contiguous",
    states=lambda x: torch.as_strided(x.hidden, x.hidden.shape, (x.hidden[0].numel(), x.hidden.shape[-1], 1)).float(),
)
_wrong("batch-of-one", "wrong only for batch 1: the batch dimension squeezed away", logps=lambda x, v: v.squeeze(0))
_wrong(
    "one-token-vocabulary",
    "wrong only for V = 1: the log-prob of certainty is -1e-6",
    logps=lambda x, v: v - 1e-6 if x.weight.shape[0] == 1 else v,
)
_wrong(
    "narrow-ids",
    "int32 ids read as int64: every other id",
    read=lambda x: x.replace(ids=x.ids.roll(1, 1)) if x.ids.dtype == torch.int32 else x,
)
_wrong(
    "all-ignored",
    "wrong only when every token is ignored: NaN",
    logps=lambda x, v: v / (x.ids >= 0).any(),
)
_wrong("states-normalised", "hidden states cast to bfloat16 first", states=lambda x: plain.states(x).bfloat16().float())

EDITED = Edited(CORRECT, MUTANTS, ("plain", "autocast", "checkpoint"), {"entropy": ""})
