"""Results that correct code gave on an H200 (torch 2.11, 26 November 2026), judged as on CUDA by the oracle of the CPU."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from cases.selftest.controls.correct import CONTROLS
from cases.selftest.oracles import oracle_of
from fixtures.pretended_cuda import pretended
from parity.judging.assess import judged
from parity.protocol.exceptions import Outcome
from parity.registry import load, loss_family

FILE = Path(__file__).parents[3] / "fixtures" / "h200.safetensors"
VALUES = load_file(FILE)
with safe_open(FILE, "pt") as header:
    CASES = {case.pop("implementation"): case for case in json.loads(header.metadata()["cases"])}


@pytest.mark.parametrize("name", CASES)
def test_results_of_an_h200_are_right(name):
    known = load() | {i.id: i for of_family in CONTROLS.values() for i in of_family}
    given = CASES[name]
    case = loss_family(given["family"]).case(given["seed"], given["dtype"], given["settings"])
    came = {key.rpartition("/")[2]: value for key, value in VALUES.items() if key.rpartition("/")[0] == name}
    with pretended():
        oracle = oracle_of(case, "cuda").offered(known[name])
        found = judged(oracle, known[name], Outcome("ran", came))
    assert came and found.keys() >= came.keys()
    assert all(found[n].agrees for n in came), {n: (found[n].gate, found[n].headroom) for n in came}
