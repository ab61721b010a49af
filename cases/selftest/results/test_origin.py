"""A library that is not the installed one: its rows carry its file, and the summary names it."""

import sys
from types import ModuleType

import pytest
import torch
from msgspec import UNSET

from cases.selftest.results.runs import summary
from parity.implementations.implementation import Implementation, origin
from parity.registry import loss_family, run_case


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    module = ModuleType("checked_out")
    module.__file__ = str(tmp_path / "checked_out" / "__init__.py")
    monkeypatch.setitem(sys.modules, "checked_out", module)
    monkeypatch.setattr(Implementation, "version", lambda self: "1.0")
    return module.__file__


def judged(library):
    family = loss_family("logprobs")

    def call(x):
        return {"logps": torch.log_softmax(x.hidden @ x.weight.T, -1).gather(-1, x.ids[..., None])[..., 0]}

    one = Implementation(id=f"{library}.loss", family="logprobs", role="candidate", call=call, library=library)
    case = family.case(1, "fp32", {"V": 11, "H": 5})
    rows = list(run_case(case, [one], thorough=False))
    return {r.imported_from for r in rows}, summary(*rows).notes


def test_rows_carry_the_file_of_a_checkout(checkout):
    said = f"imported from {checkout}, not from site-packages: checked-out.loss"
    assert judged("checked-out") == ({checkout}, (said,))


def test_nothing_is_said_of_what_is_installed():
    assert judged("torch") == ({UNSET}, ())
    assert origin("no-such-library") is None and origin("") is None
