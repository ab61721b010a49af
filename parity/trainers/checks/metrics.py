"""Metrics that a trainer logs for one batch, compared with what their names and TRL's documentation say."""

import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.families.policy_losses import divergence as k3
from parity.families.preference_losses import AVERAGED, alphapo, log_odds
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, check, holds, shared, tells
from parity.trainers.checks.twin_windows import EVALUATED, begun
from parity.trainers.checks.twins import twin
from parity.trainers.definitions.formulas import LOSSES, Loss, kl_of_others
from parity.trainers.definitions.scored import completion_logps, logits
from parity.trainers.definitions.training_step import logged, measured
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.trainers.rig.stored_window import Sample, Window
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import SPECS
from parity.upstream import trl

MODELS = ("llama", "qwen2", "gemma2")
EVALUATIONS = {
    "whole": "in one batch",
    "uneven": "in batches of six and two, sequences of one length, so that a mean over tokens is one over rows",
    "named": "as a dict of two datasets, of whose metrics each has the name of its own",
    "predicted": "behind a prediction on other data",
}
SETTINGS = {
    "model": Setting("llama", "tiny model; KTO's estimate of the KL is 0 for qwen2", MODELS),
    "beta": Setting(0.3, "beta of the config", (0.3, 0.04)),
    "brief": Setting(False, "online DPO: completions of two tokens each, so that none is padded", (False, True)),
    "split": Setting("8x1", "batch x accumulation; accumulated, every sequence has one length", ("8x1", "2x4")),
    "divergence": Setting("reverse_kl", "DPO: f-DPO's, of which no reward is made", ("reverse_kl", "forward_kl")),
    "loss": Setting("sigmoid", "CPO's simpo and tpo-l have rewards of a token's mean", ("sigmoid", "simpo", "tpo-l")),
    "power": Setting(0.0, "CPO: exponent of AlphaPO's rewards", (0.0, 0.3)),
    "evaluation": Setting("whole", "; ".join(f"{k}: {v}" for k, v in EVALUATIONS.items()), tuple(EVALUATIONS)),
    "tile": drive.TILES,
    "whole": Setting(False, "SFT: completion_only_loss is off, prompts are trained on", (False, True)),
}
PR: tuple[CheckCase, ...] = (("online-dpo-trainer", {}),)
COUNTED = "rewards/accuracies reward objective/scores objective/scores_margin mean_token_accuracy num_tokens".split()
"""Metrics that are a count, or made of what is exact in float32."""

GUESSED = ("sft-trainer", "dpo-trainer", "tpo-trainer")
"""Trainers that log a share of tokens that are the likeliest: random words are none."""

Values = dict[str, Tensor]
TRAINERS = tuple(LOSSES)


def define(window: Window, s: SimpleNamespace, model: Any) -> Values:
    """What a trainer logs of a window, by definition; `s`: model and beta. Entropies are means over the completion tokens.

    KL: of GRPO and GMPO the mean over the completion tokens of k3, of RLOO that of log π - log π_ref. CPO's and ORPO's
    `logits/*` are not judged: TRL averages every position of the padded batch, so that prompts and padding count; DPO's of the
    same name are of the completions. Nothing installed says which is meant.
    """
    spec, loss = window.spec, Loss(window, s)
    seen = {"num_tokens": torch.tensor(float(sum(len(tokens) for tokens, _ in window.expected)))}
    if spec.paired or spec.data == "labels":
        return seen | _of_sides(loss, model)
    batch = loss.scored(model)
    seen |= {"entropy": batch.entropy}
    if not spec.generates:
        return seen | {"mean_token_accuracy": torch.cat(batch.likeliest).double().mean()}
    seen |= _of_generation(window, batch.lengths)
    if not spec.grouped:
        return seen
    d = torch.cat(batch.base.tokens) - torch.cat(batch.tokens)
    kl = -d.mean() if spec.baseline == "others" else k3(d, None).mean()
    r = stored_window.rewards(window.sequences)
    seen |= {"reward": r.mean(), "reward_std": r.std(), "frac_reward_zero_std": (r.std(1) == 0).double().mean()}
    return seen | {"kl": kl, "rewards/reward/mean": r.mean(), "rewards/reward/std": r.std()}


def _of_generation(window: Window, lengths: Tensor) -> Values:
    """Tokens of completions, of all and of those that end."""
    ended = torch.tensor([row.ended for row in window.rows])
    out = {"completions/clipped_ratio": 1 - ended.double().mean()}
    for name, own in (("", lengths), ("_terminated", lengths[ended])):
        sizes = {"mean": own.mean(), "min": own.min(), "max": own.max()}
        out |= {f"completions/{which}{name}_length": size for which, size in sizes.items()}
    return out


def _of_sides(loss: Loss, model: Any) -> Values:
    """Rewards and log-probs of the chosen and the rejected, of KTO the desirable and the undesirable; what each trainer adds.

    Online DPO's `objective/` are of all completions: KL and -log π summed over the tokens of each, then their mean.
    """
    window, beta = loss.window, loss.s.beta
    spec, sides = window.spec, window.pair()
    if spec.paired:
        batch, chosen = loss.scored(model, [*sides[0], *sides[1]]), torch.arange(2 * len(sides[0])) < len(sides[0])
    else:
        batch, chosen = loss.scored(model), torch.tensor(window.labels)
    logps = batch.means if spec.loss == "orpo" or loss.s.loss in AVERAGED else batch.sums
    earned = batch.ratios if spec.given else alphapo(logps, loss.s.power)
    out: Values = {}
    for name, side in (("chosen", chosen), ("rejected", ~chosen)):
        out |= {f"rewards/{name}": beta * earned[side].mean(), f"logps/{name}": logps[side].mean()}
    out |= {"rewards/margins": out["rewards/chosen"] - out["rewards/rejected"]}
    if spec.paired:
        out |= {"rewards/accuracies": (earned[chosen] > earned[~chosen]).double().mean()}
    if spec.generates:
        scores, kl = stored_window.rewards(batch.window).flatten(), batch.ratios
        out |= {"objective/kl": kl.mean(), "objective/non_score_reward": -beta * kl.mean()}
        out |= {"objective/rlhf_reward": (scores - beta * kl).mean(), "objective/entropy": -batch.sums.mean()}
        apart = scores[chosen].mean() - scores[~chosen].mean()
        return out | {"objective/scores": scores.mean(), "objective/scores_margin": apart}
    if spec.given or spec.data == "triples":
        gold = loss.scored(model, [*batch.window, *window.gold]) if spec.data == "triples" else batch
        out |= {"entropy": gold.entropy}
        for name, side in (("chosen", chosen), ("rejected", ~chosen)):  # the vocabulary's mean, then that of all tokens
            kept = [z.mean(-1) for z, there in zip(batch.logits, side, strict=True) if there]
            out |= {f"logits/{name}": torch.cat(kept).mean()}
        right = torch.cat(batch.likeliest[: len(sides[0])]).double().mean()
        return out | ({"mean_token_accuracy": right} if spec.paired else {"kl": kl_of_others(loss, model).mean()})
    if spec.loss == "orpo":
        odds = log_odds(batch.means)
        odds = odds[chosen] - odds[~chosen]
        whole = completion_logps(model, [(tokens, 1) for tokens, _ in sides[0]])
        out |= {"log_odds_chosen": odds.mean(), "log_odds_ratio": torch.nn.functional.logsigmoid(odds).mean()}
        return out | {"nll_loss": -torch.cat(whole).mean()}
    return out | {"nll_loss": -torch.cat(batch.tokens[: len(sides[0])]).mean()}


def guessed(window: Window, model: Any) -> list[Sample]:
    """The rows with the likeliest word at the end of each completion, before its <eos>."""
    rows, first = list(window.rows), models.BOS + 1
    for name, side in zip(("completion", "other"), window.pair(), strict=True):
        with torch.no_grad():
            found = [first + int(z[-3, first:].argmax()) for z in logits(model, [tokens for tokens, _ in side])]
        texts = [
            [*getattr(row, name).split()[:-1], models.tokenizer().decode(n)] for row, n in zip(rows, found, strict=True)
        ]
        changes: list[dict[str, Any]] = [{name: " ".join(text)} for text in texts]
        rows = [dataclasses.replace(row, **change) for row, change in zip(rows, changes, strict=True)]
    return rows


def _in_pr(case: CheckCase) -> bool:
    """Every model of GRPO and KTO, one of the others."""
    return "model" not in case[1] or case[0] in ("kto-trainer", "grpo-trainer")


def cases(seed: int) -> Iterator[CheckCase]:
    for trainer in TRAINERS:
        for model in MODELS:
            yield trainer, {"model": model}
        if SPECS[trainer].generates == "model":
            yield from ((trainer, settings) for settings in ({"beta": 0.04}, {"brief": True}))
        else:
            yield from ((trainer, settings) for settings in ({}, {"beta": 0.04, "split": "2x4"}))
            yield from ((trainer, {"evaluation": name}) for name in EVALUATIONS if name != "whole")
    yield from ((trainer, {"tile": drive.NARROW}) for trainer in ("sft-trainer", "dpo-trainer", "kto-trainer"))
    yield from (
        ("sft-trainer", {"whole": True}),
        ("dpo-trainer", {"divergence": "forward_kl"}),
        ("cpo-trainer", {"loss": "simpo"}),
        ("cpo-trainer", {"loss": "simpo", "power": 0.3}),
        ("tpo-trainer", {"loss": "tpo-l"}),
    )


@check("metrics", TRAINERS, SETTINGS, cases, pr=PR, covered=_in_pr, paths=EVERY_PATH)
def metrics(call: CheckCall) -> Iterator[Quantity]:
    """What is logged of eight sequences, policy and reference unlike, is what the metrics' names say."""
    trainer, s = call.case.family, call.settings
    own: dict[str, Any] = {} if s.divergence == "reverse_kl" else {"f_divergence_type": s.divergence}
    own |= ({} if s.loss == "sigmoid" else {"loss_type": s.loss}) | ({"alpha": s.power} if s.power else {})
    drive.needs(call.trainer, *own)
    more = {**recorder.LOGGED, **EVALUATED, "beta": s.beta, **own}
    settings = twin(trainer, model=s.model, beta=s.beta, kl=call.spec.data == "labels", whole=s.whole, split=s.split)
    policy = functools.partial(stored_window.policy, s.model, torch.float64)
    uneven, named = s.evaluation == "uneven", s.evaluation == "named"
    more |= {"per_device_eval_batch_size": 6} if uneven else {}
    rows = Window.of(trainer).rows
    rows = stored_window.even(rows) if uneven or s.split != "8x1" else rows
    rows = guessed(Window.of(trainer, rows), policy()) if trainer in GUESSED else rows
    rows = [dataclasses.replace(row, limit=2) for row in rows] if s.brief else rows
    run = Run(trainer, settings, call.path, rows, plain=True, **more)
    yield run.all_there()
    log = drive.logged(run.built)
    defined = functools.partial(define, run.window, s)
    truth = shared(call, "logged", lambda: measured(policy(), defined, COUNTED))
    unmeant = [n for n in truth.exact if uneven and n.endswith("std")]  # a mean of spreads is none
    if not trl.mentions("mean_logits", trl.class_named(call.trainer)):  # other releases say nowhere which mean is meant
        unmeant += [n for n in truth.exact if n.startswith("logits/")]
    truth = dataclasses.replace(truth, exact={n: x for n, x in truth.exact.items() if n not in unmeant})
    if not truth.exact.keys() & log.keys():
        raise Unsupported(f"{call.trainer} of the installed version logs none of {', '.join(truth.exact)}")
    if trainer in GUESSED:
        right = float(truth.exact["mean_token_accuracy"])
        yield tells("likeliest", right > 0, f"{right} of the tokens are the likeliest", right)
    yield from logged(truth, log)
    # online DPO does not evaluate; KTO's KL is of pairs within micro-batches of training
    if call.spec.generates != "model" and not begun(run.built) and s.split == "8x1":
        other, every = run.built.eval_dataset.select(range(2)), run.built.eval_dataset
        run.built.args.prediction_loss_only = s.evaluation == "predicted"
        with trl.quiet():  # of the other rows nothing may stay
            (run.built.predict if s.evaluation == "predicted" else run.built.evaluate)(other)
            run.built.evaluate({"one": every, "other": other} if named else None)
        log = drive.numbers(run.built.state.log_history[-2 if named else -1])
        if named:
            lost = [name for name in truth.exact if f"eval_{name}" in log and name != "num_tokens"]
            yield holds("names", not lost, f"{len(lost)} lack the name of their dataset, first {lost[:1]}")
        yield from logged(truth, log, of="eval_one_" if named else "eval_")
