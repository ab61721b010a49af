"""transformers' own Trainer, and the layers that Liger exchanges in its model: one step and an evaluation of several models."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.judge.oracle import Oracle
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, check, entry, shared
from parity.trainers.checks.variations import EXPERTS, balance
from parity.trainers.definitions.scored import logits, rows
from parity.trainers.definitions.training_step import exact_step, first_step, measured, window_loss
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.upstream import trl

FAMILY, CLASSIFIER, IGNORED = "transformers-trainer", "classifier", -100
LENGTHS, HIDDEN, CLASSES = (9, 5, 12, 7), (0, 2, 4, 0), (0, 1, 2, 0)
"""Of each sequence its tokens, how many of its first labels are ignored, and its class."""
COUNT = len(LENGTHS)
SMOOTHED, COEFFICIENT = 0.1, 0.5
ADAPTERS: dict[str, tuple[str, ...]] = {"": (), "layers": ("q_proj",), "head": ("q_proj", "lm_head")}
SETTINGS = {
    "model": Setting(
        "llama",
        "tiny model; llama_relu: hidden_act relu; classifier: of whole sequences",
        ("llama", "qwen2", "qwen3", "gemma2", "granite", "gpt2", EXPERTS, *models.MORE),
    ),
    "split": Setting("4x1", "batch x accumulation", ("4x1", "1x4")),
    "smoothing": Setting(0.0, "label_smoothing_factor", (0.0, SMOOTHED)),
    "derived": Setting(False, "the model's class is derived from transformers', as it is under FSDP2", (False, True)),
    "adapter": Setting("", "a LoRA on the layers, or on the LM head too", tuple(ADAPTERS)),
}
PR: list[CheckCase] = [
    (FAMILY, {"split": "1x4", "smoothing": SMOOTHED}),
    *((FAMILY, {"model": name}) for name in ("gemma2", "falcon_h1")),
]
Batch = dict[str, Tensor]


def cases(seed: int) -> Iterator[CheckCase]:
    for model in SETTINGS["model"].choices or ():
        yield FAMILY, {"model": model}
        yield FAMILY, {"model": model, "split": "1x4"}
        if model != CLASSIFIER:
            yield FAMILY, {"model": model, "smoothing": SMOOTHED}
    yield from ((FAMILY, {"derived": True, "smoothing": smoothing}) for smoothing in (0.0, SMOOTHED))
    yield from ((FAMILY, {"adapter": adapter}) for adapter in ADAPTERS)


class Rows:
    """Sequences by number (the dataset), with a label of each token, or a class each."""

    def __init__(self, classes: bool):
        self.classes = classes
        self.ids = [models.ids(9, f"row {n}", length) for n, length in enumerate(LENGTHS)]
        labels = [[IGNORED] * hidden + ids[hidden:] for ids, hidden in zip(self.ids, HIDDEN, strict=True)]
        self.labels = [torch.tensor([c]) for c in CLASSES] if classes else [torch.tensor(own) for own in labels]

        self.numbers = range(COUNT)

    def batch(self, chosen: Sequence[int]) -> Batch:
        """As a data collator makes it, padded on the right."""
        labels = torch.nn.utils.rnn.pad_sequence([self.labels[n] for n in chosen], True, IGNORED)
        return rows([self.ids[n] for n in chosen]) | {"labels": labels[:, 0] if self.classes else labels}

    def logits(self, model: Any) -> list[Tensor]:
        """Of each sequence: (T, V), or those of its last token, (1, classes)."""
        if not self.classes:
            return logits(model, self.ids)
        hidden = model.model(**rows(self.ids), use_cache=False).last_hidden_state
        return [model.score(x[len(ids) - 1])[None] for x, ids in zip(hidden, self.ids, strict=True)]

    def loss(self, model: Any, smoothing: float) -> Tensor:
        """The mean of -log p over all labels that are not ignored, smoothed over the vocabulary; each token is predicted by
        the one before it."""
        ahead = int(not self.classes)
        predicted = [z[: len(z) - ahead] for z in self.logits(model)]
        told = torch.cat([own[ahead:] for own in self.labels])
        return cross_entropy(torch.cat(predicted), told, label_smoothing=smoothing, ignore_index=IGNORED)


@check("step", (FAMILY,), SETTINGS, cases, pr=PR, paths=EVERY_PATH, moves=True)
def step(call: CheckCall) -> Iterator[Quantity]:
    """Loss, gradients and evaluation of transformers' Trainer are those of the model's logits, whatever Liger exchanges in it."""
    s, data = call.settings, Rows(call.settings.model == CLASSIFIER)
    if s.smoothing and data.classes:
        raise Unsupported("classes are smoothed in another way")
    if s.adapter and s.model != "llama":
        raise Unsupported("its adapter has other modules")

    def made(dtype: torch.dtype) -> Any:
        out = models.model(s.model, dtype).train()
        if s.derived:
            out.__class__ = type(f"FSDP{type(out).__name__}", (type(out),), {})
        if s.model == EXPERTS:
            out.config.output_router_logits, out.router_aux_loss_coef = True, COEFFICIENT
        return stored_window.adapted(out, stored_window.TRAINED, targets=ADAPTERS[s.adapter]) if s.adapter else out

    def oracle(size: int) -> Oracle:
        """Of a window in micro-batches of so many rows."""
        parts = [data.ids[n : n + size] for n in range(0, COUNT, size)]

        def loss(model: Any) -> Tensor:
            balances = [balance(model, p) for p in parts] if s.model == EXPERTS else [torch.zeros(())]
            return data.loss(model, s.smoothing) + COEFFICIENT * torch.stack(balances).mean()

        return exact_step(defined(), loss)

    def defined() -> Any:
        return stored_window.written_out(made(torch.float64)) if s.adapter else made(torch.float64)

    fused, size = call.path == "fused", int(s.split.partition("x")[0])
    wanted = recorder.plain(s.split) | {"label_smoothing_factor": s.smoothing, "remove_unused_columns": False}
    wanted |= liger(s.model, call.device) if fused else {}
    # three and one: each weighs as many rows; tokens of unequal sequences are evaluated at once
    wanted |= {"per_device_eval_batch_size": COUNT - data.classes}
    model = made(torch.float32)  # its module is imported before Liger exchanges what is in it
    with exchanged(fused):
        fed = {"train_dataset": data.numbers, "eval_dataset": data.numbers, "data_collator": data.batch}
        trainer = drive.build(call.trainer, model, wanted, call.device, **fed)
        with drive.fixed(call.path, trainer):
            steps = recorder.train(trainer)
        with trl.quiet(), drive.dropping(model):
            found = trainer.predict(data.numbers, ignore_keys=["aux_loss", "router_logits", "past_key_values"])
    window = shared(call, "window", lambda: oracle(size))
    yield from first_step(window, steps)
    whole = window if s.model != EXPERTS or size == COUNT else shared(call, "whole", lambda: oracle(COUNT))
    yield window_loss(whole, found.metrics["test_loss"], "evaluation loss")
    given = torch.from_numpy(found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions)
    kept = given if data.classes else torch.cat([z[: len(ids)] for z, ids in zip(given, data.ids, strict=True)])
    exact = shared(call, "logits", lambda: measured(defined(), lambda model: {"logits": torch.cat(data.logits(model))}))
    yield entry("evaluation logits", kept, exact, of="logits")


def liger(model: str, device: str) -> dict[str, Any]:
    """Settings by which Liger exchanges the layers of this model. Raises Unsupported without Liger."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unsupported("liger-kernel is not installed")
    more = {"liger_kernel_config": {"swiglu": False}} if model == EXPERTS and device == "cpu" else {}
    return {"use_liger_kernel": True, **more}  # its experts ask Triton for a GPU


@contextlib.contextmanager
def exchanged(layers: bool = True) -> Iterator[None]:
    """If it has `layers`, Liger may exchange functions and classes of transformers and torch within it. Where its kernels run in
    Triton's interpreter they get the functions of libdevice that this lacks."""
    if not layers:
        yield
        return
    import triton
    from liger_kernel.transformers import monkey_patch  # noqa: F401 with all modules of kernels

    from parity.implementations import interpreter

    interpreter.completed()
    found = [m for name, m in sys.modules.items() if name.startswith(("transformers.models.", "liger_kernel.ops."))]
    kept = [(vars(module), dict(vars(module))) for module in (*found, torch.nn.functional)]
    try:
        for names, _ in kept * triton.knobs.runtime.interpret:
            if names["__name__"].startswith("liger_kernel"):
                names.update({n: getattr(interpreter, n) for n in ("rsqrt", "tanh") if n in names})
        yield
    finally:
        for names, before in kept:
            names.update(before)
