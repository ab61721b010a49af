"""A case of a trainer check by its settings, on one path; and mistakes that are planted in what it runs."""

import contextlib
import functools
import pkgutil
from unittest import mock

from parity.registry import run_case, select
from parity.trainers import catalogue
from parity.trainers.check import _SHARED, CheckCall


def call(trainer, check, **settings):
    """A check's call on the released path."""
    family = catalogue.family(trainer)
    case = family.case(0, "fp32", {"check": check, **settings})
    return CheckCall(case, family.full_settings(case), "released", "cpu")


def rows(trainer, check, path="released", **settings):
    """Quantity -> its row."""
    case = catalogue.family(trainer).case(0, "fp32", {"check": check, **settings})
    return {row.quantity: row for row in run_case(case, select([f"{trainer}.{path}"]))}


def wrong(trainer, check, path="released", **settings):
    """The quantities that do not agree."""
    return {q for q, row in rows(trainer, check, path, **settings).items() if row.verdict != "agree"}


def right(trainer, **asked):
    """The quantities of a case, as the installed libraries have it: each agrees. It is run once a process."""
    found = _installed(trainer, *asked.items())
    differing = {q: (row.verdict, row.message) for q, row in found.items() if row.verdict != "agree"}
    assert not differing, differing
    return found.keys()


@functools.cache
def _installed(trainer, *asked):
    return rows(trainer, **dict(asked))


@contextlib.contextmanager
def planted(path, mistake):
    """While it lasts, a call of what the dotted path stands for is `mistake(original, …)` with what it was given. A definition
    that is made meanwhile is not kept; where the mistake is in one, none is taken from before."""
    owner, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*given, **more):
        return mistake(original, *given, **more)

    kept = mock.patch.dict(_SHARED, clear=path.startswith("parity."))
    with mock.patch.object(owner, name, changed), kept:
        yield
