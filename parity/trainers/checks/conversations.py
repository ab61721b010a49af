"""Data as conversations: which tokens a chat template makes of them, and which of those are in the loss."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds
from parity.trainers.checks.twins import twin
from parity.trainers.definitions.formulas import LOSSES
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.trainers.rig.stored_window import Sample, Window
from parity.trainers.rig.twin_runs import Run
from parity.upstream import trl

USER, ASSISTANT = "w5", "w6"
"""The words before a message, by its role."""
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'ASSISTANT ' }}{% generation %}{{ m['content'] + ' <eos>' }}"
    "{% endgeneration %}{% else %}{{ 'USER ' + m['content'] }}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT ' }}{% endif %}"
)
"""A generation ends with the word, not the space behind it: the mask of a character that is in no token goes to the end."""
SETTINGS = {
    "turns": Setting(
        "one",
        "an answer to a prompt; SFT's also: two of each, trained on as a whole, on the assistant's words alone, or on those of a "
        "completion that is the last answer",
        ("one", "all", "assistant", "last"),
    ),
    "beside": Setting(
        "",
        "SFT: formatting_func writes the text, of a dataset with this column besides: messages, or dataset_text_field",
        ("", "told", "messages", "content"),
    ),
}
CASES: list[CheckCase] = [
    *((trainer, {}) for trainer in LOSSES),
    ("sft-trainer", {"turns": "all"}),
    ("sft-trainer", {"turns": "assistant"}),
    ("sft-trainer", {"turns": "last"}),
    *(("sft-trainer", {"beside": column}) for column in ("told", "messages", "content")),
]


class _Conversing(Run):
    """A run over conversations that the chat template writes out as the rows of the window."""

    def __init__(self, call: CheckCall, given: Sequence[Sample], **config: Any):
        told = [dataclasses.replace(row, prompt=f"{USER} {row.prompt}{ASSISTANT} ") for row in given]
        super().__init__(call.case.family, twin(call.case.family), call.path, told, plain=True, **config)
        self.given, self.turns = given, call.settings.turns

    def tokenizer(self) -> Any:
        found = super().tokenizer()
        found.chat_template = TEMPLATE.replace("ASSISTANT", ASSISTANT).replace("USER", USER)
        return found

    def data(self) -> Any:
        from datasets import Dataset

        turns = [_messages(row) for row in self.given]
        if self.turns == "last":
            return Dataset.from_list([{"prompt": said[:-1], "completion": said[-1:]} for said in turns])
        if self.turns != "one":
            return Dataset.from_list([{"messages": said} for said in turns])
        roles = {"prompt": "user", **dict.fromkeys(("completion", "chosen", "rejected", "reference"), "assistant")}
        rows = Window(self.trainer, self.given).dataset()
        said = ({k: [{"role": roles[k], "content": row[k].strip()}] for k in roles if k in row} for row in rows)
        return Dataset.from_list([row | texts for row, texts in zip(rows, said, strict=True)])


def _messages(row: Sample) -> list[dict[str, str]]:
    texts = [row.prompt.strip(), row.completion, row.other, row.completion]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _written(row: Sample, turns: str) -> tuple[list[int], list[int]]:
    """Token ids of the messages, and whether each is in the loss."""
    ids: list[int] = []
    loss: list[int] = []
    said, whole = _messages(row), turns == "all"
    for number, message in enumerate(said, 1):
        content, own = stored_window.ids(message["content"]), message["role"] == "assistant"
        ids += [*stored_window.ids(ASSISTANT if own else USER), *content, *([models.EOS] if own else [])]
        told = whole or (own and (turns == "assistant" or number == len(said)))
        loss += [int(whole), *[int(told)] * (len(content) + own)]
    return ids, [0, *loss[1:]]  # no model predicts a first token


def _formatted(call: CheckCall) -> Quantity:
    """Each text that formatting_func returns, once, whichever columns it was made of."""
    from datasets import Dataset

    if not trl.accepts(drive.trl_class(call.trainer), "formatting_func"):
        raise Unsupported(f"{call.trainer} takes no formatting_func")
    window, column = Window.of(call.case.family, whole=True), call.settings.beside
    data: list[dict[str, Any]] = [
        {column: _messages(row) if column == "messages" else row.other} | {"told": row.prompt + row.completion}
        for row in window.rows
    ]
    config = recorder.plain("8x1") | ({"dataset_text_field": column} if column == "content" else {})
    given = {"train_dataset": Dataset.from_list(data), "formatting_func": lambda row: row["told"]}
    trainer = drive.build(call.trainer, models.model("llama"), config, **given)
    found, wanted = sorted(recorder.sequences_of(recorder.train(trainer).batches)), sorted(window.sequences)
    return holds("sequences", found == wanted, f"the first is {found[:1]} instead of {wanted[:1]}", "exact")


@check("conversations", tuple(LOSSES), SETTINGS, lambda seed: CASES, pr=CASES, paths=("released",))
def conversations(call: CheckCall) -> Iterator[Quantity]:
    """Each sequence as the chat template writes it, once, and the tokens of the answer in the loss."""
    turns, beside = call.settings.turns, call.settings.beside
    if beside:
        yield _formatted(call)
        return
    if turns != "one" and call.case.family != "sft-trainer":
        raise Unsupported("conversations of several turns are SFT's")
    config = {"assistant_only_loss": True} if turns in ("assistant", "last") else {}
    drive.needs(call.trainer, *config)
    run = _Conversing(call, Window.of(call.case.family).rows, **config)
    if turns == "one":
        yield run.all_there()
        return
    parts = [part for batch in run.steps.batches for part in recorder.parts(batch)]
    found = sorted(
        (ids[there.bool()].tolist(), [0, *loss[there.bool()].tolist()[1:]])
        for part in parts
        for ids, there, loss in zip(*part, strict=True)
    )
    wanted = sorted(_written(row, turns) for row in run.given)
    other = next(((f, w) for f, w in zip(found, wanted, strict=False) if f != w), "")
    yield holds(
        "sequences", found == wanted, f"{len(found)} of {len(wanted)}; the first that differs: {other}", "exact"
    )
