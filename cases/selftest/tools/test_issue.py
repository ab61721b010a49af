"""What `parity replay --issue` prints: its script, in a fresh process without this package, shows what was judged."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import math

import pytest
import torch
from rich.console import Console

from parity import data
from parity.case.case import Case, normal
from parity.registry import load, loss_family, oracle_of, resolved, run_case, select
from parity.results.ledger import Ledger
from parity.tools import upstream
from parity.tools.issue import entry as entry_module
from parity.tools.issue import issue_text, patch, script, written
from parity.tools.issue.bundle import bundled
from parity.tools.issue.ran import FAULT, Ran, ran
from parity.tools.issue.sources import located
from parity.tools.issue.standalone import limits_of
from parity.tools.issue.tensors import helpers, number
from parity.tools.issue.text import at_fault
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
    done = ran(script(case, load()["liger.FusedLinearGRPOLoss"]))
    assert (done.code, done.output.splitlines()[-1]) == (0, "right"), done


def test_a_family_of_ones_own_gets_an_issue():
    resolved(f"{OWN}:FAMILY")
    (wrong,) = (i for i in select([f"{OWN}:wrong"]) if i.is_function)
    case = Case("rms_norm", 5, "fp32", {"eps": 0.3})
    text = issue_text(case, wrong, rows_of(case, wrong))
    assert text.splitlines()[0].startswith("# user function: ") and "off by" in text.splitlines()[0]
    assert "eps=0.3" in text


def test_the_branches_of_other_settings_are_left_out():
    fam = loss_family("policy")
    bundle, _ = bundled(fam.build(LUSPO), fam.oracle)
    text = "\n".join(ast.unparse(f) for f in bundle.functions.values())
    assert "mask / count" in text
    for other in ("cispo", "sigmoid", "lora_a", "top_entropy_quantile", "def _mean"):
        assert other not in text


def test_a_script_that_crashes_shows_nothing():
    assert ran("raise ValueError('no')").code == FAULT
    assert ran("raise SystemExit(1)").code == 1


def ledger():
    return Ledger.load(data.ledger_file())


def test_an_entry_is_written_with_its_reason_first_and_a_patch_that_mends_it(tmp_path):
    entry = next(e for e in ledger().entries if e.id == "liger-clip-ratio-sequence")
    sent = upstream.written(entry, ledger(), tmp_path)
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
        code = written.script(folder, entry_module.source(entry, ledger()))
        if code is None:  # then it is made from the source of adapter and definition, which a trainer does not have
            assert not entry.family.endswith("-trainer"), f"{entry.id} needs {folder}/scripts/{entry.id}.py"
            assert set(entry.implementations) != {"trl.GRPOTrainer"}, entry.id
            continue
        first, why = code.splitlines()[:2]
        assert first.startswith("# ") and any(c.isdigit() for c in first) and why.startswith("# "), entry.id
        assert not {m for m in written.modules(code) if m == "parity" or m.startswith(written.SETUP)}, entry.id
    known = {e.id for e in ledger().entries}
    assert {f.stem for f in (folder / "scripts").glob("*.py") if not f.stem.startswith(written.SETUP)} <= known


def test_every_patch_fits_the_installed_release():
    for entry in ledger().entries:
        edits = patch.edits(ledger().folder, entry.id)
        if edits and entry.in_force():
            assert patch.diff(patch.patched(edits)).startswith("--- a/"), entry.id


def test_replay_prints_the_report_of_an_entry_by_its_name(monkeypatch):
    monkeypatch.setattr(entry_module, "ran", lambda code, first=None: Ran(0 if first else 1, "| a | b |\n"))
    out = io.StringIO()
    assert replay("liger-clip-ratio-sequence", (), "cpu", True, Console(file=out)) == 1
    text = out.getvalue()
    assert text.startswith("# liger-kernel ") and "```diff\n--- a/liger_kernel/" in text and "| a | b |" in text


def test_replay_gives_the_reason_of_the_entry_that_was_asked_for():
    out = io.StringIO()
    id = "liger-fused-divergence-transposed-head"  # its case also falls under an entry above it
    assert replay(id, (), "cpu", True, Console(file=out)) == 1
    (entry,) = [e for e in Ledger.load(data.ledger_file()).entries if e.id == id]
    assert out.getvalue().split("\n\n")[1] == entry.reason


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
            "not run: not_installed not installed: pip install not-installed",
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
    sent = upstream.written(own.entries[0], own, tmp_path / "out")
    assert (sent.right, told in sent.outcome) == (right, True), sent
    assert sent.ran == ("not run" not in told)


def test_what_a_script_lacks_is_named_with_the_command_that_installs_it():
    assert written.install(["bitsandbytes", "unsloth_zoo"]) == "pip install 'llm-parity[kbit,unsloth]'"
    assert written.install(["unsloth_zoo", "foo_bar"]) == "pip install 'llm-parity[unsloth]' foo-bar"


def test_a_script_is_made_whole_from_its_setup(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup_a.py").write_text(
        "import json\n\nUSED, IDLE = 1, 2\nLOST = 3\n\n\ndef idle():\n    pass\n"
    )
    (tmp_path / "scripts" / "one.py").write_text(
        "# lib 1: x\n# why\nimport math\nfrom setup_a import USED\n\nprint(math.pi, USED)\n"
    )
    code = written.script(tmp_path, "one")
    assert code.splitlines() == [
        "# lib 1: x",
        "# why",
        "import math",
        "",
        "USED, IDLE = 1, 2",
        "",
        "",
        "print(math.pi, USED)",
    ]
    assert written.script(tmp_path, "two") is None


def imported(text):
    return set(written.modules(text))


def test_the_function_at_fault_is_read_from_the_link():
    entries = {e.id: e for e in ledger().entries}
    assert at_fault(entries["softcap-names"]) == "add_fused_lm_head"
    assert at_fault(None) == ""


def test_the_hash_of_a_script_is_that_of_a_case():
    key = int.from_bytes(hashlib.blake2b(b"7/hidden", digest_size=8).digest(), "little", signed=True)
    space = {"torch": torch}
    exec("\n".join(helpers([f"x = normal({key}, 3, 4)"])), space)
    assert torch.equal(space["normal"](key, 3, 4), normal(7, "hidden", (3, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_number_is_the_shortest_that_gives_the_bits(dtype):
    values = oracle_of(LUSPO).inputs.hidden.to(dtype).flatten()
    for value in values.tolist():
        assert torch.tensor(float(number(value, dtype)), dtype=dtype).item() == value


def test_code_is_found_in_the_installed_release():
    assert located("trl.trainer.utils.selective_log_softmax").startswith("trl/trainer/utils.py:")
    assert "not found" in located("trl.trainer.utils.gone")


def test_a_script_that_waits_for_a_busy_machine_is_not_wrong(monkeypatch):
    """Its limit is on CPU time: on the clock `upstream --all` called scripts wrong that others kept from running."""
    assert ran("import time\ntime.sleep(3)\nraise SystemExit(1)", seconds=2.0).code == 1
    endless = ran("while True:\n    pass", seconds=1.0)
    assert endless.code == 124 and "of CPU time, its limit is 1 s" in endless.error
