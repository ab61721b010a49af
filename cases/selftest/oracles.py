"""The oracle of a case, as tests ask for it, and what the ledger knows of its rows."""

from parity import data
from parity.judging.assess import CaseOracle
from parity.registry import facts, loss_family
from parity.results.ledger import Ledger


def new(rows, case):
    """Rows that fail and that the ledger does not know."""
    ledger = Ledger.load(data.ledger_file())
    return [r for r in rows if r.failing and ledger.match(r, facts(case)) is None]


def oracle_of(case, device="cpu"):
    return CaseOracle.of(loss_family(case.family), case, device)
