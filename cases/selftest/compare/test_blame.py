"""Who is to blame, and what counts as flaky: one rule for losses and for trainers."""

import pytest

from parity.compare.result_rows import Blame, flaky
from parity.results.row import Row


def row(implementation, verdict, role="candidate", **fields):
    base = {"case": "c", "family": "f", "dtype": "fp32", "device": "cpu", "quantity": "loss", "value": 2.0}
    return Row(**base | {"implementation": implementation, "verdict": verdict, "role": role} | fields)


@pytest.mark.parametrize(
    ("reference", "candidate", "blames", "against"),
    [
        ("agree", "disagree", (None, "candidate"), "lib.plain"),
        ("disagree", "disagree", ("reference", "both"), "lib.plain"),
        ("disagree", "agree", ("reference", None), "lib.plain"),
        ("agree", "nondeterministic", (None, "candidate"), "lib.plain"),
        ("crashed", "disagree", ("reference", "candidate"), None),
        ("agree", "crashed", (None, "candidate"), "lib.plain"),
        ("disagree", "out-of-memory", ("reference", "candidate"), "lib.plain"),
        ("refused", "crashed", (None, None), None),
        ("crashed", "crashed", ("reference", None), None),
        ("unsupported", "agree", (None, None), None),
    ],
)
def test_blame(reference, candidate, blames, against):
    blame = Blame()
    rows = [blame.decide(row("lib.plain", reference, "reference")), blame.decide(row("lib.fast", candidate))]
    assert tuple(r.blame for r in rows) == blames
    assert (rows[0].against, rows[1].against) == (None, against)
    assert rows[1].value_reference == (2.0 if against else None)


def test_a_reference_value_is_of_the_same_question():
    """Its upstream gradient is another where it gives no optional output."""
    blame = Blame()
    blame.decide(row("lib.plain", "agree", "reference", value=635.0, value_oracle=635.0))
    for exact, beside in ((635.0, 635.0), (727.0, None)):
        assert blame.decide(row("lib.fast", "disagree", value_oracle=exact)).value_reference == beside


def test_what_follows_another_definition_is_nobodys_fault_and_the_harness_keeps_its_own():
    blame = Blame()
    assert blame.decide(row("lib.fast", "disagree", variant="capped KL")).blame is None
    assert blame.decide(row("lib.fast", "crashed", blame="harness")).blame == "harness"


def test_flaky_is_what_does_not_fail_twice():
    assert flaky(["a", "b", "c"], lambda: {"a": True, "b": False}) == {"a", "c"}
    assert flaky([], lambda: pytest.fail("called again for nothing")) == set()
