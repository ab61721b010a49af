"""Hidden states x LM head: the inputs, settings and definition that every family with an LM head shares."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from parity.case import layouts
from parity.case.case import Case
from parity.case.family import Relation
from parity.case.inputs import Inputs, Setting, product_dtype
from parity.errors import UsageError
from parity.judge import stages
from parity.judge.monte_carlo import walk
from parity.judge.protocol import same_bits
from parity.judge.recipe import DTYPES, LARGEST
from parity.judge.stages import by_index, scaled, stored
from parity.judge.values import integers, normal, uniform

IGNORE_INDEX = -100
REQUIRED = ("hidden", "weight", "ids")
SETTINGS = {
    "B": Setting(2, "sequences, at least 1", size="rows"),
    "T": Setting(3, "positions, at least 1", size="rows"),
    "V": Setting(7, "vocabulary, at least 1", size="length"),
    "H": Setting(4, "hidden size, at least 1", size="inner"),
    "peak": Setting(1.0, "standard deviation of the raw logits"),
    "level": Setting(0.0, "added to every logit: the first hidden entry is 1, its column of the head this much larger"),
    "padded_rows": Setting(
        "none",
        "the last third of the head's rows, as of a padded vocabulary: 0, or each the first",
        ("none", "zero", "equal"),
    ),
    "targets": Setting("random", "selected token ids", ("random", "likely", "edge")),
    "temperature": Setting(1.0, "τ, divides the logits last", within="(0, inf)"),
    "softcap": Setting(None, "c in c·tanh(z/c), or none", within="(0, inf)"),
    "logit_scale": Setting(1.0, "multiplies the logits before the softcap"),
    "bias": Setting("none", "LM-head bias, of some seeds 0; 'banned' has -inf entries", ("none", "random", "banned")),
    "head_dtype": Setting("same", "dtype of weight and bias", ("same", "fp32")),
    "ids_dtype": Setting("int64", "dtype of the token ids", ("int64", "int32")),
    "layout": layouts.HIDDEN,
    "layouts": layouts.OTHERS,
    "grad": Setting("hidden weight bias", "which tensors require a gradient"),
    "cotangent": Setting(
        "random",
        "upstream gradient; 'random' ones are bf16 numbers, 'fine' float32 ones, 'small' ones 2⁻²² of these, 'rows' one a row",
        ("random", "fine", "ones", "zero", "scaled", "small", "sparse", "rows"),
    ),
    "context": Setting(
        "plain",
        "how the implementation is called",
        ("plain", "tf32", "autocast", "autocast_fp16", "checkpoint", "compile"),
    ),
}
SHAPES = ("usual",) * 82 + ("vocabulary",) * 6 + ("tokens",) * 7 + ("hidden",) * 3 + ("sequences",) * 2
"""Which size of a case is one that real models and batches have; all others are small then."""
VOCABULARY = {"quick": 1 << 15, "pr": 1 << 18}
"""Profile -> largest vocabulary that is drawn; in the others twice that of `pr`."""
TOKENS, HIDDEN, SEQUENCES = 1 << 16, 1 << 13, 1 << 9
"""Largest length of a sequence, hidden size and number of sequences."""
GRADS = ("hidden", "weight", "bias", "hidden bias", "weight bias", "hidden weight")
ENTRIES = 1 << 18
"""Entries of the logits, and a quarter of those of the head, of a case that has such a size, about."""


def check(settings: SimpleNamespace, case: Case) -> None:
    """Refuse what the definition has no value for. Raises UsageError, naming the setting and its value."""
    if not abs(settings.level) <= torch.finfo(DTYPES[case.dtype]).max:
        raise UsageError(f"case {case.id}: level={settings.level!r} must be a finite number of {case.dtype}")
    unknown = set(settings.grad.split()) - {"hidden", "weight", "bias"}
    if unknown:
        raise UsageError(f"case {case.id}: grad names {', '.join(sorted(unknown))}, choose from hidden, weight, bias")


def build(case: Case, s: SimpleNamespace) -> dict[str, Any]:
    """Tensors `hidden` (B, T, H), `weight` (V, H), `bias` (V,) or None, `ids` (B, T), and `previous_ids` (B, T)."""
    dtype = DTYPES[case.dtype]
    head_dtype = dtype if s.head_dtype == "same" else torch.float32
    hidden = normal(case.seed, "hidden", (s.B, s.T, s.H)).to(dtype)
    weight = (normal(case.seed, "weight", (s.V, s.H)) * (s.peak / s.H**0.5)).to(head_dtype)
    bias: Any = None
    if s.bias != "none":
        bias = normal(case.seed, "bias", (s.V,)).to(head_dtype)
        if s.bias == "random" and case.seed % 8 == 5:
            bias.zero_()  # as before the first step of a training
    if s.level:
        hidden[..., 0] = 1.0
        weight[:, 0] += s.level
    if s.padded_rows != "none":
        for rows in (weight,) if bias is None else (weight, bias):
            rows[s.V - s.V // 3 :] = 0.0 if s.padded_rows == "zero" else rows[0].clone()
    ids = integers(case.seed, "ids", (s.B, s.T), s.V)
    if s.targets == "likely":
        z = hidden.double() @ weight.double().T
        ids = (z if bias is None else z + bias.double()).argmax(-1)
    if s.targets == "edge":
        ids = torch.where(uniform(case.seed, "edge", (s.B, s.T)) < 0.5, 0, s.V - 1)
    if s.bias == "banned":
        banned = uniform(case.seed, "banned", (s.V,)) < 0.3
        banned[ids.unique()] = False
        bias = bias.masked_fill(banned, -torch.inf)
    return {
        "hidden": layouts.laid_out(hidden, s.layout),
        "weight": weight,
        "bias": bias,
        "ids": ids.to(torch.int32 if s.ids_dtype == "int32" else torch.int64),
    }


def beside(case: Case, s: SimpleNamespace, of: dict[str, Any], name: str, width: int, rows: int, peak: float) -> Any:
    """Hidden states (B, T, H or `width`) and head of another model, by the setting `gap`: apart, near the case's own, equal
    but for the `rows` that its head has more."""
    states = normal(case.seed, f"{name}_hidden", (s.B, s.T, width))
    weight = normal(case.seed, f"{name}_weight", (rows, width)) * (peak / width**0.5)
    if s.gap != "apart":
        states = of["hidden"].double() + (states / 16 if s.gap == "near" else 0.0)
        weight = torch.cat([of["weight"].double(), weight[s.V :]])
    return states, weight


def leaves(s: SimpleNamespace) -> tuple[str, ...]:
    """The names of the tensors that require a gradient; a LoRA adapter on the head does so always, the head beneath it never."""
    there = ("hidden", "weight", "bias") if s.bias != "none" else ("hidden", "weight")
    names = [name for name in there if name in s.grad.split()]
    if s.__dict__.get("head") == "lora":
        names = [*(name for name in names if name == "hidden"), "lora_a", "lora_b"]
    return tuple(names)


def cotangent(case: Case, s: SimpleNamespace, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """An upstream gradient of `shape`, float64 with values that float32 holds; "ones" and "rows" have stride 0, as the
    sum of all and of a sequence return; "sparse" is 1 for one entry and 0 elsewhere, as a masked sum returns."""
    kind = s.cotangent
    if kind == "ones":
        return torch.ones((), dtype=torch.float64).expand(shape)
    g = normal(case.seed, f"cotangent/{name}", shape)
    if kind in ("fine", "small"):
        return g.float().double() * (2.0**-22 if kind == "small" else 1.0)
    g = g.to(torch.bfloat16).double()
    if kind == "rows" and shape:
        return g[..., :1].expand(shape)
    if kind == "zero":
        return torch.zeros_like(g)
    if kind == "scaled":  # as a loss scaler does; log-probs in fp16 could not carry 65,536
        return g * (1024 if product_dtype(case, s) == "fp16" and shape else 65536)
    if kind == "sparse":
        keep = torch.zeros(max(g.numel(), 1), dtype=torch.bool)
        keep[int(integers(case.seed, f"sparse/{name}", (), max(g.numel(), 1)))] = True
        return keep[: g.numel()].view(shape).double()
    return g


def of_a_loss(case: Case, s: SimpleNamespace) -> torch.Tensor:
    """The upstream gradient of a scalar, 0-dim, never 0 where it is random; a float16 loss cannot carry 65,536."""
    g = cotangent(case, s, "loss", ())
    g = torch.where(g == 0, 0.5, g) if s.cotangent == "random" else g
    return g / 64 if s.cotangent == "scaled" and product_dtype(case, s) == "fp16" else g


def logits(x: Inputs, of_teacher: bool = False) -> torch.Tensor:
    """z = softcap(scale·(h Wᵀ + b))/τ, shape (…, B·T, V), float64; every leaf may carry leading replica dimensions.
    softcap(z) = c·tanh(z/c). The order scale, softcap, temperature is that of transformers' Gemma-2 and Cohere models
    followed by TRL's sampling temperature."""
    return of_model(x, of_teacher) / x.settings.temperature


def needed(x: Inputs, table: Mapping[str, Setting], names: Iterable[str], optional: Iterable[str] = ()) -> set[str]:
    """What a function must take: the tensors of a head, those of `names` that are not at their defaults, and the `optional`
    tensors that are there."""
    moved = {n for n in names if getattr(x.settings, n) != table[n].default}
    return {*REQUIRED} | moved | {n for n in optional if x.tensors.get(n) is not None}


def teacher(x: Any, s: SimpleNamespace, **more: Any) -> Any:
    """The teacher among the tensors `x` as a model of its own, `more` beside its scale and softcap."""
    settings = SimpleNamespace(logit_scale=s.teacher_logit_scale, softcap=s.teacher_softcap, **more)
    return SimpleNamespace(hidden=x.teacher_hidden, weight=x.teacher_weight, bias=x.teacher_bias, settings=settings)


def of_model(x: Inputs, of_teacher: bool = False) -> torch.Tensor:
    """The logits of `logits` as a model returns them, without the temperature."""
    s = x.settings
    plain, biased = ("teacher", "teacher") if of_teacher else ("logits", "biased")
    unbiased = plain if x.bias is None else "unbiased teacher" if of_teacher else "unbiased"
    hidden, weight = x.hidden.flatten(-3, -2), x.weight
    if s.__dict__.get("head") == "tied":  # the embedding of the previous token comes from the same matrix
        embedding = weight
        if s.head_dtype != "fp32":
            embedding, weight = stored(weight, "use"), stored(weight, "use")
        hidden = stored(hidden + embedding[..., x.previous_ids.flatten(), :], "states")
    hidden, weight = stored(hidden, "hidden"), stored(weight, "parameter")
    adapted = hidden
    if s.__dict__.get("head") == "lora":
        hidden, adapted = stored(hidden, "operand"), stored(adapted, "operand")
    z = stored(hidden @ weight.mT, unbiased)
    if s.__dict__.get("head") == "lora":  # autocast casts all three
        low_rank = stored(adapted @ stored(x.lora_a, "parameter").mT, "states")
        z = stored(z + stored(stored(low_rank, "parameter") @ stored(x.lora_b, "parameter").mT, unbiased), unbiased)
    if x.bias is not None:
        bias = stored(x.bias, "bias").unsqueeze(-2)
        # K roundings of a running sum that begins with b, each up to u·|b|: √K·u·|b| at random
        z = stored(z + bias, biased, lambda: bias.abs() * (hidden.shape[-1] ** 0.5 / 2))
    if s.logit_scale != 1.0:
        z = scaled(z, s.logit_scale)
    if s.softcap is not None:
        z = s.softcap * torch.tanh(z / s.softcap)
    return z


def log_softmax(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    """log p of the logits z of `logits`, (…, B·T, V); a replica's backward may make them again by another product."""
    s = x.settings

    def size() -> torch.Tensor:
        hidden = x.hidden[(0,) * (x.hidden.dim() - 3)].detach().flatten(0, 1).abs()
        weight = x.weight[(0,) * (x.weight.dim() - 2)].detach()
        if s.__dict__.get("head") == "tied":
            hidden = hidden + weight[x.previous_ids.flatten()].abs()
        sums = hidden @ weight.abs().mT
        if s.__dict__.get("head") == "lora":
            a, b = (t[(0,) * (t.dim() - 2)].detach().abs() for t in (x.lora_a, x.lora_b))
            sums = sums + hidden @ a.mT @ b.mT
        if x.bias is not None:
            bias = x.bias[(0,) * (x.bias.dim() - 1)].detach().abs()
            sums = sums + bias.masked_fill(bias.isinf(), 0.0)
        return sums * (walk(hidden.shape[-1]) * abs(s.logit_scale) / s.temperature)

    return stages.log_softmax(z, size)


def selected(x: Inputs, all_logps: torch.Tensor) -> torch.Tensor:
    """all_logps[…, i, ids[i]] reshaped to (…, B, T)."""
    ids = x.ids.long().clamp(min=0)
    index = ids.reshape(-1, 1).expand(*all_logps.shape[:-1], 1)
    logps = all_logps.gather(-1, index).squeeze(-1).unflatten(-1, ids.shape)
    s = x.settings
    if s.softcap is None:
        logps = by_index(logps, x.bias, ids, s.logit_scale / s.temperature)

    def products() -> torch.Tensor:
        hidden = x.hidden[(0,) * (x.hidden.dim() - 3)].detach()
        weight = x.weight[(0,) * (x.weight.dim() - 2)].detach()
        return hidden * weight[ids] * (abs(s.logit_scale) / s.temperature)

    logps = stored(logps, "selected", lambda: products().norm(dim=-1))
    return stored(logps, "target", lambda: products().abs().sum(-1) * (walk(x.hidden.shape[-1]) / 2))


def entropy(x: Inputs, z: torch.Tensor, all_logps: torch.Tensor) -> torch.Tensor:
    """-Σ p log p over the vocabulary, (…, B, T); a token of probability 0 contributes 0. Where it is computed as
    logsumexp(z) - E[z], the gradient p·(E[z] - z) takes the rounding of E[z] as it is: along p, the gradient of a
    log-sum-exp."""
    finite = all_logps.masked_fill(all_logps == -torch.inf, 0.0)
    value = -(all_logps.exp() * finite).sum(-1).unflatten(-1, x.ids.shape)

    def size() -> torch.Tensor:
        return 2 * torch.logsumexp(z.detach(), -1).abs().unflatten(-1, x.ids.shape)

    def total() -> torch.Tensor:
        return log_partition(z, all_logps).unflatten(-1, x.ids.shape)

    return stored(value, "entropy", size, total)


def log_partition(z: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """log Z = logsumexp(z) = z - log p, (…, B·T), from the log-probs at hand."""
    top = z.detach().argmax(-1, keepdim=True)
    return (z.gather(-1, top) - logps.gather(-1, top)).squeeze(-1)


def picking(draw: Any, st: Any) -> Any:
    """`pick(*values)`, which draws one of them."""
    return lambda *values: draw(_one_of_values(st, *values))


# Hypothesis checks every new strategy, which takes longer than a draw from it: these are made once.
_once = functools.lru_cache(maxsize=None, typed=True)


@_once
def _one_of_values(st: Any, *values: Any) -> Any:
    return st.sampled_from(values)


def size(draw: Any, st: Any, least: int, most: int) -> int:
    """A size, mostly a multiple of a power of two, or one beside it, else log-uniform in [least, most]."""
    steps = 4 * max(1, math.ceil(math.log2(most / least)))
    value = least * (most / least) ** (draw(st.integers(0, steps)) / steps)
    beside = picking(draw, st)(0, 0, 1, 1, -1, None)
    if beside is not None:
        unit = 1 << draw(st.integers(3, max(3, int(math.log2(value)))))
        value = max(1, round(value / unit)) * unit + beside
    return min(max(round(value), least), most)


@_once
def number(st: Any, low: float, high: float, *usual: Any) -> Any:
    """A usual value, twice as often as a log-uniform one of [low, high]."""
    steps = st.integers(0, 64).map(lambda k: float(f"{high * (low / high) ** (k / 64):.3g}"))
    return st.one_of(st.sampled_from(usual), st.sampled_from(usual), steps)


def _sizes(draw: Any, st: Any, shape: str, profile: str) -> dict[str, int]:
    """B, T, V and H of a case whose `shape` names the size that is a real one."""
    few, pick = st.integers(1, 3), picking(draw, st)
    if shape == "vocabulary":
        vocabulary = size(draw, st, 1 << 12, VOCABULARY.get(profile, 2 * VOCABULARY["pr"]))
        rest = max(1, ENTRIES // vocabulary)
        sequences, tokens = (1, min(2, rest)) if rest < 9 else (draw(few), draw(few))
        return {
            "B": sequences,
            "T": tokens,
            "V": vocabulary,
            "H": pick(*(h for h in (1, 2, 7, 16, 33, 64, 130) if h <= 4 * rest)),
        }
    small = {
        "B": draw(few),
        "T": draw(few),
        "V": draw(st.integers(1, 40)),
        "H": pick(1, 2, 7, 16, 33),
    }
    if shape == "tokens":
        tokens = size(draw, st, 65, TOKENS // small["B"])
        rest = max(2, ENTRIES // (4 * small["B"] * tokens))
        return small | {"T": tokens, "V": min(small["V"], rest), "H": min(small["H"], rest)}
    if shape == "sequences":
        return small | {"B": size(draw, st, 9, SEQUENCES)}
    if shape == "hidden":
        return small | {"H": size(draw, st, 257, HIDDEN)}
    vocabulary = st.one_of(st.integers(1, 40), st.integers(1, 40), st.integers(1, 300), st.just(None))
    odd = st.sampled_from([2, 3, 4, 7, 8, 13, 16, 31, 33, 64, 100, 130, 257, 300])
    v = draw(vocabulary)
    return {
        "B": draw(st.integers(1, 5)),
        "T": draw(st.integers(1, 12)),
        "V": size(draw, st, 64, 2048) if v is None else v,
        "H": draw(st.one_of(st.integers(1, 16), odd)),
    }


def one_in(count: int, out: Mapping[str, Any]) -> bool:
    """Whether one of so many draws is chosen: by what it has so far, so that no other draw moves."""
    return zlib.crc32(repr(out).encode()) % count == 0


def draw_head(draw: Any, st: Any, dtype: str, *, profile: str, contexts: tuple[str, ...]) -> dict[str, Any]:
    """Draw the shared settings; `st` is hypothesis.strategies. Every dimension is drawn independently of the others.
    Settings that move seldom do so often beside a size of real models, or they would not meet it."""
    pick = picking(draw, st)
    shape = pick(*(["usual"] if profile == "demo" else SHAPES))  # a finding to be read, in seconds
    large = shape == "vocabulary"
    usual, most = (12, 3) if shape == "usual" else (4, 1)
    out: dict[str, Any] = _sizes(draw, st, shape, profile) | {
        "peak": pick(1.0, 0.05, 4.0, 12.0, 50.0),
        "level": pick(*[0.0] * usual, -150.0, 150.0),
        "padded_rows": pick(*["none"] * usual, "zero", "equal"),
        "targets": pick("random", "random", "likely", "edge"),
        "temperature": draw(temperatures(st)),
        "softcap": draw(st.one_of(st.none(), st.none(), number(st, 0.5, 500.0, 30.0, 1.0, 3.0, 50.0))),
        "logit_scale": draw(st.one_of(*[st.just(1.0)] * most, number(st, 0.01, 16.0, 0.0625, 0.3, 2.5))),
        "bias": pick(*["none"] * most, "random", "random", *["banned"] * (3 if large else 1)),
        "head_dtype": pick(*["same"] * most, "fp32") if dtype != "fp32" else "same",
        "ids_dtype": pick("int64", "int64", "int64", "int32"),
        "layout": pick(*["contiguous"] * 4, "strided", "transposed", "offset", "flat"),
        "layouts": pick(*layouts.DRAWN),
        "grad": pick(*["hidden weight bias"] * 4, *GRADS),
        "context": pick(*contexts),
    }
    if out["softcap"] is not None and draw(st.integers(0, 3)):  # it holds every logit at its bound
        out["level"] = 0.0
    return canonical(dtype, out)


def canonical(dtype: str, out: dict[str, Any]) -> dict[str, Any]:
    """Settings of a case, with those at their defaults that say nothing beside the others."""
    if dtype == "fp32":  # the head has it anyway
        out["head_dtype"] = "same"
    elif out["context"] in ("autocast", "autocast_fp16", "tf32"):  # of float32 parameters
        out["context"] = "plain"
    if out["bias"] == "none" and out["grad"] == "bias":
        out["grad"] = "weight"
    return out


@_once
def temperatures(st: Any) -> Any:
    """1, a usual one, or log-uniform from 1e-3 to 8."""
    return st.one_of(
        st.just(1.0),
        st.sampled_from([0.7, 0.9, 0.5, 2.0, 1.2]),
        st.integers(0, 64).map(lambda k: float(f"{8 * 0.000125 ** (k / 64):.4g}")),
    )


def largest(s: SimpleNamespace) -> float:
    """About the largest logit, before its softcap: of few products of normal numbers the tail is long."""
    return float(((5 + 12 / s.H**0.5) * s.peak + abs(s.level)) * s.logit_scale / s.temperature)


def features(case: Case, s: SimpleNamespace) -> dict[str, Any]:
    """Facts for coverage and ledger scopes that every loss of an LM head has."""
    return {
        "V = 1": s.V == 1,
        "V beyond a chunk": s.V > 4096,
        "cap active": s.softcap is not None and s.peak * s.logit_scale * 2 > s.softcap,
        "fp16 overflow": product_dtype(case, s) == "fp16" and largest(s) > LARGEST["fp16"],
        "logit_std": s.peak * s.logit_scale / s.temperature,
        "nearly equal": nearly_equal(s.peak * s.logit_scale, s.softcap, s),
        "tokens": s.B * s.T,
    }


def nearly_equal(std: float, cap: float | None, s: SimpleNamespace) -> bool:
    """Whether logits before the temperature, of this standard deviation, are so near to each other under a softcap that Σ
    exp(z - max) may be beyond float16."""
    return LARGEST["fp16"] < s.V and min(abs(std), cap or math.inf) <= s.temperature


def ignored(case: Case, s: SimpleNamespace) -> torch.Tensor:
    """(B, T) bool: the positions without a label, of the setting `ignored`."""
    out = torch.zeros(s.B, s.T, dtype=torch.bool)
    if s.ignored == "some":
        out = uniform(case.seed, "ignored", (s.B, s.T)) < 0.4
    elif s.ignored == "row":
        out[0] = True
    elif s.ignored == "all":
        out[:] = True
    return out


def unlabelled(x: Inputs) -> dict[str, torch.Tensor]:
    """Ignored positions: exactly zero gradient of their hidden states."""
    return {"grad_hidden": x.ids == IGNORE_INDEX}


def _double_cotangents(x: Inputs) -> Inputs | None:
    if x.settings.cotangent in ("zero", "scaled"):
        return None
    return dataclasses.replace(x, cotangents={k: layouts.like(g * 2, g) for k, g in x.cotangents.items()})


GRADIENTS = ("grad_hidden", "grad_weight", "grad_bias")
LINEAR = Relation(_double_cotangents, dict.fromkeys(GRADIENTS, 2.0), "backward is linear in the upstream gradient")
"""Of twice the upstream gradients."""


REPLICATED = frozenset(
    "hidden weight bias lora_a lora_b teacher_hidden teacher_weight teacher_bias teacher_logits support_logps "
    "ref_hidden ref_weight ref_bias".split()
)
"""What an oracle rounds: every replica has its own."""
inputs = functools.partial(Inputs, replicated=REPLICATED)
"""Inputs of a loss with an LM head: case, settings, tensors, leaves, upstream gradients."""


def shared(x: Inputs, prefix: str) -> Inputs:
    """The same where each tensor of a teacher, named by the `prefix`, is the student's if it has the same bits."""
    pairs = {prefix + name: name for name in ("hidden", "weight", "bias")}
    given = {other: own for other, own in pairs.items() if x.tensors[other] is not None}
    found = {other: own for other, own in given.items() if same_bits(x.tensors[other], x.tensors[own])}
    return dataclasses.replace(x, shared=found)
