"""Real vocabularies, more than 2³¹ logits, and the spin lock of cut-cross-entropy's backward, 200 times over."""

import pytest
import torch

from parity import data
from parity.implementations.implementation import Implementation
from parity.judging.assess import Bench, judge_all
from parity.judging.execute import execute
from parity.registry import facts, family, load, run_case, select
from parity.results.ledger import Ledger
from parity.results.report.failure import text_of
from parity.running.shard import VOCABULARIES
from parity.tools.large import embedded

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILY = family("logprobs")


def new(rows, case):
    ledger = Ledger.load(data.ledger_file())
    return [r for r in rows if r.failing and ledger.match(r, facts(case)) is None]


def ours() -> list[Implementation]:
    return [i for i in select(()) if i.family == "logprobs" and not i.missing()]


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_real_vocabularies(size, dtype):
    case = FAMILY.case(1, dtype, {"B": 1, "T": 4, "V": size, "H": 16})
    rows = list(run_case(case, ours(), "cuda", thorough=False))
    assert any(r.judged for r in rows) and not new(rows, case), text_of(rows)


@pytest.mark.parametrize("id", [i.id for i in ours()])
def test_beyond_2_31_logits(id):
    case = FAMILY.case(2, "bf16", {"B": 1, "T": 4, "V": 131_073, "H": 16})
    one = embedded(load()[id], 2**31 // 131_073 + 64)
    rows = list(run_case(case, [one], "cuda", thorough=False))
    assert not [r for r in new(rows, case) if r.verdict != "out-of-memory"], text_of(rows)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [8_200, 131_073])
def test_the_spin_lock_200_times(size):
    """Its release has no barrier before it in 25.1.1: a lost addition shows as a wrong gradient, a dead lock as a time-out."""
    one = load()["cce.unfiltered"]
    bench = Bench.of(FAMILY, FAMILY.case(3, "bf16", {"B": 1, "T": 512, "V": size, "H": 16}), "cuda")
    recipe = one.recipe_for(bench.inputs)
    for turn in range(200):
        found = judge_all(bench, one, execute(one, bench.inputs), recipe)
        assert all(j.agrees for j in found.values()), (turn, {n: j.gates for n, j in found.items()})
