"""What accumulation leaves of a mean: `divide_by_accumulation` for online DPO, `average_over_window` for CPO, ORPO and others."""

import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.fixes import uncounted
from parity.fixes.override import replaced, source_of
from parity.fixes.patch import Patch
from parity.fixes.uncounted import BEHIND, COUNTS, EVERY, NAME, WINDOW, weights

LOCAL = "the trainer divides by the tokens of the micro-batch"


def divide_by_accumulation(trainer: Any) -> Patch:
    """Every part of a loss that is a mean of one micro-batch is divided by the micro-batches of the window.

    transformers' Trainer (4.46 to 5.23) divides a loss by `gradient_accumulation_steps` only where the model's forward takes no
    **kwargs, as if every other model divided by `num_items_in_batch`. Classifiers, BERT, T5, BART and others do not (since 4.54,
    5.0): their gradients are as many times too large, and as many times the number of processes. The load-balancing loss of
    experts is added whole in each micro-batch. Rows of the dataset are tried without gradient. Where the loss is a mean whatever
    the count, `trainer.model_accepts_loss_kwargs` becomes False; what a coefficient of the model adds is divided in
    `trainer.compute_loss`.

    OnlineDPOTrainer (trl 0.24.0 to 1.16.0) overrides `training_step`, hands the mean of a micro-batch to
    `accelerator.backward` and divides only what it returns. Trainer tells accelerate of one accumulation step, so nobody
    divides (but transformers 5.2.0 to 5.5.0): gradients are `gradient_accumulation_steps` times those of the window,
    under a logged loss that is right. Wraps `trainer.accelerator.backward`. Nothing is done where the trainer's step leaves the
    backward pass to `Trainer` or divides itself (its source is read), or where accelerate divides.

    All is for this trainer alone.
    """
    if uncounted.own_loss(trainer) == "Trainer":
        return uncounted.divide(trainer)
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

    transformers' Trainer (4.46 to 5.23), and SFTTrainer, take the model's own mean where its class says `accepts_loss_kwargs =
    False`, as Gemma 4, Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V and 24 more do, or where it makes no use of the count. Rows of the
    dataset are tried: of labels, or of rows, the loss must be the mean.

    Wraps `trainer.get_batch_samples` and the method that takes the mean, for this trainer alone; in evaluation nothing changes.
    Nothing is done where the trainer takes no such mean (its source is read).
    """
    if uncounted.own_loss(trainer):
        return uncounted.weigh(trainer)
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
    labelled = COUNTS[EVERY if encoder else BEHIND]  # a decoder alone predicts none of the first tokens
    chosen = _prompt_too if prompt_too else lambda batch: labelled(batch["chosen_labels"])
    sampled, factor = weights(_gold if gold else chosen)

    def weighted(self: Any, original: Any, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(model, batch, *args, **kwargs)
        return (*out[:4], out[4] * factor(model, batch), *out[5:])

    def by_weight(self: Any, original: Any, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        share = factor(model, batch) or 1.0  # of 0, TRL takes the batch for one without gold sequences
        with mock.patch.object(self, "tpo_alpha", self.tpo_alpha * share):
            return original(model, batch, *args, **kwargs)

    if gold:
        return _changed(trainer, get_batch_samples=sampled, _compute_loss=by_weight)
    return _changed(trainer, get_batch_samples=sampled, concatenated_forward=weighted)


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
        with mock.patch.object(Trainer, "training_step", return_value=None):
            for batch in batches:  # the trainer's own step exchanges them in place; what follows it there is left out
                type(self).training_step(self, self.model_wrapped, batch)
        return batches, self._get_num_items_in_batch(batches, device) / ranks

    def stepped(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.multiple(self, lmbda=-1.0, seq_kd=False):
            return original(*args, **kwargs)

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


def _gold(batch: Mapping[str, Tensor]) -> Tensor:
    """Completion tokens of the gold sequences, the last third of a batch."""
    return batch["completion_mask"].chunk(3)[-1][:, 1:].sum().cpu()


def _prompt_too(batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens of the chosen sequences with their prompts but the first of each."""
    return batch["chosen_attention_mask"][:, 1:].sum().cpu()
