"""The loss of one micro-batch of a real trainer, by its definition: a function of the log-probs that the trainer has.

Masks, advantages, references and settings are the trainer's own; what the losses are is in `parity.families`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.families.policy_losses import CONFIG_FIELDS, GIVEN, divergence, losses
from parity.families.preference_losses import DPO, ONLINE, Pairs, unpaired

Define = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch by its definition."""

    name: str  # its type
    of: Define  # log-probs (B, T) float64 -> what is minimised, 0-dim, divided by all that it is divided by
    mask: Tensor  # (B, T) float64, the tokens in the loss
    # what counting padding makes of each gradient, a factor (B, 1) or number; None: nothing is divided by tokens
    padded: Tensor | None = None
    without: Mapping[str, Define] = dataclasses.field(default_factory=dict)  # cause -> the loss that it makes
    size: float = 0.0  # Σ|terms|; clipped ones have no slope
    valued: bool = True  # whether `of` is all of the loss: no term that log-probs have no part in


def loss_mask(inputs: Any) -> Tensor:
    """Which tokens of the completions are in the loss, (B, T)."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _exact(x: Any) -> Any:
    return x.detach().double().cpu() if torch.is_tensor(x) else None


def _setting(trainer: Any, name: str, absent: Any = None) -> Any:
    """The trainer's own, which may change as it trains, or the config's."""
    return getattr(trainer, name, getattr(trainer.args, name, absent))


def _grpo(trainer: Any, inputs: Any, taken: Any, mask: Tensor, others: Any, items: Any) -> Loss:
    """`parity.families.policy_losses.losses`."""
    args = trainer.args
    absent = {"importance_sampling_level": "token", "use_bias_correction_kl": False, "max_completion_length": 1}
    s = SimpleNamespace(**{n: _setting(trainer, n, absent.get(n)) for n in CONFIG_FIELDS})
    s.epsilon = _setting(trainer, "epsilon_low", s.epsilon)
    valued = not s.entropy_coef
    s.entropy_coef, s.mode = 0.0, "train"  # the bonus reaches the entropies alone
    s.accumulation = accumulation(trainer)
    s.steps_per_generation = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    count, quantile = inputs.get("num_items_in_batch"), _setting(trainer, "top_entropy_quantile", 1.0)
    x = SimpleNamespace(**{ours: _exact(inputs.get(theirs)) for theirs, ours in GIVEN.items()}, mask=mask)
    x.advantages = _exact(inputs["advantages"])
    x.top_entropy_quantile = None if quantile >= 1 else torch.tensor(quantile)
    x.num_items_in_batch = float(mask.sum() if count is None else count) / trainer.accelerator.num_processes
    entropies = _exact(taken.entropies)

    def of(x: SimpleNamespace, lp: Tensor, what: str = "loss", s: SimpleNamespace = s, kl: Any = divergence) -> Tensor:
        return losses(s, x, lp, torch.zeros_like(lp) if entropies is None else entropies, kl)[what]

    without = SimpleNamespace(**{**vars(x), "importance_sampling_ratio": None})
    dropped = {"the sampler's importance ratio is not applied": lambda lp: of(without, lp)}
    padded = {"grpo": mask.mean(-1, keepdim=True), "sapo": mask.mean(-1, keepdim=True), "bnpo": mask.mean()}
    applied = dropped if x.importance_sampling_ratio is not None else {}
    if x.old_logps is not None and s.off_policy_mask_threshold is None:
        now = SimpleNamespace(**{**vars(x), "old_logps": None})
        applied |= {"the ratio to the old log-probs is 1": lambda lp: of(now, lp)}
    if s.beta:
        free = SimpleNamespace(**{**vars(s), "beta": 0.0})
        applied |= {
            "beta is ignored: there is no KL": lambda lp: of(x, lp, s=free),
            "the KL is subtracted": lambda lp: of(x, lp, kl=lambda r, w: -divergence(r, w)),
            "the KL has the models exchanged": lambda lp: of(x, lp, kl=lambda r, w: divergence(-r, w)),
            "the KL is the difference of the log-probs": lambda lp: of(
                x, lp, kl=lambda r, w: -r * (1 if w is None else w)
            ),
        }
    size = float(of(x, _exact(taken.logps), "_terms").abs().sum())
    return Loss(s.loss_type, lambda lp: of(x, lp), mask, padded.get(s.loss_type), applied, size, valued)


def _rloo(trainer: Any, inputs: Any, taken: Any, mask: Tensor, others: Any, items: Any) -> Loss:
    """-mean of min(ρA, clip(ρ)A), ρ = π/π_old of whole completions."""
    a, old = _exact(inputs["advantages"]), _exact(inputs["old_logps"])
    low, high = trainer.epsilon_low, trainer.epsilon_high

    def terms(lp: Tensor) -> Tensor:
        ratio = ((lp * mask).sum(1) - old).exp()
        return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a) / (len(a) * accumulation(trainer))

    return Loss("rloo", lambda lp: terms(lp).sum(), mask, size=float(terms(_exact(taken.logps)).abs().sum()))


def _order(batch: Tensor, scored: Tensor) -> Tensor:
    """Where each row of the batch is among those that were scored, (B,); their own places where not all are there."""
    same = (batch[:, None] == scored).all(-1) if batch.shape == scored.shape else scored.new_zeros(len(scored), 1)
    own = torch.arange(len(scored))
    return own if torch.equal(batch, scored) or not bool(same.any(1).all()) else same.int().argmax(1).cpu()


def _dpo(trainer: Any, inputs: Any, taken: Any, mask: Tensor, others: Sequence[Any], items: Any) -> Loss | None:
    """`parity.families.preference_losses.DPO`, its types weighted."""
    of = functools.partial(_setting, trainer)
    divergence = of("f_divergence_type")
    if of("ld_alpha") not in (None, 1.0) or of("use_weighting") or divergence == "alpha_divergence":
        return None
    same = next((_exact(t.logps) for t in others if torch.equal(t.ids, taken.ids)), None)
    order = _order(inputs.get("input_ids", taken.ids), taken.ids)
    ref = [inputs.get(f"ref_{side}_logps") for side in ("chosen", "rejected")] if same is None else []
    ref = [_exact(r) for r in ref] if same is None else list((same * mask).sum(1)[order].chunk(2))
    if any(r is None for r in ref):
        return None
    s = SimpleNamespace(beta=of("beta"), smoothing=of("label_smoothing"), tau=trainer.args.discopop_tau, alpha=0.0)
    s.divergence = getattr(divergence, "value", divergence)
    types = of("loss_types", trainer.args.loss_type)
    types = [types] if isinstance(types, str) else list(types)
    weights = dict(zip(types, of("loss_weights") or [1.0] * len(types), strict=True))

    def total(lp: Tensor) -> Tensor:
        lp, own = lp[order], mask[order]
        chosen = own.chunk(2)[0]
        nll = -(lp.chunk(2)[0] * chosen).sum() / chosen.sum()
        pairs = Pairs(s, (lp * own).sum(1).chunk(2), ref, own.sum(1).clamp(min=1).chunk(2), nll)
        terms = (w * DPO[name](pairs).mean() for name, w in weights.items())
        return sum(terms, lp.new_zeros(())) / accumulation(trainer)

    return Loss("+".join(types), total, mask)


def _online_dpo(trainer: Any, inputs: Any, taken: Any, mask: Tensor, others: Sequence[Any], items: Any) -> Loss | None:
    """`parity.families.preference_losses.ONLINE`; chosen is the first completion of a prompt where its reward is not lower."""
    args, rewards = trainer.args, _exact(inputs.get("rewards"))
    ref = next((_exact(t.logps) for t in others if torch.equal(t.ids, taken.ids)), None)
    loss = args.loss_type if isinstance(args.loss_type, str) else args.loss_type[0]
    if rewards is None or ref is None or loss not in ONLINE:
        return None
    if args.missing_eos_penalty is not None:
        ends = torch.as_tensor(getattr(trainer, "eos_token_ids", [trainer.processing_class.eos_token_id]))
        ended = torch.isin(taken.ids[:, -mask.shape[1] :].cpu(), ends.cpu()).any(-1)
        rewards = rewards - args.missing_eos_penalty * ~ended
    first, second = rewards.chunk(2)
    other, pairs = (first < second).long() * len(first), torch.arange(len(first))
    order = [pairs + other, pairs + len(first) - other]
    s = SimpleNamespace(beta=trainer.beta, divergence="reverse_kl", alpha=0.0)
    whole = (ref * mask).sum(1)

    def of(lp: Tensor) -> Tensor:
        sums, base, lengths = ([x[rows] for rows in order] for x in ((lp * mask).sum(1), whole, mask.sum(1)))
        return ONLINE[loss](Pairs(s, sums, base, lengths, lp.new_zeros(()))).mean() / accumulation(trainer)

    return Loss(loss, of, mask)


def _kto(trainer: Any, inputs: Any, taken: Any, mask: Tensor, others: Sequence[Any], items: Any) -> Loss | None:
    """`parity.families.preference_losses.unpaired`; z of the completions beside other prompts, policy first."""
    of, ref = functools.partial(_setting, trainer), inputs.get("ref_logps")
    sums = [((t.logps * (1 if t.mask is None else t.mask)).sum(1), t) for t in others]
    ref = _exact(next((x for x, t in sums if torch.equal(t.ids, taken.ids)), ref))
    beside = [_exact(x) for x, t in sums if t.mask is not None and not torch.equal(t.ids, taken.ids)]
    beside += [_exact(x)] if torch.is_tensor(x := inputs.get("ref_KL_logps")) else []
    loss = of("loss_type")
    if ref is None or (loss == "kto" and (len(beside) != 2 or trainer.accelerator.num_processes > 1)):
        return None
    z = (beside[0] - beside[1]).mean().clamp(min=0) if loss == "kto" else None
    s = SimpleNamespace(beta=of("beta"), desirable=of("desirable_weight"), undesirable=of("undesirable_weight"))
    labels = torch.as_tensor(inputs["label"]).bool().cpu()
    return Loss(loss, lambda lp: unpaired((lp * mask).sum(1) - ref, labels, s, z).mean() / accumulation(trainer), mask)


def _sft(trainer: Any, inputs: Any, taken: Any, mask: Tensor, others: Any, items: Any) -> Loss:
    """-Σ log p / N over the N tokens of the optimizer step, of all ranks; dft: -Σ p·log p / N, p without gradient."""
    whole = accumulation(trainer) == 1 and trainer.accelerator.num_processes == 1
    count = float(mask.sum() if whole or items is None else items) / trainer.accelerator.num_processes
    steps = 1 if items is not None else accumulation(trainer)
    dft, own = trainer.args.loss_type == "dft", mask.sum().clamp(min=1)

    def total(lp: Tensor) -> Tensor:
        return -(mask * lp * (lp.detach().exp() if dft else 1.0)).sum()

    averaged = {
        "each micro-batch is averaged by itself": lambda lp: total(lp) / own / accumulation(trainer),
        "each micro-batch is averaged by itself, and their sum is not divided": lambda lp: total(lp) / own,
    }
    return Loss(trainer.args.loss_type, lambda lp: total(lp) / max(count, 1.0) / steps, mask, mask.mean(), averaged)


LOSSES = {"grpo": _grpo, "rloo": _rloo, "dpo": _dpo, "online_dpo": _online_dpo, "kto": _kto, "sft": _sft}
"""Name of TRL's trainer -> its loss by log-probs."""


def known(trainer: Any) -> str:
    """Name of the trainer of TRL whose loss and step these are; empty of a subclass with another loss or step."""
    kind = type(trainer)
    if getattr(trainer, "compute_loss_func", None) is not None:
        return ""
    methods = [getattr(kind, n) for n in ("_compute_loss", "compute_loss", "training_step") if hasattr(kind, n)]
    if not all(m.__module__.startswith(("trl.", "transformers.")) for m in methods):
        return ""
    return _first(methods)


def nearest(trainer: Any) -> str:
    """Name of the trainer of TRL that it is a subclass of."""
    return _first(type(trainer).__mro__)


def _first(found: Iterable[Any]) -> str:
    """Name of the trainer whose module of TRL the first of these is from; empty where none is from one."""
    modules = (one.__module__ for one in found if one.__module__.startswith("trl."))
    return next(modules, "").rpartition(".")[2].removesuffix("_trainer")


def accumulation(trainer: Any) -> int:
    """Micro-batches of this optimizer step."""
    return int(getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps))


def defined(trainer: Any, inputs: Any, taken: Any, mask: Tensor, others: Sequence[Any], items: Any) -> Loss | None:
    """The definition of the loss of this micro-batch, if one is known; of a trainer with a loss of its own TRL's."""
    make = LOSSES.get(known(trainer) or nearest(trainer))
    loss: Loss | None = None if make is None else make(trainer, inputs, taken, mask.double().cpu(), others, items)
    of_router = getattr(trainer, "aux_loss_enabled", False)
    return dataclasses.replace(loss, valued=False) if loss is not None and of_router else loss
