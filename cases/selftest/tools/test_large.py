"""A case inside a batch too large for its definition is judged as itself; what the tables measure."""

import dataclasses

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


def test_what_replicas_cost_and_where_the_device_is_faster():
    ((logits, _, _, apart),) = large.homes("cpu", (16,))
    assert (logits, apart) == (128, 0.0)
    found = [(8, 1.0, 0.5, 0.0), (64, 1.0, 2.0, 0.0), (512, 1.0, 0.5, 0.0), (4096, 1.0, 0.5, 0.0)]
    assert large.crossing(found).startswith(
        "Replicas are faster on the device from 512 logits on; ON_DEVICE is 1,048,576"
    )
    assert "at none of these sizes, the largest 64" in large.crossing(found[:2])
