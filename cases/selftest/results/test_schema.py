"""docs/results.md is what the structures say."""

from pathlib import Path

import msgspec
from click.testing import CliRunner

from parity.cli.commands import main
from parity.results import schema
from parity.results.row import DECLINED, FAILING, JUDGED, STOPPED, VERDICTS, Row

PAGE = Path(__file__).parents[3] / "docs" / "results.md"


def test_the_committed_page_is_what_the_command_prints():
    assert CliRunner().invoke(main, ["schema"]).output == PAGE.read_text(), "parity schema > docs/results.md"
    assert len(PAGE.read_text().split()) <= 700


def test_every_field_has_a_meaning():
    lines = {
        line.split("`")[1]: line for line in schema.page().split("## Every other row")[1].splitlines() if "`" in line
    }
    assert set(lines) == {field.encode_name for field in msgspec.structs.fields(Row)}
    assert all(line.partition(": ")[2] for line in lines.values())


def test_each_verdict_is_agreement_or_in_one_of_the_sets():
    assert set(VERDICTS) == {*JUDGED, *STOPPED, *DECLINED}
    assert set(FAILING) == {*JUDGED, *STOPPED} - {"agree"}
