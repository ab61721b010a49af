"""What `parity replay --issue` and `parity upstream` write: numbers, how to run it again, scripts by hand and their patches."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from cases.selftest.results.runs import ledger_of
from parity import data
from parity.case.case import Case
from parity.compare.result_rows import empty_row
from parity.registry import family, load, resolved, run_case, select
from parity.results.ledger import Ledger
from parity.tools import issue, upstream
from parity.tools.issue import Ran, issue_text, ran
from parity.tools.replay import replay

BANNED = Case("logprobs", 3, "fp32", {"bias": "banned", "entropy": "gradient", "V": 9})
OWN = "fixtures/rms_norm.py"


def rows_of(case, implementation):
    return list(run_case(case, [implementation], thorough=False))


def test_a_trainers_finding_is_replayed():
    case = Case("grpo-trainer", 0, "fp32", {"check": "step-one"})
    row = empty_row(
        family(case.family), case, "grpo-trainer.fused", "cpu", verdict="disagree", quantity="kl", cls="logic"
    )
    text = issue_text(case, load()["grpo-trainer.fused"], [row])
    assert "    parity replay case.json --implementation grpo-trainer.fused" in text


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
    assert "eps=0.3" in text and "| y | " in text
    kept = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert Case.from_json(kept) == case and f"parity replay case.json --implementation {wrong.id}" in text


def test_the_issue_of_a_users_function_is_its_own(tmp_path):
    """It was TRL's, whose known finding the references show on the same case."""
    file, screen = tmp_path / "loss.py", io.StringIO()
    lines = (
        "z = ((hidden @ weight.T).float() / temperature).log_softmax(-1)",
        "return 0.9 * z.gather(-1, ids.long()[..., None])[..., 0]",
    )
    file.write_text("def loss(hidden, weight, ids, temperature=1.0):\n    " + "\n    ".join(lines))
    replay("trl-entropy-fp16-overflow", (f"{file}:loss",), "cpu", True, Console(file=screen))
    title, text = screen.getvalue().partition("\n")[::2]
    assert title.startswith(f"# user function: `{file}:loss`: ") and "| logps | " in text
    assert "none or not finite" not in text


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
        code = issue.script(folder, upstream.source(entry, ledger()))
        assert code is not None, f"{entry.id} needs {folder}/scripts/{entry.id}.py"
        first, why = code.splitlines()[:2]
        assert first.startswith("# ") and any(c.isdigit() for c in first) and why.startswith("# "), entry.id
        assert not {m for m in issue.modules(code) if m == "parity" or m.startswith(issue.SETUP)}, entry.id
    known = {e.id for e in ledger().entries}
    assert {f.stem for f in (folder / "scripts").glob("*.py") if not f.stem.startswith(issue.SETUP)} <= known


def test_every_patch_fits_the_installed_release():
    for entry in ledger().entries:
        wanted = issue.edits(ledger().folder, entry.id)
        if wanted and entry.in_force():
            assert issue.diff(issue.patched(wanted)).startswith("--- a/"), entry.id


def test_replay_prints_the_report_of_an_entry_by_its_name(monkeypatch):
    monkeypatch.setattr(upstream, "ran", lambda code, first=None: Ran([], 0 if first else 1, "| a | b |\n", ""))
    out = io.StringIO()
    assert replay("liger-clip-ratio-sequence", (), "cpu", True, Console(file=out)) == 1
    text = out.getvalue()
    assert text.startswith("# liger-kernel ") and "```diff\n--- a/liger_kernel/" in text and "| a | b |" in text


ABSENT = "import not_installed\n\nnot_installed.call()\n"
SILENT = 'import iniconfig\n\nprint("x")\nraise SystemExit(int(not hasattr(iniconfig, "mended")))\n'


@pytest.mark.parametrize(
    ("new", "versions", "script", "right", "told"),
    [
        pytest.param("mended = True\n", "", SILENT, True, "exit 0", id="mended"),
        pytest.param("other = True\n", "", SILENT, False, "exit 1", id="patch that does not mend"),
        pytest.param("no line\n", "", SILENT, True, "no patch: iniconfig", id="patch of another release"),
        pytest.param("", {"iniconfig": "<0.1"}, SILENT, False, "shows", id="shows where it cannot be"),
        pytest.param("", "", "print('fine')\n", False, "is gone", id="gone"),
        pytest.param("", "", "raise ValueError\n", False, "script fails", id="fails"),
        pytest.param("", "", ABSENT, True, "not run: not_installed not installed", id="not installed"),
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
    fields = {"implementations": ["a"], "reason": "Because.", "link": "lib 1.0: file", "case": "case.json"}
    own = Ledger.load(ledger_of(tmp_path / "ledger.toml", fields | ({"versions": versions} if versions else {})))
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
    code = issue.script(tmp_path, "one")
    whole = "# lib 1: x\n# why\nimport os\n\nos.environ['A'] = '1'\nUSED = 1\n\nTWO = 2 * USED\n\nprint(TWO, USED)\n"
    assert code == whole
    assert issue.script(tmp_path, "two") is None


def test_a_script_that_waits_for_a_busy_machine_is_not_wrong(monkeypatch):
    """Its limit is on CPU time: on the clock `upstream --all` called scripts wrong that others kept from running."""
    assert ran("import time\ntime.sleep(3)\nraise SystemExit(1)", seconds=2.0).returncode == 1
    endless = ran("while True:\n    pass", seconds=1.0)
    assert endless.returncode == 124 and "s of them CPU time" in endless.stderr
