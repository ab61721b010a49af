"""Metrics that a trainer logs for one batch, compared with what their names and TRL's documentation say."""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.families.policy import divergence as k3
from parity.trainers.check import CheckCall, CheckCase, Quantity, by_profile, check, shared
from parity.trainers.checks.losses import offered
from parity.trainers.checks.twins import twin
from parity.trainers.definitions.formulas import Loss, kl_of_others, log_odds
from parity.trainers.definitions.gradients import logged
from parity.trainers.definitions.scored import Scored, completion_logps
from parity.trainers.definitions.training_step import measured
from parity.trainers.rig import drive, recorder, stored_window
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import Run
from parity.upstream import trl

MODELS = ("llama", "qwen2", "gemma2")
SETTINGS = {
    "model": Setting("llama", "tiny model; KTO's estimate of the KL is 0 for qwen2", MODELS),
    "beta": Setting(0.3, "beta of the config", (0.3, 0.04)),
    "divergence": Setting(
        "reverse_kl", "f_divergence_type, DPO: rewards are log-ratios all the same", ("reverse_kl", "js_divergence")
    ),
}
PR: tuple[tuple[str, Mapping[str, Any]], ...] = (("online-dpo-trainer", {}), ("grpo-trainer", {"beta": 0.04}))
COUNTED = ("rewards/accuracies", "completions/mean_length", "reward", "objective/scores")
"""Metrics that are a count, or made of what is exact in float32."""

Values = dict[str, Tensor]


class Logged:
    """What a trainer logs of a window, by definition; a function of the model. `s`: model and beta."""

    def __init__(self, window: Window, s: SimpleNamespace):
        self.window, self.s, self.loss = window, s, Loss(window, s)

    def __call__(self, model: Any) -> Values:
        return DEFINED[self.window.trainer](self, model)

    def pairs(self, model: Any) -> tuple[Scored, Tensor]:
        """The chosen, which come first, and the rejected in the same order; which are chosen, (2N,)."""
        sides = self.window.pair()
        return self.loss.scored(model, [*sides[0], *sides[1]]), torch.arange(2 * len(sides[0])) < len(sides[0])


def _dpo(a: Logged, model: Any) -> Values:
    """DPO's own: rewards are β(log π - log π_ref) of a whole completion, means over the pairs."""
    batch, chosen = a.pairs(model)
    return _preferences(batch, chosen, a.s.beta) | _accuracy(batch, chosen) | _of_logits(batch, chosen)


def _accuracy(batch: Scored, chosen: Tensor) -> Values:
    return {"rewards/accuracies": (batch.ratios[chosen] > batch.ratios[~chosen]).double().mean()}


def _of_logits(batch: Scored, chosen: Tensor) -> Values:
    """Entropy; logits as TRL's `mean_logits`: the mean over the vocabulary, then over the tokens of all completions of a side."""
    sides = {"chosen": chosen, "rejected": ~chosen}
    return {"entropy": batch.entropy} | {
        f"logits/{name}": torch.cat([z.mean(-1) for z, kept in zip(batch.logits, side, strict=True) if kept]).mean()
        for name, side in sides.items()
    }


def _preferences(batch: Scored, chosen: Tensor, beta: float) -> Values:
    """Rewards and log-probs of those that `chosen` (N,) is true for, and of the others."""
    out = {}
    for name, side in (("chosen", chosen), ("rejected", ~chosen)):
        out[f"rewards/{name}"] = beta * batch.ratios[side].mean()
        out[f"logps/{name}"] = batch.sums[side].mean()
    return out | {"rewards/margins": out["rewards/chosen"] - out["rewards/rejected"]}


def _online(a: Logged, model: Any) -> Values:
    """Online DPO's: `objective/` of all completions, KL and -log π summed over the tokens of each, then their mean."""
    batch, chosen = a.pairs(model)
    scores, kl, beta = stored_window.rewards(batch.window).flatten(), batch.ratios, a.s.beta
    return (_preferences(batch, chosen, beta) | _accuracy(batch, chosen)) | {
        "objective/kl": kl.mean(),
        "objective/non_score_reward": -beta * kl.mean(),
        "objective/rlhf_reward": (scores - beta * kl).mean(),
        "objective/entropy": -batch.sums.mean(),
        "objective/scores": scores.mean(),
    }


def _unpaired(a: Logged, model: Any) -> Values:
    """KTO's: as DPO's, over the desirable and over the undesirable completions; KL on completions of other prompts."""
    batch, chosen = a.loss.scored(model), torch.tensor(a.window.labels)
    return (_preferences(batch, chosen, a.s.beta) | _of_logits(batch, chosen)) | {"kl": kl_of_others(a.loss, model)}


def _sampled(kl: Callable[[Tensor], Tensor], a: Logged, model: Any) -> Values:
    """GRPO's, GMPO's and RLOO's: entropy and KL are means over the completion tokens."""
    batch = a.loss.scored(model)
    return {
        "kl": kl(torch.cat(batch.base.tokens) - torch.cat(batch.tokens)),
        "entropy": batch.entropy,
        "reward": stored_window.rewards(batch.window).mean(),
        "completions/mean_length": batch.lengths.mean(),
    }


def _without_reference(averaged: bool, a: Logged, model: Any) -> Values:
    """CPO's and ORPO's: rewards are β log π of a completion, `averaged` (ORPO) its mean over the tokens.

    Not judged: `logits/chosen` and `logits/rejected`. TRL averages the logits of every position of the padded batch, so
    that prompts and padding count; DPO's of the same name are of the completions. Nothing installed says which is meant.
    """
    sides = a.loss.sides(model)
    chosen, rejected = (side.means if averaged else side.sums for side in sides)
    out = {"logps/chosen": chosen.mean(), "logps/rejected": rejected.mean()}
    out |= {f"rewards/{side}": a.s.beta * out[f"logps/{side}"] for side in ("chosen", "rejected")}
    out |= {"rewards/margins": out["rewards/chosen"] - out["rewards/rejected"]}
    out |= {"rewards/accuracies": (chosen > rejected).double().mean()}
    if not averaged:
        return out | {"nll_loss": -torch.cat(sides[0].tokens).mean()}
    odds = log_odds(sides[0]) - log_odds(sides[1])
    whole = completion_logps(model, [(t, 1) for t, _ in sides[0].window])
    out |= {"log_odds_chosen": odds.mean(), "log_odds_ratio": torch.nn.functional.logsigmoid(odds).mean()}
    return out | {"nll_loss": -torch.cat(whole).mean()}


DEFINED: dict[str, Callable[[Logged, Any], Values]] = {
    "dpo-trainer": _dpo,
    "kto-trainer": _unpaired,
    "sft-trainer": lambda a, model: {"entropy": a.loss.scored(model).entropy},
    "online-dpo-trainer": _online,
    "grpo-trainer": functools.partial(_sampled, lambda d: k3(d, None).mean()),
    "rloo-trainer": functools.partial(_sampled, lambda d: -d.mean()),  # log π - log π_ref
    "gmpo-trainer": functools.partial(_sampled, lambda d: k3(d, None).mean()),
    "cpo-trainer": functools.partial(_without_reference, False),
    "orpo-trainer": functools.partial(_without_reference, True),
}
"""Trainer -> what it logs of its window by the model; entropies are means over the completion tokens."""


@by_profile(pr=PR, covered=lambda case: "model" not in case[1] or case[0] in ("kto-trainer", "grpo-trainer"))
def cases(seed: int) -> Iterator[CheckCase]:
    """Every trainer with every model."""
    for trainer in DEFINED:
        for model in MODELS:
            yield trainer, {"model": model}
        yield trainer, {"beta": 0.04}
    yield "dpo-trainer", {"divergence": "js_divergence"}


@check("metrics", DEFINED, SETTINGS, cases, paths=("released", "fused", "fixed"))
def metrics(call: CheckCall) -> Iterator[Quantity]:
    """What is logged of one batch of eight, policy and reference unlike, is what the metrics' names say."""
    trainer, s = call.case.family, call.settings
    more = {**recorder.LOGGED, "beta": s.beta, **({"loss_type": "kto"} if call.spec.data == "labels" else {})}
    if s.divergence != SETTINGS["divergence"].default:
        drive.needs(call.trainer, "f_divergence_type")
        more["f_divergence_type"] = offered(call.trainer, "f_divergence_type", s.divergence)
    settings = twin(trainer, model=s.model, beta=s.beta)
    run = Run(trainer, settings, call.path, plain=True, **more)
    yield run.all_there()
    log, define = drive.logged(run.built), Logged(run.window, s)
    truth = shared(call, "logged", lambda: measured(stored_window.policy(s.model, torch.float64), define, COUNTED))
    if not trl.mentions("mean_logits", trl.class_named(call.trainer)):  # other releases say nowhere which mean is meant
        log = {name: value for name, value in log.items() if not name.startswith("logits/")}
    if not truth.exact.keys() & log.keys():
        raise Unsupported(f"{call.trainer} of the installed version logs none of {', '.join(truth.exact)}")
    yield from logged(truth, log)
