"""Mutants by machine: the edits that there are, in force and taken back, and the fate of known ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from parity.cli.commands import main
from parity.selftest.mutants import command, laboratory, machine, machine_page
from parity.selftest.mutants.edits import Edit, bodies, edits, exchanged
from parity.selftest.mutants.laboratory import Laboratory, Mutated

SOURCE = '''
import torch

class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        """A docstring is no constant."""
        if limit < 0:
            raise ValueError(limit)
        return (x - x.amax(-1, keepdim=True)).clamp(min=limit).exp().sum(-1)

def outer(x: "int" = 3):
    def inner(y):
        return x + y.detach().float()
    return inner

cold = lambda z, t: scaled(t, capped(t, z))
'''


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "edited.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("edited", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_operator_has_its_edits_and_what_is_no_code_has_none(module):
    found = [(e.operator, f"{e.before} → {e.after}") for e, _ in edits(module)]
    for expected in [
        ("axis", "-1 → 0"),
        ("sign", "-1 → 1"),
        ("function", "x.amax(-1, keepdim=True) → x.amin(-1, keepdim=True)"),
        ("keyword dropped", "(x - x.amax(-1, keepdim=True)).clamp(min=limit) → (x - x.amax(-1, keepdim=True)).clamp()"),
        ("call dropped", "(x - x.amax(-1, keepdim=True)).clamp(min=limit) → x - x.amax(-1, keepdim=True)"),
        ("operands exchanged", "x - x.amax(-1, keepdim=True) → x.amax(-1, keepdim=True) - x"),
        ("detach removed", "y.detach() → y"),
        ("cast removed", "y.detach().float() → y.detach()"),
        ("rounded to bf16", "y.detach().float() → y.detach().float().bfloat16().float()"),
        ("term dropped", "x + y.detach().float() → x"),
        ("order", "scaled(t, capped(t, z)) → capped(t, scaled(t, z))"),
    ]:
        assert expected in found
    said = " ".join(text for _, text in found)
    assert not any(word in said for word in ("docstring", "ValueError", "limit < 0", "3 →"))


def test_an_edit_changes_live_functions_and_closures_and_is_taken_back(module):
    one = module.outer()
    for edit, tree in edits(module):
        changed = exchanged(module, bodies(module, tree))
        if edit.after == "x - y.detach().float()":
            assert edit.place == (one.__code__.co_qualname, one.__code__.co_firstlineno)
            assert {f.__name__ for f, _ in changed} == {"outer", "inner"}
    assert exchanged(module, bodies(module, tree)) == []


KNOWN = {
    "c.log_r.exp() - c.log_r - 1 → c.log_r.exp() - c.log_r": "killed",
    "c.log_ratio.exp() → c.log_ratio.expm1()": "killed",
    "c.x.mask.float() → c.x.mask": "equivalent",
}


def test_known_edits_have_their_fates(monkeypatch):
    monkeypatch.setattr(machine, "DOUBLES", 8)
    monkeypatch.setattr(machine, "EARLY", 12)
    monkeypatch.setattr(laboratory, "REACH", 2)
    monkeypatch.setattr(laboratory, "FAMILIES", ("policy",))
    monkeypatch.setattr(machine, "FAMILIES", ("policy",))
    monkeypatch.setitem(laboratory.SOURCES, "controls", ("honest.policy.plain", ("parity.selftest.controls.policy",)))
    of = Laboratory("controls")
    chosen = [m for m in of.sample(0, 10**6) if f"{m.edit.before} → {m.edit.after}" in KNOWN]
    assert len(chosen) == 3
    k3 = of.modules["parity.selftest.controls.policy"].k3
    before = k3.__code__
    machine.decide(of, chosen, 0)
    assert {f"{m.edit.before} → {m.edit.after}": m.fate for m in chosen}.items() <= KNOWN.items()
    assert k3.__code__ is before


def mutated(number: int, fate: str = "alive", **fields: object) -> Mutated:
    edit = Edit("a.module", "f", 1, 2, "sign", "-x", f"x{number}", number)
    return Mutated(edit, "honest", "policy", 7, fate=fate, **fields)


def test_a_sample_goes_on_where_it_ended(monkeypatch, tmp_path):
    ran: list[int] = []

    class Fake:
        def __init__(self, source: str): ...

        def sample(self, seed: int, count: int) -> list[Mutated]:
            return [mutated(n) for n in range(count)]

    def decide(of: Fake, mutants: list[Mutated], seed: int) -> None:
        for m in mutants:
            m.fate = "survived" if m.edit.number == 4 else "killed"
            ran.append(m.edit.number)

    monkeypatch.setattr(machine, "Laboratory", Fake)
    monkeypatch.setattr(machine, "decide", decide)
    monkeypatch.setattr(machine, "BATCH", 2)
    monkeypatch.setattr(machine, "prepare", lambda *a, **k: None)
    monkeypatch.setattr(command, "MACHINE", str(tmp_path / "{source}-{seed}.ndjson"))
    path = Path(tmp_path / "controls-0.ndjson")
    assert [len(found) for found in machine.run("controls", 0, 3, path)] == [2, 3]
    arguments = ["mutants", "--machine", "controls", "--sample"]
    assert CliRunner().invoke(main, [*arguments, "4"]).exit_code == 0
    done = CliRunner().invoke(main, [*arguments, "6"])
    assert done.exit_code == 1
    assert ran == [0, 1, 2, 3, 4, 5]
    assert "6 edits, 6 of them wrong: 5 killed (83.3 %)" in done.stdout
    assert "| module.f: -x → x4 | honest | 0 | 0 | not known |" in done.stdout


def test_the_page_counts_by_operator_and_file():
    found = [mutated(n, "killed", cases=n + 1) for n in range(10)] + [mutated(10, "equivalent"), mutated(11, "crashed")]
    page = machine_page.markdown(found)
    assert "12 edits, 10 of them wrong: 10 killed (100 %), 10 within 100 cases" in page
    assert "| sign | 12 | 1 | 0 | 1 | 10 | 0 | 5.5 | 9 | 10 |" in page
    assert "| a.module | 12 |" in page
