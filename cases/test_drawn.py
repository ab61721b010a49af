"""Drawn cases of every implementation, under pytest: a new disagreement fails with the finding's text."""

import pytest

from parity import data
from parity.case.drawing import cases, draws
from parity.registry import facts, load, loss_families, loss_family, run_case
from parity.results.ledger import Ledger
from parity.results.report.render import text_of
from parity.running.plan import DTYPES
from parity.running.provenance import resolve_device
from parity.running.run import FIXED_SEED
from parity.sampling.capabilities import selected

CHOSEN = [i for i in load().values() if not i.opt_in and i.family in loss_families()]


@pytest.mark.parametrize("implementation", CHOSEN, ids=lambda i: i.id)
def test_drawn(implementation, request) -> None:
    if implementation.missing():
        pytest.skip(implementation.missing())
    count = request.config.getoption("--parity-cases")
    ledger, fam = Ledger.load(data.ledger_file()), loss_family(implementation.family)
    judged = []
    drawn = draws(
        cases(fam, DTYPES, "quick"), f"{FIXED_SEED}/{implementation.id}", count * (8 if implementation.every > 1 else 1)
    )
    for case in drawn:
        if not selected(implementation, case, 1, resolve_device("auto")):
            continue
        rows = list(run_case(case, [implementation], resolve_device("auto"), thorough=False))
        judged.extend(r for r in rows if r.verdict == "agree")
        new = [r for r in rows if r.failing and ledger.match(r, facts(case)) is None]
        assert not new, text_of(rows)
    if not judged:
        pytest.skip(f"{implementation.id}: none of the drawn cases is one that it claims here")
