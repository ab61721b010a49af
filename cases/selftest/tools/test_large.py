"""A case inside a batch too large for its definition is judged as itself; what the tables measure."""

import dataclasses

import pytest
import torch

from parity.registry import family, run_case
from parity.selftest.controls import control
from parity.tools import large
from parity.tools.large import embedded

CASE = family("logprobs").case(3, "fp32", {"V": 9, "T": 4, "ignored": "some"})


def test_a_case_in_a_large_batch():
    honest = control("honest.logprobs.plain")

    def wraps(x):
        """An index that overflows beyond 500 rows."""
        return {"logps": honest.call(x)["logps"][:, torch.arange(x.ids.shape[1]) % 500]}

    wrong = dataclasses.replace(honest, id="wraps", call=wraps)
    verdicts: dict[str, set[str]] = {}
    for row in run_case(CASE, [embedded(honest, 1000), embedded(wrong, 500), embedded(wrong, 1000)], thorough=False):
        verdicts.setdefault(row.implementation, set()).add(row.verdict)
    assert verdicts.pop("wraps in 1000 rows") >= {"disagree"}
    assert len(verdicts) == 2 and all(v == {"agree"} for v in verdicts.values()), verdicts


def test_the_share_that_a_filter_drops_and_what_replicas_cost(monkeypatch):
    whole = control("honest.logprobs.plain")
    half = dataclasses.replace(whole, call=lambda x: {"logps": 0.5 * whole.call(x)["logps"]})
    monkeypatch.setattr(large, "load", lambda: {"cce.default": half, "cce.unfiltered": whole})
    assert [share for *_, share in large.dropped("cpu", (16,), ("fp32",))] == pytest.approx([0.5] * 4)
    ((logits, _, _, apart),) = large.homes("cpu", (16,))
    assert (logits, apart) == (128, 0.0)
