"""What accumulation leaves of a mean: `divide_by_accumulation` for online DPO, `average_over_window` for CPO, ORPO and others."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sized
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.fixes.logits import undisturbed
from parity.fixes.override import overridden, replaced, source_of
from parity.fixes.patch import ALREADY, Change, Patch

NAME = "divide_by_accumulation"
SAME = 1e-5
"""Relative difference of a loss that is computed twice, on a GPU in another order."""
TRIED, NEAR = 8, 0.02
"""Rows of the dataset that are tried; how near the mean of parts is to that of all, in 16 bits too."""
ACCEPTS, _COUNTED, COEFFICIENT = "model_accepts_loss_kwargs", "_parity_counted", "router_aux_loss_coef"
WINDOW = "average_over_window"
LOCAL = "the trainer divides by the tokens of the micro-batch"


def divide_by_accumulation(trainer: Any) -> Patch:
    """Every part of a loss that is a mean of one micro-batch is divided by the micro-batches of the window.

    transformers' Trainer (4.46 to 5.23) divides a loss by `gradient_accumulation_steps` only where the model's forward takes no
    **kwargs, as if every other model divided by `num_items_in_batch`. Classifiers, BERT, T5, BART and others do not (since 4.54,
    5.0): their gradients are as many times too large, and as many times the number of processes. The load-balancing loss of
    experts is added whole in each micro-batch. One batch of the dataset is tried without gradient, with a count of infinity: what
    is left of the loss is not divided. Where all is left `trainer.model_accepts_loss_kwargs` becomes False; else, where a
    coefficient of the model makes it, `trainer.compute_loss` divides this.

    OnlineDPOTrainer (trl 0.24.0 to 1.16.0) overrides `training_step`, hands the mean of a micro-batch to
    `accelerator.backward` and divides only what it returns. Trainer tells accelerate of one accumulation step, so nobody
    divides (but transformers 5.2.0 to 5.5.0): gradients are `gradient_accumulation_steps` times those of the window,
    under a logged loss that is right. Wraps `trainer.accelerator.backward`. Nothing is done where the trainer's step leaves the
    backward pass to `Trainer` or divides itself (its source is read), or where accelerate divides.

    All is for this trainer alone.
    """
    if _plain(trainer):
        return _of_trainer(trainer)
    step = getattr(type(trainer), "training_step", None)
    if step is None:
        return Patch(NAME, reason=f"{type(trainer).__name__} has no training_step")
    if not _undivided(step):
        return Patch(NAME, reason="the trainer's step leaves the division to Trainer, or divides")
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is None:
        return Patch(NAME, reason=f"{type(trainer).__name__} has no accelerator")
    if accelerator.gradient_accumulation_steps != 1:
        return Patch(NAME, reason="accelerate divides by the accumulation steps")

    def divided(self: Any, original: Any, loss: Tensor, **kwargs: Any) -> Any:
        planned = getattr(getattr(trainer, "args", None), "gradient_accumulation_steps", 1)
        return original(loss / getattr(trainer, "current_gradient_accumulation_steps", planned), **kwargs)

    return replaced(trainer, NAME, accelerator, "accelerator", backward=divided)


def _undivided(step: Any) -> bool:
    """Whether a training step calls `accelerator.backward` and divides no loss before it does."""
    before, call, _ = source_of(step).partition("accelerator.backward(")
    return bool(call) and re.search(r"loss\s*(/=|=\s*loss\s*/)", before) is None


def _plain(trainer: Any) -> bool:
    """Whether a trainer's losses and steps are transformers' own."""
    from transformers import Trainer

    own = (getattr(type(trainer), name, None) is getattr(Trainer, name) for name in ("compute_loss", "training_step"))
    return isinstance(trainer, Trainer) and all(own)


def _of_trainer(trainer: Any) -> Patch:
    change = overridden(trainer, "compute_loss", NAME) or vars(trainer).get(_COUNTED)
    if change is not None and change.active:
        return Patch(NAME, reason=ALREADY, _undo=change.hold(trainer))
    steps, ranks = trainer.args.gradient_accumulation_steps, trainer.accelerator.num_processes
    if steps == ranks == 1:
        return Patch(NAME, reason="one micro-batch is a window")
    if not getattr(trainer, "model_accepts_loss_kwargs", False) or trainer.compute_loss_func is not None:
        return Patch(NAME, reason="Trainer divides, or a loss function of the user's is told the count")
    if not isinstance(trainer.train_dataset, Sized):
        return Patch(NAME, reason="no batch is taken of a stream to be tried")
    model = trainer.accelerator.unwrap_model(trainer.model)
    try:
        whole, left = _tried(trainer)
        holder = next((h for h in (model, model.config.get_text_config()) if hasattr(h, COEFFICIENT)), None)
        without = (0.0, 0.0) if holder is None else _tried(trainer, holder)
    except Exception as error:
        return Patch(NAME, reason=f"a batch could not be tried ({type(error).__name__}: {error})")
    if math.isclose(whole, left, rel_tol=SAME):
        change = Change(lambda: setattr(trainer, ACCEPTS, True), lambda: delattr(trainer, _COUNTED))
        setattr(trainer, ACCEPTS, False)
        setattr(trainer, _COUNTED, change)
        return Patch(NAME, changed=(f"trainer.{ACCEPTS}",), _undo=change.hold(trainer))
    if left == 0.0 or holder is None or abs(without[1]) > SAME * abs(left):
        return Patch(NAME, reason=f"of a loss of {whole:.3g}, {left:.3g} is not divided by the model")

    def divided(self: Any, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        count = kwargs.get("num_items_in_batch")
        if count is None or not model.training:
            return original(model, *args, **kwargs)
        times = ranks if self.args.average_tokens_across_devices else 1
        share = getattr(holder, COEFFICIENT) / (self.current_gradient_accumulation_steps * times)
        with mock.patch.object(holder, COEFFICIENT, share):
            return original(model, *args, **kwargs)

    return replaced(trainer, NAME, trainer, "trainer", compute_loss=divided)


def _tried(trainer: Any, without: Any = None) -> tuple[float, float]:
    """The loss of a batch with a count of items, and of infinitely many; of what balances experts `without` its holder's."""
    zero = contextlib.nullcontext() if without is None else mock.patch.object(without, COEFFICIENT, 0.0)
    with undisturbed(trainer.model), torch.no_grad(), zero:
        trainer.model.eval()
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        counts = (torch.tensor(n, device=trainer.args.device) for n in (8.0, math.inf))
        whole, left = (float(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=n)) for n in counts)
    return whole, left


def average_over_window(trainer: Any) -> Patch:
    """The likelihood of the chosen sequences is a mean over the tokens of the whole window, however it is cut.

    CPOTrainer and ORPOTrainer (trl 0.19.1 to 1.16.0; 0.15 on for CPO) take nn.CrossEntropyLoss over each micro-batch, a mean
    over its n tokens, and the training loop divides by the M micro-batches: tokens of a micro-batch with few count more. Each
    is multiplied by n·M/N, N the tokens of the window, or their mean over the processes. TPOTrainer (trl 1.4 to 1.16) does so
    with the gold ones.

    AsyncGRPOTrainer (trl 1.0 to 1.16) and AsyncDistillationTrainer (trl 1.11 to 1.16) divide the sum of each micro-batch by its
    own tokens, `global_n_tokens`: it gets N/M.

    GKDTrainer (trl 1.7 to 1.16) divides completions that it generates by the token count of those that they replace: they are
    generated before tokens are counted. Besides it divides by the tokens of all processes, whose gradients are averaged: by
    their mean.

    GOLDTrainer (trl 1.7 to 1.16) and IWOPDTrainer (trl 1.9 to 1.16) are handed the whole window once for each of its
    micro-batches, and its labels are counted each time; in a dataset of prompts there are none. The count becomes that of the
    micro-batches that the trainer makes of it, the mean of the processes. GOLD's ULD loss and IW-OPD's JSD to a server are means
    of a micro-batch that nobody divides by their number: without a count Trainer does.

    transformers' Trainer (4.46 to 5.23), and SFTTrainer, take the model's own loss where its class says `accepts_loss_kwargs =
    False`, as Gemma 4, Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V and 25 more do, or where it takes the count and does not use it: a
    mean over the micro-batch of one process. Which labels it counts is tried on rows of the dataset.

    Wraps `trainer.get_batch_samples` and the method that takes the mean, for this trainer alone; in evaluation nothing changes.
    Nothing is done where the trainer takes no such mean (its source is read).
    """
    if _plain(trainer) or _supervised(trainer):
        return _over_model(trainer)
    names = ("compute_loss", "_compute_loss")
    losses = [vars(kind)[name] for kind in type(trainer).__mro__ for name in names if name in vars(kind)]
    loss = "".join(map(source_of, losses))
    if 'inputs["global_n_tokens"]' in loss:
        return _over_rollouts(trainer)
    if hasattr(trainer, "_fill_buffer"):
        taken = "num_items_in_batch=num_items_in_batch" in loss
        return _over_kept(trainer) if taken else Patch(WINDOW, reason=LOCAL)
    if hasattr(trainer, "generate_on_policy_outputs") and hasattr(trainer, "_get_num_items_in_batch"):
        return _over_generated(trainer)
    return _over_likelihood(trainer, gold="self.tpo_alpha * nll_loss" in loss)


def _changed(trainer: Any, **methods: Callable[..., Any]) -> Patch:
    return replaced(trainer, WINDOW, trainer, "trainer", **methods)


def _over_likelihood(trainer: Any, gold: bool) -> Patch:
    source = source_of(getattr(type(trainer), "concatenated_forward", None))
    if not (gold or "nn.CrossEntropyLoss()" in source) or not hasattr(trainer, "get_batch_samples"):
        return Patch(WINDOW, reason="the trainer takes no mean of a micro-batch's likelihood")
    encoder = bool(getattr(trainer, "is_encoder_decoder", False))
    prompt_too = '"concatenated_input_ids"].clone()' in source and not encoder
    ahead = 0 if encoder else 1
    sampled, factor = _weights(_gold if gold else _prompt_too if prompt_too else functools.partial(_labelled, ahead))

    def weighted(self: Any, original: Any, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(model, batch, *args, **kwargs)
        return (*out[:4], out[4] * factor(model, batch), *out[5:])

    def by_weight(self: Any, original: Any, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        alpha = self.tpo_alpha
        self.tpo_alpha *= factor(model, batch) or 1.0  # of 0, TRL takes the batch for one without gold sequences
        try:
            return original(model, batch, *args, **kwargs)
        finally:
            self.tpo_alpha = alpha

    if gold:
        return _changed(trainer, get_batch_samples=sampled, _compute_loss=by_weight)
    return _changed(trainer, get_batch_samples=sampled, concatenated_forward=weighted)


def _weights(count: Callable[[Any], Tensor]) -> tuple[Callable[..., Any], Callable[[Any, Any], float]]:
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


def _supervised(trainer: Any) -> bool:
    """Whether a trainer's losses and steps are those of TRL's SFTTrainer."""
    own = (getattr(type(trainer), name, None) for name in ("compute_loss", "training_step"))
    return all(f is not None and f.__module__.startswith("trl.") and "SFTTrainer." in f.__qualname__ for f in own)


def _over_model(trainer: Any) -> Patch:
    if trainer.args.gradient_accumulation_steps == trainer.accelerator.num_processes == 1:
        return Patch(WINDOW, reason="one micro-batch is a window")
    if overridden(trainer, "compute_loss", WINDOW):
        return _changed(trainer, compute_loss=_as_it_is, get_batch_samples=_as_it_is)
    if getattr(trainer, ACCEPTS, True) or trainer.compute_loss_func or trainer.label_smoother:
        return Patch(WINDOW, reason="the loss is told the count of the window")
    if getattr(trainer.model.config.get_text_config(), "output_router_logits", False):
        return Patch(WINDOW, reason="the balance of experts is no mean over tokens")
    if not isinstance(trainer.train_dataset, Sized):
        return Patch(WINDOW, reason="no rows are taken of a stream to be tried")
    try:
        ahead = _counted_from(trainer)
    except Exception as error:
        return Patch(WINDOW, reason=f"rows could not be tried ({type(error).__name__}: {error})")
    if ahead is None:
        return Patch(WINDOW, reason="the model's loss is no mean over labels")
    sampled, factor = _weights(lambda batch: _counted(batch["labels"], ahead))

    def weighted(self: Any, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        share = factor(model, inputs)
        out = original(model, inputs, *args, **kwargs)
        return (out[0] * share, *out[1:]) if isinstance(out, tuple) else out * share

    return _changed(trainer, get_batch_samples=sampled, compute_loss=weighted)


def _as_it_is(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _counted_from(trainer: Any) -> int | None:
    """From which label of a row the model's loss is a mean: 1 of a causal model, 0 of others. Of the mean of all rows it is the
    mean of their parts, each by its labels. None where it is neither."""
    loader = trainer.get_train_dataloader()
    rows = [loader.dataset[i] for i in range(min(TRIED, len(loader.dataset)))]
    with undisturbed(trainer.model), torch.no_grad():
        trainer.model.eval()
        batches = [trainer._prepare_inputs(loader.collate_fn(part)) for part in (rows, rows[:1], rows[1:])]
        means = [float(trainer.model(**batch)["loss"]) for batch in batches]

    def off(ahead: int) -> float:
        whole, *parts = (float(_counted(batch["labels"], ahead)) for batch in batches)
        return abs(sum(n * x for n, x in zip(parts, means[1:], strict=True)) / whole / means[0] - 1)

    best = min((1, 0), key=off)
    return best if off(best) < NEAR else None


def _counted(labels: Tensor, ahead: int) -> Tensor:
    """How many labels are not ignored, of classes all."""
    return (labels[:, ahead:] if labels.dim() > 1 else labels).ne(-100).sum().cpu()


def _over_rollouts(trainer: Any) -> Patch:
    def sampled(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = original(*args, **kwargs)
        if batches:
            mean = torch.stack([batch["global_n_tokens"] for batch in batches]).mean(0)
            batches = [{**batch, "global_n_tokens": mean} for batch in batches]
        return batches, items

    return _changed(trainer, get_batch_samples=sampled)


def _over_generated(trainer: Any) -> Patch:
    if "num_items_in_batch" not in source_of(getattr(type(trainer), "generalized_jsd_loss", None)):
        return Patch(WINDOW, reason=LOCAL)
    generates, ranks = bool(trainer.lmbda or trainer.seq_kd), _averaged(trainer)
    if not generates and ranks == 1:
        return Patch(WINDOW, reason="nothing is generated, by one process")
    from transformers import Trainer

    def sampled(self: Any, original: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, items = original(epoch_iterator, num_batches, device)
        if not generates or items is None:
            return batches, None if items is None else items / ranks
        batches = [self._prepare_inputs(batch) for batch in batches]
        step, Trainer.training_step = Trainer.training_step, lambda *args, **kwargs: None
        try:
            for batch in batches:  # the trainer's own step exchanges them in place; what follows it there is left out
                type(self).training_step(self, self.model_wrapped, batch)
        finally:
            Trainer.training_step = step
        return batches, self._get_num_items_in_batch(batches, device) / ranks

    def stepped(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked = self.lmbda, self.seq_kd
        self.lmbda, self.seq_kd = -1.0, False
        try:
            return original(*args, **kwargs)
        finally:
            self.lmbda, self.seq_kd = asked

    return _changed(trainer, get_batch_samples=sampled, **({"training_step": stepped} if generates else {}))


def _over_kept(trainer: Any) -> Patch:
    weighted = getattr(trainer, "distillation_objective", "") == "iw_opd"
    served = getattr(trainer, "use_teacher_server", False) and not weighted
    if served or getattr(trainer, "use_uld_loss", False):
        return _changed(
            trainer, get_batch_samples=lambda self, original, *args, **kwargs: (original(*args, **kwargs)[0], None)
        )
    counts: list[Tensor] = []  # that of a window of which no micro-batch has been made

    def sampled(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = original(*args, **kwargs)
        counts[:] = [] if items is None else [torch.as_tensor(items).float()]
        return batches, counts[0] if counts else items

    def prepared(self: Any, original: Any, batch: Any) -> Any:
        out = original(batch)
        if self.model.training and counts:  # the first of a window: its micro-batches are made
            count = counts.pop()
            count.copy_(self._get_num_items_in_batch(self._buffered_inputs, count.device) / _averaged(self))
        return out

    return _changed(trainer, get_batch_samples=sampled, _prepare_inputs=prepared)


def _averaged(trainer: Any) -> int:
    """The processes whose tokens are counted together, and whose gradients are averaged."""
    return trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1


def _labelled(ahead: int, batch: Mapping[str, Tensor]) -> Tensor:
    """Label positions of the chosen sequences; a decoder predicts none of the first tokens."""
    return _counted(batch["chosen_labels"], ahead)


def _gold(batch: Mapping[str, Tensor]) -> Tensor:
    """Completion tokens of the gold sequences, the last third of a batch."""
    return batch["completion_mask"].chunk(3)[-1][:, 1:].sum().cpu()


def _prompt_too(batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens of the chosen sequences with their prompts but the first of each."""
    return batch["chosen_attention_mask"][:, 1:].sum().cpu()
