"""Preference losses: `exchange_alpha` for DPO's alpha divergence, `average_over_window` for CPO, ORPO, GKD and others."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.fixes.override import overridden, override, source_of
from parity.fixes.patch import ALREADY, Change, Patch

ALPHA, COEFFICIENT = "exchange_alpha", "f_alpha_divergence_coef"
WINDOW = "average_over_window"


def exchange_alpha(trainer: Any) -> Patch:
    """DPO's alpha divergence is (1 - u^-α)/α, u = π/π_ref, with the α of the config (f-DPO, arXiv 2309.16240, table 1).

    DPOTrainer (trl 0.29.0 to 1.16.0) computes (u^(α-1) - 1)/(α - 1): α and 1 - α are exchanged. Sets
    `trainer.f_alpha_divergence_coef` to 1 - α, for this trainer alone; its config stays. Nothing is done where the trainer has
    another divergence, α is 0.5, or its loss does not subtract 1 from α (its source is read).
    """
    kind = getattr(getattr(trainer, "args", None), "f_divergence_type", None)
    if getattr(kind, "value", kind) != "alpha_divergence" or not hasattr(trainer, COEFFICIENT):
        return Patch(ALPHA, reason="the trainer has no alpha divergence")
    if f"{COEFFICIENT} - 1.0" not in source_of(getattr(type(trainer), "_compute_loss", None)):
        return Patch(ALPHA, reason="its loss has α as the paper has it")
    held: Change | None = vars(trainer).get("_parity_alpha")
    if held is not None and held.active:
        return Patch(ALPHA, reason=ALREADY, _undo=held.hold(trainer))
    alpha = getattr(trainer, COEFFICIENT)
    if alpha == 0.5:
        return Patch(ALPHA, reason="α is 0.5, where the two are the same")
    change = Change(lambda: setattr(trainer, COEFFICIENT, alpha), lambda: delattr(trainer, "_parity_alpha"))
    setattr(trainer, COEFFICIENT, 1.0 - alpha)
    trainer._parity_alpha = change
    return Patch(ALPHA, changed=(f"trainer.{COEFFICIENT}",), _undo=change.hold(trainer))


def average_over_window(trainer: Any) -> Patch:
    """The likelihood of the chosen sequences is a mean over the tokens of the whole window, however it is cut.

    CPOTrainer and ORPOTrainer (trl 0.19.1 to 1.16.0; 0.15 on for CPO) take nn.CrossEntropyLoss over each micro-batch, a mean
    over its n tokens, and the training loop divides by the M micro-batches: tokens of a micro-batch with few count more. Each
    is multiplied by n·M/N, N the tokens of the window, or their mean over the processes.

    AsyncGRPOTrainer (trl 1.0 to 1.16) divides the sum of each micro-batch by its own tokens, `global_n_tokens`: it gets N/M.

    GKDTrainer (trl 1.7 to 1.16) divides completions that it generates by the token count of those that they replace: they are
    generated before tokens are counted.

    Wraps `trainer.get_batch_samples` and the method that takes the mean, for this trainer alone; in evaluation nothing changes.
    Nothing is done where the trainer takes no such mean (its source is read).
    """
    if 'inputs["global_n_tokens"]' in source_of(getattr(type(trainer), "compute_loss", None)):
        return _over_rollouts(trainer)
    if hasattr(trainer, "generate_on_policy_outputs") and hasattr(trainer, "_get_num_items_in_batch"):
        return _over_generated(trainer)
    source = source_of(getattr(type(trainer), "concatenated_forward", None))
    if "nn.CrossEntropyLoss()" not in source or not hasattr(trainer, "get_batch_samples"):
        return Patch(WINDOW, reason="the trainer takes no mean of a micro-batch's likelihood")
    change = overridden(trainer, "concatenated_forward", WINDOW)
    if change is not None:
        return Patch(WINDOW, reason=ALREADY, _undo=change.hold(trainer))
    encoder = bool(getattr(trainer, "is_encoder_decoder", False))
    count = _prompt_too if '"concatenated_input_ids"].clone()' in source and not encoder else _labelled
    of_window: dict[str, Any] = {"micro-batches": 0, "tokens": 1.0}

    def sampled(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = original(*args, **kwargs)
        tokens = sum((count(batch, encoder) for batch in batches), torch.zeros((), dtype=torch.long))
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None:
            tokens = accelerator.gather(tokens.to(accelerator.device)).float().mean()
        of_window.update({"micro-batches": len(batches), "tokens": float(tokens)})
        return batches, items

    def weighted(self: Any, original: Any, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(model, batch, *args, **kwargs)
        if not model.training or not of_window["micro-batches"]:
            return out
        factor = float(count(batch, encoder)) * of_window["micro-batches"] / max(of_window["tokens"], 1.0)
        return (*out[:4], out[4] * factor, *out[5:])

    samples = override(trainer, "get_batch_samples", WINDOW, sampled)
    forward = override(trainer, "concatenated_forward", WINDOW, weighted)
    undo: list[Callable[[], object]] = [*samples.hold(trainer), *forward.hold(trainer)]
    return Patch(WINDOW, changed=("trainer.get_batch_samples", "trainer.concatenated_forward"), _undo=undo)


def _over_rollouts(trainer: Any) -> Patch:
    change = overridden(trainer, "get_batch_samples", WINDOW)
    if change is not None:
        return Patch(WINDOW, reason=ALREADY, _undo=change.hold(trainer))

    def sampled(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = original(*args, **kwargs)
        if batches:
            mean = torch.stack([batch["global_n_tokens"] for batch in batches]).mean(0)
            batches = [{**batch, "global_n_tokens": mean} for batch in batches]
        return batches, items

    change = override(trainer, "get_batch_samples", WINDOW, sampled)
    return Patch(WINDOW, changed=("trainer.get_batch_samples",), _undo=change.hold(trainer))


def _over_generated(trainer: Any) -> Patch:
    if "num_items_in_batch" not in source_of(getattr(type(trainer), "generalized_jsd_loss", None)):
        return Patch(WINDOW, reason="the trainer divides by the tokens of the micro-batch")
    if not trainer.lmbda and not trainer.seq_kd:
        return Patch(WINDOW, reason="nothing is generated")
    change = overridden(trainer, "training_step", WINDOW)
    if change is not None:
        return Patch(WINDOW, reason=ALREADY, _undo=change.hold(trainer))
    from transformers import Trainer

    def sampled(self: Any, original: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, _ = original(epoch_iterator, num_batches, device)
        batches = [self._prepare_inputs(batch) for batch in batches]
        step, Trainer.training_step = Trainer.training_step, lambda *args, **kwargs: None
        try:
            for batch in batches:  # the trainer's own step exchanges them in place; what follows it there is left out
                type(self).training_step(self, self.model_wrapped, batch)
        finally:
            Trainer.training_step = step
        return batches, self._get_num_items_in_batch(batches, device)

    def stepped(self: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked = self.lmbda, self.seq_kd
        self.lmbda, self.seq_kd = -1.0, False
        try:
            return original(*args, **kwargs)
        finally:
            self.lmbda, self.seq_kd = asked

    samples = override(trainer, "get_batch_samples", WINDOW, sampled)
    step = override(trainer, "training_step", WINDOW, stepped)
    undo: list[Callable[[], object]] = [*samples.hold(trainer), *step.hold(trainer)]
    return Patch(WINDOW, changed=("trainer.get_batch_samples", "trainer.training_step"), _undo=undo)


def _labelled(batch: Mapping[str, Tensor], encoder: bool) -> Tensor:
    """Label positions of the chosen sequences; a decoder predicts none of the first tokens."""
    return (batch["chosen_labels"][:, 0 if encoder else 1 :] != -100).sum().cpu()


def _prompt_too(batch: Mapping[str, Tensor], encoder: bool) -> Tensor:
    """Tokens of the chosen sequences with their prompts but the first of each."""
    return batch["chosen_attention_mask"][:, 1:].sum().cpu()
