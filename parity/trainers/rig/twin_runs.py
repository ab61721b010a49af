"""Run a real trainer on one stored window, with one variation that must not change its gradients."""

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.trainers.check import Quantity, holds
from parity.trainers.rig import batches, drive, models, recorder, stored_window
from parity.trainers.rig.stored_window import Sample, Sequences
from parity.trainers.specs import SPECS
from parity.upstream import trl

PACKED = 48
"""Tokens of a row of packed sequences: the window fills two, no sequence is cut."""


def rows(trainer: str) -> list[Sample]:
    """The window of a trainer: groups of one prompt where advantages are relative to a group."""
    return stored_window.rows(4 if SPECS[trainer].grouped else 8)


def expected(trainer: str, part: Sequence[Sample] | None = None) -> Sequences:
    """The token sequences that must reach the loss, each once."""
    chosen = rows(trainer) if part is None else part
    scored = sequences(trainer, chosen)
    return scored + _of(trainer, chosen, "other") if SPECS[trainer].paired else scored


def sequences(trainer: str, chosen: Sequence[Sample]) -> Sequences:
    return _of(trainer, chosen, "completion")


def pair(trainer: str, chosen: Sequence[Sample], penalty: float = 0.0) -> tuple[Sequences, Sequences]:
    """The chosen and the rejected sequences of the rows: the dataset's, or those of the higher and the lower reward.

    `penalty`: what a generated completion without an end loses.
    """
    if SPECS[trainer].generates:
        return stored_window.preferred(chosen, penalty)
    return sequences(trainer, chosen), _of(trainer, chosen, "other")


def labels(chosen: Sequence[Sample]) -> list[bool]:
    """Whether each row is desirable."""
    return [row.label for row in chosen]


def _of(trainer: str, chosen: Sequence[Sample], name: str) -> Sequences:
    spec = SPECS[trainer]
    found = stored_window.sequences(chosen, name, generated=spec.generates == "method")
    return [([models.BOS, *tokens], start + 1) for tokens, start in found] if spec.begun else found


def dataset(trainer: str, chosen: Sequence[Sample]) -> Any:
    """The window as the dataset that the trainer takes."""
    spec = SPECS[trainer]
    if spec.given == "teacher_model" and not hasattr(drive.trl_class(spec.upstream), "_generate_single_turn"):
        return stored_window.dataset(chosen, "messages")
    if spec.grouped:
        chosen = list({sample.prompt: sample for sample in chosen}.values())
    return stored_window.dataset(chosen, "prompts" if spec.generates else spec.data)


def beta(trainer: str, s: SimpleNamespace) -> float:
    """The weight of the reference or the teacher: the trainer's own, or the twin's."""
    own = SPECS[trainer].beta
    return float(s.beta) if own is None else own


def options(trainer: str, s: SimpleNamespace) -> dict[str, Any]:
    """Arguments of the trainer's config for a twin."""
    spec = SPECS[trainer]
    batch, accumulation = map(int, s.split.split("x"))
    out: dict[str, Any] = recorder.PLAIN | {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "beta": beta(trainer, s),
        "temperature": 1.0,
        "num_generations": stored_window.GENERATIONS,
        "max_length": None if s.padding == "none" else 64,
        "use_bias_correction_kl": False,
        **drive.checkpointing(s.checkpointing),
        **spec.options,
    }
    out |= {"loss_type": s.loss} if "loss" in spec.own else {}
    out |= {"pad_to_multiple_of": 16} if s.padding == "extra" else {}
    out |= {"padding_free": True} if s.padding == "none" else {}
    out |= {"packing": True, "max_length": PACKED} if s.padding == "packed" else {}
    out |= {"bf16": True} if s.precision == "autocast" else {}
    return out


def needed(s: SimpleNamespace) -> tuple[str, ...]:
    """Config fields without which the twin would be the same run twice."""
    return {"extra": ("pad_to_multiple_of",), "none": ("padding_free",), "packed": ("packing",)}.get(s.padding, ())


def build(
    trainer: str,
    s: SimpleNamespace,
    path: str = "released",
    part: Sequence[Sample] | None = None,
    adapter: Any = None,
    ends: Sequence[int] = (),
    **more: Any,
) -> Any:
    """The trainer over the window or a part of it, on a path of `check.PATHS`; `more` goes to its config.

    With an `adapters.Adapter` it trains that one instead of the whole model; `ends`: the tokens that end a completion.

    "fused" and "fixed" take the version's fused path; "fixed" goes without where there is none.

    Raises:
        Unsupported: when the installed version lacks the trainer or what the twin needs of its config.
    """
    spec, name = SPECS[trainer], SPECS[trainer].upstream
    chosen = rows(trainer) if part is None else part
    switches = {} if path == "released" else _fused(drive.config(name), required=path == "fused")
    masked = {} if all(r.counted for r in chosen) else {"mask_truncated_completions": True}
    data = dataset(trainer, chosen)
    given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data}
    policy = stored_window.policy(s.model) if adapter is None else adapter.model(s.model)
    if ends:
        policy.generation_config.eos_token_id = list(ends)
    if adapter is not None:
        given["peft_config"] = adapter.config()
    elif spec.given == "ref_model":
        given["ref_model"] = models.model(s.model)
    if spec.given == "teacher_model":
        given["teacher_model"] = models.model(s.teacher)
    wanted = {**options(trainer, s), **switches, **masked, **more}
    given["processing_class"] = tokenizer = models.tokenizer(s.pad)
    side, tokenizer.padding_side = tokenizer.padding_side, "right" if s.padding == "right" else "left"
    try:
        out = drive.build(name, policy, wanted, (*needed(s), *masked), **given)
    finally:
        tokenizer.padding_side = side
    if adapter is not None:
        adapter.move(out.model)
    if s.padding == "none" and not getattr(out, "padding_free", True):
        raise Unsupported("padding_free=True: the installed version falls back to padding")
    if spec.generates == "method":
        _hand_out(out, chosen)
    if spec.generates == "model":
        _generate_stored(out, chosen)
    if s.tools:
        (_with_tools if spec.rewarded else generate_tools)(out)
    return out


def unfixed(path: str) -> str:
    """The path to build a run on for trainers whose fused loss no fix of ours replaces: "fixed" patches their plain path."""
    return "fused" if path == "fused" else "released"


def _fused(config: type, required: bool) -> dict[str, Any]:
    try:
        return trl.liger(config)
    except Unsupported:
        if required:
            raise
        return {}


def train(trainer: Any, path: str, **options: Any) -> recorder.Steps:
    """Trains and records it, on the path "fixed" with `parity.fixes` applied to the path that the version has."""
    with drive.fixed(path, trainer):
        return recorder.train(trainer, **options)


def _hand_out(trainer: Any, chosen: Sequence[Sample]) -> None:
    """Stored completions in place of generation; everything behind it is the trainer's own."""
    original = getattr(trainer, "_generate_single_turn", None)
    if original is None and not hasattr(trainer, "_generate_with_model"):
        raise Unsupported("the installed version does not generate in a method of its own")
    stored: dict[tuple[int, ...], list[list[int]]] = {}
    for row in chosen:
        completion = stored_window.ids(row.completion) + ([row.end] if row.ended else [])
        stored.setdefault(tuple(stored_window.ids(row.prompt)), []).append(completion)

    if original is None:
        trainer._local_teacher_tokenizer_matches_student = True  # it has one vocabulary, and no files to be read from
        generate_in_model(trainer, stored)
        return
    names = handed_names(original)

    def generate(prompts: list[Any], *_: Any, **__: Any) -> Any:
        prompt_ids = [stored_window.ids(p) if isinstance(p, str) else list(p) for p in prompts]
        left = {k: list(v) for k, v in stored.items()}
        completion_ids = [left[tuple(p)].pop(0) for p in prompt_ids]
        known = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "extra_fields": {}, "forward_kwargs": {}}
        out = tuple(known.get(n) for n in names)
        return out if len(out) > 1 else out[0]

    generate.original = original  # type: ignore[attr-defined]
    trainer._generate_single_turn = generate


def generate_in_model(
    trainer: Any,
    stored: Mapping[tuple[int, ...], Sequence[list[int]]],
    handed: Callable[[Tensor], Any] = lambda sequences: SimpleNamespace(sequences=sequences),
) -> None:
    """The stored completions of a prompt in turn, in place of `model.generate`: distillation's up to 1.9, online DPO's."""
    turns = {prompt: itertools.cycle(completions) for prompt, completions in stored.items()}
    ends = trainer.processing_class.eos_token_id
    if trainer.processing_class.pad_token_id == ends and any(c[-1] != ends for own in stored.values() for c in own):
        raise Unsupported("model.generate fills up with <eos> here, and a stored completion does not end with it")

    def generate(input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        prompts = [tuple(tokens[seen.bool()].tolist()) for tokens, seen in zip(input_ids, attention_mask, strict=True)]
        completions = [torch.tensor(next(turns[prompt])) for prompt in prompts]
        filled = trainer.processing_class.pad_token_id
        new = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True, padding_value=filled)
        return handed(torch.cat([input_ids, new.to(input_ids)], 1))

    trainer.model.generate = generate


def handed_names(generate: Any) -> list[str]:
    """The names of what a trainer's method of generation returns.

    Raises:
        Unsupported: where it does not return completion_ids by that name.
    """
    handed = re.findall(r"return ((?:\w+, )*completion_ids(?:, \w+)*)\n", inspect.getsource(generate))
    if not handed:
        raise Unsupported(f"{generate.__name__} of the installed version does not return completion_ids by that name")
    return str(handed[0]).split(", ")


def _generate_stored(trainer: Any, chosen: Sequence[Sample]) -> None:
    """The stored pairs in place of `model.generate`: the first of a prompt, then the other; tokenising, masks are theirs."""
    stored = {
        tuple(stored_window.ids(r.prompt)): [
            [*stored_window.ids(text), models.EOS][: r.limit] for text in (r.completion, r.other)
        ]
        for r in chosen
    }
    generate_in_model(trainer, stored, lambda sequences: sequences)


def external(tokens: Tensor) -> Tensor:
    """1 where a token counts as the model's own, 0 where it is part of a tool's answer: every fifth word."""
    return (tokens % 5 != 0).long()


def _with_tools(trainer: Any) -> None:
    """A tool mask beside what the trainer's own scoring hands to its own batching, as a tool-calling run has it."""
    score = trainer._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        out = score(inputs)
        out["tool_mask"] = torch.where(out["completion_mask"].bool(), external(out["completion_ids"]), 1)
        if trl.mentions("self.tools"):  # the losses of 0.26 and 0.27 look at the mask for trainers with tools only
            trainer.tools = [external]
        return out

    if not trl.mentions("tool_mask"):
        raise Unsupported("the installed version reads no tool_mask")
    trainer._generate_and_score_completions = scored


def generate_tools(trainer: Any) -> None:
    """A tool mask beside the completions that the trainer's own generation hands on."""
    original: Any = getattr(trainer, "_generate", None)
    names = handed_names(original) if original else []
    if "tool_mask" not in names:
        raise Unsupported("the installed version generates no tool_mask")

    def generate(*args: Any, **options: Any) -> Any:
        out = dict(zip(names, original(*args, **options), strict=True))
        out["tool_mask"] = [external(torch.tensor(ids)).tolist() for ids in out["completion_ids"]]
        return tuple(out.values())

    trainer._generate = generate


def hand_old(trainer: Any, logps: Mapping[tuple[int, ...], Tensor]) -> None:
    """Log-probs of an older policy, those of each sequence's completion, in place of the policy's own at generation."""
    score = trainer._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        out = score(inputs)
        old = [logps[tuple(tokens)] for tokens, _ in batches.sequences_of([out])]
        if "old_logps" in out:  # RLOO
            out["old_logps"] = torch.stack([lp.sum() for lp in old]).float()
        else:
            out["old_per_token_logps"] = torch.nn.utils.rnn.pad_sequence(old, batch_first=True).float()
        return out

    trainer._generate_and_score_completions = scored


def all_there(trainer: str, steps: recorder.Steps, part: Sequence[Sample] | None = None) -> Quantity:
    """Every sequence of the window, each once, prompt and completion as they were given."""
    wanted, got = sorted(expected(trainer, part)), sorted(batches.sequences_of(steps.batches))
    missing = [w for w in wanted if w not in got]
    message = (
        f"{len(got)} of {len(wanted)} sequences; missing {missing[:1]}, got {[g for g in got if g not in wanted][:1]}"
    )
    return holds("sequences", wanted == got, message, gate="exact", value=float(len(got)))
