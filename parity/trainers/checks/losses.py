"""Every loss of the preference trainers, KTO's with its KL and weights, and DFT: one batch by its definition."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.families.preference_losses import CPO, DPO, ONLINE, SCORED, TPO
from parity.fixes.override import source_of
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, always, check, tells
from parity.trainers.checks.twin_windows import begun
from parity.trainers.checks.twins import judged, step_of, twin
from parity.trainers.definitions.formulas import MIXED, OPTIONS, Loss, kl_of_others
from parity.trainers.definitions.training_step import window_loss
from parity.trainers.rig import drive, models, stored_window
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import Run
from parity.upstream import trl

OWN = {
    "dpo-trainer": (*DPO, *MIXED),
    "kto-trainer": ("kto", "apo_zero_unpaired"),
    "sft-trainer": ("nll", "dft"),
    "online-dpo-trainer": tuple(ONLINE),
    "cpo-trainer": CPO,
    "orpo-trainer": ("orpo",),
    "tpo-trainer": TPO,
}
"""Trainer -> its loss types."""
TYPES = tuple(dict.fromkeys(name for names in OWN.values() for name in names))
SETTINGS = {
    "loss": Setting("sigmoid", "loss_type of the trainer's config", TYPES),
    "beta": Setting(0.3, "beta of the config", (0.3, 0.05)),
    **{name: setting for name, (_, setting) in OPTIONS.items()},
    "split": Setting("8x1", "batch x accumulation; without it where `twins` has the trainer", ("8x1", "2x4")),
    "zero": Setting(False, "a word of a chosen completion has id 0, and padding another", (False, True)),
    "even": Setting(False, "sequences of one length: a micro-batch's mean is that of all", (False, True)),
    "tile": drive.TILES,
    "model": Setting("llama", "tiny model; KTO's KL is positive for llama, negative for qwen2", ("llama", "qwen2")),
}
FIELDS = {
    "sft-trainer": {"smoothing": "label_smoothing_factor"},
    "tpo-trainer": {"nll": "tpo_alpha", "gamma": "tpo_l_gamma"},
}
"""Trainer -> fields of its config that are called otherwise than in `OPTIONS`."""
UNKNOWN = "unknown"
"""No word of the tokenizer: id 0."""
PR: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("dpo-trainer", {"loss": "robust", "smoothing": 0.1, "divergence": "js_divergence"}),
    ("dpo-trainer", {"loss": "aot", "ld_alpha": 0.4}),
    ("kto-trainer", {"loss": "kto", "desirable": 0.7, "undesirable": 1.3}),
    ("sft-trainer", {"loss": "dft"}),
    ("dpo-trainer", {"loss": "ipo", "divergence": "forward_kl"}),
    ("dpo-trainer", {"weighting": True}),
    *(("dpo-trainer", {"loss": "apo_zero", "precomputed": True, **more}) for more in ({}, {"ld_alpha": 0.4})),
    ("cpo-trainer", {"loss": "simpo", "nll": 0.4, "gamma": 1.2, "power": 0.3, "smoothing": 0.1}),
    ("orpo-trainer", {"loss": "orpo"}),
    ("tpo-trainer", {"loss": "tpo-l", "nll": 0.4, "gamma": 1.2, "smoothing": 0.1}),
)


def _with(*losses: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Settings that all losses of a trainer honour, or these alone."""
    return losses, settings


HONOURED: dict[str, tuple[tuple[tuple[str, ...], dict[str, Any]], ...]] = {
    "dpo-trainer": (
        _with("apo_zero", "ipo", precomputed=True),  # in sigmoid what a pair shares cancels
        _with("apo_zero", "ipo", precomputed=True, ld_alpha=0.4),
        _with(beta=0.05, model="qwen2"),
        _with(weighting=True),
        _with("sigmoid", weighting=True, tile=drive.NARROW),
        _with(*(loss for loss in DPO if loss != "sft"), ld_alpha=0.4),
        _with("robust", "aot", "aot_unpaired", smoothing=0.1),
        _with("discopop", tau=0.5),
        _with("sft", "mpo", zero=True),
        *(_with(*SCORED, divergence=name) for name in ("js_divergence", "alpha_divergence")),
        _with(*(loss for loss in SCORED if loss != "discopop"), divergence="forward_kl"),  # exp(-exp(…)) overflows
        _with("sigmoid", divergence="alpha_divergence", alpha=0.3),
    ),
    "kto-trainer": (
        _with(desirable=0.7, undesirable=1.3),
        _with(model="qwen2"),
        _with(precomputed=True),
        _with("kto", split="2x4"),
        _with("kto", prepared=2),
    ),
    "sft-trainer": (
        _with(whole=True),
        _with("nll", smoothing=0.1),
        _with("nll", smoothing=0.1, split="2x4"),
        _with("nll", eval_packed=True),
    ),
    "online-dpo-trainer": (_with(penalty=2.0), _with(weight=-1.0)),
    "cpo-trainer": (
        _with(split="2x4"),
        _with(split="2x4", even=True),
        _with(split="2x4", nll=0.0),
        _with(nll=0.0, beta=0.05, model="qwen2"),
        _with("sigmoid", "simpo", nll=0.4, smoothing=0.1),
        _with("ipo", "simpo", "alphapo", power=0.3),  # the others' sums are so large that their power drowns the margin
        _with("alphapo", power=-0.3),
        _with("simpo", "alphapo", gamma=1.2),
    ),
    "tpo-trainer": (
        _with("sigmoid", "ipo", split="2x4"),
        _with(split="2x4", even=True),
        _with(split="2x4", nll=0.0),
        _with(nll=0.4, beta=0.05, model="qwen2"),
        _with("sigmoid", "tpo-l", smoothing=0.1),
        _with("tpo-l", gamma=1.2),
    ),
    "orpo-trainer": (_with(beta=0.05, model="qwen2"), _with(split="2x4"), _with(split="2x4", even=True)),
}
"""Trainer -> the losses, none for all, and the settings that they are looked at with."""


def cases(seed: int) -> Iterator[CheckCase]:
    """Every loss of every trainer, and with each of the settings that it honours."""
    plain: dict[str, Any]
    for trainer, names in OWN.items():
        for loss in names:
            plain = {} if loss == SETTINGS["loss"].default else {"loss": loss}
            plain |= {"smoothing": 0.1} if loss == "exo_pair" else {}  # ε = 0 is log 0
            yield trainer, plain
            yield from ((trainer, {**plain, **more}) for only, more in HONOURED[trainer] if loss in (only or names))


@check("losses", tuple(OWN), SETTINGS, cases, pr=PR, covered=always, paths=EVERY_PATH)
def losses(call: CheckCall) -> Iterator[Quantity]:
    """One batch of eight: loss and every gradient as the definition of its loss type has them."""
    trainer, s = call.case.family, call.settings
    if s.loss not in OWN[trainer]:
        raise Unsupported(f"{trainer} has no loss type {s.loss}: {', '.join(OWN[trainer])}")
    if s.even and not any("even" in settings for _, settings in HONOURED[trainer]):
        raise Unsupported("only CPO's, ORPO's and TPO's likelihood is a mean over the tokens of a micro-batch")
    if s.zero and not call.spec.paired:
        raise Unsupported("only a paired trainer's likelihood is its own")
    if s.prepared and call.path == "fixed":  # which would start as many processes again
        raise Unsupported("no fix of ours is in the preparation of a dataset")
    rows = list(Window.of(trainer).rows)
    if s.penalty:  # completions end with the second of two tokens, where the version knows more than one
        several = "self.eos_token_ids" in source_of(vars(trl.class_named(call.trainer))["__init__"])
        end = models.END if several else models.EOS
        rows = [dataclasses.replace(r, limit=6, end=end) for r in rows]
    rows = stored_window.even(rows) if s.even else rows
    if s.zero:  # as a vocabulary's first word
        rows[0] = dataclasses.replace(rows[0], completion=f"{rows[0].completion} {UNKNOWN}")
    settings = twin(trainer, model=s.model, split=s.split, pad="<eos>" if s.zero else "<pad>", whole=s.whole)
    more = _options(call) | {"per_device_eval_batch_size": len(rows)}
    run = Run(trainer, settings, call.path, rows, plain=True, changed=models.two_ends if s.penalty else None, **more)
    loss = Loss(run.window, s)
    every = bool(s.nll) or call.spec.data != "triples"  # without it no gold one is scored
    yield from judged(call, run, loss, there=every)
    # online DPO does not evaluate; a KL is estimated of each micro-batch, and evaluation has one
    if call.spec.generates != "model" and not begun(run.built) and not (s.loss == "kto" and s.split != "8x1"):
        with trl.quiet(), drive.fixed(call.path, run.built):
            found = float(run.built.evaluate()["eval_loss"])
        yield window_loss(step_of(call, run, loss), found, "evaluation loss")
    if s.loss == "kto":
        z = float(kl_of_others(loss, stored_window.policy(s.model, torch.float64)).mean())
        yield tells("estimate", (z > 0) is (s.model == "llama"), f"{z:.3g}", z)


def offered(trainer: str, name: str, value: str) -> Any:
    """`value` as the field `name` of the trainer's config has it: of its enum where its default is of one (trl <= 0.27).
    Raises Unsupported where neither the enum nor the choices that the field documents have it."""
    field = next(f for f in dataclasses.fields(drive.config(trainer)) if f.name == name)
    kind: Any = type(field.default)
    members = [member.value for member in kind] if issubclass(kind, enum.Enum) else None
    choices = members or field.metadata.get("choices", (value,))
    if value not in choices:
        raise Unsupported(f"{name}={value}: {trainer} of the installed version has {', '.join(choices)}")
    return kind(value)


def _options(call: CheckCall) -> dict[str, Any]:
    """The config's fields; of settings at their default only those that the installed version has. Raises Unsupported
    where it lacks one that is away from its default."""
    s, known = call.settings, trl.fields(drive.config(call.trainer))
    fields = {name: field for name, (field, _) in OPTIONS.items()} | FIELDS.get(call.case.family, {})
    drive.needs(
        call.trainer,
        *(field for name, field in fields.items() if getattr(s, name) != SETTINGS[name].default),
        *(["loss_type"] if s.loss != OWN[call.case.family][0] else []),  # a field that a config lacks is left out of it
        *(["loss_weights"] if s.loss in MIXED else []),
    )
    mixed = MIXED.get(s.loss)
    out = {"beta": s.beta, "loss_type": list(mixed) if mixed else s.loss}
    out |= {"loss_weights": list(mixed.values())} if mixed and set(mixed.values()) != {1.0} else {}
    out |= {field: getattr(s, name) for name, field in fields.items() if name not in ("divergence", "weight", "whole")}
    out |= {"ld_alpha": None if s.ld_alpha == SETTINGS["ld_alpha"].default else s.ld_alpha}
    out |= {"reward_weights": [s.weight]} if s.weight != 1.0 else {}
    out |= {"missing_eos_penalty": s.penalty or None}
    if "f_divergence_type" in known:
        out["f_divergence_type"] = offered(call.trainer, "f_divergence_type", s.divergence)
    return out
