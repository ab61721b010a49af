"""What an audit moves in each loss family: one setting away from its default, and the same inputs without it.

Shapes, dtypes, layouts and what only changes data are inputs, not settings.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parity.case.family import CALLING, Family
from parity.case.inputs import Inputs, Setting

Tensors = dict[str, torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A setting moved away from its default, and how to reset it on the same tensors.

    Attributes:
        setting: as in the family's table.
        value: what it is moved to.
        among: further settings, the same on both sides.
        back: settings that go back to their default with it.
        off: inputs -> tensors exchanged on the way back, where the setting is a tensor.
        bases: settings of both sides, one after the other until an implementation runs on one.
        stays: the definition does not move: an implementation that does is wrong.
        data: the value names what the tensors of every pair are, not a value of the setting.
        leaves: the only leaves, where the others would not be there without the setting.
        outputs: outputs that the setting asks for; without it they get no upstream gradient.
        note: what distinguishes it from another probe of the same setting.
    """

    setting: str
    value: Any
    among: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    back: tuple[str, ...] = ()
    off: Callable[[Inputs], Tensors] = lambda x: {}
    bases: tuple[Mapping[str, Any], ...] = ({},)
    stays: bool = False
    data: bool = False
    leaves: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    note: str = ""

    @property
    def label(self) -> str:
        """`setting=value`, with its note."""
        return f"{self.setting}={self.value}" + (f" ({self.note})" if self.note else "")


def derived(settings: Mapping[str, Setting], example: Mapping[str, Any]) -> tuple[Probe, ...]:
    """The probes of a family that names none: every choice of a setting, and a number at its value in the example.

    A number that the example leaves alone is moved to 0.7 times its default; a whole number (a shape) is not moved.
    """
    out = []
    for name, setting in settings.items():
        if name in CALLING:
            continue
        if setting.choices is not None:
            out += [Probe(name, value) for value in setting.choices if value != setting.default]
        elif (
            isinstance(setting.default, float)
            and (value := example.get(name, 0.7 * setting.default)) != setting.default
        ):
            out.append(Probe(name, value))
    return tuple(out)


def _without(*names: str) -> Callable[[Inputs], Tensors]:
    return lambda x: dict.fromkeys(names)


def _as_built_without(setting: str, *names: str) -> Callable[[Inputs], Tensors]:
    """The named tensors as they are where the setting was never moved."""

    def off(x: Inputs) -> Tensors:
        kept = {k: v for k, v in x.case.settings.items() if k != setting}
        built: Family = importlib.import_module(f"parity.families.{x.case.family}").FAMILY
        plain = built.build(dataclasses.replace(x.case, settings=kept))
        return {n: plain.tensors[n] for n in names if n in plain.tensors}

    return off


SUPPORT = ("ids", "support_ids", "support_logps", "top1_ids", "top1_logps", "label_logps")


HEAD = (
    Probe("temperature", 0.7),
    Probe("softcap", 3.0),
    Probe("logit_scale", 0.3),
    Probe("bias", "random", off=_without("bias")),
)
"""Settings of every family with an LM head."""


LOGPROBS = (
    *HEAD,
    Probe("temperature", 0.7, {"softcap": 3.0}, note="with softcap 3"),
    Probe("logit_scale", 0.3, {"softcap": 3.0}, note="with softcap 3"),
    Probe("bias", "random", {"temperature": 0.7}, off=_without("bias"), note="with temperature 0.7"),
    Probe("ignored", "some", off=_as_built_without("ignored", "ids")),
    Probe("entropy", "gradient", outputs=("entropy",)),
    Probe("chunk_size", 5, stays=True),
)

LOSS_TYPES = tuple(
    Probe("loss_type", value, {"epsilon_high": 2.0} if value == "cispo" else {})
    for value in ("bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
)

KL = {"beta": 0.5, "ref": "apart"}

POLICY = (
    *HEAD,
    Probe("head", "tied"),
    Probe("head", "lora", leaves=("hidden",)),
    *LOSS_TYPES,
    Probe("importance_sampling_level", "sequence"),
    Probe("epsilon", 0.05, {"epsilon_high": 0.28}),
    Probe("epsilon_high", 0.5),
    Probe("delta", 1.8),
    Probe("beta", 0.5, {"ref": "apart"}, off=_without("ref_logps")),
    Probe("use_bias_correction_kl", True, KL),
    Probe("old", "mixed", off=_without("old_logps")),
    Probe("ratio", "token", {"ratio_range": "wide"}, off=_without("importance_sampling_ratio")),
    Probe("ratio", "sequence", {"ratio_range": "wide"}, off=_without("importance_sampling_ratio")),
    Probe("off_policy_mask_threshold", 0.1, {"sampler": "given"}),
    Probe("sampler", "given", {"off_policy_mask_threshold": 0.1}, off=_without("sampling_logps")),
    Probe("entropy_quantile", True, off=_without("top_entropy_quantile")),
    Probe("entropy_coef", 0.3),
    Probe("advantages", "token", off=lambda x: {"advantages": x.advantages[:, 0]}),
    Probe(
        "lengths",
        "ragged",
        data=True,
        off=lambda x: {n: torch.ones_like(x.tensors[n]) for n in ("mask", "completion_mask")},
    ),
    Probe("holes", True, off=lambda x: {"tool_mask": None, "mask": x.completion_mask}, note="tool mask"),
    Probe("accumulation", 4, {"steps_per_generation": 4}, back=("steps_per_generation",)),
    Probe(
        "accumulation",
        4,
        {"steps_per_generation": 4, "loss_type": "dapo"},
        back=("steps_per_generation",),
        stays=True,
        note="dapo",
    ),
    Probe("steps_per_generation", 2, {"loss_type": "dapo"}, note="dapo"),
    Probe(
        "other_tokens",
        40,
        {"loss_type": "dapo"},
        off=lambda x: {"num_items_in_batch": x.mask.sum()},
        note="dapo: num_items_in_batch",
    ),
    Probe("max_completion_length", 512, {"loss_type": "dr_grpo"}),
    Probe("mode", "eval", {"accumulation": 4, "steps_per_generation": 4}),
    Probe("sapo_temperature_pos", 0.3, {"loss_type": "sapo", "advantages": "positive"}),
    Probe("sapo_temperature_neg", 3.0, {"loss_type": "sapo", "advantages": "negative"}),
    Probe("vespo_k_pos", 1.0, {"loss_type": "vespo", "advantages": "positive"}),
    Probe("vespo_lambda_pos", 1.5, {"loss_type": "vespo", "advantages": "positive"}),
    Probe("vespo_k_neg", 1.5, {"loss_type": "vespo", "advantages": "negative"}),
    Probe("vespo_lambda_neg", 1.0, {"loss_type": "vespo", "advantages": "negative"}),
    Probe("chunk_size", 2, stays=True),
)

FORWARD: Mapping[str, Any] = {"beta": 0.0}
SPARSE: Mapping[str, Any] = {"sparse": "topk", "beta": 0.0}
MIXED: Mapping[str, Any] = {"sparse": "mixed", "beta": 1.0}
DENSE: tuple[Mapping[str, Any], ...] = ({}, FORWARD)
ANY = (*DENSE, SPARSE, MIXED)
"""What distillation losses take: a dense teacher, the forward KL alone, a teacher's top k, its top 1 and the label."""

DIVERGENCE = (
    *(dataclasses.replace(probe, bases=ANY) for probe in HEAD),
    *(Probe("beta", value) for value in (0.0, 1.0, 0.1)),
    Probe("teacher_softcap", 1.0, bases=DENSE),
    Probe("teacher_logit_scale", 0.3, bases=DENSE),
    Probe("teacher_bias", "random", off=_without("teacher_bias"), bases=DENSE),
    Probe("ignored", "some", off=_as_built_without("ignored", *SUPPORT), bases=ANY),
    Probe("num_items", "given", {"other_tokens": 40}, off=_without("num_items_in_batch"), bases=DENSE),
    Probe(
        "extra_vocabulary",
        9,
        off=_as_built_without("extra_vocabulary", "teacher_weight", "teacher_bias"),
        bases=DENSE,
        stays=True,
    ),
    Probe("tail", False, {"sparse": "topk", "beta": 0.0}),
    Probe("chunk_size", 3, bases=DENSE, stays=True),
)

CPO: Mapping[str, Any] = {"method": "cpo"}
KTO: Mapping[str, Any] = {"method": "kto", "loss_type": "kto"}
PREFERENCE = (
    *(dataclasses.replace(probe, bases=({}, CPO)) for probe in HEAD),
    *(Probe("loss_type", value) for value in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard")),
    *(Probe("loss_type", value) for value in ("apo_zero", "apo_down", "discopop", "sigmoid_norm")),
    Probe("loss_type", "exo_pair", {"smoothing": 0.1}),
    Probe("loss_type", "robust", {"smoothing": 0.1}),
    Probe("loss_type", "simpo", {"method": "cpo"}),
    Probe("beta", 0.7, bases=({}, CPO, KTO)),
    Probe("average", True, bases=({}, CPO, KTO)),
    Probe("nll", 0.4, bases=({}, CPO)),
    Probe("smoothing", 0.2, {"loss_type": "robust"}),
    Probe("smoothing", 0.2, CPO, note="cpo"),
    Probe("gamma", 1.5, {"method": "cpo", "loss_type": "simpo"}),
    Probe("tau", 1.0, {"loss_type": "discopop"}),
    Probe(
        "reference",
        "none",
        off=_as_built_without("reference", "ref_hidden", "ref_weight", "ref_bias"),
        bases=({}, KTO),
    ),
    Probe("kl", 2.0, KTO),
    Probe("desirable", 0.7, KTO),
    Probe("undesirable", 1.3, KTO),
    Probe("ignored", "none", off=_as_built_without("ignored", "ids")),
    Probe("chunk_size", 2, bases=({}, CPO, KTO), stays=True),
)

PROBES: Mapping[str, tuple[Probe, ...]] = {
    "logprobs": LOGPROBS,
    "policy": POLICY,
    "divergence": DIVERGENCE,
    "preference": PREFERENCE,
}
"""Family -> what an audit moves."""
BASES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "policy": ({"old": "absent", "beta": 0.04}, {"loss_type": "bnpo"}),  # TRL 0.15, 0.16
}
"""Family -> settings with which an implementation may run that refuses the defaults, as early releases do."""


def example(family: Family, number: int) -> dict[str, Any]:
    """Settings of a small case without special values: logits well spread, no size equal to another or a multiple of a block.
    Of other families the last values that they draw."""
    if family.name not in PROBES:
        drawn = {n: s.drawn for n, s in family.settings.items() if s.drawn}
        return {name: values[-1 - number % len(values)] for name, values in drawn.items()}
    sizes = ({"B": 3, "T": 6, "V": 11, "H": 5}, {"B": 2, "T": 5, "V": 37, "H": 8})[number % 2]
    sizes |= {"B": 4} if family.name == "preference" else {}
    out = {**sizes, "peak": 2.0, "grad": "hidden weight"}
    out |= {"lengths": ([6, 4, 2], [3, 5])[number % 2]} if family.name == "policy" else {}
    return out if family.name == "logprobs" else out | {"cotangent": "ones"}


def probes_of(family: Family) -> tuple[Probe, ...]:
    """What an audit moves; of a family without probes every choice and every number, see `derived`."""
    return PROBES.get(family.name) or derived(family.settings, example(family, 0))
