"""The page for users: what `parity findings` prints, of every entry, in the order of severity."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cases.selftest.results.runs import ABOUT
from parity import data
from parity.cli.commands import main
from parity.results.ledger import SEVERITIES, Ledger
from parity.results.report import PAGES
from parity.results.report.render import ledger_page
from parity.results.report.stack import Stack, is_mended, releases
from parity.results.row import About, Asked

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "findings.md"
FILES = {"high": PAGE} | {name: DOCS / "measured" / f"findings-{name}.md" for name in PAGES[1:]}
LEDGER = Ledger.load(data.ledger_file())
BY_ID = {entry.id: entry for entry in LEDGER.entries}


@pytest.mark.parametrize("option", PAGES)
def test_the_committed_page_is_what_the_command_prints(option):
    printed = CliRunner().invoke(main, ["findings", "--page", option])
    assert printed.exit_code == 0
    assert FILES[option].read_text() == printed.output


def test_an_entry_that_a_release_ends_stands_among_the_mended_alone():
    assert BY_ID["gmpo-liger"].versions == {"trl": ">=1.7,<1.14"}
    for name, of in {
        "gmpo-liger": "mended",
        "gc-overwrite": "high",
        "head-hook": "medium",
        "trl-cpo-fp16-sum": "low",
    }.items():
        assert [page for page in PAGES if f"| {name} |" in ledger_page(LEDGER, page)] == [of]


def test_it_can_be_sent_to_a_friend():
    text = PAGE.read_text()
    assert len(text.split()) <= 1500
    for word in ("oracle", "bias=banned", "headroom", "implementation"):
        assert word not in text


@pytest.mark.parametrize("entry", LEDGER.entries, ids=lambda e: e.id)
def test_every_entry_says_what_it_means_to_a_user(entry):
    assert entry.severity in SEVERITIES
    if entry.user.part_of:
        whole = BY_ID[entry.user.part_of]
        assert not whole.user.part_of
        assert whole.severity == entry.severity
        assert not (entry.user.when or entry.user.effect or entry.user.fix or entry.user.applies)
        return
    assert entry.user.when
    assert entry.user.effect.endswith(".")
    assert entry.user.fix
    committed = FILES["mended" if is_mended(entry) else "low" if entry.severity == "convention" else entry.severity]
    assert f"| {entry.user.effect} | {releases(entry)} |" in committed.read_text()


def test_severe_ones_come_first_and_conventions_apart_at_the_end():
    text = ledger_page(LEDGER, "low")
    assert text.index("## Low") < text.index("## Convention")
    assert [severity for severity in SEVERITIES if f"## {severity.capitalize()}" in ledger_page(LEDGER)] == ["high"]
    text = ledger_page(LEDGER) + text
    assert (
        text.index("| trl-online-dpo-accumulation |") < text.index("| softcap-names |") < text.index("| gc-overwrite |")
    )
    assert {e.id for e in LEDGER.entries if e.severity == "convention" and not e.user.part_of} == {
        "trl-dpo-uneven-window",
        "liger-jsd-teacher-padded",
        "cce-gradient-filter",
        "unsloth-kl-capped",
    }


def test_findings_shows_what_is_wrong_in_the_installed_libraries(tmp_path, monkeypatch):
    """By severity, without conventions in the count; `--config` keeps what a training run meets."""
    monkeypatch.setenv("COLUMNS", "110")
    stack = Stack.here(LEDGER)
    assert all(e.in_force() for e in stack.entries)
    mended = {e.id for e in stack.entries if is_mended(e)}
    assert mended <= {"torch-linear-cross-entropy-confident"}  # by a torch that is newer than the one here
    printed = CliRunner().invoke(main, ["findings"]).output
    high, convention = len(stack.by_severity["high"]), len(stack.by_severity["convention"])
    counted = sum(map(len, stack.by_severity.values())) - convention
    assert stack.defects.startswith(f"{high} high, ") and high and convention
    assert sum(int(word) for word in stack.defects.split() if word.isdecimal()) == counted
    assert " ".join(printed.split()).startswith(f"{stack.named}: {stack.defects} ")
    places = [printed.index(text) for text in ("\nhigh: ", "gc-overwrite", "\nmedium: ", "\nlow: ", "\nconvention: ")]
    assert places == sorted(places) and max(map(len, printed.splitlines())) <= 110
    listed = [line.split()[-1] for line in printed.splitlines() if line.strip()]
    assert [id for id in listed if id in {e.id for e in stack.entries}] == [e.id for e in stack.entries]
    (tmp_path / "grpo.yaml").write_text("top_entropy_quantile: 0.2\nnum_generations: 4\n")
    words = ["findings", "--config", str(tmp_path / "grpo.yaml")]  # GMPO, made of GRPO, has its settings too
    printed = CliRunner().invoke(main, words).output
    assert "trl-grpo-quantile-minus-inf" in printed and "trl-online-dpo-accumulation" not in printed
    (line,) = (line for line in printed.splitlines() if "has no model_name_or_path: add it" in line)
    assert "softcap-names" in line and "has no use_peft: add it" in printed


def test_findings_imports_no_torch():
    """Which takes seconds. In a process of its own, which the command ends."""
    code = "import atexit, sys; from parity.cli.commands import main; atexit.register(lambda: print('torch' in sys.modules))"
    code += "; main.main(['findings'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "gc-overwrite" in done.stdout and done.stdout.endswith("\nFalse\n"), done.stdout + done.stderr


def test_a_ledger_of_another_machine_is_not_a_stack_without_defects(tmp_path):
    """A run's results are read elsewhere, and its own ledger is not there: what it met is not all that is known."""
    about = About(**ABOUT | {"asked": Asked(ledger=str(tmp_path / "mine.toml"))})
    assert "mine.toml cannot be read here" in Stack.of_run(about, []).defects
    assert Stack.of_run(About(**ABOUT), []).defects.endswith("known defects")


def test_no_known_failure_of_a_trainer_covers_every_case_of_a_check():
    """A mistake in the same number would show in no case."""
    known = [entry for entry in LEDGER.entries if "check" in entry.settings and entry.in_force()]
    assert [entry.id for entry in known if len(entry.settings) == 1] == []
