"""A case inside a batch too large for its definition is judged as itself."""

import dataclasses

import torch

from cases.selftest.controls.correct import control
from fixtures.large import embedded
from parity.registry import family, run_case

CASE = family("logprobs").case(3, "fp32", {"V": 9, "T": 4, "ignored": "some"})


def test_a_case_in_a_large_batch():
    honest = control("control.logprobs.plain")

    def wraps(x):
        """An index that overflows beyond 500 rows."""
        return {"logps": honest.call(x)["logps"][:, torch.arange(x.ids.shape[1]) % 500]}

    wrong = dataclasses.replace(honest, id="wraps", call=wraps)
    verdicts: dict[str, set[str]] = {}
    for row in run_case(CASE, [embedded(honest, 1000), embedded(wrong, 500), embedded(wrong, 1000)], thorough=False):
        verdicts.setdefault(row.implementation, set()).add(row.verdict)
    assert verdicts.pop("wraps in 1000 rows") >= {"disagree"}
    assert len(verdicts) == 2 and all(v == {"agree"} for v in verdicts.values()), verdicts
