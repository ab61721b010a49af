"""Beyond one full window: evaluation, the incomplete last window, a second step, a resumed run."""

import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import TRAINERS, CheckCall, CheckCase, CheckResult, bounded, by_profile, check, holds, judged
from parity.trainers.checks.twins import LOSSES, SETTINGS, by_definition, plain_twin
from parity.trainers.definitions import twin_losses, windows
from parity.trainers.definitions.gradients import first_step, gradients
from parity.trainers.definitions.training_step import ExactStep
from parity.trainers.rig import batches, drive, models, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import Row
from parity.upstream import trl

OF_STORED = ("evaluation", "incomplete", "uneven", "second", "resumed")
KINDS = (*OF_STORED, "synced", "truncated", "ends", "adaptive", "satisfied", "generation", "clipped", "misaligned")
SYNCED = ("dpo-trainer", "kto-trainer", "grpo-trainer", "rloo-trainer")
"""Trainers with sync_ref_model."""
MIXED = 0.6
"""ref_model_mixup_alpha of the runs."""
STORED = tuple(t for t in twin_runs.TWINS if t not in twin_runs.SAMPLED)
END = models.VOCABULARY - 1
"""Another token that ends a completion, in none of them."""
CLIP = (0.2, 0.28)
"""ε and ε_high of the runs whose ratios are beyond them."""
RATE = 0.05
"""Learning rate of the runs whose second step must differ from the first."""


PR: tuple[CheckCase, ...] = (
    ("sft-trainer", {"kind": "uneven"}),
    *(("grpo-trainer", {"kind": kind, "loss": "dapo"}) for kind in ("generation", "misaligned")),
)


@by_profile(pr=PR, covered=lambda case: True)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every kind, those that a trainer has; evaluation for all."""
    for trainer in twin_runs.JUDGED:
        for kind in OF_STORED if trainer in STORED else ("evaluation",):
            yield trainer, {"kind": kind}
    for trainer in SYNCED:
        yield trainer, {"kind": "synced"}
    for loss in LOSSES:
        yield "grpo-trainer", {"kind": "truncated", "loss": loss}
    yield "rloo-trainer", {"kind": "truncated"}
    for trainer in ("grpo-trainer", "rloo-trainer"):
        yield trainer, {"kind": "ends"}
    yield "grpo-trainer", {"kind": "adaptive"}
    yield "grpo-trainer", {"kind": "satisfied"}
    for loss in LOSSES:
        yield "grpo-trainer", {"kind": "generation", "loss": loss}
        yield "grpo-trainer", {"kind": "misaligned", "loss": loss}
    yield "grpo-trainer", {"kind": "clipped", "loss": "dapo"}
    for trainer in ("rloo-trainer", "gmpo-trainer"):
        for kind in ("generation", "clipped", "misaligned"):
            yield trainer, {"kind": kind}


@check(
    "windows",
    twin_runs.JUDGED,
    {"kind": Setting("evaluation", "what is looked at", KINDS), "loss": SETTINGS["loss"]},
    cases,
    paths=("released", "fixed"),
)
def beyond_one_window(call: CheckCall) -> Iterator[CheckResult]:
    """Evaluation, incomplete windows, second steps and resumed runs follow the same definition."""
    yield from RUNS[call.settings.kind](call.case.family, call.path, plain_twin(loss=call.settings.loss))


def _evaluation(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """The loss that evaluation reports on the window is the loss that training takes its gradient of."""
    run = twin_runs.build(trainer, s, per_device_eval_batch_size=8, num_generations_eval=stored_window.GENERATIONS)
    if "answer_input_ids" in getattr(run.eval_dataset, "column_names", ()):
        raise Unsupported(
            "KTO of the installed version puts <bos> before each prompt, and pairs as training batches are"
        )
    with trl.quiet():
        loss = float(run.evaluate()["eval_loss"])
    step = by_definition(trainer, s)
    yield judged("evaluation loss", step.judge_loss(loss), loss, step.loss)


def _incomplete(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """Five sequences in windows of four: the second step is the gradient of the one that is left."""
    yield from _epoch(trainer, path, s, 5, "1x4", expected=(4, 1))


def _uneven(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """Seven sequences two by two in windows of four: the last micro-batch of the last window holds one."""
    yield from _epoch(trainer, path, s, 7, "2x2", expected=(4, 3))


def _epoch(
    trainer: str, path: str, s: SimpleNamespace, count: int, split: str, expected: tuple[int, ...]
) -> Iterator[CheckResult]:
    part = twin_runs.rows(trainer)[:count]
    s = SimpleNamespace(**{**vars(s), "split": split})
    run = twin_runs.build(trainer, s, part=part, max_steps=-1, num_train_epochs=1, dataloader_drop_last=False)
    steps = twin_runs.train(run, path)
    sizes = tuple(len(found_rows(trainer, part, steps.window(i))) for i in range(len(steps.gradients)))
    yield holds("windows", sizes == expected, f"windows of {sizes} sequences instead of {expected}", gate="exact")
    last = len(steps.gradients) - 1
    step = _step(trainer, s.model, tuple(found_rows(trainer, part, steps.window(last))))
    yield gradients(step, steps.gradients[last], f"gradient of window {last + 1}")


@functools.lru_cache(maxsize=4)
def _step(trainer: str, model: str, rows: tuple[Row, ...]) -> ExactStep:
    s = SimpleNamespace(model=model, beta=SETTINGS["beta"].default, tools=False)
    return ExactStep(stored_window.policy(model, torch.float64), twin_losses.definition(trainer, s, rows))


def found_rows(trainer: str, part: Sequence[Row], micro_batches: list[dict[str, Any]]) -> list[Row]:
    """The rows whose completion is among the sequences of these micro-batches."""
    seen = [tokens for tokens, _ in batches.sequences_of(micro_batches)]
    sequences = twin_runs.sequences(trainer, part)
    return [row for row, (tokens, _) in zip(part, sequences, strict=True) if tokens in seen]


def _second(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """Two steps of four sequences: the second gradient is that of the definition at the parameters it was taken at."""
    steps = twin_runs.train(_two_steps(trainer, s), path)
    yield from _second_gradient(trainer, s, steps, 1)


def _resumed(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """The same from a checkpoint after the first step: same parameters, same sequences, gradient of the definition."""
    folder = Path(tempfile.mkdtemp(prefix="parity-resumed-"))
    try:
        saved = _two_steps(trainer, s, save_strategy="steps", save_steps=1, output_dir=str(folder))
        whole = twin_runs.train(saved, path)
        run = _two_steps(trainer, s, output_dir=str(folder))
        resumed = twin_runs.train(run, path, resume_from_checkpoint=str(folder / "checkpoint-1"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if len(resumed.gradients) != 1:
        yield holds("steps", False, f"{len(resumed.gradients)} steps after resuming at 1 of 2")
        return
    moved = [n for n, p in whole.parameters[1].items() if not torch.equal(p, resumed.parameters[0][n])]
    yield holds(
        "parameters", not moved, f"{len(moved)} parameters differ after resuming, first {moved[:1]}", gate="exact"
    )
    same = batches.sequences_of(whole.window(1)) == batches.sequences_of(resumed.window(0))
    yield holds("sequences", same, "the resumed run goes on with other sequences", gate="exact")
    yield from _second_gradient(trainer, s, resumed, 0)


def _synced(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """sync_ref_model after each of two steps: the reference is (1 - a)·reference + a·policy (TR-DPO, arXiv 2404.09656).

    The second step's gradient is that of the definition with this reference.
    """
    s = SimpleNamespace(**{**vars(s), "beta": 0.04})
    if trainer not in SYNCED:
        raise Unsupported(f"{trainer} has no sync_ref_model")
    drive.needs(TRAINERS[trainer], "sync_ref_model")
    run = _two_steps(trainer, s, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=MIXED)
    steps = twin_runs.train(run, path)
    first, moved = models.model(s.model, torch.float64), models.model(s.model, torch.float64)
    _mix(first, steps.parameters[1])
    _mix(moved, steps.parameters[1])
    _mix(moved, dict(run.accelerator.unwrap_model(run.model).named_parameters()))
    found = dict(run.accelerator.unwrap_model(run.ref_model).named_parameters())
    wanted = dict(moved.named_parameters())
    off = {n: float((found[n].double() - w).abs().max() / (6 * 2.0**-24 * w.abs().max())) for n, w in wanted.items()}
    worst = max(off, key=lambda name: off[name])
    yield CheckResult("reference", {"bound": off[worst]}, message=f"furthest off: {worst}" if off[worst] > 1 else "")
    yield from _second_gradient(trainer, s, steps, 1, first.eval().requires_grad_(False))


def _ends(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """The same, two of the others ended by the second of the two tokens that the model's generation config lists."""
    yield from _truncated(trainer, path, s, second=(0, 6))


def _truncated(trainer: str, path: str, s: SimpleNamespace, second: Sequence[int] = ()) -> Iterator[CheckResult]:
    """mask_truncated_completions: three of eight completions have no <eos>, earn their rewards, and are not trained on."""
    if trainer not in ("grpo-trainer", "rloo-trainer"):
        raise Unsupported("the trainer generates no completions that could be truncated")
    every = [dataclasses.replace(r, end=END) if i in second else r for i, r in enumerate(twin_runs.rows(trainer))]
    part = stored_window.without(every, (1, 4, 5))
    run = twin_runs.build(trainer, s, part=part, ends=(models.EOS, END) if second else ())
    if second and not hasattr(run, "eos_token_ids"):
        raise Unsupported(f"{TRAINERS[trainer]} of the installed version knows the tokenizer's <eos> alone")
    steps = twin_runs.train(run, path)
    earned = stored_window.rewards(twin_runs.sequences(trainer, every))
    step = ExactStep(
        stored_window.policy(s.model, torch.float64), twin_losses.definition(trainer, s, part, earned=earned)
    )
    yield judged("loss", step.judge_loss(sum(steps.losses)), sum(steps.losses), step.loss)
    yield gradients(step, steps.gradients[0])


def _adaptive(
    trainer: str, path: str, s: SimpleNamespace, target: float = 100.0, applied: float = 0.15, left: float = 0.2
) -> Iterator[CheckResult]:
    """use_adaptive_entropy (Skywork-OR1, arXiv 2505.22312): below the target the bonus grows by a step and is applied.

    Two steps of four sequences in one micro-batch each; the second gradient has the grown coefficient in it.
    """
    drive.needs(TRAINERS[trainer], "use_adaptive_entropy")
    adaptive: dict[str, Any] = {"use_adaptive_entropy": True, "entropy_target": target}
    adaptive |= {"entropy_coef": 0.1, "entropy_coef_delta": 0.05}
    s = SimpleNamespace(**{**vars(s), "split": "4x1"})
    run = twin_runs.build(trainer, s, max_steps=2, learning_rate=RATE, **adaptive)
    steps = twin_runs.train(run, path)
    rows = found_rows(trainer, twin_runs.rows(trainer), steps.window(1))
    model = stored_window.policy_at(s.model, steps.parameters[1])
    settings = {"loss_type": s.loss, "beta": 0.0, "max_completion_length": drive.COMPLETION, "entropy_coef": applied}
    window = twin_runs.sequences(trainer, rows)
    step = ExactStep(model, functools.partial(windows.grpo, window, s.model, settings, None, None))
    yield bounded("coefficient", float(run.entropy_coef), left, 1e-12, "0.1, twice moved by 0.05")
    yield gradients(step, steps.gradients[1], "gradient of step 2")


def _satisfied(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """Above its target the coefficient shrinks, and is not applied."""
    yield from _adaptive(trainer, path, s, target=0.0, applied=0.0, left=0.0)


def _clipped(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """One step with the log-probs of an older policy: ratios within and beyond both bounds; their logged shares."""
    drive.needs(TRAINERS[trainer], "epsilon", "epsilon_high")
    low, high = CLIP
    logging: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}
    run = twin_runs.build(trainer, s, epsilon=low, epsilon_high=high, **logging)
    window = twin_runs.sequences(trainer, twin_runs.rows(trainer))
    older = stored_window.policy(s.model, torch.float64, stored_window.OLDER)
    generation = windows.Generation(window, older, steps=1)
    with torch.no_grad():
        old = windows.completion_logps(generation.old, window)
    twin_runs.hand_old(run, {tuple(t): lp for (t, _), lp in zip(window, old, strict=True)})
    steps = twin_runs.train(run, path)
    yield twin_runs.all_there(trainer, steps)
    model = stored_window.policy(s.model, torch.float64)
    share = dict(zip(("low", "high"), windows.beyond(trainer, window, generation, CLIP, model).tolist(), strict=True))
    yield holds("beyond", all(0 < x < 0.5 for x in share.values()), f"{share}: the case tests nothing", gate="exact")
    yield from first_step(ExactStep(model, twin_losses.definition(trainer, s, generation=generation, clip=CLIP)), steps)
    share["region"] = sum(share.values())
    logged = drive.logged(run)
    for side, exact in share.items():
        name = f"clip_ratio/{side}_mean"
        if name in logged:
            yield bounded(name, float(logged[name]), exact, 2.0**-22, "the share of what is beyond the bound")


def _misaligned(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """Generations of two micro-batches, windows of three, and a last one of the fourth: from before the first step.

    Its ratios are to the policy that generated it, its tokens are estimated as half of the generation's.
    """
    s = SimpleNamespace(**{**vars(s), "split": "2x3"})
    more: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 1, "learning_rate": RATE, "steps_per_generation": 2}
    run = twin_runs.build(trainer, s, **more)
    if getattr(run.args, "steps_per_generation", None) != 2:
        raise Unsupported("the config of the installed version has no steps_per_generation")
    steps = twin_runs.train(run, path)
    every = twin_runs.rows(trainer)
    sizes = [len(found_rows(trainer, every, steps.window(i))) for i in range(len(steps.gradients))]
    yield holds("windows", sizes == [6, 2], f"windows of {sizes} sequences instead of [6, 2]", gate="exact")
    whole = twin_runs.sequences(trainer, found_rows(trainer, every, steps.batches[2:]))
    generation = windows.Generation(whole, stored_window.policy_at(s.model, steps.parameters[0]), steps=2)
    rows = found_rows(trainer, every, steps.window(1))
    model = stored_window.policy_at(s.model, steps.parameters[1])
    step = ExactStep(model, twin_losses.definition(trainer, s, rows, generation))
    yield gradients(step, steps.gradients[1], "gradient of window 2")


def _mix(reference: Any, policy: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.mul_(1 - MIXED).add_(policy[name].double(), alpha=MIXED)


def _two_steps(trainer: str, s: SimpleNamespace, **more: Any) -> Any:
    s = SimpleNamespace(**{**vars(s), "split": "2x2"})
    return twin_runs.build(trainer, s, max_steps=2, learning_rate=RATE, **more)


def _second_gradient(
    trainer: str, s: SimpleNamespace, steps: recorder.Steps, at: int, reference: Any = None
) -> Iterator[CheckResult]:
    rows = found_rows(trainer, twin_runs.rows(trainer), steps.window(at))
    if len(rows) != 4:
        raise Unsupported(f"the second window holds {len(rows)} known sequences instead of 4")
    model = stored_window.policy_at(s.model, steps.parameters[at])
    step = ExactStep(model, twin_losses.definition(trainer, s, rows, reference=reference))
    yield gradients(step, steps.gradients[at], "gradient of step 2")


def _generation(trainer: str, path: str, s: SimpleNamespace) -> Iterator[CheckResult]:
    """Two steps on one generation: the second one's ratios are to the policy that generated, not to the last one."""
    s = SimpleNamespace(**{**vars(s), "split": "2x2"})
    run = twin_runs.build(trainer, s, max_steps=2, learning_rate=RATE, steps_per_generation=4)
    if getattr(run.args, "steps_per_generation", None) != 4:
        raise Unsupported("the config of the installed version has no steps_per_generation")
    steps = twin_runs.train(run, path)
    old = stored_window.policy(s.model, torch.float64)
    whole = twin_runs.sequences(trainer, twin_runs.rows(trainer))
    generation = windows.Generation(whole, old, steps=2)
    for number, parameters in enumerate(steps.parameters):
        rows = found_rows(trainer, twin_runs.rows(trainer), steps.window(number))
        model = stored_window.policy_at(s.model, parameters)
        step = ExactStep(model, twin_losses.definition(trainer, s, rows, generation))
        yield gradients(step, steps.gradients[number], f"gradient of step {number + 1}")


RUNS = dict(
    zip(
        KINDS,
        (_evaluation, _incomplete, _uneven, _second, _resumed, _synced, _truncated, _ends, _adaptive)
        + (_satisfied, _generation, _clipped, _misaligned),
        strict=True,
    )
)
