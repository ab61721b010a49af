"""The page: its sections, what it says since when, and that nothing from a file becomes markup."""

import html.parser
import re

from msgspec import convert

from cases.selftest.results.test_memory import BAD, GOOD, night, row
from cases.selftest.results.test_report import FINDING, HEADER, KNOWN, LOSS, in_order, summarise
from parity.results import memory, notify, trend
from parity.results.header import About, Header
from parity.results.report import render
from parity.results.report.summary import summarise as typed
from parity.results.row import Row

EVIL = "<script>alert('x')</script> & \"more\""


class Links(html.parser.HTMLParser):
    """Targets within the page, and ids."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.ids = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "a":
            self.targets.append(found["href"])
        self.ids += [found["id"]] if "id" in found else []


def test_since_when_and_what_is_gone(tmp_path):
    gone = row(implementation="trl.g", headroom=3.0, verdict="disagree", case="policy-2")
    for day in range(3):
        night(tmp_path, day, [*GOOD, gone])
    now = [
        row(implementation="trl.g", case="policy-2"),
        row(headroom=0.9),
        *rename_typed(BAD, implementation="lib.new"),
    ]
    last = night(tmp_path, 3, now, 1)
    about = Header(run="run3", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    text = render.page(typed(about, now), render.Ending(1, past=memory.runs(tmp_path)))
    in_order(
        text,
        "in 1 of 1 run",
        "New findings",
        "Fixed",
        "trl.g policy disagree loss",
        "2026-11-01",
        "logic",
        "3.00",
        "parity replay",
    )


def test_the_first_screen_says_what_is_wrong_whose_fault_it_is_and_since_when(tmp_path):
    old = [*GOOD, *rename_typed(BAD, implementation="lib.old")]
    rows = [*old, *rename_typed(BAD, implementation="lib.new", blame="reference")]
    night(tmp_path, 0, GOOD)
    night(tmp_path, 1, old, 1)
    last = night(tmp_path, 2, rows, 1, {"trl": "1.17.0<b>"})
    about = Header(run="run2", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    text = render.page(typed(about, rows), render.Ending(1, past=memory.runs(tmp_path)))
    said = [
        " ".join(re.sub("<.*?>", " ", line).split())
        for line in re.findall("(?s)<li>(.*?)</li>", text.split("<nav>")[0])
    ]
    what, replay = "logic in loss · wrong: the", "parity replay policy-1"
    assert sorted(said) == [
        f"lib.new {what} reference lib.new · new in this run, in 1 of 1 run {replay}",
        f"lib.old {what} candidate lib.old · since yesterday, 2026-11-02, in 2 of 2 runs {replay}",
    ]
    assert "Since the last green run, 2026-11-01: trl 1.16.0 → 1.17.0&lt;b&gt;." in text.split("<nav>")[0]
    found = Links(text)
    assert {"#new-1", "#new-2"} < set(found.targets) and {"new-1", "new-2"} < set(found.ids)

    last = night(tmp_path, 3, now := rename_typed(GOOD * 2, implementation="lib.new"), 0)
    about = Header(run="run3", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    text = render.page(typed(about, now), render.Ending(past=memory.runs(tmp_path)))
    assert '<p>1 finding <a href="#fixed">fixed</a> since the run before.</p>' in text.split("<nav>")[0]


def test_a_finding_not_drawn_again_is_not_called_fixed_while_its_implementation_fails(tmp_path):
    side = row(quantity="grad_weight", headroom=1.3, verdict="disagree", case="policy-2")
    night(tmp_path, 0, [*GOOD, *BAD, side], 1)
    last = night(tmp_path, 1, now := [*GOOD, *BAD], 1)
    about = Header(run="run1", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    past = memory.runs(tmp_path)
    text, still = (
        render.page(typed(about, now), render.Ending(1, past=past)),
        "not seen; its implementation still fails",
    )
    assert "fixed</a>" not in text.split("<nav>")[0] and still in text
    assert still in notify.body(trend.of("run1", past))


def test_a_fixed_finding_is_shown_as_the_run_before_it_had_it(tmp_path):
    """Class, blame, gates, worst entries, case and replay line, all of it escaped."""
    worst = [{"index": [1], "value": 2.0, "oracle": 1.0, "error": 1.0, "parameter": EVIL}]
    night(tmp_path, 0, [*GOOD, row(headroom=7.25, verdict="disagree", worst=worst, minimised=True)], 1)
    now = [row()]
    last = night(tmp_path, 1, now)
    about = Header(run="run1", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    summary = typed(about, now)
    text = render.page(summary, render.Ending(past=memory.runs(tmp_path)))
    section = text.split('<h2 id="fixed">')[1].split("<h2")[0]
    pieces = ("<details>", "logic in loss", "the candidate liger.f", "gate scalar: 7.25 times", "policy-1")
    in_order(section, *pieces, "scalar", "disagree", "worst entries of loss", "&lt;script", "parity replay policy-1")
    assert "<script" not in section


def rename_typed(rows, **fields):
    return [convert(r.to_json() | fields, Row) for r in rows]


def test_a_run_that_was_not_kept_says_nothing_of_others(tmp_path):
    night(tmp_path, 0, GOOD)
    text = render.page(summarise(HEADER, [LOSS]), render.Ending(past=memory.runs(tmp_path)))
    assert 'id="fixed"' not in text


def test_every_link_has_its_heading():
    found = Links(render.page(summarise(HEADER, [*FINDING, *KNOWN])))
    assert len(found.targets) > 5 and len(found.ids) == len(set(found.ids))
    assert {t.removeprefix("#") for t in found.targets} <= set(found.ids)
