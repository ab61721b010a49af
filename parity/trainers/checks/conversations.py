"""Data as conversations: which tokens a chat template makes of them, and which of those are in the loss."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds, same
from parity.trainers.checks.twins import twin
from parity.trainers.definitions.formulas import LOSSES
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.trainers.rig.stored_window import Sample, Window
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import SPECS

USER, ASSISTANT, TOOL, FIRST = "w5", "w6", "w7", "w8"
"""The words before a message, by its role, a tool's name, and the first word of an answer."""
ARGUMENTS = ("w9", "w10")
"""Two names of a call's argument. A table of rows has both in each row, one without a value."""
SHAREGPT = {"user": "human", "assistant": "gpt"}
"""ShareGPT's names of roles."""
TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] + ' ' }}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'ASSISTANT ' }}{% generation %}{{ m['content'] + ' <eos>' }}"
    "{% endgeneration %}{% else %}{{ 'USER ' + m['content'] }}{% endif %}{{ ' ' }}"
    "{% for c in m['tool_calls'] or [] %}{% for a in c['function']['arguments'] %}{{ a + ' ' }}{% endfor %}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT ' }}{% endif %}"
)
"""A generation ends with the word, not the space behind it: the mask of a character that is in no token goes to the end."""
SETTINGS = {
    "turns": Setting(
        "one",
        "an answer to a prompt; to one that ends with its first word (prefilled); both texts, whose tokenizer puts <bos> first; "
        "SFT's also: two of each, trained on as a whole, on the assistant's words alone, on those of a completion that is the "
        "last answer, refused for completion_only_loss without a completion (messages), or as a whole in ShareGPT's form",
        ("one", "prefilled", "texts", "all", "assistant", "last", "messages", "sharegpt"),
    ),
    "beside": Setting(
        "",
        "SFT: formatting_func writes the text, of a dataset with this column besides: messages, or dataset_text_field; "
        "tools of a prompt; calls in it, of every second row with another argument; GKD: the prompt of its messages",
        ("", "told", "messages", "content", "tools", "calls", "prompt"),
    ),
}
GKD = "gkd-trainer"
TOOLS = [{"type": "function", "function": {"name": TOOL, "description": "", "parameters": {"type": "object"}}}]
PR: list[CheckCase] = [
    *((trainer, {}) for trainer in LOSSES),
    ("sft-trainer", {"turns": "all"}),
    ("sft-trainer", {"turns": "assistant"}),
    ("sft-trainer", {"turns": "last"}),
    *(("sft-trainer", {"beside": column}) for column in ("told", "messages", "content")),
]
CASES: list[CheckCase] = [
    *PR,
    *(("sft-trainer", {"turns": turns}) for turns in ("messages", "sharegpt")),
    *((trainer, {"turns": "texts"}) for trainer in LOSSES),
    *((trainer, {"turns": "prefilled"}) for trainer in LOSSES if SPECS[trainer].generates),
    *((trainer, {"beside": "tools"}) for trainer in LOSSES if not SPECS[trainer].generates),
    *((trainer, {"beside": "calls"}) for trainer in LOSSES),
    *((GKD, settings) for settings in ({}, {"beside": "tools"}, {"beside": "prompt"})),
]


class _Conversing(Run):
    """A run over conversations that the chat template writes out as the rows of the window."""

    def __init__(self, call: CheckCall, given: Sequence[Sample], **config: Any):
        told = _told(call, given)
        super().__init__(call.case.family, twin(call.case.family), call.path, told, plain=True, **config)
        self.given, self.turns, self.beside = given, call.settings.turns, call.settings.beside

    def tokenizer(self) -> Any:
        return _tokenizer(self.turns == "texts")

    def data(self) -> Any:
        from datasets import Dataset

        turns = [_messages(row) for row in self.given]
        if self.turns == "last":
            return Dataset.from_list([{"prompt": said[:-1], "completion": said[-1:]} for said in turns])
        if self.turns == "sharegpt":
            shared = [[{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in said] for said in turns]
            return Dataset.from_list([{"conversations": said} for said in shared])
        if self.turns in ("all", "assistant", "messages"):
            return Dataset.from_list([{"messages": said} for said in turns])
        if self.turns == "texts":
            return Window(self.trainer, self.given).dataset()
        roles = {"prompt": "user", **dict.fromkeys(("completion", "chosen", "rejected", "reference"), "assistant")}
        rows = Window(self.trainer, self.given).dataset()
        said = [{k: [{"role": roles[k], "content": row[k].strip()}] for k in roles if k in row} for row in rows]
        if self.beside == "calls":
            calls = _calls(self.given)
            said = [row | {"prompt": row["prompt"] + _called(calls[row["prompt"][0]["content"]])} for row in said]
        out = [row | texts | _beside(self.beside) for row, texts in zip(rows, said, strict=True)]
        for row in out if self.turns == "prefilled" else []:
            row["prompt"].append({"role": "assistant", "content": FIRST})
        return Dataset.from_list(out)


def _read(trainer: Any, tokenizer: Any) -> list[list[int]]:
    """What a reward model reads that takes the place of reward functions."""
    out: list[list[int]] = []

    class Scores(torch.nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
            out.extend(ids[there.bool()].tolist() for ids, there in zip(input_ids, attention_mask, strict=True))
            return SimpleNamespace(logits=torch.zeros(len(input_ids), 1))

    trainer.reward_funcs, trainer.reward_processing_classes = [Scores()], [tokenizer]
    return out


def _words(sequences: Iterable[Sequence[int]]) -> list[list[int]]:
    """Each sequence without <bos>, <eos> and padding."""
    return [[token for token in ids if token > models.BOS] for ids in sequences]


def _tokenizer(begins: bool = False) -> Any:
    out = models.own_tokenizer()
    out.chat_template = TEMPLATE.replace("ASSISTANT", ASSISTANT).replace("USER", USER)
    if begins:
        from tokenizers.processors import TemplateProcessing

        out.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", models.BOS)])
    return out


def _beside(column: str, prompt: str = "") -> dict[str, Any]:
    columns = {"tools": TOOLS, "prompt": prompt.strip()}
    return {column: columns[column]} if column in columns else {}


def _calls(given: Iterable[Sample]) -> dict[str, str]:
    """The argument of the call in each prompt: in turns another."""
    return dict(zip(dict.fromkeys(row.prompt.strip() for row in given), itertools.cycle(ARGUMENTS), strict=False))


def _called(argument: str) -> list[dict[str, Any]]:
    """A call in the prompt of a row, and what the tool says."""
    function = {"name": TOOL, "arguments": {argument: 1}}
    calls = [{"type": "function", "function": function}]
    return [{"role": "assistant", "content": FIRST, "tool_calls": calls}, {"role": "tool", "content": TOOL}]


def _told(call: CheckCall, given: Sequence[Sample]) -> list[Sample]:
    """The rows, each prompt as the model should read it."""
    begin, tool = "" if call.spec.begun else "<bos> ", f"{TOOL} " * (call.settings.beside == "tools")
    first = f"{FIRST} " * (call.settings.turns == "prefilled")
    ends = (begin, "") if call.settings.turns == "texts" else (f"{tool}{USER} ", f"{ASSISTANT} {first}")
    calls, out = _calls(given), []
    for row in given:
        called = f"{ASSISTANT} {FIRST} <eos> {calls[row.prompt.strip()]} {USER} {TOOL} " * (
            call.settings.beside == "calls"
        )
        out.append(dataclasses.replace(row, prompt=f"{ends[0]}{row.prompt}{called}{ends[1]}"))
    return out


def _messages(row: Sample) -> list[dict[str, str]]:
    texts = [row.prompt.strip(), row.completion, row.other, row.completion]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _written(row: Sample, turns: str) -> tuple[list[int], list[int]]:
    """Token ids of the messages, and whether each is in the loss."""
    ids: list[int] = []
    loss: list[int] = []
    said, whole = _messages(row), turns in ("all", "sharegpt")
    for number, message in enumerate(said, 1):
        content, own = stored_window.ids(message["content"]), message["role"] == "assistant"
        ids += [*stored_window.ids(ASSISTANT if own else USER), *content, *([models.EOS] if own else [])]
        told = whole or (own and (turns == "assistant" or number == len(said)))
        loss += [int(whole), *[int(told)] * (len(content) + own)]
    return ids, [0, *loss[1:]]  # no model predicts a first token


def _formatted(call: CheckCall) -> Quantity:
    """Each text that formatting_func returns, once, whichever columns it was made of."""
    from datasets import Dataset

    window, column = Window.of(call.case.family, whole=True), call.settings.beside
    data: list[dict[str, Any]] = [
        {column: _messages(row) if column == "messages" else row.other} | {"told": row.prompt + row.completion}
        for row in window.rows
    ]
    config = recorder.plain("8x1") | ({"dataset_text_field": column} if column == "content" else {})
    given = {"train_dataset": Dataset.from_list(data), "formatting_func": lambda row: row["told"]}
    return _trained(call, window, config, **given)


def _trained(call: CheckCall, window: Window, config: Mapping[str, Any], **given: Any) -> Quantity:
    trainer = drive.build(call.trainer, models.model("llama"), config, **given)
    return same(recorder.sequences_of(recorder.train(trainer).batches), window.sequences)


def _taught(call: CheckCall) -> Quantity:
    """GKD: what of messages is the prompt, and in the loss, does not depend on a column beside them."""
    from datasets import Dataset

    rows = stored_window.rows()
    data = [{"messages": _messages(row)[:2], **_beside(call.settings.beside, row.prompt)} for row in rows]
    given = {"teacher_model": models.model("llama"), "train_dataset": Dataset.from_list(data)}
    config = recorder.plain("8x1") | {"lmbda": 0.0, "max_length": 64}
    window = Window.of(call.case.family, _told(call, rows))
    return _trained(call, window, config, processing_class=_tokenizer(), **given)


@check("conversations", (*LOSSES, GKD), SETTINGS, lambda seed: CASES, pr=PR, paths=("released",))
def conversations(call: CheckCall) -> Iterator[Quantity]:
    """Each sequence as the chat template writes it, once, and the tokens of the answer in the loss."""
    turns, beside, family = call.settings.turns, call.settings.beside, call.case.family
    asked = {n: v for n, v in vars(call.settings).items() if n in SETTINGS and v != SETTINGS[n].default}
    if (family, asked) not in CASES:
        raise Unsupported(f"{call.trainer} is not given such data")
    if family == GKD or beside not in ("", "tools", "calls"):
        yield _taught(call) if family == GKD else _formatted(call)
        return
    config = {"assistant_only_loss": True} if turns in ("assistant", "last") else {}
    config |= {"completion_only_loss": True} if turns == "messages" else {}
    drive.needs(call.trainer, *config)
    run = _Conversing(call, Window.of(family).rows, **config)
    if turns == "messages":
        try:
            run.built  # noqa: B018
        except ValueError as error:
            raise Unsupported(f"refused: {error}") from error
    if turns in ("one", "prefilled", "texts"):
        rewarded = turns == "texts" and hasattr(run.built, "reward_funcs")
        read = _read(run.built, run.tokenizer()) if rewarded else []
        yield run.all_there()
        if rewarded:
            begun = sum(ids[0] == models.BOS for ids in read)
            yield holds("reward model", begun == len(read), f"{begun} of {len(read)} begin with <bos>")
            trained = recorder.sequences_of(run.steps.batches)
            yield same(_words(read), _words(ids for ids, _ in trained), "reward model's texts")
        return
    parts = [part for batch in run.steps.batches for part in recorder.parts(batch)]
    found = [
        (ids[there.bool()].tolist(), [0, *loss[there.bool()].tolist()[1:]])
        for part in parts
        for ids, there, loss in zip(*part, strict=True)
    ]
    yield same(found, [_written(row, turns) for row in run.given])
