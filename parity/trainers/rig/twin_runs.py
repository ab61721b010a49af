"""Run a real trainer on one stored window, with one variation that must not change its gradients."""

import ast
import functools
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.fixes.override import source_of
from parity.trainers.check import Quantity, same
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.trainers.rig.stored_window import Sample, Window
from parity.trainers.specs import SPECS
from parity.upstream import trl

PROMPTS_TOO = {"completion_only_loss": False}
"""Prompts are trained on too, so that a first token that is predicted from the sequence before it would show."""
PADDINGS: Mapping[str, Mapping[str, Any]] = {
    "extra": {"pad_to_multiple_of": 16},
    "none": {"padding_free": True, "max_length": None, **PROMPTS_TOO},
    "packed": {"packing": True, "max_length": 48, **PROMPTS_TOO},  # the window fills two rows, no sequence is cut
}
"""A twin's padding -> fields of the config, without the first of which it would be the same run twice."""
HEAD = "cast_lm_head_to_fp32"


def options(trainer: str, s: SimpleNamespace) -> dict[str, Any]:
    spec = SPECS[trainer]
    out: dict[str, Any] = recorder.plain(s.split) | {
        "beta": s.beta,
        "temperature": s.temperature,
        "num_generations": stored_window.GENERATIONS,
        "max_length": 64,
        "use_bias_correction_kl": False,
        **drive.checkpointing(s.checkpointing),
        **spec.options,
        **PADDINGS.get(s.padding, {}),
        **(PROMPTS_TOO if s.whole else {}),
    }
    out |= {"loss_type": s.loss} if "loss" in spec.own or s.kl else {}
    out |= {HEAD: True} if getattr(s, HEAD) else {}
    return out | ({"bf16": True} if s.precision == "autocast" else {})


def train(trainer: Any, path: str) -> recorder.Steps:
    """Trains and records it, on the path "fixed" with `parity.fixes` applied to the path that the version has."""
    with drive.fixed(path, trainer):
        return recorder.train(trainer)


class Run:
    """A run of a trainer (`trainer`: its family) over the window or some rows, built and trained when that is asked for.

    `s`: settings of the twin; `path`: of `check.PATHS`; `plain`: whether "fixed" patches the plain path of the trainer, also
    where there is a fused one; `adapter`: gives a model and its peft_config, and the LoRA is trained; `changed`: changes the
    policy first; `reported`: the log-probs of each row's completion that a sampler hands over with it; `config`: more of the
    trainer's config.
    """

    def __init__(
        self,
        trainer: str,
        s: SimpleNamespace,
        path: str = "released",
        rows: Sequence[Sample] | None = None,
        plain: bool = False,
        adapter: Callable[[], tuple[Any, Any]] | None = None,
        changed: Callable[[Any], Any] | None = None,
        reported: Sequence[list[float | None]] | None = None,
        **config: Any,
    ):
        self.trainer, self.s, self.path, self.plain, self.config = trainer, s, path, plain, config
        self.adapter, self.changed, self.reported = adapter, changed, reported
        self.window = Window.of(trainer, rows, s.whole)

    def build(self, **more: Any) -> Any:
        """The trainer; `more` goes to its config. "fused" and "fixed" take the version's fused path; "fixed" goes without
        where there is none, or where no fix of ours replaces it. Raises Unsupported when the installed version lacks the
        trainer or what the twin needs of its config."""
        spec, s, window = SPECS[self.trainer], self.s, self.window
        path = "released" if self.plain and self.path == "fixed" else self.path
        switches: Mapping[str, Any] = {}
        if path == "fused" or (path == "fixed" and spec.fused_fix):
            try:
                switches = trl.liger(drive.config(spec.upstream))
            except Unsupported:
                if path == "fused":
                    raise
        masked = {} if all(r.counted for r in window.rows) else {"mask_truncated_completions": True}
        policy, peft_config = self.adapter() if self.adapter else (stored_window.policy(s.model), None)
        if self.changed is not None:
            self.changed(policy)
        data = self.data()
        given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data}
        if self.adapter is not None:
            given["peft_config"] = peft_config
        elif spec.given == "ref_model":
            given["ref_model"] = models.model(s.model)
        if spec.given == "teacher_model":
            given["teacher_model"] = models.model(s.teacher)
        given["processing_class"] = tokenizer = self.tokenizer()
        padding = itertools.islice(PADDINGS.get(s.padding, ()), 1)
        drive.needs(spec.upstream, *padding, *masked, *((HEAD,) if getattr(s, HEAD) else ()))
        wanted = {**options(self.trainer, s), **switches, **masked, **self.config, **more}
        with mock.patch.object(tokenizer, "padding_side", "right" if s.padding == "right" else "left"):
            out = drive.build(spec.upstream, policy, wanted, **given)
        if self.adapter is not None:  # away from where it started: a reference that were the policy would show
            stored_window.fill_adapter(out.model, stored_window.TRAINED)
        if spec.generates == "method":
            _hand_out(out, window.rows, self.reported)
        if spec.generates == "model":  # the first of a prompt, then the other
            pairs = {}
            for row in window.rows:
                both = [[*stored_window.ids(text), row.end][: row.limit] for text in (row.completion, row.other)]
                pairs[tuple(stored_window.ids(row.prompt))] = both
            generate_in_model(out, pairs, lambda sequences: sequences)
        if s.tools:
            generate_tools(out)
        return out

    def data(self) -> Any:
        spec = SPECS[self.trainer]
        kind = drive.trl_class(spec.upstream)
        conversing = spec.given == "teacher_model" and not hasattr(kind, "_generate_single_turn")
        return stored_window.dataset(self.window.rows, "messages") if conversing else self.window.dataset()

    def tokenizer(self) -> Any:
        return models.own_tokenizer(self.s.pad)

    @functools.cached_property
    def built(self) -> Any:
        return self.build()

    @functools.cached_property
    def steps(self) -> recorder.Steps:
        return train(self.built, self.path)

    def all_there(self) -> Quantity:
        """Every sequence of the window, each once, prompt and completion as they were given."""
        return same(recorder.sequences_of(self.steps.batches), self.window.expected)


def _hand_out(trainer: Any, rows: Sequence[Sample], reported: Sequence[Any] | None) -> None:
    """Stored completions in place of generation; everything behind it is the trainer's own."""
    original = getattr(trainer, "_generate_single_turn", None)
    if original is None and not hasattr(trainer, "_generate_with_model"):
        raise Unsupported("the installed version does not generate in a method of its own")
    stored: dict[tuple[int, ...], list[tuple[list[int], Any]]] = {}
    for row, logps in zip(rows, reported or [None] * len(rows), strict=True):
        completion = stored_window.ids(row.completion) + ([row.end] if row.ended else [])
        stored.setdefault(tuple(stored_window.ids(row.prompt)), []).append((completion, logps))
    if original is None:
        trainer._local_teacher_tokenizer_matches_student = True  # it has one vocabulary, and no files to be read from
        generate_in_model(trainer, {prompt: [ids for ids, _ in own] for prompt, own in stored.items()})
        return
    names = handed_names(trainer, "_generate_single_turn")
    if reported and "logprobs" not in names:
        raise Unsupported(f"_generate_single_turn of the installed version returns {', '.join(names)}: no logprobs")

    def generate(prompts: list[Any], *_: Any, **__: Any) -> Any:
        if any(isinstance(part, dict) for p in prompts for part in p):
            raise Unsupported("the installed version writes a conversation out where it generates")
        prompt_ids = [stored_window.ids(p) if isinstance(p, str) else list(p) for p in prompts]
        left = {k: list(v) for k, v in stored.items()}
        unknown = ([models.EOS], [0.0])  # of a prompt that nobody gave: `all_there` tells
        handed = [left[tuple(p)].pop(0) if left.get(tuple(p)) else unknown for p in prompt_ids]
        completion_ids, logps = map(list, zip(*handed, strict=True))
        known = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "extra_fields": {}, "forward_kwargs": {}}
        known |= {"logprobs": logps} if reported else {}
        out = tuple(known.get(n) for n in names)
        return out if len(out) > 1 else out[0]

    trainer._generate_single_turn = generate


def generate_in_model(
    trainer: Any,
    stored: Mapping[tuple[int, ...], Sequence[list[int]]],
    handed: Callable[[Tensor], Any] = lambda sequences: SimpleNamespace(sequences=sequences),
    model: Any = None,
) -> None:
    """The stored completions of a prompt in turn, in place of `generate` of the trainer's model, or of another one."""
    turns = {prompt: itertools.cycle(completions) for prompt, completions in stored.items()}
    ends = trainer.processing_class.eos_token_id
    if trainer.processing_class.pad_token_id == ends and any(c[-1] != ends for own in stored.values() for c in own):
        raise Unsupported("model.generate fills up with <eos> here, and a stored completion does not end with it")

    def generate(input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        prompts = [tuple(tokens[seen.bool()].tolist()) for tokens, seen in zip(input_ids, attention_mask, strict=True)]
        unknown = itertools.repeat([ends])  # of a prompt that nobody gave
        completions = [torch.tensor(next(turns.get(prompt, unknown))) for prompt in prompts]
        filled = trainer.processing_class.pad_token_id
        new = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True, padding_value=filled)
        return handed(torch.cat([input_ids, new.to(input_ids)], 1))

    (trainer.model if model is None else model).generate = generate


def handed_names(trainer: Any, method: str) -> list[str]:
    """The names of what a trainer's method of generation returns; those of the class that it extends, where a user's own hands
    on what that returns, or its source cannot be read. Raises Unsupported where none returns completion_ids by that name."""
    written = [source_of(vars(kind).get(method)) for kind in type(trainer).__mro__]
    nodes = (node for text in written for node in ast.walk(ast.parse(textwrap.dedent(text))))
    for returned in (node.value for node in nodes if isinstance(node, ast.Return)):
        parts = returned.elts if isinstance(returned, ast.Tuple) else [returned]
        names = [part.id if isinstance(part, ast.Name) else "" for part in parts]
        if "completion_ids" in names:
            return names
    raise Unsupported(f"{method} of the installed version does not return completion_ids by that name")


def generate_tools(trainer: Any) -> None:
    """A tool mask beside the completions that the trainer's own generation hands on."""
    names = handed_names(trainer, "_generate") if hasattr(trainer, "_generate") else []
    if "tool_mask" not in names or trl.mentions("self.tools"):  # losses of 0.26 and 0.27 look at it beside tools alone
        raise Unsupported("the installed version generates no tool_mask that its loss looks at")

    def generated(args: Any, out: Any) -> Any:
        found = dict(zip(names, out, strict=True))
        found["tool_mask"] = [stored_window.external(torch.tensor(ids)).tolist() for ids in found["completion_ids"]]
        return tuple(found.values())

    drive.changed(trainer, "_generate", generated)


def hand_old(trainer: Any, logps: Mapping[tuple[int, ...], Tensor]) -> None:
    """Log-probs of an older policy, those of each sequence's completion, in place of the policy's own at generation."""

    def scored(args: Any, out: Any) -> Any:
        old = [logps[tuple(tokens)] for tokens, _ in recorder.sequences_of([out])]
        if "old_logps" in out:  # RLOO
            out["old_logps"] = torch.stack([lp.sum() for lp in old]).float()
        else:
            out["old_per_token_logps"] = torch.nn.utils.rnn.pad_sequence(old, batch_first=True).float()
        return out

    drive.changed(trainer, "_generate_and_score_completions", scored)
