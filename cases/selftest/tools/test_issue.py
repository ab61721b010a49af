"""What `parity replay --issue` prints: its script, in a fresh process without this package, shows what was judged."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
from rich.console import Console

from parity import data
from parity.case.case import Case
from parity.errors import Unsupported
from parity.registry import load, oracle_of, resolved, run_case, select
from parity.results.ledger import Ledger
from parity.tools import upstream
from parity.tools.issue import written
from parity.tools.issue.standalone import limits_of, number, script
from parity.tools.issue.text import FAULT, Ran, issue_text, ran
from parity.tools.replay import replay

LUSPO = Case("policy", 3, "fp32", {"loss_type": "luspo", "lengths": [3, 1]})
BANNED = Case("logprobs", 3, "fp32", {"bias": "banned", "entropy": "gradient", "V": 9})
ROUNDED = Case("divergence", 5, "bf16", {"beta": 0.999, "teacher_peak": 4.0})
OWN = "fixtures/rms_norm.py"


def rows_of(case, implementation):
    return list(run_case(case, [implementation], thorough=False))


def columns(text):
    """Printed table: quantity -> (library, float64)."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: (cells[1], cells[2]) for cells in lines[1:]}


def same(printed, row):
    if row.value is None:
        return printed in ("nan", "inf", "none")
    return math.isclose(float(printed), row.value, rel_tol=1e-4, abs_tol=1e-30)


@pytest.mark.parametrize(
    ("case", "id"),
    [
        pytest.param(BANNED, "trl.selective_log_softmax", id="log-probs"),
        pytest.param(LUSPO, "liger.FusedLinearGRPOLoss", id="policy"),
        pytest.param(ROUNDED, "trl.generalized_jsd_loss", id="divergence"),
    ],
)
def test_a_script_prints_what_was_judged_and_exits_with_1(case, id):
    implementation = load()[id]
    rows = rows_of(case, implementation)
    assert any(r.verdict == "disagree" for r in rows)
    text = script(case, implementation, limits_of(rows))
    assert imported(text).isdisjoint({"parity", "json"}), text
    done = ran(text)
    assert done.code == 1, done
    table = columns(done.output)
    judged = [r for r in rows if r.quantity in table]
    assert len(judged) > 2
    for row in judged:
        library, exact = table[row.quantity]
        assert same(library, row), (row.quantity, library, row.value)
        assert math.isclose(float(exact), row.value_oracle, rel_tol=1e-5, abs_tol=1e-12)


def test_a_script_of_what_is_right_exits_with_0():
    case = Case("policy", 3, "fp32", {"loss_type": "dapo", "lengths": [3, 1], "beta": 0.1})
    done = ran(
        script(case, load()["liger.FusedLinearGRPOLoss"], {"loss": 1e-3, "grad_hidden": 1e-3, "grad_weight": 1e-3})
    )
    assert (done.code, done.output.splitlines()[-1]) == (0, "right"), done


def test_large_results_are_compared_by_products():
    case = Case("logprobs", 3, "fp32", {"V": 60, "H": 16, "temperature": 0.7})
    limits = {"logps": 1e-5, "grad_hidden": 1e-5, "grad_weight": 1e-5}
    text = script(case, load()["liger.chunked_selective_logprob"], limits)
    assert text.count("_ChunkedSelectiveLogProbFunction.apply(") == 1
    assert ran(text).code == 0
    damaged = text.replace("chunk_size", "c").replace(".backward([", ".backward([1.001 * ")
    assert ran(damaged).code == 1


def test_autocast_is_part_of_a_script():
    case = Case("logprobs", 3, "fp32", {"context": "autocast"})
    text = script(case, load()["trl.selective_log_softmax"], {"logps": 1e-6})
    assert "with torch.autocast(hidden.device.type, torch.bfloat16):\n    v0 = " in text
    assert ran(text).code == 1  # the definition is of float32


@pytest.mark.parametrize(
    ("family", "settings", "id", "why"),
    [
        ("logprobs", {"V": 600, "H": 16}, "liger.chunked_selective_logprob", "a script of .* characters"),
        ("policy", {}, "trl.GRPOTrainer", "that no line of the script makes"),
        ("logprobs", {"context": "checkpoint"}, "trl.selective_log_softmax", "made under checkpoint"),
        ("logprobs", {}, "fixes.selective_log_probs", "calls no function of a library by name"),
        ("logprobs", {}, "cce.default", "the harness changes the library's process"),
    ],
)
def test_what_no_script_can_show_says_why(family, settings, id, why):
    with pytest.raises(Unsupported, match=why):
        script(Case(family, 3, "fp32", settings), load()[id], {"loss": 0.1})


def test_a_trainers_finding_is_replayed():
    (case,) = [Case("grpo-trainer", 0, "fp32", {"check": "step-one"})]
    text = issue_text(case, load()["grpo-trainer.fused"], [])
    assert "There is no stand-alone script: it needs a whole trainer." in text
    assert "    parity replay case.json --implementation grpo-trainer.fused" in text


OWN_LOSS = """
import torch

def logps(hidden, weight, ids):
    return 2 * torch.log_softmax(hidden @ weight.T, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
"""


def test_a_function_of_ones_own_is_called_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_issue.py").write_text(OWN_LOSS)
    (own,) = (i for i in select(["own_issue.py:logps"]) if i.is_function)
    case = Case("logprobs", 5, "fp32", {})
    text = issue_text(case, own, rows_of(case, own))
    assert "from own_issue import logps\n" in text and "= logps(" in text
    assert "| logps | " in text.partition("## Script")[0]


def test_a_title_names_what_is_not_finite_before_the_error_of_the_rest():
    own = load()["torch.linear_cross_entropy"]
    case = Case("logprobs", 0, "fp32", {"B": 1, "H": 2, "T": 4, "V": 3, "bias": "banned", "ignored": "some"})
    assert ": logps: 2 NaN and 0 infinite entries" in issue_text(case, own, rows_of(case, own)).splitlines()[0]


def test_a_family_of_ones_own_gets_an_issue():
    resolved(f"{OWN}:FAMILY")
    (wrong,) = (i for i in select([f"{OWN}:wrong"]) if i.is_function)
    case = Case("rms_norm", 5, "fp32", {"eps": 0.3})
    text = issue_text(case, wrong, rows_of(case, wrong))
    assert text.splitlines()[0].startswith("# user function: ") and "off by" in text.splitlines()[0]
    assert "eps=0.3" in text


def test_a_script_that_crashes_shows_nothing():
    assert ran("raise ValueError('no')").code == FAULT
    assert ran("raise SystemExit(1)").code == 1


def ledger():
    return Ledger.load(data.ledger_file())


def test_an_entry_is_written_with_its_reason_first_and_a_patch_that_mends_it(tmp_path):
    entry = next(e for e in ledger().entries if e.id == "liger-clip-ratio-sequence")
    sent = upstream.sent(entry, ledger(), tmp_path)
    assert sent.right and sent.outcome.startswith("shows: ") and sent.outcome.endswith("with the patch: exit 0"), sent
    text = (tmp_path / entry.id / "issue.md").read_text()
    title, _, reason, *_ = text.splitlines()
    assert title.startswith("# liger-kernel ") and "sequence level: the logged clip ratio" in title
    assert reason == entry.reason
    for name in ("script.py", "patch.diff"):
        assert (tmp_path / entry.id / name).read_text() in text
    assert "| Liger | 0.8 |" in text.partition("## Script")[0]


def test_every_entry_has_a_script_that_needs_the_libraries_alone():
    folder = ledger().folder
    for entry in ledger().entries:
        code = written.script(folder, upstream.source(entry, ledger()))
        assert code is not None, f"{entry.id} needs {folder}/scripts/{entry.id}.py"
        first, why = code.splitlines()[:2]
        assert first.startswith("# ") and any(c.isdigit() for c in first) and why.startswith("# "), entry.id
        assert not {m for m in written.modules(code) if m == "parity" or m.startswith(written.SETUP)}, entry.id
    known = {e.id for e in ledger().entries}
    assert {f.stem for f in (folder / "scripts").glob("*.py") if not f.stem.startswith(written.SETUP)} <= known


def test_every_patch_fits_the_installed_release():
    for entry in ledger().entries:
        wanted = written.edits(ledger().folder, entry.id)
        if wanted and entry.in_force():
            assert written.diff(written.patched(wanted)).startswith("--- a/"), entry.id


def test_replay_prints_the_report_of_an_entry_by_its_name(monkeypatch):
    monkeypatch.setattr(upstream, "ran", lambda code, first=None: Ran(0 if first else 1, "| a | b |\n"))
    out = io.StringIO()
    assert replay("liger-clip-ratio-sequence", (), "cpu", True, Console(file=out)) == 1
    text = out.getvalue()
    assert text.startswith("# liger-kernel ") and "```diff\n--- a/liger_kernel/" in text and "| a | b |" in text


SILENT = 'import iniconfig\n\nprint("x")\nraise SystemExit(int(not hasattr(iniconfig, "mended")))\n'


@pytest.mark.parametrize(
    ("new", "versions", "script", "right", "told"),
    [
        pytest.param("mended = True\n", "", SILENT, True, "exit 0", id="mended"),
        pytest.param("other = True\n", "", SILENT, False, "exit 1", id="patch that does not mend"),
        pytest.param("no line\n", "", SILENT, True, "no patch: iniconfig", id="patch of another release"),
        pytest.param("", "versions = { iniconfig = '<0.1' }", SILENT, False, "shows", id="shows where it cannot be"),
        pytest.param("", "", "print('fine')\n", False, "is gone", id="gone"),
        pytest.param("", "", "raise ValueError\n", False, "script fails", id="fails"),
        pytest.param(
            "",
            "",
            "import not_installed\n\nnot_installed.call()\n",
            True,
            "not run: not_installed not installed",
            id="not installed",
        ),
    ],
)
def test_a_script_is_right_only_if_it_shows_the_defect_and_falls_silent_with_the_patch(
    tmp_path, new, versions, script, right, told
):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "one.py").write_text("# lib 1.0: x\n# why\n" + script)
    if new:
        edit = {"entries": ["one"], "file": "iniconfig/__init__.py", "old": "import os\n", "new": "import os\n" + new}
        edit |= {"old": "not there\n"} if new == "no line\n" else {}
        lines = "\n".join(f"{k} = {json.dumps(v)}" for k, v in edit.items())
        (tmp_path / "patches.toml").write_text(f"[[patch]]\n{lines}\n")
    (tmp_path / "case.json").write_text(json.dumps(BANNED.to_json()))
    (tmp_path / "ledger.toml").write_text(
        f"""[[finding]]
id = "one"
family = "logprobs"
implementations = ["a"]
quantities = ["*"]
reason = "Because."
link = "lib 1.0: file"
date = "2026-11-22"
case = "case.json"
{versions}
"""
    )
    own = Ledger.load(tmp_path / "ledger.toml")
    sent = upstream.sent(own.entries[0], own, tmp_path / "out")
    assert (sent.right, told in sent.outcome) == (right, True), sent
    assert (sent.done is not None) == ("not run" not in told)


def test_a_script_is_made_whole_from_its_setup(tmp_path):
    """Each setup once, in the place of the first import of it: what it sets before it imports something stays before that."""
    (tmp_path / "scripts").mkdir()
    for name, text in {
        "setup_a": "import os\n\nos.environ['A'] = '1'\nUSED = 1\n",
        "setup_b": "from setup_a import USED\n\nTWO = 2 * USED\n",
        "one": "# lib 1: x\n# why\nfrom setup_b import TWO\nfrom setup_a import USED\n\nprint(TWO, USED)\n",
    }.items():
        (tmp_path / "scripts" / f"{name}.py").write_text(text)
    code = written.script(tmp_path, "one")
    assert (
        code
        == "# lib 1: x\n# why\nimport os\n\nos.environ['A'] = '1'\nUSED = 1\n\nTWO = 2 * USED\n\nprint(TWO, USED)\n"
    )
    assert written.script(tmp_path, "two") is None


def imported(text):
    return set(written.modules(text))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_number_is_the_shortest_that_gives_the_bits(dtype):
    values = oracle_of(LUSPO).inputs.hidden.to(dtype).flatten()
    for value in values.tolist():
        assert torch.tensor(float(number(value, dtype)), dtype=dtype).item() == value


def test_a_script_that_waits_for_a_busy_machine_is_not_wrong(monkeypatch):
    """Its limit is on CPU time: on the clock `upstream --all` called scripts wrong that others kept from running."""
    assert ran("import time\ntime.sleep(3)\nraise SystemExit(1)", seconds=2.0).code == 1
    endless = ran("while True:\n    pass", seconds=1.0)
    assert endless.code == 124 and "s of them CPU time" in endless.error
