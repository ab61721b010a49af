"""Softcap, logit scale, a head's bias, tied heads, adapters on the head, copies of it, hooks on it: the model's own forward
applies them; a trainer that multiplies hidden states by `lm_head.weight` itself has to find each one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, entry, shared
from parity.trainers.definitions.scored import completion_logps
from parity.trainers.definitions.training_step import LOSS, exact_step, gradients, measured
from parity.trainers.rig import drive, models, quantised_heads, stored_window
from parity.trainers.rig.drawn import normal
from parity.upstream import trl

HEADS = {
    "plain": "as the model has it",
    "lora": "a LoRA on it",
    "modules_to_save": "in modules_to_save: PEFT trains a copy",
    "hook": "with a forward hook that halves its output, as steering and quantisation libraries install",
    "quantised": "in 4 bits (bitsandbytes, nf4), frozen",
    "fake-quantised": "trained as int8 will see it (torch.ao.nn.qat.Linear)",
}
SETTINGS = {
    "model": Setting("llama", "tiny model", tuple(models.ARCHITECTURES)),
    "head": Setting("plain", "; ".join(f"{k}: {v}" for k, v in HEADS.items()), tuple(HEADS)),
    "temperature": Setting(0.7, "of the log-probs, where the trainer has one"),
}
TRAINERS = ("grpo-trainer", "rloo-trainer", "async-grpo-trainer", "dpo-trainer", "sft-trainer")
PROMPT, LENGTH = 3, 12
LOGPS = "logps"
PR: tuple[CheckCase, ...] = (("grpo-trainer", {"model": "gemma4"}), ("sft-trainer", {"head": "modules_to_save"}))
"""One nested softcap, and one head that is not what it seems."""
KINDS = {frozenset(a.changes_logits) - {"tied head"}: name for name, a in models.ARCHITECTURES.items()}
"""What changes a model's logits -> a model of it, with a nested config if there is such a one."""
BETA = 0.5
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"targets": (*models.PROJECTIONS, "lm_head")},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
}
"""Head -> the LoRA that makes it."""


def _in_pr(case: CheckCase) -> bool:
    """All of GRPO's cases; of the trainers that share its code a model of each kind, and the heads that need no bitsandbytes."""
    trainer, settings = case
    if trainer == "grpo-trainer":
        return True
    wanted = settings.get("model") in KINDS.values() or settings.get("head") not in (None, "plain", "quantised")
    return wanted and len(settings) == 1


def cases(seed: int) -> Iterator[CheckCase]:
    yield from PR
    for trainer in TRAINERS:
        for name in models.ARCHITECTURES:
            yield trainer, {"model": name}
        for head in HEADS:
            yield trainer, {"head": head}
            yield trainer, {"model": "gemma2", "head": head}


@check("config-values", TRAINERS, SETTINGS, cases, quick=PR[:1], pr=PR, covered=_in_pr, moves=True)
def config_values(call: CheckCall) -> Iterator[Quantity]:
    """Log-probs (or the loss made of them) and every gradient equal those of the model's own logits."""
    batch = Batch(call)
    truth = shared(call, "model", lambda: altered(models.model(call.settings.model, torch.float64), call).eval())
    step = shared(call, "step", lambda: exact_step(truth, batch.definition))
    patched = call.spec.scored and not call.spec.generates
    ask = _ask_patched if patched else _ask_scores if call.spec.scored else _ask_loss
    model, value = ask(batch, call)  # the log-probs, where the trainer hands them out; else the loss
    (batch.weighed(value) if call.spec.scored else value).backward()
    if call.spec.scored:
        oracle, found = measured(truth, lambda model: {LOGPS: batch.logps(model)}), value.detach().cpu()
        exact = oracle.exact[LOGPS]
        b, t = divmod(int((found.double() - exact).abs().argmax()), exact.shape[1])
        worst = f"worst at sequence {b}, token {t}: {float(found[b, t]):.5g}, {float(exact[b, t]):.5g}"
        yield entry(LOGPS, found, oracle, f"{worst} by the model's own logits")
    else:
        loss, exact = float(value.detach()), float(step.exact[LOSS])
        yield entry(LOSS, loss, step, f"{loss:.6g} instead of {exact:.6g}")
    named = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    yield gradients(step, {n: None if g is None else g.cpu() for n, g in named.items()})


class Batch:
    """Two sequences with a prompt each, `ids` (2, LENGTH), and the upstream gradient of the log-probs of their completions,
    `cotangent` (2, LENGTH - PROMPT)."""

    def __init__(self, call: CheckCall):
        self.ids = torch.tensor([models.ids(5, f"row {i}", LENGTH) for i in range(2)])
        self.cotangent = normal(5, "cotangent", (2, LENGTH - PROMPT))
        self.spec = call.spec
        self.temperature = call.settings.temperature if call.spec.scored else 1.0

    def logps(self, model: Any) -> Tensor:
        """Log-probs of the completion tokens by the model's own forward, (2, LENGTH - PROMPT)."""
        return torch.stack(completion_logps(model, [(row, PROMPT) for row in self.ids.tolist()], self.temperature))

    def definition(self, model: Any) -> Tensor:
        """The scalar whose gradients are compared, by the model's own logits."""
        logps = self.logps(model)
        if self.spec.data == "completions":
            return -logps.mean()
        if self.spec.paired:  # the reference is the policy, without its adapter if it has one
            with torch.no_grad(), stored_window.base_alone(model):
                reference = self.logps(model)
            chosen, rejected = (logps - reference).sum(1)
            return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))
        return self.weighed(logps)

    def weighed(self, logps: Tensor) -> Tensor:
        return (logps * self.cotangent.to(logps)).sum()


def _built(call: CheckCall, **wanted: Any) -> Any:
    head = call.settings.head
    adapter = trl.lora(**ADAPTERS[head]) if head in ADAPTERS else None
    wanted = {"gradient_checkpointing": False, **wanted}
    trainer = drive.build(call.trainer, _model(call), wanted, call.device, adapter)
    _fill(trainer.model, head)
    trainer.model.train()
    return trainer


def _model(call: CheckCall) -> Any:
    """The model that a trainer is given: its head quantised, where that is asked for before any trainer sees it."""
    model = models.model(call.settings.model)
    quantised_heads.quantise(model, call.settings.head)
    return model


def altered(model: Any, call: CheckCall) -> Any:
    """The definition's model with the same head, adapters and hooks as the trainer's."""
    head = call.settings.head
    if head in ADAPTERS:
        model = stored_window.written_out(stored_window.with_adapter(model, **ADAPTERS[head]))
    elif head == "quantised":
        quantised_heads.dequantised(model, models.model(call.settings.model))
    else:
        quantised_heads.quantise(model, head)
    _fill(model, head)
    return model.double()


def _fill(model: Any, head: str) -> None:
    stored_window.fill_adapter(model, 2, size=0.2, nudge=0.2)
    if head == "hook":
        model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: 0.5 * output)


def _ask_scores(batch: Batch, call: CheckCall) -> tuple[Any, Tensor]:
    """The model, and the log-probs by the trainer's own path."""
    trainer = _built(call, temperature=batch.temperature, beta=0.0)
    score = getattr(trainer, drive.scorer(trainer))
    with drive.fixed(call.path, trainer):
        ids = batch.ids.to(trainer.model.device)
        logps, _ = drive.scores(score(trainer.model, ids, torch.ones_like(ids), LENGTH - PROMPT))
    return trainer.model, logps


def _ask_patched(batch: Batch, call: CheckCall) -> tuple[Any, Tensor]:
    """AsyncGRPOTrainer needs a vLLM server to exist; what it does to the model it does with one function of TRL's."""
    import trl.trainer.utils as utils

    if call.settings.head in ADAPTERS:
        raise Unsupported("the trainer itself builds adapters, and it needs a vLLM server")
    model = _model(call).train().to(call.device)
    _fill(model, call.settings.head)
    ids = batch.ids.to(model.device)
    if hasattr(utils, "add_fused_lm_head"):
        utils.add_fused_lm_head(model, temperature=batch.temperature)
        if call.path == "fixed":
            from parity.fixes.patches import use_model_logits

            use_model_logits(model)
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        logps = out.log_probs
    elif hasattr(utils, "patch_chunked_lm_head"):
        utils.patch_chunked_lm_head(model, chunk_size=32, temperature=batch.temperature)
        completion = torch.ones_like(ids)
        out = model(input_ids=ids, attention_mask=completion, labels=ids, completion_mask=completion, use_cache=False)
        logps = out["log_probs"] if isinstance(out, dict) else out.log_probs
    else:
        raise Unsupported("this version of TRL patches no model for AsyncGRPOTrainer")
    return model, logps[:, -(LENGTH - PROMPT) :]


def _ask_loss(batch: Batch, call: CheckCall) -> tuple[Any, Tensor]:
    trainer = _built(call, beta=BETA, max_length=64)
    if getattr(trainer, "ref_model", None) is not None:
        quantised_heads.quantise(trainer.ref_model, call.settings.head)
        if call.settings.head == "hook":
            _fill(trainer.ref_model, "hook")
    ids = batch.ids.to(trainer.model.device)  # what a collator makes of the sequences
    completion = torch.ones_like(ids)
    completion[:, :PROMPT] = 0
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}
    inputs |= {} if call.spec.paired else {"labels": ids.masked_fill(completion == 0, -100)}
    with trl.quiet(), drive.fixed(call.path, trainer):
        return trainer.model, trainer.compute_loss(trainer.model, inputs)
