"""What the benchmarks measure and how they are told: exact peaks, paired ratios, reasons in cells, accuracy tables."""

import math
import sys
from pathlib import Path

import pytest
import torch

from cases.bench import accuracy, losses, measure, rate, same
from cases.selftest.results import runs as shared
from parity.judging.oracle import exact
from parity.registry import load, loss_family
from parity.results.report.rows import Writer

MB = 1 << 20


def test_what_counts_as_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert measure.out_of_memory(caught.value)
    assert measure.out_of_memory(torch.OutOfMemoryError())
    assert not measure.out_of_memory(RuntimeError("shapes"))


@pytest.mark.parametrize(
    ("family", "ours"), [("logprobs", "fixes.selective_log_probs"), ("policy", "fixes.FusedLinearGRPOLoss")]
)
def test_a_pass_of_ours_needs_neither_logits_nor_their_gradient(family, ours):
    size = losses.Size(2, 64, 16, 4096)
    given = losses.inputs(family, size, "fp32", "cpu")
    run = losses.prepared(load()[ours], given)
    found = run()
    assert {"grad_hidden", "grad_weight"} < set(found)
    with measure.peak("cpu") as peak:
        run()
    assert peak.bytes < size.B * size.T * size.V * 4
    assert given.tensors["weight"].grad is None


def test_the_error_of_a_pass_is_told_apart_by_value_and_gradient():
    right = {"logps": torch.tensor([3.0, 4.0]), "grad_hidden": torch.ones(4), "grad_weight": torch.full((4,), 2.0)}
    right = {name: x.double() for name, x in right.items()}
    found = right | {"logps": torch.tensor([3.0, 4.5]), "grad_weight": torch.full((4,), 2.5)}
    assert losses.errors(found, right) == {"value": 0.1, "gradient": 0.25}


@pytest.mark.parametrize("family", ["logprobs", "policy"])
def test_the_reference_of_blocks_is_that_of_the_whole(family):
    """With more logits than fit there was none, and every error passed."""
    given = losses.inputs(family, losses.Size(5, 3, 4, 16), "fp32", "cpu")
    whole = exact(loss_family(family), given)
    for logits in (1, 2 * 3 * 16, 2**20):
        found = losses.reference(given, logits)
        assert {"grad_hidden", "grad_weight"} < set(found)
        assert all(torch.allclose(found[name], whole[name], rtol=1e-12, atol=1e-14) for name in found)


def row(name, case, quantity, dist, oracle=2.0, **fields):
    return shared.row(case, quantity, implementation=name, dist=dist, value_oracle=oracle, **fields)


def test_accuracy_pairs_the_cases_that_both_were_judged_on():
    own, peer = "fixes.selective_log_probs", "lib.loss"
    rows = [
        *(row(own, case, "logps", 1.0) for case in "abc"),
        row(peer, "a", "logps", 4.0),
        row(peer, "b", "logps", None, verdict="disagree"),
        row(peer, "c", "logps", 0.5, verdict="refused"),
        row(own, "a", "grad_weight", 0.25, oracle=0.0),
        row(peer, "a", "grad_weight", 0.0, oracle=0.0, headroom=None),
        row(own, "a", "relation: cotangent x2", 9.0),
        row(peer, "a", "relation: cotangent x2", 9.0),
    ]
    gradients, values = accuracy.compare(rows, (own,))
    assert values.pairs == ((0.5, 2.0), (0.5, math.inf))
    assert values.no_farther == 1.0
    assert gradients.pairs == ((0.25, 0.0),)
    assert gradients.no_farther == 0.0
    assert "| fixes.selective_log_probs | lib.loss | fp32 | values | 2 | 0.5, ∞ | 0.5, ∞ | 100% |" in accuracy.table(
        [values]
    )


def test_a_comparison_is_an_implementation_on_a_case(tmp_path):
    """Not its quantities, not what was declined, and no row about the whole run."""
    told = [("a", "x", "agree", "loss"), ("a", "x", "disagree", "kl"), ("a", "y", "nondeterministic", "loss")]
    made = [shared.row(c, q, verdict, implementation=i) for c, i, verdict, q in told]
    made += [shared.row("b", None, "unsupported", implementation="x"), shared.row("pooled", settings={})]

    def run(words, root):
        with Writer(words[words.index("--results") + 1]) as write:
            for record in (shared.HEADER, *made):
                write(record)
        return 0.5

    assert rate.rate(tmp_path, "logprobs", "quick", run) == (2, 0.5)
    assert rate.row("logprobs", "c735fbd", 2, 0.5) == "| logprobs | c735fbd | 2 | 0.5 | 4 |"


def test_cpu_seconds_are_those_of_all_that_was_started():
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    both = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {burn!r}])\n{burn}"
    assert 0.55 < rate.cpu([sys.executable, "-S", "-c", both], Path.cwd()) < 3


def _row(case="a", **fields):
    return shared.row(case, **{"implementation": "x", "headroom": 0.5} | fields)


def test_two_runs_say_the_same_but_for_what_is_a_run_s_own():
    before = [_row("a"), _row("b"), _row("b", headroom=0.2)]
    after = [_row("b", run="2", headroom=0.5 * (1 + 1e-7)), _row("b", headroom=0.2), _row("a", replay="elsewhere")]
    assert not list(same.differences(before, after))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ([_row(verdict="disagree", cls=None, blame=None)], "a x loss: verdict 'agree', 'disagree'"),
        ([_row(gates={"norm": 0.500002})], "a x loss: gates {'norm': 0.5}, {'norm': 0.500002}"),
        ([_row(headroom=None, gates={"norm": 0.5})], "a x loss: headroom 0.5, None"),
        ([_row(), _row("c")], "c x loss: only after"),
        ([], "a x loss: only before"),
    ],
)
def test_what_two_runs_do_not_agree_on_is_said(changed, said):
    assert list(same.differences([_row()], changed)) == [said]
