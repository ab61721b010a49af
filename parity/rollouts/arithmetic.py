"""The importance ratio that the installed TRL makes of two sets of log-probs, to the last bits of float32.

TRL forms it inside `GRPOTrainer._generate_and_score_completions`. A real trainer runs that method on stored completions;
only what comes from outside is given: the sampler's log-probs, the tool mask, and the trainer's own log-probs, in the place
of its forward pass. What comes out is compared with the definition in float64 of the same float32 numbers.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.families import policy
from parity.trainers.checks.sampler import MODES
from parity.trainers.rig import drive, models, twin_runs
from parity.upstream import trl

LOW, HIGH = 0.5, 2.0
ULPS = 4.0
"""Allowed beyond what is derived: one rounding of the difference, two of exp, and one to spare."""


@dataclasses.dataclass(frozen=True)
class Given:
    """Log-probs of trainer and sampler (B, T) float32, and the masks (B, T) of 0 and 1 whose product counts."""

    name: str
    old: Tensor
    sampler: Tensor
    completion: Tensor
    tool: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """The tokens that count."""
        return self.completion if self.tool is None else self.completion * self.tool


def definition(
    g: Given, mode: str, low: float | None, high: float | None, sequence: Literal["sum", "mean"] = "sum"
) -> Tensor:
    """exp(log π - log π_sampler) in float64, (B, T) or (B, 1).

    The log-ratio of a sequence is the sum of its tokens' (the likelihood ratio of the sequence, TRL's) or their mean (its
    length-normalised root, GSPO's).

    A token whose difference is NaN counts 0: no log-prob at the sampler, or two infinities. An infinite difference counts
    as the largest float32, which is what TRL puts: a token that the sampler held impossible (-inf) has ratio infinity before
    the bounds, one that the trainer holds impossible has ratio 0. Both bounds belong to what is kept. Truncation clamps to
    the bounds, masking puts 0 outside them.
    """
    d = torch.where(g.mask > 0, (g.old - g.sampler).double(), 0.0)  # one float32 rounding, TRL's storage
    d = torch.where(d.isnan(), 0.0, d).clamp(-MAX, MAX)
    if mode.startswith("sequence"):
        d = d.sum(-1, keepdim=True) / (g.mask.sum(-1, keepdim=True).clamp(min=1) if sequence == "mean" else 1)
    found = d.exp().float().double()  # beyond float32's range it is infinite there too
    if mode.endswith("truncate"):
        return found.clamp(-math.inf if low is None else low, math.inf if high is None else high)
    outside = (found < (-math.inf if low is None else low)) | (found > (math.inf if high is None else high))
    return torch.where(outside, 0.0, found)


MAX = torch.finfo(torch.float32).max


def allowed(g: Given, mode: str) -> Tensor:
    """Relative error, (B, T) or (B, 1), in units of 2⁻²³: `ULPS`, and for a sum of n float32 numbers (n - 1)/2·Σ|d| more.

    exp turns an absolute error of the sum into a relative one of the ratio, and each of the n - 1 additions may be off by
    half a unit of a partial sum of at most Σ|d| (Higham, Accuracy and Stability, section 4.2).
    """
    d = torch.where(g.mask > 0, (g.old - g.sampler).double(), 0.0)
    d = torch.where(d.isfinite(), d, 0.0).abs()
    if not mode.startswith("sequence"):
        return torch.full_like(d, ULPS)
    return ULPS + (d > 0).sum(-1, keepdim=True).sub(1).clamp(min=0) / 2 * d.sum(-1, keepdim=True)


def ulps(found: Tensor, exact: Tensor) -> Tensor:
    """|found - exact| in units of 2⁻²³ of the exact value; 0 where both are the same infinity, infinite for NaN."""
    same = found.double() == exact
    error = (found.double() - exact).abs() / (exact.abs().clamp(min=2.0**-126) * 2.0**-23)
    return torch.where(same, 0.0, error.nan_to_num(nan=math.inf))


@dataclasses.dataclass(frozen=True)
class Ratios:
    """TRL's ratio of a case beside the definition: (B, T) or (B, 1)."""

    given: Given
    mode: str
    bounds: tuple[float | None, float | None]
    found: Tensor
    exact: Tensor

    @property
    def headroom(self) -> float:
        """Largest error over what is allowed."""
        return float((ulps(self.found, self.exact) / allowed(self.given, self.mode)).max())


LENGTHS = (16, 9, 1, 12, 16, 5, 16, 2)
"""Completion lengths of the rows that are scored."""
BOUNDS = (
    (None, HIGH),
    (LOW, HIGH),
    (LOW, None),
    (None, math.inf),
    (LOW, 1.0),
    (1.0, 1 + 2.0**-23),
    (1 + 2.0**-23, HIGH),
)
"""Lower and upper bound. With neither, TRL 1.16's truncation ends in torch.clamp's "must not be None". The last three have 1
at the upper, at and below the lower bound: a ratio of exactly 1 is kept, is kept, and is not."""


def edge_cases() -> Iterator[Given]:
    """Small differences, none, beyond 20 nats, at the ends of float32, missing and infinite entries, empty rows."""
    from parity.case.case import normal, uniform

    shape = (len(LENGTHS), max(LENGTHS))
    completion = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).int()
    sampler = (-4 * uniform(0, "sampler", shape) - 0.01).float()
    noise, hole = normal(0, "noise", shape).float(), uniform(0, "hole", shape) < 0.3
    far = noise.sign() * (20 + 3 * noise.abs())
    tool = ((uniform(0, "tool", shape) < 0.6) | (torch.arange(shape[1]) == 0)).int()
    empty = torch.ones(shape, dtype=torch.int32)
    empty[::3] = 0
    yield Given("near one", sampler + 1e-3 * noise, sampler, completion)
    yield Given("half a nat apart", sampler + 0.5 * noise, sampler, completion)
    yield Given("equal", sampler, sampler, completion)
    yield Given("beyond 20 nats", sampler + far, sampler, completion)
    yield Given("beyond float32", sampler + 5 * far, sampler, completion)
    yield Given("certain at both", torch.zeros(shape), torch.zeros(shape), completion)
    yield Given("a tool's tokens", sampler + 0.5 * noise, sampler, completion, tool)
    yield Given("empty rows", sampler + 0.5 * noise, sampler, completion, empty)
    under = sampler.masked_fill(tool == 0, -math.inf).masked_fill((tool == 0) & hole, math.nan)
    yield Given("missing and infinite under the tool mask", sampler + 0.5 * noise, under, completion, tool)
    yield Given("not scored", sampler + 0.5 * noise, sampler.masked_fill(hole, math.nan), completion)
    yield Given("impossible at the sampler", sampler + 0.5 * noise, sampler.masked_fill(hole, -math.inf), completion)
    yield Given("impossible at the trainer", (sampler + 0.5 * noise).masked_fill(hole, -math.inf), sampler, completion)
    both = sampler.masked_fill(hole, -math.inf)
    yield Given("impossible at both", both, both, completion)


def compared() -> Iterator[Ratios]:
    """Every mode and pair of bounds on every edge case, by a real GRPOTrainer of the installed TRL.

    Raises:
        Unsupported: where the installed version has no such modes.
    """
    config = drive.config("GRPOTrainer")
    if "vllm_importance_sampling_clip_min" not in trl.fields(config) or not trl.mentions("tool_mask"):
        raise Unsupported("the installed version has no ratio modes with two bounds and tool masks")
    args = drive.arguments(config, "cpu", {"per_device_train_batch_size": len(LENGTHS), "num_generations": 2})
    trainer = drive.build("GRPOTrainer", models.model("llama"), args)
    trainer.use_vllm = True
    for g in edge_cases():
        _hand_out(trainer, g)
        for mode in MODES:
            for low, high in BOUNDS:
                trainer.vllm_importance_sampling_mode = mode
                trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = low, high
                with trl.quiet():
                    out = trainer._generate_and_score_completions([{"prompt": "w3 w4"}] * len(LENGTHS))
                yield Ratios(g, mode, (low, high), out["importance_sampling_ratio"], definition(g, mode, low, high))


def _hand_out(trainer: Any, g: Given) -> None:
    """What comes from outside, in the place of generation and of the trainer's forward pass."""
    names = twin_runs.handed_names(getattr(trainer._generate, "original", trainer._generate))
    rows = [row[:n].tolist() for row, n in zip(g.sampler, LENGTHS, strict=True)]
    known: dict[str, Any] = {
        "prompt_ids": [[3, 4]] * len(LENGTHS),
        "completion_ids": [[5] * n for n in LENGTHS],
        "tool_mask": None if g.tool is None else [m[:n].tolist() for m, n in zip(g.tool, LENGTHS, strict=True)],
        "completions": ["w5"] * len(LENGTHS),
        "logprobs": [[None if math.isnan(x) else x for x in row] for row in rows],
        "extra_fields": {},
    }

    def generate(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(known.get(name) for name in names)

    generate.original = getattr(trainer._generate, "original", trainer._generate)  # type: ignore[attr-defined]
    trainer._generate = generate
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (g.old.clone(), None, None)


@dataclasses.dataclass(frozen=True)
class Weights:
    """VESPO's φ of `owner` beside the definition, (B, 1), and the relative error that is derived for it."""

    name: str
    owner: str
    found: Tensor
    exact: Tensor
    allowed: Tensor

    @property
    def headroom(self) -> float:
        """Largest error over what is allowed."""
        tiny = torch.finfo(torch.float32).tiny  # below it float32 keeps no relative precision
        error = (self.found.double() - self.exact).abs()
        return float((error / (self.allowed * self.exact.abs() + tiny)).nan_to_num(nan=math.inf).max())


def folded() -> Iterator[Weights]:
    """TRL's and Liger's `get_gamma_weights` against `families.policy.vespo_phi`, the ratios of every edge case folded in.

    δ, the error of log W, is (n + 1)·2⁻²⁴ of the sum of the sizes of its n terms; φ = exp(λ + k·log W - λ·W) is off by
    (k + λ·W)·δ and by the rounding of the exponent's own three terms. A ratio of 0 counts as 1e-8.

    Raises:
        Unsupported: where neither has VESPO.
    """
    owners = {"trl": getattr(drive.trl_class("GRPOTrainer"), "get_gamma_weights", None), "liger": _of_liger()}
    if not any(owners.values()):
        raise Unsupported("neither installed version has VESPO")
    s = SimpleNamespace(vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)
    from parity.case.case import normal

    for g, mode in itertools.product(edge_cases(), ("token_truncate", "token_mask")):
        d = normal(1, "policy", tuple(g.old.shape)).float() * (25.0 if "20" in g.name else 0.3)
        advantages = torch.tensor([1.0, -1.0] * (len(LENGTHS) // 2))
        ratio = definition(g, mode, None, HIGH).float()
        exact = policy.vespo_phi(s, d.double(), advantages[:, None].double(), g.mask.double(), ratio.double())
        folds = ratio.double().log().clamp(math.log(1e-8), 20)
        terms = (d.clamp(-20, 20) * g.mask).abs().double() + folds.abs()
        delta = (2 * g.mask.shape[1] + 1) * 2.0**-24 * terms.sum(-1, keepdim=True)
        total = ((d.double().clamp(-20, 20) * g.mask) + folds).sum(-1, keepdim=True).clamp(math.log(1e-8), 20)
        k, lam = (torch.where(advantages[:, None] > 0, *pair) for pair in ((2.0, 3.0), (3.0, 2.0)))
        exponent = lam + k * total.abs() + lam * total.exp()
        bound = (k + lam * total.exp()) * delta + (exponent + 4) * 2.0**-22
        for owner, method in owners.items():
            if method is not None:
                a = advantages[:, None] if owner == "trl" else advantages
                yield Weights(f"{g.name}, {mode}", owner, method(a, d, g.mask, ratio, 2.0, 3.0, 3.0, 2.0), exact, bound)


def _of_liger() -> Any:
    try:
        import liger_kernel.chunked_loss.grpo_loss as module
    except ImportError:
        return None
    return getattr(module, "get_gamma_weights", None)
