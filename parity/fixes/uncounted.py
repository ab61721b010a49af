"""Losses of a model that are told no count of the window's tokens, of transformers' Trainer and TRL's SFTTrainer."""

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Sized
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from parity.fixes.language_models import undisturbed
from parity.fixes.override import already, replaced
from parity.fixes.patch import ALREADY, Change, Patch

NAME = "divide_by_accumulation"
WINDOW = "average_over_window"
ACCEPTS, CHANGE, COEFFICIENT = "model_accepts_loss_kwargs", "_parity_uncounted", "router_aux_loss_coef"
ROWS, SOME = 8, 8.0
"""Of the dataset, from which two are tried; a count of items."""
SAME, TIGHT, NEAR = 1e-5, 1e-4, 0.02
"""Relative difference of a loss computed twice, on a GPU in another order; how near a weighted mean of parts is to the mean of
all, in float32, and in 16 bits."""
SHIFTED = "CausalLM", "ConditionalGeneration", "LMHeadModel"
"""Parts of the names of transformers' models whose first label has no prediction."""
BEHIND, EVERY = "labels behind the first", "labels"
COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    BEHIND: lambda labels: labels[:, 1:].ne(-100).sum().cpu(),
    EVERY: lambda labels: labels.ne(-100).sum().cpu(),
    "rows": lambda labels: torch.tensor(len(labels)),
}
"""Of what a loss may be the mean: (labels of a batch) -> how many."""


def own_loss(trainer: Any) -> str:
    """Whose loss and step a trainer has: "Trainer", "SFTTrainer", or "" for others."""
    own = [getattr(type(trainer), name, None) for name in ("compute_loss", "training_step")]
    for kind, package in (("Trainer", "transformers."), ("SFTTrainer", "trl.")):
        if all(
            f is not None and f.__qualname__.split(".")[0] == kind and f.__module__.startswith(package) for f in own
        ):
            return kind
    return ""


def divide(trainer: Any) -> Patch:
    """Trainer divides what the model does not divide by the count."""
    if (done := already(trainer, NAME, trainer, "compute_loss")) is not None:
        return done
    held: Change | None = vars(trainer).get(CHANGE)
    if held is not None:
        return Patch(NAME, reason=ALREADY, _undo=held.hold(trainer))
    steps, ranks = trainer.args.gradient_accumulation_steps, trainer.accelerator.num_processes
    if steps == ranks == 1:
        return Patch(NAME, reason="one micro-batch is a window")
    if not getattr(trainer, ACCEPTS, False) or trainer.compute_loss_func is not None:
        return Patch(NAME, reason="Trainer divides, or a loss function of the user's is told the count")
    holder = next((m for m in trainer.model.modules() if COEFFICIENT in vars(m)), None)
    try:
        with _tried(trainer) as part:
            whole, left = (_loss(trainer, part(0, 1), count) for count in (SOME, math.inf))
            mean = math.isclose(whole, left, rel_tol=SAME) and math.isclose(
                whole, _loss(trainer, part(0, 1, 0, 1), SOME), rel_tol=NEAR
            )
            beside = left
            if holder is not None and not mean:
                with mock.patch.object(holder, COEFFICIENT, 0.0):
                    beside = _loss(trainer, part(0, 1), math.inf)
    except Exception as error:
        return Patch(NAME, reason=f"rows could not be tried ({type(error).__name__}: {error})")
    if not (math.isfinite(whole) and math.isfinite(left)):
        return Patch(NAME, reason=f"the loss of two rows is {whole}, with an infinite count {left}")
    if abs(left) <= SAME * abs(whole):
        return Patch(NAME, reason="the model divides by the count")
    if mean:
        change = Change(lambda: setattr(trainer, ACCEPTS, True), lambda: delattr(trainer, CHANGE))
        setattr(trainer, ACCEPTS, False)
        setattr(trainer, CHANGE, change)
        return Patch(NAME, changed=(f"trainer.{ACCEPTS}",), _undo=change.hold(trainer))
    if abs(beside) > SAME * abs(left):
        return Patch(
            NAME, reason=f"of a loss of {whole:.3g}, {left:.3g} is not divided, and no mean over labels or rows"
        )

    def divided(self: Any, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_items_in_batch") is None or not model.training:
            return original(model, *args, **kwargs)
        parts = self.current_gradient_accumulation_steps * (ranks if self.args.average_tokens_across_devices else 1)
        with mock.patch.object(holder, COEFFICIENT, getattr(holder, COEFFICIENT) / parts):
            return original(model, *args, **kwargs)

    return replaced(trainer, NAME, trainer, "trainer", compute_loss=divided)


def weigh(trainer: Any) -> Patch:
    """Each micro-batch's mean is weighed by what it is the mean of."""
    if trainer.args.gradient_accumulation_steps == trainer.accelerator.num_processes == 1:
        return Patch(WINDOW, reason="one micro-batch is a window")
    if (done := already(trainer, WINDOW, trainer, "get_batch_samples", "compute_loss")) is not None:
        return done
    if getattr(trainer, ACCEPTS, True) or trainer.compute_loss_func is not None:
        return Patch(WINDOW, reason="the loss is told the count of the window")
    if trainer.label_smoother is not None:
        return Patch(WINDOW, reason="smoothed labels: the loss is not the model's own")
    if getattr(trainer.model.config.get_text_config(), "output_router_logits", False):
        return Patch(WINDOW, reason="the balance of experts is no mean over tokens")
    if own_loss(trainer) == "SFTTrainer":
        counted: str | None = BEHIND
    else:
        try:
            with _tried(trainer) as part:
                counted = _counted(trainer, part)
        except Exception as error:
            return Patch(WINDOW, reason=f"rows could not be tried ({type(error).__name__}: {error})")
    if counted is None:
        return Patch(WINDOW, reason="the model's loss is no mean over labels or rows")
    count = COUNTS[counted]
    sampled, factor = weights(lambda batch: count(batch["labels"]))

    def weighted(self: Any, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        share = factor(model, inputs)
        out = original(model, inputs, *args, **kwargs)
        return (out[0] * share, *out[1:]) if isinstance(out, tuple) else out * share

    return replaced(trainer, WINDOW, trainer, "trainer", get_batch_samples=sampled, compute_loss=weighted)


def weights(count: Callable[[Any], Tensor]) -> tuple[Callable[..., Any], Callable[[Any, Any], float]]:
    """In the place of `get_batch_samples`: it counts a window; and n·M/N of a micro-batch of it, 1 in evaluation."""
    of_window: dict[str, Any] = {"micro-batches": 0, "tokens": 1.0}

    def sampled(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = original(*args, **kwargs)
        tokens = sum(map(count, batches), torch.zeros((), dtype=torch.long))
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None:
            tokens = accelerator.gather(tokens.to(accelerator.device)).float().mean()
        of_window.update({"micro-batches": len(batches), "tokens": float(tokens)})
        return batches, items

    def factor(model: Any, batch: Any) -> float:
        if not model.training or not of_window["micro-batches"]:
            return 1.0
        return float(count(batch)) * of_window["micro-batches"] / max(of_window["tokens"], 1.0)

    return sampled, factor


@contextlib.contextmanager
def _tried(trainer: Any) -> Iterator[Callable[..., dict[str, Any]]]:
    """Gives batches of two rows of the dataset, by their numbers, 0 and 1, which have labels, of unlike numbers if there are any;
    the model in evaluation mode and without gradients. Random states, the collator and the dataset's order stay as they were.
    ValueError where there are no two such rows."""
    data, known = trainer.train_dataset, {id(trainer.model): trainer.model}
    collator = copy.deepcopy(trainer.data_collator, known)
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise ValueError("the dataset is a stream")
    if hasattr(data, "column_names"):
        data = trainer._remove_unused_columns(data)
    else:
        collator = trainer._get_collator_with_removed_columns(collator)
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 the one that collators may draw from
    try:
        with undisturbed(trainer.model), torch.no_grad():
            trainer.model.eval()
            rows = [data[i] for i in range(min(ROWS, len(data)))]
            batch = dict(trainer._prepare_inputs(collator(rows)))
            labels = batch.get("labels")
            if not isinstance(labels, Tensor) or len(labels) != len(rows):
                raise ValueError("labels are not one row each")
            counts = [int(row[row.numel() > 1 :].ne(-100).sum()) for row in labels.reshape(len(rows), -1)]
            there = [i for i, n in enumerate(counts) if n]
            if len(there) < 2:
                raise ValueError("fewer than two rows have labels")
            other = max(there[1:], key=lambda i: abs(counts[i] - counts[there[0]]))
            tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.dim()]
            sliced = all(len(x) == len(rows) for x in tensors)  # patches of images are not

            def part(*numbers: int) -> dict[str, Any]:
                chosen = [(there[0], other)[n] for n in numbers]
                if not sliced:
                    return dict(trainer._prepare_inputs(collator([rows[i] for i in chosen])))
                return {n: x[chosen] if isinstance(x, Tensor) and x.dim() else x for n, x in batch.items()}

            yield part
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _loss(trainer: Any, batch: dict[str, Any], items: float) -> float:
    """As the trainer has it, told of so many items."""
    count = torch.tensor(items, device=trainer.args.device)
    return float(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count))


def _counted(trainer: Any, part: Callable[..., dict[str, Any]]) -> str | None:
    """Of what in `COUNTS` the model's loss is a mean: that of two rows, each weighed by it, is that of both. Where rounding
    leaves several, the one that transformers' models of this kind have; None where it is of nothing, or of a model of somebody
    else's in 16 bits."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = getattr(model, "get_base_model", lambda: model)()
    narrow = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in model.parameters())
    if narrow and not type(model).__module__.startswith("transformers."):
        return None
    causal = not getattr(model.config, "is_encoder_decoder", False)
    batches = [part(0, 1), part(0), part(1)]
    whole, *means = (float(trainer.model(**batch)["loss"]) for batch in batches)
    near, labels = [], batches[0]["labels"]
    shifts = causal and labels.dim() == 2 and labels.shape[1] > 1
    for name, count in COUNTS.items():
        all_of, *sizes = (float(count(batch["labels"])) if shifts or name != BEHIND else 0.0 for batch in batches)
        if all_of and math.isclose(sum(sizes), all_of):
            mean = sum(n * x for n, x in zip(sizes, means, strict=True)) / all_of
            near += [name] * math.isclose(mean, whole, rel_tol=NEAR if narrow else TIGHT)
    order = [*COUNTS] if any(part in type(model).__name__ for part in SHIFTED) else [EVERY, "rows", BEHIND]
    return min(near, key=order.index, default=None)
