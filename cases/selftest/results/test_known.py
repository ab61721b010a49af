"""The page for users: what `parity findings` prints, of every entry, in the order of severity."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from parity import data
from parity.cli.commands import main
from parity.errors import UsageError
from parity.results.ledger import Ledger
from parity.results.report.known import is_mended, page, releases
from parity.results.user import SEVERITIES

DOCS = Path(__file__).parents[3] / "docs"
PAGE, MENDED = DOCS / "findings.md", DOCS / "measured" / "findings-mended.md"
LEDGER = Ledger.load(data.ledger_file())
BY_ID = {entry.id: entry for entry in LEDGER.entries}


@pytest.mark.parametrize(("committed", "option"), [(PAGE, []), (MENDED, ["--mended"])], ids=["newest", "mended"])
def test_the_committed_page_is_what_the_command_prints(committed, option):
    printed = CliRunner().invoke(main, ["findings", *option])
    assert printed.exit_code == 0
    assert committed.read_text() == printed.output


def test_an_entry_that_a_release_ends_stands_among_the_mended_alone():
    assert BY_ID["gmpo-liger"].versions == {"trl": ">=1.7,<1.14"}
    assert "| gmpo-liger |" in page(LEDGER, mended=True)
    assert "| gmpo-liger |" not in page(LEDGER)
    assert "| gc-overwrite |" not in page(LEDGER, mended=True)


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
    assert entry.user.applies
    committed = MENDED if is_mended(entry) else PAGE
    assert f"| {entry.user.effect} | {releases(entry)} |" in committed.read_text()


def test_severe_ones_come_first_and_conventions_apart_at_the_end():
    text = page(LEDGER)
    places = [text.index(f"## {severity.capitalize()}") for severity in SEVERITIES]
    assert places == sorted(places)
    assert (
        text.index("| trl-online-dpo-accumulation |") < text.index("| softcap-names |") < text.index("| gc-overwrite |")
    )
    assert {e.id for e in LEDGER.entries if e.severity == "convention" and not e.user.part_of} == {
        "trl-dpo-uneven-window",
        "liger-jsd-teacher-padded",
        "cce-gradient-filter",
        "unsloth-kl-capped",
    }


@pytest.mark.parametrize(
    ("added", "says"),
    [('severity = "grave"', "severity"), ("[finding.user]\nrnk = 1", "rnk")],
    ids=["severity", "user"],
)
def test_a_ledger_with_an_unknown_word_is_refused(tmp_path, added, says):
    entry = LEDGER.entries[0]
    (tmp_path / "case.json").write_text("{}")
    required = {"id": "x", "family": entry.family, "reason": "r", "date": "2026-11-20", "case": "case.json"}
    lines = [f'{k} = "{v}"' for k, v in required.items()] + ['implementations = ["a"]', 'quantities = ["b"]', added]
    (tmp_path / "ledger.toml").write_text("[[finding]]\n" + "\n".join(lines))
    with pytest.raises(UsageError, match=says):
        Ledger.load(tmp_path / "ledger.toml")
