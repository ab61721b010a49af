"""The definitions written out token by token in 50 digits (mpmath), from the papers; nothing here calls an oracle."""

import functools
import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import mpmath as mp
import torch

from parity.case.drawing import cases, draws
from parity.case.inputs import Inputs
from parity.registry import family

Tokens = list[list[Any]]

mp.mp.dps = 50


SIZES = {"B": 3, "T": 4, "V": 9, "H": 3, "teacher_H": 3, "k": 3}
"""The largest that 50 digits can afford."""


@functools.cache
def drawn(name: str, count: int, **few: tuple[Any, ...]) -> list[Inputs]:
    """So many drawn cases of a family, none larger than SIZES; `few`: values, in turn, of settings that draws seldom move."""
    of, found = family(name), []
    for case in draws(cases(of, ("fp32", "fp16", "bf16"), "pr"), "written out", count):
        s = vars(of.full_settings(case))
        small = {n: min(s[n], most) for n, most in SIZES.items() if n in s}
        if s.get("lengths"):
            small["lengths"] = [min(n, small["T"]) for n in s["lengths"][: small["B"]]]
        small |= {n: values[len(found) % len(values)] for n, values in few.items()}
        found.append(of.build(of.case(case.seed, case.dtype, of.canonical(case.dtype, s | small))))
    return found


def number(value: Any) -> Any:
    """A tensor's entry, exactly."""
    return mp.mpf(float(value))


def table(tensor: torch.Tensor) -> list[Any]:
    """A two- or three-dimensional tensor as nested lists of numbers."""
    return [table(row) if row.dim() else number(row) for row in tensor]


def differences(
    leaf: dict[str, Any], found: dict[str, Any], names: Iterable[str], seed: int, of: Callable[[], Any]
) -> Any:
    """Three entries of each gradient: its name, the entry, `of`'s central difference in 50 digits, the largest entry.

    `leaf`: nested lists that `of` reads. Where the leaf is infinite the gradient must be 0.
    """
    choose, step = random.Random(seed), mp.mpf("1e-18")
    for name in names:
        grad = found[f"grad_{name}"]
        for _ in range(3):
            *outer, last = index = tuple(choose.randrange(n) for n in grad.shape)
            place = functools.reduce(operator.getitem, outer, leaf[name])
            at, sides = place[last], []
            if not mp.isfinite(at):
                assert float(grad[index]) == 0.0, name
                continue
            for moved in (at + step, at - step):
                place[last] = moved
                sides.append(of())
            place[last] = at
            yield name, float(grad[index]), (sides[0] - sides[1]) / (2 * step), float(grad.abs().max())


def logits(hidden: Any, weight: Any, bias: Any, scale: float, softcap: float | None, more: Any = None) -> list[Any]:
    """The logits of one token before its temperature; `more` is added like the bias."""
    out = []
    for v, row in enumerate(weight):
        z = mp.fsum(map(operator.mul, hidden, row)) + sum(given[v] for given in (bias, more) if given)
        z *= number(scale)
        out.append(z if softcap is None else number(softcap) * mp.tanh(z / number(softcap)))
    return out


class Values:
    """Leaves of a case as numbers, so that one entry can be moved."""

    def __init__(self, x: Inputs):
        self.x = x
        names = ("hidden", "weight", "bias", "lora_a", "lora_b")
        self.leaf = {n: table(t.detach()) for n in names if (t := x.tensors.get(n)) is not None}

    def logits(self, b: int, t: int) -> list[Any]:
        """The logits of one token."""
        s, leaf, more = self.x.settings, self.leaf, None
        hidden = leaf["hidden"][b][t]
        if getattr(s, "head", "plain") == "tied":
            hidden = [*map(operator.add, hidden, leaf["weight"][int(self.x.previous_ids[b, t])])]
        if getattr(s, "head", "plain") == "lora":
            low = [mp.fsum(map(operator.mul, hidden, direction)) for direction in leaf["lora_a"]]
            more = [mp.fsum(map(operator.mul, low, row)) for row in leaf["lora_b"]]
        z = logits(hidden, leaf["weight"], leaf.get("bias"), s.logit_scale, s.softcap, more)
        return [v / number(s.temperature) for v in z]

    def logp_and_entropy(self, b: int, t: int) -> tuple[Any, Any]:
        """Selected log-prob and entropy of one token; an ignored one has neither."""
        token = int(self.x.ids[b, t])
        if token == -100:
            return mp.mpf(0), mp.mpf(0)
        z = self.logits(b, t)
        total = mp.fsum(mp.exp(v) for v in z)
        logs = [v - mp.log(total) for v in z]
        entropy = -mp.fsum(mp.exp(v) * v for v in logs if v != -mp.inf)
        smoothing, z_loss = (number(getattr(self.x.settings, n, 0.0)) for n in ("smoothing", "z_loss"))
        logp = (1 - smoothing) * logs[token] + (smoothing * mp.fsum(logs) / len(logs) if smoothing else 0)
        return logp - z_loss * mp.log(total) ** 2, entropy

    def tokens(self) -> tuple[Tokens, Tokens]:
        """Two (B, T) lists: log-probs and entropies."""
        shape = self.x.ids.shape
        pairs = [[self.logp_and_entropy(b, t) for t in range(shape[1])] for b in range(shape[0])]
        return [[p[0] for p in row] for row in pairs], [[p[1] for p in row] for row in pairs]


def clamp(value: Any, low: Any, high: Any) -> Any:
    """value held between two bounds."""
    return max(low, min(high, value))


class Policy:
    """The loss of one micro-batch as a function of log-probs, entropies and the log-probs that no gradient enters."""

    def __init__(self, x: Inputs):
        self.x, self.s = x, x.settings
        self.rows, self.width = x.ids.shape
        self.m = [[int(v) for v in row] for row in x.mask.tolist()]
        self.size = [sum(row) for row in self.m]
        self.tokens = [(b, t) for b in range(self.rows) for t in range(self.width) if self.m[b][t]]
        self.a = table(x.advantages.view(self.rows, -1).expand(x.ids.shape))
        names = ("old_logps", "ref_logps", "sampling_logps", "importance_sampling_ratio")
        self.given = {n: table(t.expand(x.ids.shape)) for n in names if (t := x.tensors[n]) is not None}

    def log_ratio(self, lp: Tokens, stop: Tokens, b: int, t: int) -> Any:
        """lp - lp_old."""
        return lp[b][t] - self.given.get("old_logps", stop)[b][t]

    def weight(self, lp: Tokens, stop: Tokens, b: int, t: int) -> Any:
        """Importance weight of a token, or of its sequence."""
        if self.s.importance_sampling_level == "token":
            return mp.exp(self.log_ratio(lp, stop, b, t))
        total = mp.fsum(self.m[b][u] * self.log_ratio(lp, stop, b, u) for u in range(self.width))
        return mp.exp(total / max(self.size[b], 1))

    def high(self) -> Any:
        """The upper clip, or for cispo the bound itself."""
        return number(self.s.epsilon if self.s.epsilon_high is None else self.s.epsilon_high)

    def surrogate(self, lp: Tokens, stop: Tokens, b: int, t: int) -> Any:
        """The policy term of a token, before masks, sampler ratio and KL."""
        s, a, w = self.s, self.a[b][t], self.weight(lp, stop, b, t)
        if s.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
            first = (w if s.delta is None else min(w, number(s.delta))) * a
            second = clamp(w, 1 - number(s.epsilon), 1 + self.high()) * a
            return -min(first, second)
        if s.loss_type == "cispo":
            return -min(self.weight(stop, stop, b, t), self.high()) * a * lp[b][t]
        if s.loss_type == "sapo":
            tau = number(s.sapo_temperature_pos if a > 0 else s.sapo_temperature_neg)
            return -4 / tau / (1 + mp.exp(-tau * (w - 1))) * a
        assert s.loss_type == "vespo"
        low, top = mp.log(mp.mpf("1e-8")), mp.mpf(20)
        log_w = mp.fsum(self.m[b][u] * clamp(self.log_ratio(stop, stop, b, u), -top, top) for u in range(self.width))
        ratio = self.x.importance_sampling_ratio
        for rho in () if ratio is None else map(number, ratio[b]):
            log_w += clamp(mp.log(rho) if rho > 0 else -mp.inf, low, top)
        log_w = clamp(log_w, low, top)
        k, lam = (s.vespo_k_pos, s.vespo_lambda_pos) if a >= 0 else (s.vespo_k_neg, s.vespo_lambda_neg)
        return -mp.exp(number(lam) + number(k) * log_w - number(lam) * mp.exp(log_w)) * a * lp[b][t]

    def kept_sequence(self, stop: Tokens, b: int, t: int) -> int:
        """Off-policy mask of DeepSeek-V3.2."""
        sampled = self.given.get("sampling_logps", self.given.get("old_logps"))
        if self.a[b][t] >= 0 or sampled is None:
            return 1
        scored = [u for u in range(self.width) if self.m[b][u] and not mp.isnan(sampled[b][u])]
        gap = mp.fsum(sampled[b][u] - stop[b][u] for u in scored) / max(self.size[b], 1)
        return int(gap <= number(self.s.off_policy_mask_threshold))

    def kept_tokens(self, entropy: Tokens) -> list[list[int]]:
        """Mask times the tokens of highest entropy; the quantile interpolates linearly between order statistics."""
        if self.x.top_entropy_quantile is None:
            return self.m
        values = sorted(entropy[b][t] for b, t in self.tokens)
        if not values:
            return self.m
        place = (1 - number(self.x.top_entropy_quantile)) * (len(values) - 1)
        below = int(mp.floor(place))
        above = min(below + 1, len(values) - 1)
        threshold = values[below] + (place - below) * (values[above] - values[below])
        return [[int(self.m[b][t] and entropy[b][t] >= threshold) for t in range(self.width)] for b in range(self.rows)]

    def kl(self, lp: Tokens, stop: Tokens, b: int, t: int) -> Any:
        """k3 of a token, importance-weighted where the setting asks for it."""
        r = self.given["ref_logps"][b][t] - lp[b][t]
        k3 = mp.exp(r) - r - 1
        return k3 * self.weight(lp, stop, b, t) if self.s.use_bias_correction_kl else k3

    def loss(self, lp: Tokens, entropy: Tokens, stop: Tokens, kept: list[list[int]]) -> Any:
        """The loss; `kept` is the entropy mask, which no gradient enters either."""
        s = self.s
        steps = s.accumulation if s.mode == "train" else 1
        per_row = [mp.mpf(0)] * self.rows
        for b, t in self.tokens:
            l = self.surrogate(lp, stop, b, t) * kept[b][t]
            if s.off_policy_mask_threshold is not None:
                l *= self.kept_sequence(stop, b, t)
            if "importance_sampling_ratio" in self.given and s.loss_type != "vespo":
                l *= self.given["importance_sampling_ratio"][b][t]
            per_row[b] += l + (number(s.beta) * self.kl(lp, stop, b, t) if s.beta else 0)
        if s.loss_type in ("grpo", "sapo"):
            out = mp.fsum(p / max(n, 1) for p, n in zip(per_row, self.size, strict=True)) / self.rows / steps
        elif s.loss_type == "bnpo":
            out = mp.fsum(per_row) / max(sum(self.size), 1) / steps
        elif s.loss_type == "dr_grpo":
            out = mp.fsum(per_row) / (self.rows * s.max_completion_length) / steps
        elif s.loss_type == "luspo":
            out = mp.fsum(per_row) / self.rows / steps
        else:
            share = mp.mpf(s.accumulation) / s.steps_per_generation if s.mode == "train" else mp.mpf(1)
            out = mp.fsum(per_row) / (max(int(self.x.num_items_in_batch), 1) * share)
        if s.entropy_coef:
            total = mp.fsum(entropy[b][t] * kept[b][t] for b, t in self.tokens)
            out -= number(s.entropy_coef) * total / max(sum(map(sum, kept)), 1) / steps
        return out

    def metrics(self, lp: Tokens, entropy: Tokens) -> dict[str, Any]:
        """Means over loss tokens; clip fractions at sequence level count sequences."""
        s, tokens = self.s, self.tokens
        count = max(len(tokens), 1)
        out = {"entropy": mp.fsum(entropy[b][t] for b, t in tokens) / count}
        if s.beta:
            out["kl"] = mp.fsum(self.kl(lp, lp, b, t) for b, t in tokens) / count
        places, divisor = tokens, count
        if s.importance_sampling_level == "sequence" and self.x.advantages.dim() == 1:
            places, divisor = [(b, 0) for b in range(self.rows)], self.rows
        facts = [(self.weight(lp, lp, b, t), self.a[b][t]) for b, t in places]
        if s.loss_type == "cispo":
            out["clip_ratio"] = mp.mpf(sum(w > self.high() and a > 0 for w, a in facts)) / divisor
        elif s.loss_type not in ("sapo", "vespo") and (s.delta is None or number(s.delta) > 1 + self.high()):
            low = [w < 1 - number(s.epsilon) and a < 0 for w, a in facts]
            high = [w > 1 + self.high() and a > 0 for w, a in facts]
            out["clip_low"], out["clip_high"] = mp.mpf(sum(low)) / divisor, mp.mpf(sum(high)) / divisor
            out["clip_ratio"] = mp.mpf(sum(low) + sum(high)) / divisor
        return out
