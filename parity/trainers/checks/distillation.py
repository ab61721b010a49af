"""Checks of distillation: a teacher behind HTTP, its parts in isolation, and GKD with a local teacher as the control.

A server returns log-probs of few tokens; TRL pads ragged completions with -inf and must keep that out of the loss. In
trl 1.1.0 to 1.3.0 it did not: the loss is finite, every gradient NaN at the first step (reverse KL, beta 1).
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.case.case import normal
from parity.case.inputs import Setting
from parity.families.divergence import completed, divergence
from parity.fixes import patches
from parity.judge.oracle import gradient_name
from parity.judge.problem import Problem
from parity.trainers.check import CheckCall, CheckCase, Entry, Quantity, by_profile, check, holds
from parity.trainers.definitions.formulas import jsd
from parity.trainers.definitions.gradients import first_step
from parity.trainers.definitions.scored import Scored
from parity.trainers.definitions.training_step import exact_step
from parity.trainers.rig import batches, drive, models, recorder, stored_window, teacher_client
from parity.trainers.rig.batches import Sequences
from parity.trainers.rig.teacher_server import Teacher, scorer, serving

BETAS, SPLITS = (0.0, 0.5, 1.0), ("1x2", "2x1")
ARCHITECTURE, TEACHER = "llama", "qwen2"
IGNORED = -100
"""The label of a token that is not in the loss."""


BETA = Setting(1.0, "teacher's weight in the divergence: 0 forward KL, 1 reverse KL", BETAS)
SPLIT = Setting("2x1", "batch x accumulation", SPLITS)


LEAKED = {"beta": 1.0, "split": "1x2"}
"""Where the padding leaked: accumulated."""
SHORT: list[CheckCase] = [("server-distillation-trainer", s) for s in ({"beta": 0.0}, LEAKED)]
SHORT_CONTROL: list[CheckCase] = [("gkd-trainer", {**LEAKED, "prompts": "ragged"})]


@by_profile(SHORT, SHORT)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every beta with every split."""
    yield from (("server-distillation-trainer", {"beta": b, "split": s}) for b in BETAS for s in SPLITS)


@by_profile(SHORT_CONTROL, SHORT_CONTROL)
def control_cases(seed: int) -> Iterator[CheckCase]:
    """The same, and with every kind of prompts."""
    for _, settings in cases("nightly", seed):
        yield from (("gkd-trainer", {**settings, "prompts": prompts}) for prompts in teacher_client.SAMPLES)


@functools.cache
def _teacher() -> Any:
    return models.model(TEACHER).eval()


@check(
    "teacher-server",
    ("server-distillation-trainer",),
    {
        "beta": BETA,
        "split": SPLIT,
        "temperature": Setting(1.0, "of student and teacher", (1.0, 0.7)),
        "top_k": Setting(1, "tokens that the teacher returns; above 1 only at beta 0", (1, 4)),
    },
    cases,
)
def teacher_server(call: CheckCall) -> Iterator[Quantity]:
    """Distillation from a real HTTP teacher on ragged completions: finite, by the definition, exactly 0 at padding."""
    s = call.settings
    fix = patches.mask_teacher_padding if call.path == "fixed" else contextlib.nullcontext
    with serving(scorer(_teacher())) as teacher, fix():
        trainer = teacher_client.trainer(
            teacher, ARCHITECTURE, s.split, beta=s.beta, temperature=s.temperature, loss_top_k=s.top_k
        )
        seen: list[Tensor] = []
        handle = trainer.model.register_forward_hook(functools.partial(_keep_logits, seen))
        steps = recorder.train(trainer)
        handle.remove()
        yield from _handed_over(trainer, steps.batches, teacher)
    window = [batches.sequences_of([batch]) for batch in steps.batches]
    yield holds("sequences", sorted(len(t) for b in window for t, _ in b) == [6, 7], f"the window holds {window}")
    step = exact_step(models.model(ARCHITECTURE, torch.float64).train(), functools.partial(_loss, window, teacher, s))
    yield from first_step(step, steps)
    yield _at_padding(steps.batches, seen)


def _keep_logits(seen: list[Tensor], module: Any, args: Any, output: Any) -> None:
    if output.logits.requires_grad:
        output.logits.retain_grad()
        seen.append(output.logits)


def _loss(window: list[Sequences], teacher: Teacher, s: Any, model: Any) -> Tensor:
    """Mean over the micro-batches of each one's mean over its completion tokens: the server path's own normaliser."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in window:
        terms = []
        tables = Scored(model, batch, temperature=s.temperature).tables
        for logps, (tokens, start) in zip(tables, batch, strict=True):
            answer = teacher.answers[tuple(tokens)][start:].double()
            terms.append(_sparse(logps, answer, torch.tensor(tokens[start:]), s).sum(-1))
        total = total + torch.cat(terms).mean() / len(window)
    return total


def _sparse(logps: Tensor, answer: Tensor, tokens: Tensor, s: Any) -> Tensor:
    """Divergence terms on the support that a server gives, completed by a tail bucket: (T, K + 1).

    beta 0: the teacher's k likeliest; 1: the token that is there; between: both, once where they are the same.
    """
    top = answer.topk(s.top_k, -1).indices
    actual = tokens.unsqueeze(-1)
    support = top if s.beta == 0.0 else actual if s.beta == 1.0 else torch.cat([top, actual], -1)
    gone = torch.zeros_like(support, dtype=torch.bool)
    if support.shape[-1] == 2 and s.beta not in (0.0, 1.0):
        gone[:, 1] = support[:, 0] == support[:, 1]
    p, q = (completed(x.gather(-1, support), gone, tail=True) for x in (logps, answer))
    gone = torch.cat([gone, torch.zeros_like(gone[:, :1])], -1)
    return divergence(p, q, gone, gone, s.beta)


def _handed_over(trainer: Any, recorded: list[dict[str, Any]], teacher: Teacher) -> Iterator[Quantity]:
    """The getter's contract: -inf exactly where there is no label, elsewhere what the server said of that token."""
    wrong: list[str] = []
    for number, batch in enumerate(recorded):
        tokens, mask, loss = batches.parts(batch)[0]
        labels = tokens.masked_fill(loss == 0, IGNORED)
        given = batch if "labels" in batch else {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        start = trainer._compute_prompt_length(given)
        got = trainer._get_teacher_token_logprobs_from_server(given, start)
        width = got["actual_logprobs"].shape[1]
        for i, (sequence, prompt) in enumerate(batches.sequences_of([batch])):
            label = labels[i, start : start + width]
            logps = teacher.answers[tuple(sequence)][prompt:]
            expected = torch.full((width,), -torch.inf)
            expected[label != IGNORED] = logps.gather(-1, label[label != IGNORED].unsqueeze(-1))[:, 0]
            top = torch.full((width,), -torch.inf)
            top[label != IGNORED] = logps.amax(-1)
            for name, truth in (("actual_logprobs", expected), ("topk_logprobs", top)):
                value = got[name][i] if name == "actual_logprobs" else got[name][i, :, 0]
                if not torch.equal(value, truth):
                    wrong.append(
                        f"{name} of sequence {i} in micro-batch {number}: {value.tolist()}, not {truth.tolist()}"
                    )
    yield holds("teacher log-probs", not wrong, "; ".join(wrong[:2]), gate="exact")


def _at_padding(recorded: list[dict[str, Any]], seen: list[Tensor]) -> Quantity:
    """The gradient of the logits where no label is predicted."""
    largest, where = 0.0, ""
    if len(seen) != len(recorded):
        raise RuntimeError(f"{len(seen)} student forward passes recorded for {len(recorded)} micro-batches")
    for number, (batch, logits) in enumerate(zip(recorded, seen, strict=True)):
        predicts = torch.nn.functional.pad(batches.parts(batch)[0][2][:, 1:] != 0, (0, 1))
        gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
        outside = gradient[~predicts].abs()
        if not bool((outside == 0).all()):
            largest, where = float(outside.amax()), f"micro-batch {number}"
    message = f"gradient {largest:.3g} at positions without a label in {where}"
    return holds("gradient at padding", not where, message, gate="zero", value=largest)


@check(
    "sentinel",
    ("server-distillation-trainer",),
    {"beta": BETA},
    lambda profile, seed: [("server-distillation-trainer", {"beta": b}) for b in (0.5, 1.0)],
    paths=("released",),
    drives=False,
)
def sentinel(call: CheckCall) -> Iterator[Quantity]:
    """A log-prob that the teacher does not have where the loss needs it: the trainer must refuse, not train on it."""
    whole = scorer(_teacher())
    gone = {tuple(stored_window.ids(sample.prompt)) for sample in teacher_client.samples()[:1]}

    def partial(tokens: list[int]) -> Tensor:
        out = whole(tokens)
        return out.clone().index_fill_(0, torch.tensor([3]), torch.nan) if tuple(tokens[:2]) in gone else out

    with serving(partial) as teacher:
        trainer = teacher_client.trainer(teacher, ARCHITECTURE, "2x1", beta=call.settings.beta)
        try:
            recorder.train(trainer)
            refusal = ""
        except ValueError as error:
            refusal = str(error)
    message = f"trained although the teacher has no log-prob for one position, or said otherwise: {refusal!r}"
    yield holds("missing log-prob refused", "1/7" in refusal and "missing" in refusal, message)


@check(
    "divergence-parts",
    ("server-distillation-trainer",),
    {"beta": BETA, "peak": Setting(1.0, "spread of the logits", (1.0, 50.0))},
    lambda profile, seed: [("server-distillation-trainer", {"beta": b, "peak": p}) for b in BETAS for p in (1.0, 50.0)],
    paths=("released",),
    drives=False,
)
def divergence_parts(call: CheckCall) -> Iterator[Quantity]:
    """`_add_tail_bucket` and `_jsd_divergence` alone: finite forward and backward once padding is masked, and by definition."""
    lp, lq, padded = _rows(call.settings.peak)
    lq = lq.masked_fill(padded, 0.0)  # what the server path does with its sentinel
    kept, module, beta = ~padded[:, 0], _module(), call.settings.beta

    def define(student: Tensor, teacher: Tensor) -> Mapping[str, Tensor]:
        gone = torch.zeros_like(student, dtype=torch.bool)
        p, q = (completed(x, gone, tail=True) for x in (student, teacher))
        gone = torch.cat([gone, gone], -1)
        return {"terms": divergence(p, q, gone, gone, beta)[kept]}

    ones = torch.ones(int(kept.sum()), 2)
    oracle = Problem(define, {"student": lp, "teacher": lq}, {}, ("student",), given={"terms": ones}).oracle
    leaf, valid = lp.clone().requires_grad_(), torch.ones_like(lp, dtype=torch.bool)
    (p, support), (q, _) = module._add_tail_bucket(leaf, valid), module._add_tail_bucket(lq, valid)
    terms = module._jsd_divergence(p, q, beta, support)[kept]
    (slope,) = torch.autograd.grad(terms.sum(), leaf)
    finite = bool(terms.isfinite().all() and slope.isfinite().all())
    yield holds("finite", finite, "the divergence or its gradient is not finite after masking")
    yield Quantity("terms", terms.detach(), Entry(oracle, "terms"))
    yield Quantity("gradient", slope, Entry(oracle, gradient_name("student")))
    leaked = float(slope[padded[:, 0]].abs().amax())
    yield holds("gradient at padding", leaked == 0.0, f"{leaked:.3g} at a masked row", gate="zero", value=leaked)


def _module() -> Any:
    trainer = drive.trl_class(teacher_client.upstream())
    return importlib.import_module(next(b.__module__ for b in trainer.__mro__ if b.__module__.startswith("trl.")))


def _rows(peak: float) -> tuple[Tensor, Tensor, Tensor]:
    """Student's and teacher's log-probs (6, 1) of one token out of eight, and where a row is padding."""
    lp, lq = (torch.log_softmax(normal(0, name, (6, 8)) * peak, -1)[:, :1] for name in ("student", "teacher"))
    padded = torch.tensor([False, False, True, False, True, False]).unsqueeze(-1)
    return lp.float(), lq.float().masked_fill(padded, -torch.inf), padded


@check(
    "ragged-control",
    ("gkd-trainer",),
    {
        "beta": BETA,
        "split": SPLIT,
        "prompts": Setting("equal", "lengths of the prompts", ("equal", "ragged")),
    },
    control_cases,
    paths=("released",),
    moves=True,
)
def ragged_control(call: CheckCall) -> Iterator[Quantity]:
    """GKD with a local teacher on ragged completions: finite also in releases whose server path was not."""
    s = call.settings
    wanted = recorder.plain(s.split) | {"lmbda": 0.0, "beta": s.beta, "temperature": 1.0, "max_length": 32}
    data = stored_window.dataset(teacher_client.samples(s.prompts), "turns")
    given = {"teacher_model": models.model(TEACHER), "train_dataset": data}
    trainer = drive.build(call.trainer, models.model(ARCHITECTURE), wanted, device=call.device, **given)
    steps = recorder.train(trainer)
    window = [batches.sequences_of([b]) for b in steps.batches]
    local = all(n is None for n in steps.items)
    definition = functools.partial(_dense, window, s.beta, local)
    step = exact_step(models.model(ARCHITECTURE, torch.float64).train(), definition)
    yield from first_step(step, steps)


def _dense(window: list[Sequences], beta: float, local: bool, model: Any) -> Tensor:
    """Mean over the completion tokens of the window; `local`: of each micro-batch, then over those (before 1.10)."""
    parts = [torch.cat(jsd(Scored(model, batch, TEACHER), beta)) for batch in window]
    return torch.stack([p.mean() for p in parts]).mean() if local else torch.cat(parts).mean()
