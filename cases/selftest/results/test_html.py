"""The page: its sections, what it says since when, and that nothing from a file becomes markup."""

import html.parser
import json
import re
import sqlite3

import pytest
from msgspec import convert

from cases.selftest.results.test_brief import shown
from cases.selftest.results.test_memory import BAD, GOOD, night, row
from cases.selftest.results.test_report import BASE, FINDING, GRADIENT, HEADER, KNOWN, LOSS, in_order, rename, summarise
from parity.cli import page
from parity.results import memory, notify
from parity.results.header import About, Header
from parity.results.report import html as report
from parity.results.report.summary import summarise as typed
from parity.results.row import Row
from parity.results.step import CommandOutcome

EVIL = "<script>alert('x')</script> & \"more\""
STEP = {"check": "step-one", "model": "gemma4", "B": 1}
KL = LOSS | {"family": "grpo-trainer", "implementation": "grpo-trainer.released", "case": "g-1", "settings": STEP}


def rows_of(*rows):
    return [convert(r, Row) for r in rows]


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


def test_matrix_has_loss_and_dtype_and_tells_new_from_known():
    sapo = {"settings": BASE["settings"] | {"loss_type": "sapo"}}
    header = HEADER | {"header": HEADER["header"] | {"dimensions": {"policy": {"loss_type": "grpo"}}}}
    known = GRADIENT | sapo | {"known": "entry-1", "case": "p-3", "implementation": "lib.known"}
    (grid,) = summarise(header, [LOSS, *rename([LOSS], dtype="fp32", case="p-2", **sapo), known, *FINDING]).grids
    assert grid.columns == ("grpo", "sapo") and grid.by_dtype
    cells = {(r.implementation, r.dtype): [c and (c.text, c.style) for c in r.cells] for r in grid.rows}
    assert cells == {
        ("lib.loss", "fp32"): [None, ("0.20", "h0")],
        ("lib.loss", "bf16"): [("∞", "hnew"), None],
        ("lib.known", "bf16"): [None, ("85.25", "hk")],
    }
    (single,) = summarise(HEADER, [LOSS, *KNOWN, *rename([LOSS], dtype="fp32", case="p-2")]).grids
    assert single.columns == ("fp32", "bf16") and not single.by_dtype
    assert [c and c.style for c in single.rows[0].cells] == [None, "h0 also"]


def test_kl_at_step_one():
    rows = [KL | {"quantity": "kl", "value": 45000.0}, KL | {"quantity": "log_ratio", "value": 13.9, "headroom": 0.4}]
    (line,) = summarise(HEADER, rows).step_one
    assert (line.settings, line.kl, line.log_ratio, line.headroom) == ("model=gemma4", 45000.0, 13.9, 0.4)
    in_order(report.render(summarise(HEADER, rows)), "KL at step 1", "model=gemma4", "45000", "13.9")


def test_errors_of_candidate_and_reference():
    near, far = LOSS | {"value_oracle": 2.0, "dist": 2e-3}, LOSS | {"value_oracle": 2.0, "dist": 2e-2}
    reference = near | {"implementation": "trl.GRPOTrainer", "role": "reference"}
    ((family, dtypes, ((name, kind, (cell,)),)),) = summarise(HEADER, [far, reference]).errors
    assert (family, dtypes, name, kind) == ("policy", ["bf16"], "lib.loss", "values")
    assert (cell.ours, cell.peer, cell.farther) == ("0.01 (0.01)", "0.001 (0.001)", True)
    ((_, _, ((_, _, (cell,)),)),) = summarise(HEADER, [near, reference]).errors
    assert not cell.farther


def test_since_when_what_is_gone_and_what_grew(tmp_path):
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
    text = report.render(typed(about, now), report.Extras(code=1, past=memory.runs(tmp_path)))
    in_order(
        text,
        "New findings",
        "in 1 of 1 run",
        "Fixed",
        "trl.g policy disagree loss",
        "logic",
        "3.00",
        "2026-11-01",
        "parity replay",
    )
    printed = shown(typed(about, now), grown=report.Extras(past=memory.runs(tmp_path)).change(typed(about, now)).growth)
    assert "\ngrew     liger.f loss fp32: 0.50 to 0.90\n" in printed
    in_order(text, "Headroom that grew", "liger.f", "0.50", "0.90", "Trend", "last 4 kept runs", "polyline", "0.90")


def test_the_first_screen_says_what_is_wrong_whose_fault_it_is_and_since_when(tmp_path):
    old = [*GOOD, *rename_typed(BAD, implementation="lib.old")]
    rows = [*old, *rename_typed(BAD, implementation="lib.new", blame="reference")]
    night(tmp_path, 0, GOOD)
    night(tmp_path, 1, old, 1)
    last = night(tmp_path, 2, rows, 1, {"trl": "1.17.0<b>"})
    about = Header(run="run2", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    text = report.render(typed(about, rows), report.Extras(code=1, past=memory.runs(tmp_path)))
    said = [
        " ".join(re.sub("<.*?>", " ", line).split())
        for line in re.findall("(?s)<li>(.*?)</li>", text.split("<nav>")[0])
    ]
    what, replay = "logic in loss · the", "parity replay policy-1"
    assert sorted(said) == [
        f"lib.new {what} reference is wrong · new in this run {replay}",
        f"lib.old {what} candidate is wrong · since yesterday, 2026-11-02 {replay}",
    ]
    assert "Since the last green run, 2026-11-01: trl 1.16.0 → 1.17.0&lt;b&gt;.</p>" in text.split("<nav>")[0]
    found = Links(text)
    assert {"#new-1", "#new-2"} < set(found.targets) and {"new-1", "new-2"} < set(found.ids)

    last = night(tmp_path, 3, now := rename_typed(GOOD * 2, implementation="lib.new"), 0)
    about = Header(run="run3", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    text = report.render(typed(about, now), report.Extras(past=memory.runs(tmp_path)))
    assert '<p>1 finding <a href="#fixed">fixed</a> since the run before.</p>' in text.split("<nav>")[0]


def test_a_finding_not_drawn_again_is_not_called_fixed_while_its_implementation_fails(tmp_path):
    side = row(quantity="grad_weight", headroom=1.3, verdict="disagree", case="policy-2")
    night(tmp_path, 0, [*GOOD, *BAD, side], 1)
    last = night(tmp_path, 1, now := [*GOOD, *BAD], 1)
    about = Header(run="run1", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    extras = report.Extras(code=1, past=memory.runs(tmp_path))
    text, still = report.render(typed(about, now), extras), "not seen; its implementation still fails"
    assert "fixed</a>" not in text.split("<nav>")[0] and still in text
    assert still in notify.body(extras.change(typed(about, now)))


def test_the_release_that_a_search_found_is_on_the_first_screen(tmp_path):
    night(tmp_path / "history", 0, GOOD)
    at = "2026-11-02T01:17:00+00:00"
    header = Header(run="run1", header=About(profile="nightly", device="cpu", started=at))
    summary, line = typed(header, BAD), "policy-1, <b>liger.f broke in trl 1.14.0"
    steps = [
        CommandOutcome("bisect trl", "parity bisect trl", code, 60.0, f"measuring\n{line}\nverdict") for code in (0, 1)
    ]
    memory.remember(summary, 1, tmp_path / "history", steps=steps)
    text = report.render(summary, page.extras(header, summary, tmp_path, 1, (), BAD))
    said = '<p><a href="#night">Searched</a>: policy-1, &lt;b&gt;liger.f broke in trl 1.14.0.</p>'
    assert text.split("<nav>")[0].count(said) == 1, "one search found nothing"
    assert "night" in Links(text).ids


def test_a_fixed_finding_is_shown_as_the_run_before_it_had_it(tmp_path):
    """Class, blame, gates, worst entries, case and replay line, all of it escaped; a run kept by an earlier parity has none."""
    worst = [{"index": [1], "value": 2.0, "oracle": 1.0, "error": 1.0, "parameter": EVIL}]
    night(tmp_path, 0, [*GOOD, row(headroom=7.25, verdict="disagree", worst=worst, minimised=True)], 1)
    now = [row()]
    last = night(tmp_path, 1, now)
    about = Header(run="run1", header=About(profile="nightly", device="cpu", started=last.started.isoformat()))
    summary = typed(about, now)
    text = report.render(summary, report.Extras(past=memory.runs(tmp_path)))
    section = text.split('<h2 id="fixed">')[1].split("<h2")[0]
    pieces = ("<details>", "logic in loss", "the candidate liger.f", "gate scalar", "7.25", "smallest case", "policy-1")
    in_order(section, *pieces, "scalar", "disagree", "worst entries of loss", "&lt;script", "parity replay policy-1")
    assert "<script" not in section
    (old,) = (run for run in memory.runs(tmp_path) if run.id == "run0")
    with sqlite3.connect(old.path) as base:
        base.execute("UPDATE shown SET row = '{\"verdict\": 7}'")
    assert f"{old.path}: " in report.render(summary, report.Extras(past=memory.runs(tmp_path))), "it is named"
    with sqlite3.connect(old.path) as base:
        base.execute("DROP TABLE shown")
    section = report.render(summary, report.Extras(past=memory.runs(tmp_path))).split('<h2 id="fixed">')[1]
    assert "7.25" in section and "<details>" not in section.split("<h2")[0]


def rename_typed(rows, **fields):
    return [convert(r.to_json() | fields, Row) for r in rows]


def test_a_run_that_was_not_kept_has_no_trend(tmp_path):
    night(tmp_path, 0, GOOD)
    text = report.render(summarise(HEADER, [LOSS]), report.Extras(past=memory.runs(tmp_path)))
    assert 'id="trend"' not in text and 'id="fixed"' not in text


@pytest.fixture
def folder(tmp_path):
    """Reports of other commands, with markup in every text."""
    answer = {"family": "policy", "implementation": EVIL, "label": EVIL, "answer": "ignored", "known": [EVIL]}
    (tmp_path / "audit.ndjson").write_text(json.dumps({"header": {}}) + "\n" + json.dumps(answer) + "\n")
    fate = {"family": "policy", "name": EVIL, "mistake": EVIL, "seed": 0, "cases": 3, "judged": 9, "gate": "norm"}
    (tmp_path / "mutants.ndjson").write_text(json.dumps(fate | {"quantity": "loss", "dtype": "fp32"}) + "\n")
    info = {"table": "policy", "size": "s", "dtype": "fp32", "turn": 0, "peak": 5, "why": None}
    records = [
        {"extra_info": info | {"name": name}, "stats": {"mean": 1.0}} for name in ("fixes.FusedLinearGRPOLoss", EVIL)
    ]
    (tmp_path / "benchmark.json").write_text(json.dumps({"benchmarks": records}))
    script = tmp_path / "upstream" / "trl-chunk-7" / "script.py"
    script.parent.mkdir(parents=True)
    script.write_text(f"print({EVIL!r})\n")
    return tmp_path


def test_what_other_commands_left_is_shown_and_escaped(folder):
    evil = rename(FINDING, message=EVIL, implementation=EVIL, case=EVIL, replay=EVIL)
    summary = summarise(HEADER, [*evil, *KNOWN])
    text = report.render(summary, page.extras(Header(header=About()), summary, folder, 1, [EVIL]))
    assert "<script" not in text
    in_order(text, "ended with 1", "&lt;script", "stand-alone script", "print(&#39;&lt;script")
    in_order(text, "Settings audit: policy", "1 answers, 1 of them", "ignored: &lt;script", "1 of 1 mutants killed")
    in_order(text, "Benchmarks", 'src="data:image/svg+xml;base64,')
    assert not re.search(r"https?://", text), "nothing is fetched"


SETTINGS = [
    row(
        case="logprobs-1",
        family="logprobs",
        implementation="liger.cross_entropy",
        settings={"V": 3, "temperature": 0.7},
    ),
    row(case="logprobs-1", family="logprobs", implementation=EVIL, settings={"V": 3, "temperature": 0.7}),
    row(
        case="dpo-1",
        family="dpo-trainer",
        implementation="dpo-trainer.released",
        quantity="kl",
        settings={"check": "twins"},
        features={"config": ["beta"], "logged": ["kl", EVIL]},
    ),
]


def test_what_was_never_judged_stands_in_red_above_what_was(tmp_path):
    """`parity list --coverage` as a section: settings by implementation, fields and keys by trainer; all of it escaped."""
    summary = typed(Header(header=About()), SETTINGS)
    text = report.render(summary, page.extras(Header(header=About()), summary, tmp_path, 0, (), SETTINGS))
    section = text.split('<h2 id="judged">')[1].split("<h2")[0]
    assert "<script" not in section and section.count("&lt;script") == 2
    lines = [re.findall(r'<td class="([^"]*)">(.*?)</td>', line) for line in re.findall("<tr>(.*?)</tr>", section)]
    told = {line[0][1]: [(text, style.split()[1:]) for style, text in line[1:]] for line in lines if line}
    assert told["softcap"] == [("0", ["over"])] * 2 and told["temperature"] == [("1", [])] * 2
    names = [line[0] for line in lines if line]
    places = [[text for _, text in names].index(name) for name in ("softcap", "temperature", "label_smoothing", "kl")]
    assert places == sorted(places)
    styles = {text: style.split()[1:] for style, text in names}
    assert (styles["label_smoothing"], styles["beta"], styles["kl"]) == (["over"], [], [])
    assert '<a href="#judged">' in text and 'id="judged"' in text


def test_a_damaged_file_is_named_and_the_page_is_there(folder):
    (folder / "audit.ndjson").write_text('{"answer": 3}\n')
    (folder / "mutants.ndjson").write_text("nonsense\n")
    (folder / "benchmark.json").write_text("[]")
    (folder / "history").mkdir()
    (folder / "history" / "x.sqlite").write_text("nonsense")
    summary = summarise(HEADER, [LOSS])
    text = report.render(summary, page.extras(Header(header=About()), summary, folder, 0, ()))
    assert text.count("cannot be read: ") == 4
    assert "0.20" in text


def test_a_new_finding_carries_its_script():
    settings = {"B": 1, "T": 1, "V": 3, "H": 1}
    fields = {"family": "logprobs", "seed": 5, "dtype": "fp32", "settings": settings}
    failing = GRADIENT | fields | {"implementation": "trl.selective_log_softmax"}
    case = page.Case(family="logprobs", seed=5, dtype="fp32", settings=settings)
    (text,) = page.scripts(summarise(HEADER, [failing | {"case": case.id}]), page.Path("nowhere")).values()
    compile(text, "script", "exec")
    assert "selective_log_softmax" in text and "parity" not in text
    assert page.scripts(summarise(HEADER, [failing]), page.Path("nowhere")) == {}, "another case than the row's"


def test_every_link_has_its_heading():
    found = Links(report.render(summarise(HEADER, [*FINDING, *KNOWN])))
    assert len(found.targets) > 5 and len(found.ids) == len(set(found.ids))
    assert {t.removeprefix("#") for t in found.targets} <= set(found.ids)
