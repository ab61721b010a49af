"""The tiny models themselves: transformers' forward and backward pass beside the architecture written out.

No trainer is in it. Elsewhere definition and trainer run the same model, so that a mistake of the model's own is in both.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds
from parity.trainers.checks.twins import split, twin
from parity.trainers.definitions import decoder
from parity.trainers.definitions.scored import rows
from parity.trainers.definitions.training_step import exact_step, gradients, window_loss
from parity.trainers.rig import drive, models, recorder
from parity.trainers.rig.drawn import normal
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import TWINS
from parity.upstream import trl

LENGTHS = (80, 67)
"""Longer than the sliding windows of 64."""
NAMES = (*models.ARCHITECTURES, models.GROUPED, *models.VISION)
SETTINGS = {"model": Setting("llama", "tiny model", NAMES)}
CASES: list[CheckCase] = [("sft-trainer", {"model": name}) for name in NAMES]
PR = [case for case in CASES if case[1]["model"] not in ("recurrent_gemma", "gpt2", "deepseek_v4", *models.VISION)]
"""Without those that are known to be wrong."""
PACKED = "packed into one row"
SHARE = 0.3
DROPPED: list[CheckCase] = [("sft-trainer", {"checkpointing": kind}) for kind in (drive.REENTRANT, drive.NON_REENTRANT)]
PLACES = ("adapter", "attention")
DISABLED: list[CheckCase] = [(t, {"disabled": at}) for t in TWINS if t != "sft-trainer" for at in PLACES]


@check(
    "architecture", ("sft-trainer",), SETTINGS, lambda seed: CASES, pr=PR, paths=("released",), drives=False, moves=True
)
def architecture(call: CheckCall) -> Iterator[Quantity]:
    """Logits and every gradient of the model by itself are those of its architecture, whatever the padding and attention."""
    name = call.settings.model
    sequences = [models.ids(9, f"row {n}", n) for n in LENGTHS]
    upstream = [normal(9, f"upstream {n}", (n, models.VOCABULARY)) for n in LENGTHS]

    def loss(z: Sequence[Tensor]) -> Tensor:
        parts = [(g.to(own) * own).sum() for g, own in zip(upstream, z, strict=True)]
        return torch.stack(parts).sum() / sum(LENGTHS)

    exact = models.model(name, torch.float64)
    step = exact_step(exact, lambda model: loss(decoder.logits(model, name, sequences)))
    message = f"no trainer is in this: transformers' {type(exact).__name__}"
    fused = "sdpa" if exact._supports_sdpa else "eager"  # Gemma-2's softcap on scores is eager's alone
    ways = [("eager", "padded on the right"), *((fused, way) for way in ("padded on the left", "one by one", PACKED))]
    for attention, way in ways[: None if _knows_packing() else -1]:
        model = models.model(name, attention=attention).train().to(call.device)
        found = loss([z.cpu() for z in _logits(model, sequences, way)])
        found.backward()
        told = f"{attention} attention, {way}"
        yield dataclasses.replace(window_loss(step, float(found.detach()), f"logits, {told}"), message=message)
        grads = {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}
        yield dataclasses.replace(gradients(step, grads, f"gradient, {told}"), message=message)


def _knows_packing() -> bool:
    """Whether the installed transformers tells sequences in one row apart by their positions, without FlashAttention."""
    try:
        from transformers.masking_utils import create_causal_mask
    except ImportError:
        return False
    return "position_ids" in inspect.signature(create_causal_mask).parameters


def _logits(model: Any, sequences: Sequence[Sequence[int]], way: str) -> list[Tensor]:
    """Logits (T_i, V) of each: of a padded batch; of each sequence by itself, without a mask (causal attention's own path); or
    of all in one row, whose positions begin again at 0, with all else that TRL's padding_free and packing hand over."""
    device = next(model.parameters()).device
    # some releases require them in training of a model that sees images; GPT-2 embeds them
    typed = "token_type_ids" in inspect.signature(model.forward).parameters and hasattr(model.config, "text_config")

    def logits(input_ids: Tensor, **given: Any) -> Tensor:
        given |= {"input_ids": input_ids} | ({"token_type_ids": torch.zeros_like(input_ids)} if typed else {})
        moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
        return model(**moved, use_cache=False).logits

    if way == "one by one":
        return [logits(torch.tensor([s]))[0] for s in sequences]
    sizes = [len(s) for s in sequences]
    if way == PACKED:
        borders = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
        given: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in sizes])[None]}
        if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()):
            numbers = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), borders.diff())[None]
            given |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "seq_idx": numbers}
            given |= {"max_length_q": max(sizes), "max_length_k": max(sizes)}
        return list(logits(torch.tensor([list(itertools.chain(*sequences))]), **given)[0].split(sizes))
    batch = rows(sequences)
    if way == "padded on the left":
        ends = [len(s) for s in sequences]
        batch = {n: torch.stack([x.roll(len(x) - e) for x, e in zip(b, ends, strict=True)]) for n, b in batch.items()}
    found = logits(**batch)
    return [z[seen.bool()] for z, seen in zip(found, batch["attention_mask"], strict=True)]


@check(
    "dropout",
    TWINS,
    {
        "checkpointing": Setting(drive.REENTRANT, "gradient checkpointing", (drive.REENTRANT, drive.NON_REENTRANT)),
        "disabled": Setting("", "with disable_dropout, dropout of this", ("", *PLACES)),
    },
    lambda seed: [*DROPPED, *DISABLED],
    pr=DROPPED,
    paths=("released",),
)
def dropout(call: CheckCall) -> Iterator[Quantity]:
    """What checkpointing computes again drops the same activations, with disable_dropout none: the same gradients, to the bit."""
    s, trainer = call.settings, call.case.family
    if s.disabled:
        drive.needs(call.trainer, "disable_dropout")  # which is on

    def taken(share: float, checkpointing: str = drive.OFF) -> recorder.Steps:
        def handed() -> tuple[Any, Any]:
            base = models.model("llama")
            for module in base.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = share * (s.disabled != "adapter")
            return base, trl.lora(lora_dropout=share * (s.disabled != "attention"))

        run = Run(trainer, twin(trainer, split=split(trainer, "4x2"), checkpointing=checkpointing), adapter=handed)
        with drive.seeded():
            return run.steps

    plain = taken(0.0 if s.disabled else SHARE)
    again = taken(SHARE) if s.disabled else taken(SHARE, s.checkpointing)
    other = [n for n, g in plain.gradients[0].items() if not torch.equal(g, again.gradients[0][n])]
    yield holds("loss", plain.losses == again.losses, f"{again.losses} instead of {plain.losses}", sum(again.losses))
    many = f"{len(other)} of {len(plain.gradients[0])} parameters differ"
    yield holds("gradient", not other, f"{many}, first {other[:1]}")
