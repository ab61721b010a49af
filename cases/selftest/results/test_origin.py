"""A library that is not the installed one: its rows carry its file, and the summary names it."""

import io
import sys
from types import ModuleType

import pytest
import torch
from rich.console import Console

from parity.implementations.implementation import Implementation, origin
from parity.registry import loss_family, run_case
from parity.results.report import render
from parity.results.report.summary import summarise
from parity.results.row import About, Header


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
    console = Console(width=200, record=True, file=io.StringIO())
    render.terminal(summarise(Header(run="r", header=About()), rows), console, full=True)
    return rows, console.export_text()


def test_rows_carry_the_file_of_a_checkout(checkout):
    rows, printed = judged("checked-out")
    assert {r.imported_from for r in rows} == {checkout} and len(rows) > 2
    assert f"imported from {checkout}, not from site-packages: checked-out.loss" in " ".join(printed.split())


def test_nothing_is_said_of_what_is_installed():
    rows, printed = judged("torch")
    assert not any(r.imported_from for r in rows) and "imported from" not in printed
    assert origin("no-such-library") is None and origin("") is None
