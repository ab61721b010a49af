"""A case of a trainer check by its settings, on one path."""

from parity.registry import run_case, select
from parity.trainers import catalogue
from parity.trainers.check import CheckCall


def call(trainer, check, **settings):
    """A check's call on the released path."""
    family = catalogue.family(trainer)
    case = family.case(0, "fp32", {"check": check, **settings})
    return CheckCall(case, family.full_settings(case), "released", "cpu")


def rows(trainer, check, path="released", **settings):
    """Quantity -> its row."""
    case = catalogue.family(trainer).case(0, "fp32", {"check": check, **settings})
    return {row.quantity: row for row in run_case(case, select([f"{trainer}.{path}"]))}


def verdicts(trainer, check, path="released", **settings):
    """Quantity -> its verdict."""
    return {quantity: row.verdict for quantity, row in rows(trainer, check, path, **settings).items()}


def disagreeing(found):
    """The quantities, of verdicts, that do not agree."""
    return {quantity for quantity, verdict in found.items() if verdict != "agree"}
