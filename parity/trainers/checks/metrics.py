"""Metrics that a trainer logs for one batch, compared with what their names and TRL's documentation say."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.families.policy import divergence
from parity.trainers.check import CheckCall, CheckCase, Entry, Quantity, by_profile, check, shared
from parity.trainers.checks.losses import offered
from parity.trainers.checks.twins import plain_twin
from parity.trainers.definitions import preference, training_step
from parity.trainers.rig import drive, stored_window, twin_runs
from parity.trainers.rig.stored_window import Sequences
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
LOGGED = {"logging_strategy": "steps", "logging_steps": 1}
COUNTED = ("rewards/accuracies", "completions/mean_length", "reward", "objective/scores")
"""Metrics that are a count, or made of what is exact in float32."""

Values = dict[str, Tensor]


class Batch:
    """One batch of stored sequences by a model: log-probs, distributions, and log-ratios to the reference.

    Attributes:
        lengths: tokens of each completion, (N,).
        logps: log π(completion), (N,); ref: log π_ref(completion), (N,).
        tokens: log π of every token of every completion, one after the other; ref_tokens likewise.
        entropy: mean over them of -Σ π log π.
        averages: means over the vocabulary of the logits of every completion token, a tensor (tokens,) for each completion.
    """

    def __init__(self, window: Sequences, architecture: str, model: Any):
        own, dists, self.averages = [], [], []
        for z, tokens in training_step.completion_logits(model, window):
            self.averages.append(z.mean(-1))
            dists.append(torch.log_softmax(z, -1))
            own.append(training_step.taken(dists[-1], tokens))
        base = training_step.completion_logps(stored_window.reference(architecture), window)
        self.logps, self.ref = (torch.stack([t.sum() for t in side]) for side in (own, base))
        self.tokens, self.ref_tokens, table = torch.cat(own), torch.cat(base), torch.cat(dists)
        self.entropy = -(table.exp() * table).sum(-1).mean()
        self.lengths = torch.tensor([len(t) - start for t, start in window], dtype=torch.float64)


def _dpo(window: tuple[Sequences, Sequences], s: SimpleNamespace, model: Any) -> Values:
    """DPO's own: rewards are β(log π - log π_ref) of a whole completion, means over the pairs."""
    batch = Batch([*window[0], *window[1]], s.model, model)
    chosen = torch.arange(len(batch.logps)) < len(window[0])
    return _pairs(batch, s.beta) | _mean_logits(batch, chosen) | {"entropy": batch.entropy}


def _pairs(batch: Batch, beta: float) -> Values:
    """Of the chosen, which come first, and the rejected in the same order."""
    count = len(batch.logps) // 2
    delta = batch.logps - batch.ref
    accuracy = (delta[:count] > delta[count:]).double().mean()
    return _preferences(batch, torch.arange(2 * count) < count, beta) | {"rewards/accuracies": accuracy}


def _mean_logits(batch: Batch, chosen: Tensor) -> Values:
    """Mean over the vocabulary, then over the tokens of all completions of a side (`mean_logits` of TRL's fused LM head)."""
    sides = {"chosen": chosen, "rejected": ~chosen}
    return {
        f"logits/{name}": torch.cat([z for z, kept in zip(batch.averages, side, strict=True) if kept]).mean()
        for name, side in sides.items()
    }


def _preferences(batch: Batch, chosen: Tensor, beta: float) -> Values:
    """Rewards and log-probs of those that `chosen` (N,) is true for, and of the others."""
    out = {}
    for name, side in (("chosen", chosen), ("rejected", ~chosen)):
        out[f"rewards/{name}"] = beta * (batch.logps - batch.ref)[side].mean()
        out[f"logps/{name}"] = batch.logps[side].mean()
    return out | {"rewards/margins": out["rewards/chosen"] - out["rewards/rejected"]}


def _online(window: tuple[Sequences, Sequences], s: SimpleNamespace, model: Any) -> Values:
    """Online DPO's: `objective/` of all completions, KL and -log π summed over the tokens of each, then their mean."""
    both = [*window[0], *window[1]]
    batch, scores = Batch(both, s.model, model), _scores(both)
    kl = batch.logps - batch.ref
    return _pairs(batch, s.beta) | {
        "objective/kl": kl.mean(),
        "objective/non_score_reward": -s.beta * kl.mean(),
        "objective/rlhf_reward": (scores - s.beta * kl).mean(),
        "objective/entropy": -batch.logps.mean(),
        "objective/scores": scores.mean(),
    }


def _scores(window: Sequences) -> Tensor:
    return stored_window.rewards(window).flatten()


def _unpaired(window: Sequences, labels: Sequence[bool], s: SimpleNamespace, model: Any) -> Values:
    """KTO's: as DPO's, over the desirable and over the undesirable completions; KL on completions of other prompts."""
    batch = Batch(window, s.model, model)
    chosen = torch.tensor(labels)
    return _preferences(batch, chosen, s.beta) | {
        **_mean_logits(batch, chosen),
        "kl": preference.shift(preference.mismatched(window), s.model, model),
        "entropy": batch.entropy,
    }


def _sft(window: Sequences, s: SimpleNamespace, model: Any) -> Values:
    """SFT's: the mean over the completion tokens."""
    return {"entropy": Batch(window, s.model, model).entropy}


def _k3(d: Tensor) -> Tensor:
    """r - 1 - log r with r = π_ref/π, as in the losses of GRPO and GMPO."""
    return divergence(d, None).mean()


def _log_ratio(d: Tensor) -> Tensor:
    """RLOO's: log π - log π_ref."""
    return -d.mean()


def _sampled(kl: Callable[[Tensor], Tensor], window: Sequences, s: SimpleNamespace, model: Any) -> Values:
    """GRPO's, GMPO's and RLOO's: entropy and KL are means over the completion tokens."""
    batch = Batch(window, s.model, model)
    return {
        "kl": kl(batch.ref_tokens - batch.tokens),
        "entropy": batch.entropy,
        "reward": _scores(window).mean(),
        "completions/mean_length": batch.lengths.mean(),
    }


def _without_reference(averaged: bool, window: tuple[Sequences, Sequences], s: SimpleNamespace, model: Any) -> Values:
    """CPO's and ORPO's: rewards are β log π of a completion, `averaged` (ORPO) its mean over the tokens.

    Not judged: `logits/chosen` and `logits/rejected`. TRL averages the logits of every position of the padded batch, so
    that prompts and padding count; DPO's of the same name are of the completions. Nothing installed says which is meant.
    """
    tokens = [training_step.completion_logps(model, side) for side in window]
    chosen, rejected = (torch.stack([t.mean() if averaged else t.sum() for t in side]) for side in tokens)
    out = {"logps/chosen": chosen.mean(), "logps/rejected": rejected.mean()}
    out |= {f"rewards/{side}": s.beta * out[f"logps/{side}"] for side in ("chosen", "rejected")}
    out |= {"rewards/margins": out["rewards/chosen"] - out["rewards/rejected"]}
    out |= {"rewards/accuracies": (chosen > rejected).double().mean()}
    if not averaged:
        return out | {"nll_loss": -torch.cat(tokens[0]).mean()}
    odds = preference.log_odds(tokens[0]) - preference.log_odds(tokens[1])
    whole = training_step.completion_logps(model, [(t, 1) for t, _ in window[0]])
    out |= {"log_odds_chosen": odds.mean(), "log_odds_ratio": torch.nn.functional.logsigmoid(odds).mean()}
    return out | {"nll_loss": -torch.cat(whole).mean()}


def _of_pair(define: Callable[..., Values], trainer: str, s: SimpleNamespace) -> Callable[[Any], Values]:
    return functools.partial(define, twin_runs.pair(trainer, twin_runs.rows(trainer)), s)


def _of_sampled(kl: Callable[[Tensor], Tensor], trainer: str, s: SimpleNamespace) -> Callable[[Any], Values]:
    return functools.partial(_sampled, kl, _window(trainer), s)


def _window(trainer: str) -> Sequences:
    return twin_runs.sequences(trainer, twin_runs.rows(trainer))


DEFINED: dict[str, Callable[[str, SimpleNamespace], Callable[[Any], Values]]] = {
    "dpo-trainer": functools.partial(_of_pair, _dpo),
    "kto-trainer": lambda t, s: functools.partial(_unpaired, _window(t), twin_runs.labels(twin_runs.rows(t)), s),
    "sft-trainer": lambda t, s: functools.partial(_sft, _window(t), s),
    "online-dpo-trainer": functools.partial(_of_pair, _online),
    "grpo-trainer": functools.partial(_of_sampled, _k3),
    "rloo-trainer": functools.partial(_of_sampled, _log_ratio),
    "gmpo-trainer": functools.partial(_of_sampled, _k3),
    "cpo-trainer": functools.partial(_of_pair, functools.partial(_without_reference, False)),
    "orpo-trainer": functools.partial(_of_pair, functools.partial(_without_reference, True)),
}
"""Trainer and settings -> what it logs of its window, by definition."""


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
    more = {**LOGGED, "beta": s.beta, **({"loss_type": "kto"} if call.spec.data == "labels" else {})}
    if s.divergence != SETTINGS["divergence"].default:
        drive.needs(call.trainer, "f_divergence_type")
        more["f_divergence_type"] = offered(call.trainer, "f_divergence_type", s.divergence)
    run = twin_runs.build(
        trainer, plain_twin(model=s.model, split="8x1", beta=s.beta), twin_runs.unfixed(call.path), **more
    )
    yield twin_runs.all_there(trainer, twin_runs.train(run, call.path))
    logged = drive.logged(run)
    exact = functools.partial(stored_window.policy, s.model, torch.float64)
    truth = shared(call, "logged", lambda: training_step.measured(exact(), DEFINED[trainer](trainer, s), COUNTED))
    names = [name for name in truth.exact if name in logged]
    if not trl.mentions("mean_logits", trl.class_named(call.trainer)):  # other releases say nowhere which mean is meant
        names = [name for name in names if not name.startswith("logits/")]
    if not names:
        raise Unsupported(f"{call.trainer} of the installed version logs none of {', '.join(truth.exact)}")
    for name in names:
        yield Quantity(name, float(logged[name]), Entry(truth, name))
