"""docs/results.md names every field; each verdict is in one set."""

import re
from pathlib import Path
from typing import get_args

from msgspec.structs import fields

from parity.results.row import DECLINED, FAILING, JUDGED, STOPPED, About, End, Header, Row, Verdict

PAGE = Path(__file__).parents[3] / "docs" / "results.md"
INNER = {"interrupted", "parts", "asked", "plan", "seconds"}


def test_the_page_says_what_each_field_holds_and_no_more():
    told = re.findall(r"^- `(.+?)`.*: \S", PAGE.read_text(), re.MULTILINE)
    there = {field.encode_name for kind in (Header, About, End, Row) for field in fields(kind)}
    assert set(told) == there - INNER - {"end"}


def test_each_verdict_is_agreement_or_in_one_of_the_sets():
    assert set(get_args(Verdict)) == {*JUDGED, *STOPPED, *DECLINED}
    assert set(FAILING) == {*JUDGED, *STOPPED} - {"agree"}
    page = PAGE.read_text().split("## Verdicts")[1]
    assert all(", ".join(names) in page for names in (JUDGED, STOPPED, DECLINED, FAILING))
