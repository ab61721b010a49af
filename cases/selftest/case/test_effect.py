"""A setting that is drawn must change the value: moved in a case whose loss it does not touch, it shows nothing."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from cases.selftest.case.test_drawing import EXCLUDED
from cases.selftest.mutants.matrix import drawn
from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.registry import loss_family
from parity.sampling.capabilities import DECIDING

FLOOR, PAIRS, RARE = 30, 2, 0.02
"""Cases of profile pr in which every setting changes the value, and in which all but a share `RARE` of the pairs of settings
do so beside each other; the rest in one."""
MEASURED = 1 << 17
"""Entries of the logits from which on a case is not measured: they cost the most, and are few."""
OTHERWISE = {"lengths", "holes", "entropy", "beta"}
"""Other tensors, not another value; another output; divergence: the default is a definition of its own."""


def without(*names: str, of: str = "") -> Callable[[Family, Inputs], dict[str, torch.Tensor | None]]:
    """Inputs -> the named tensors as None, or as they are built where the setting `of` was never moved."""

    def tensors(family: Family, x: Inputs) -> dict[str, torch.Tensor | None]:
        if not of:
            return dict.fromkeys(names)
        kept = {k: v for k, v in x.case.settings.items() if k != of}
        plain = family.build(dataclasses.replace(x.case, settings=kept)).tensors
        return {n: plain[n] for n in names if n in plain}

    return tensors


OF_TENSORS = {
    "bias": without("bias"),
    "teacher_bias": without("teacher_bias"),
    "old": without("old_logps"),
    "ratio": without("importance_sampling_ratio"),
    "sampler": without("sampling_logps"),
    "entropy_quantile": without("top_entropy_quantile"),
    "advantages": lambda family, x: {"advantages": x.advantages[:, 0]},
    "other_tokens": lambda family, x: {"num_items_in_batch": x.mask.sum()},
    "num_items": without("num_items_in_batch"),
    "ignored": without("ids", "support_ids", "support_logps", "top1_ids", "top1_logps", "label_logps", of="ignored"),
}
"""Settings that are tensors, and what these are at the default."""
OF_OTHER_LOSSES = {frozenset(pair): why for pair, why in EXCLUDED["policy"].items()}
NEVER_TOGETHER = OF_OTHER_LOSSES | {
    frozenset(pair): why
    for why, pairs in {
        "evaluation has one micro-batch": [("accumulation", "mode"), ("mode", "steps_per_generation")],
        "a sparse teacher comes without a window's tokens": [("num_items", "tail")],
        "a sparse teacher's log-probs are given": [
            ("tail", n) for n in ("teacher_bias", "teacher_softcap", "teacher_logit_scale")
        ],
        "the loss of vespo has no ratio of a sequence": [
            ("importance_sampling_level", n)
            for n in ("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg")
        ],
    }.items()
    for pair in pairs
}


def value(family: Family, x: Inputs) -> list[torch.Tensor]:
    """The first output of the definition and its gradients, in float64, under an upstream gradient that is not 0."""
    tensors = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in x.tensors.items()}
    leaves = {n: tensors[n].clone().requires_grad_() for n in x.leaves}
    out = family.oracle(x.replace(**tensors | leaves))[family.first]
    above = x.cotangents[family.first].double()
    above = torch.where((above == 0).all(), 1.0, above)
    given = torch.autograd.grad(out, list(leaves.values()), above, allow_unused=True) if out.requires_grad else ()
    return [out.detach(), *(g for g in given if g is not None)]


def differs(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    if [t.shape for t in one] != [t.shape for t in other]:
        return True
    close = (torch.allclose(a, b, rtol=1e-9, atol=1e-30, equal_nan=True) for a, b in zip(one, other, strict=True))
    return not all(close)


def effects(family: Family, case: Case) -> set[str]:
    """The moved settings without which the value of a case is another."""
    x = family.build(case)
    with_all, out = value(family, x), set()
    for name in {*DECIDING[family.name]} & case.settings.keys() - OTHERWISE:
        if name == "advantages" and x.advantages.dim() == 1:  # other values, not other settings
            continue
        settings = SimpleNamespace(**{**vars(x.settings), name: family.settings[name].default})
        tensors = OF_TENSORS.get(name, without())(family, x)
        leaves = tuple(n for n in x.leaves if tensors.get(n, 0) is not None)
        plain = dataclasses.replace(x.replace(**tensors), settings=settings, leaves=leaves)
        if differs(with_all, value(family, plain)):
            out.add(name)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logprobs", "policy", "divergence"])
def test_every_setting_and_every_pair_has_an_effect(name: str) -> None:
    family, alone, pairs = loss_family(name), collections.Counter(), collections.Counter()
    for case in drawn(name, 0):
        rows, length = family.sizes(family.full_settings(case))
        if rows * length < MEASURED:
            found = sorted(effects(family, case))
            alone.update(found)
            pairs.update(itertools.combinations(found, 2))
    moved = {*DECIDING[name]} - OTHERWISE
    assert {n: alone[n] for n in sorted(moved) if alone[n] < FLOOR} == {}
    together = [pair for pair in itertools.combinations(sorted(moved), 2) if frozenset(pair) not in NEVER_TOGETHER]
    seldom = {pair: pairs[pair] for pair in together if pairs[pair] < PAIRS}
    assert len(seldom) <= RARE * len(together) and all(seldom.values()), seldom
