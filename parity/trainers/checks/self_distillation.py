"""Checks of SDFT and SDPO, whose teacher is the student with more in its prompt, and of A*-PO: one window by its definition."""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.families.divergence import completed, divergence
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, same, tells
from parity.trainers.definitions.formulas import Generation, Loss, grpo
from parity.trainers.definitions.scored import Scored
from parity.trainers.definitions.training_step import exact_step, gradients, logged, measured, window_loss
from parity.trainers.rig import drive, models, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import GENERATIONS, Window

SDFT, SDPO, A2PO = "sdft-trainer", "sdpo-trainer", "a2po-trainer"
MODEL, TEACHERS = "llama", ("base", "live", "ema")
OPTIONS = {
    "mode": ("distillation_mode", Setting("sampled_token", "", ("sampled_token", "full_logits", "topk_logits"))),
    "alpha": ("distillation_alpha", Setting(1.0, "of the divergence: 0 forward KL, 1 reverse KL", (0.0, 0.3, 1.0))),
    "tail": ("distillation_add_tail", Setting(False, "of topk_logits", (False, True))),
    "skip": ("num_loss_tokens_to_skip", Setting(0, "SDFT", (0, 2))),
    "temperature": ("temperature", Setting(1.0, "of student and teacher", (1.0, 0.7))),
    "teacher": ("teacher_model_kind", Setting("base", "the initial student, the student, or its average", TEACHERS)),
    "feedback": ("include_environment_feedback", Setting(False, "SDPO", (False, True))),
    "spared": (
        "environment_feedback_only_without_solution",
        Setting(False, "SDPO: feedback where nothing else is shown", (False, True)),
    ),
    "shown": ("use_successful_as_teacher", Setting(True, "SDPO: the group's first success", (True, False))),
    "others": ("dont_reprompt_on_self_success", Setting(True, "SDPO: never a completion's own", (True, False))),
    "weight": ("distillation_weight", Setting(1.0, "SDPO: 1 less that of its policy loss", (1.0, 0.4, 0.0))),
    "loss": ("loss_type", Setting("dapo", "SDPO: of its policy loss", ("dapo", "grpo", "bnpo", "dr_grpo"))),
    "scale": ("scale_rewards", Setting("group", "SDPO", ("group", "batch", "none"))),
    "level": ("importance_sampling_level", Setting("token", "SDPO", ("token", "sequence"))),
    "beta": ("beta", Setting(0.0, "SDPO: of the KL in its policy loss", (0.0, 2.0))),
}
"""Setting -> the field of the trainer's config, and its values."""
WINDOWS = {
    "first": "the first",
    "second": "the second, generated behind a step",
    "again": "the second, of the first one's generation",
    "resumed": "the second, by another trainer from the first one's checkpoint",
}
SETTINGS = {name: setting for name, (_, setting) in OPTIONS.items()} | {
    "moved": Setting(False, "the student's weights are not those of its path", (False, True)),
    "longest": Setting(0, "max_prompt_length; 0: none", (0, 4)),
    "side": Setting("left", "padding_side of the tokenizer", ("left", "right")),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "2x4")),
    "window": Setting("first", "; ".join(f"{k}: {v}" for k, v in WINDOWS.items()), tuple(WINDOWS)),
}
BOTH = {"mode", "alpha", "tail", "temperature", "teacher", "moved", "side", "split", "window"}
HONOURED = {
    SDFT: BOTH | {"skip", "longest"},
    SDPO: BOTH | {"feedback", "spared", "shown", "others", "weight", "loss", "scale", "level", "beta"},
    A2PO: {"longest", "side", "split", "window"},
}
TOP, BOUND, UPDATE, BETA1, BETA2, SAMPLES, REWARD = 8, 1.05, 0.3, 0.3, 0.05, 2, 2.0
CLIP = {"epsilon": 0.03, "epsilon_high": 0.06}
CONFIG: dict[str, Any] = {
    **CLIP,
    "distillation_is_clip": BOUND,
    "teacher_update_rate": UPDATE,
    "shuffle_dataset": False,
}
CONFIG |= {"beta1": BETA1, "beta2": BETA2, "num_value_samples": SAMPLES, "filter_all_incorrect": False}
CONFIG |= {"reward_weights": [REWARD], "success_reward_threshold": REWARD}
EARNED = (1.0, 0.25, 0.25, 0.5, 1.0, 1.5, 0.0, 1.25)
"""SDPO's rewards, to be multiplied by `REWARD`, in groups: one, none, two and one of the two are successes, of 1 or more."""
FULL, TOPK = {"mode": "full_logits"}, {"mode": "topk_logits", "tail": True}
POLICY: dict[str, Any] = {"weight": 0.0}
BESIDE: dict[str, Mapping[str, Any]] = dict.fromkeys(("loss", "scale", "level", "beta"), POLICY)
BESIDE |= {
    "scale": {**POLICY, "loss": "grpo"},
    "alpha": FULL,
    "tail": {"mode": "topk_logits"},
    "spared": {"feedback": True},
    "shown": {"feedback": True},
    "beta": POLICY | {"window": "again"},
}
"""Setting -> those without which it changes nothing."""
PR: list[CheckCase] = [
    (SDFT, {**TOPK, "alpha": 0.3, "skip": 2, "split": "2x4"}),
    (SDFT, {**FULL, "alpha": 0.0, "teacher": "ema", "window": "again", "temperature": 0.7}),
    (SDFT, {"mode": "topk_logits", "alpha": 0.3}),
    (SDPO, {**TOPK, "alpha": 0.3, "split": "2x4", "teacher": "ema", "window": "second"}),
    (SDPO, {"weight": 0.4, "loss": "grpo", "scale": "batch", "window": "again"}),
    (SDPO, {"feedback": True, "spared": True, "others": False, "mode": "topk_logits"}),
    (A2PO, {"split": "2x4", "window": "second"}),
]


def cases(seed: int) -> Iterator[CheckCase]:
    """Each value of each setting by itself, losses also accumulated and clipped, and each teacher where it could be another."""
    yield from PR
    for trainer, names in HONOURED.items():
        for name in sorted(names):
            yield from ((trainer, {**BESIDE.get(name, {}), name: value}) for value in SETTINGS[name].choices or ())
    for loss in ("dapo", "grpo", "dr_grpo"):  # bnpo is a mean over a micro-batch by definition
        yield from ((SDPO, POLICY | {"loss": loss} | more) for more in ({"split": "2x4"}, {"window": "again"}))
    yield SDPO, {**POLICY, "loss": "grpo", "level": "sequence", "window": "again"}
    for trainer in (SDFT, SDPO):
        yield from ((trainer, {**TOPK, "alpha": alpha, "split": "2x4"}) for alpha in (0.0, 0.3, 1.0))
        yield from ((trainer, {"teacher": "ema", "window": window}) for window in WINDOWS)
        yield from ((trainer, {"teacher": teacher, "moved": True}) for teacher in ("live", "ema"))
        yield trainer, {**FULL, "teacher": "live", "window": "again"}


@check("self-distillation", tuple(HONOURED), SETTINGS, cases, pr=PR, paths=("released",))
def self_distillation(call: CheckCall) -> Iterator[Quantity]:
    """SDFT, SDPO or A*-PO on stored completions: sequences, those of the teacher, loss and gradient by the definition."""
    s, family = call.settings, call.case.family
    away = [name for name, setting in SETTINGS.items() if getattr(s, name) != setting.default]
    refused = [name for name in away if name not in HONOURED[family]]
    if refused or (family == A2PO and s.window == "again"):
        raise Unsupported(f"{call.trainer} has no {', '.join(refused) or 'generation that is taken twice'}")
    if s.mode == "sampled_token" and s.alpha != 1.0:
        raise Unsupported("sampled_token is the reverse KL alone")
    needed = {"beta2"} if family == A2PO else {"distillation_mode", "teacher_model_kind"}
    drive.needs(call.trainer, *sorted(needed | {OPTIONS[name][0] for name in away if name in OPTIONS}))
    with tempfile.TemporaryDirectory(prefix="parity-self-") as folder:
        run = Stored(call, folder)
        trainer = run.trainer
        steps = last = recorder.train(trainer)
        if s.window == "resumed":
            checkpoint = str(Path(folder, "checkpoint-1"))
            trainer = Stored(call, folder).trainer
            last = recorder.train(trainer, resume_from_checkpoint=checkpoint)
    batches = last.window(len(last.gradients) - 1)
    yield same(recorder.sequences_of(batches), run.window)
    if family != A2PO:
        seen = recorder.sequences_of(map(_taught, batches))
        yield same(seen, run.teachers.values(), "teacher's sequences")
    now = None if s.window == "first" else steps.parameters[1]
    student = run.student(now)
    if s.window == "again":
        with torch.no_grad():
            pairs = (torch.cat(Scored(m, run.window, temperature=s.temperature).tokens) for m in (student, run.initial))
        share = float(((next(pairs) - next(pairs)).exp() > BOUND).double().mean())
        yield tells("beyond", 0 < share < 1, f"{share:.2g} of the ratios are beyond the bound", share)
    step = exact_step(student, run.loss(now))
    yield window_loss(step, sum(last.losses[-len(batches) :]))
    yield gradients(step, last.gradients[-1])
    if family == A2PO:
        log = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
        yield from logged(measured(student, run.numbers), drive.numbers(log))


def _taught(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the teacher scores of a batch, where the student learns from it."""
    names = ("input_ids", "attention_mask")
    kept = batch.get("self_distillation_mask", torch.ones(len(batch["completion_ids"]))).bool()
    given = {name: batch[f"teacher_{name}"][kept] for name in names}
    return given | {"logits_to_keep": batch["completion_ids"].shape[1]}


class Stored:
    """A trainer over stored completions, and the definition of its loss."""

    def __init__(self, call: CheckCall, folder: str):
        self.call, self.s, self.family = call, call.settings, call.case.family
        self.given = Window.of(self.family)
        self.rows = self.given.rows
        cut = [dataclasses.replace(r, prompt=" ".join(r.prompt.split()[-self.s.longest :])) for r in self.rows]
        self.window = Window.of(self.family, cut).sequences
        self.initial = self.student()
        self.trainer = self._built(folder)
        # number of each sequence from which the student learns -> what the teacher scores for it
        prompts = {i: stored_window.ids(text)[-self.s.longest :] for i, text in self._prompts()}
        self.teachers = {i: (prompt + self._completion(i), len(prompt)) for i, prompt in prompts.items()}
        self._hand_out()

    def _completion(self, i: int) -> list[int]:
        ids, start = self.window[i]
        return ids[start:]

    def student(self, parameters: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float64) -> Any:
        """The initial student, or the student of these parameters."""
        out = stored_window.policy(MODEL, dtype) if self.s.moved else models.model(MODEL, dtype).train()
        if parameters is not None:
            out.load_state_dict(parameters)
        return out

    def _built(self, folder: str) -> Any:
        s, grouped = self.s, self.given.spec.grouped
        wanted = (
            recorder.plain(s.split)
            | recorder.LOGGED
            | CONFIG
            | {field: getattr(s, name) for name, (field, _) in OPTIONS.items()}
        )
        wanted |= {
            "distillation_topk": TOP if s.mode == "topk_logits" else None,
            "max_prompt_length": s.longest or None,
        }
        wanted |= {"num_generations": GENERATIONS if grouped else 1, "num_iterations": 1 + (s.window == "again")}
        wanted |= {"max_steps": 2, "learning_rate": 2e-3} if s.window != "first" else {}
        wanted |= {"save_strategy": "steps", "save_steps": 1, "output_dir": folder} if s.window == "resumed" else {}
        given: dict[str, Any] = {
            "train_dataset": self.given.dataset(),
            "processing_class": models.own_tokenizer(),
        }
        given["processing_class"].padding_side = s.side
        if self.family != A2PO:
            context = [self._context(prompt) for prompt in given["train_dataset"]["prompt"]]
            given["train_dataset"] = given["train_dataset"].add_column("privileged_context", context)
        if self.family != SDFT:
            given["reward_funcs"] = [stored_window.reward if self.family == A2PO else self._reward]
        return drive.build(self.call.trainer, self.student(dtype=torch.float32), wanted, **given)

    def _context(self, prompt: str) -> str:
        return next(row.other for row in self.rows if row.prompt == prompt)

    def _reward(self, completions: Sequence[str], **_: Any) -> list[float]:
        earned = {row.completion: x for row, x in zip(self.rows, EARNED, strict=True)}
        return [earned.get(completion, 0.0) for completion in completions]

    def _prompts(self) -> Iterator[tuple[int, str]]:
        """Numbers of sequences and the teacher's prompts. SDFT: the prompt and its context (arXiv 2601.19897, section 3). SDPO:
        with the first success of another of the group, and with feedback (2601.20802, section 3); none without either."""
        args = self.trainer.args
        for i, row in enumerate(self.rows):
            context = self._context(row.prompt)
            if self.family == SDFT:
                yield i, args.teacher_prompt_template.format(prompt=row.prompt, privileged_context=context)
            if self.family == SDPO:
                first, s = i - i % GENERATIONS, self.s
                group = [j for j in range(first, first + GENERATIONS) if EARNED[j] >= 1.0 and not (s.others and j == i)]
                shown = [
                    args.solution_template.format(successful_previous_attempt=self.rows[j].completion)
                    for j in group[: int(s.shown)]
                ]
                spared = not s.feedback or (s.spared and shown)
                told = [] if spared else [args.feedback_template.format(feedback_raw=context)]
                parts = {"prompt": row.prompt, "solution": "".join(shown), "feedback": "".join(told)}
                yield from [(i, args.reprompt_template.format(**parts))] if shown or told else []

    def _hand_out(self) -> None:
        """Stored completions of a prompt, whichever end of it is cut off; of A*-PO's reference the row's other one too."""
        n = self.s.longest
        stored: dict[tuple[int, ...], list[list[int]]] = {}
        both: dict[tuple[int, ...], list[list[int]]] = {}
        for i, row in enumerate(self.rows):
            whole = stored_window.ids(row.prompt)
            for prompt in {tuple(whole[-n:]), tuple(whole[: n or None])}:
                stored.setdefault(prompt, []).append(self._completion(i))
                both[prompt] = [self._completion(i), [*stored_window.ids(row.other), models.EOS]]
        twin_runs.generate_in_model(self.trainer, stored, lambda sequences: sequences)
        if self.family == A2PO:
            reference = self.trainer.ref_model
            twin_runs.generate_in_model(self.trainer, both, lambda sequences: sequences, model=reference)
            one = reference.generate
            reference.generate = lambda input_ids, attention_mask, **options: one(
                *(x.repeat_interleave(SAMPLES, 0) for x in (input_ids, attention_mask)), **options
            )

    def loss(self, now: Mapping[str, Tensor] | None) -> Callable[[Any], Tensor]:
        """The loss of the window; `now`: the parameters behind the first step, where it is not the first window."""
        if self.family == A2PO:
            return self._regression
        teacher = self.student()
        if now is not None and self.s.teacher == "ema":
            with torch.no_grad():
                for name, p in teacher.named_parameters():
                    p.mul_(1 - UPDATE).add_(now[name].double(), alpha=UPDATE)
        w = self.s.weight if self.family == SDPO else 1.0
        if w == 1.0:
            return lambda model: self._distilled(model, teacher)
        s = SimpleNamespace(loss=self.s.loss, beta=self.s.beta, model=MODEL)
        earned = REWARD * torch.tensor(EARNED, dtype=torch.float64).view(-1, GENERATIONS)
        generation = Generation(self.window, self.initial, steps=1) if self.s.window == "again" else None
        own = {"importance_sampling_level": self.s.level, **CLIP}
        policy = Loss(self.given, s, self.initial, generation, earned, self.s.scale, own)
        return lambda model: (1 - w) * grpo(policy, model) + (w * self._distilled(model, teacher) if w else 0.0)

    def _distilled(self, model: Any, teacher: Any) -> Tensor:
        """The mean over sequences of the mean over a completion's tokens of w·d, 0 without a teacher. d: the divergence to the
        teacher over the vocabulary, or the student's likeliest tokens; of the sampled token (log p - log q)·log p, the first
        factor without a gradient. w: min(p / p of the generation, bound), without a gradient."""
        s, window = self.s, [self.window[i] for i in self.teachers]
        student = Scored(model, window, temperature=s.temperature)
        with torch.no_grad():
            taught = Scored(
                model if s.teacher == "live" else teacher, [*self.teachers.values()], temperature=s.temperature
            )
            pairs = [*zip(taught.tables, taught.tokens, strict=True)]
            old = Scored(self.initial, window, temperature=s.temperature).tokens if s.window == "again" else None
        out = []
        for i, (lq, theirs) in enumerate(pairs):
            own = student.tokens[i]
            d = (own - theirs).detach() * own if s.mode == "sampled_token" else self._divergence(student.tables[i], lq)
            d = d if old is None else d * (own - old[i]).exp().clamp(max=BOUND).detach()
            out.append(d[s.skip :].sum() / max(len(d) - s.skip, 1))
        return torch.stack(out).sum() / len(self.window)

    def _divergence(self, lp: Tensor, lq: Tensor) -> Tensor:
        """At each token of a completion, (T,), from log p and log q, (T, V)."""
        if self.s.mode == "topk_logits":
            top = lp.topk(TOP).indices
            lp, lq = (
                completed(x.gather(-1, top), torch.zeros_like(top, dtype=torch.bool), self.s.tail) for x in (lp, lq)
            )
        gone = torch.zeros_like(lp, dtype=torch.bool)
        return divergence(lp, lq, gone, gone, self.s.alpha).sum(-1)

    def _regression(self, model: Any) -> Tensor:
        """The mean over completions y of (β₂·log(π(y)/π_ref(y)) - (r(y) - V))², V = β₁·log of the mean of exp(r/β₁) over the
        reference's samples (arXiv 2505.20686, algorithm 1)."""
        rewards, value = self._values()
        return (BETA2 * Scored(model, self.window, self.initial).ratios - (rewards - value)).square().mean()

    def numbers(self, model: Any) -> Mapping[str, Tensor]:
        """A*-PO's metrics: r, V, β₂·log(π/π_ref) and r - V, means over the completions."""
        (rewards, value), ratios = self._values(), Scored(model, self.window, self.initial).ratios
        out = {"reward": rewards, "v_star": value, "implicit_reward": BETA2 * ratios, "advantage": rewards - value}
        return {name: x.mean() for name, x in out.items()}

    def _values(self) -> tuple[Tensor, Tensor]:
        prompts = [ids[:start] for ids, start in self.window]
        others = [
            (p + [*stored_window.ids(r.other), models.EOS], len(p)) for p, r in zip(prompts, self.rows, strict=True)
        ]
        samples = REWARD * stored_window.rewards([x for pair in zip(self.window, others, strict=True) for x in pair])
        return samples[:, 0], BETA1 * (torch.logsumexp(samples / BETA1, 1) - math.log(SAMPLES))
