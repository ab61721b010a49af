"""What reports must hold whatever a run found: one screen, no word cut, nothing that a library writes becomes markup."""

import html.parser
import io
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cases.selftest.results.runs import (
    ABOUT,
    BAD,
    CRASH,
    EVIL,
    FINDING,
    GOOD,
    GRADIENT,
    KNOWN,
    LONG,
    LOSS,
    UNSUPPORTED,
    about,
    changed,
    declined,
    everything,
    in_order,
    night,
    row,
    summary,
)
from cases.selftest.results.test_shown import printed
from parity.results import memory, notify, trend
from parity.results.ledger import installed
from parity.results.report import render
from parity.results.row import About, Asked, Header


def shown(of_run, width=100, ending=render.IN_ORDER, full=False):
    return printed(lambda console: render.terminal(of_run, console, ending, full), width)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_everything_fits_and_no_id_is_cut(width):
    text = render.text_of(FINDING, width)
    assert max(len(line) for line in text.splitlines() if not line.startswith("replay")) <= width
    table = shown(everything(), width, full=True).split("error ÷ allowed, ")[1].split("not compared")[0]
    assert max(len(line) for line in table.splitlines()) <= width and "85.25!" in table
    text = shown(summary(*changed(FINDING, implementation=LONG)), width, full=True)
    assert f"new 1 · {LONG} · logic" in " ".join(text.split()) and f"\n{LONG}\n" in text.split("error ÷ allowed, ")[1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"blame": "reference"}, "the reference lib.loss"),
        ({"blame": "reference", "family": "dpo-trainer"}, "the trainer as released"),
        ({"blame": "both"}, "both the candidate lib.loss and the reference trl.GRPOTrainer"),
        ({"blame": "harness"}, "the harness, in its adapter for lib.loss"),
        ({"blame": None, "variant": "trl 1.13"}, "wrong    lib.loss follows another definition: trl 1.13"),
        ({"blame": None}, "not decided"),
    ],
)
def test_who_is_wrong(fields, says):
    assert says in render.text_of(changed([GRADIENT], **fields), 120)


def test_of_some_cases_that_follow_another_definition_it_is_known_who_is_wrong():
    cases = row(verdict="disagree", blame=None, variant="trl 1.13"), row("policy-2", verdict="disagree")
    assert "wrong: candidate in 1, another definition in 1" in " ".join(shown(summary(*cases)).split())


def test_a_long_replay_line_stays_one_line():
    line = "parity replay " + "x" * 200 + " --implementation " + LONG
    rows = changed([GRADIENT], replay=line)
    assert f"replay   {line}\n" in render.text_of(rows, 80) and f"{line}\n" in shown(summary(*rows), 80)


def test_colour_adds_nothing_but_colour():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system="standard", highlight=False)
    render.terminal(everything(), console, full=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) == shown(everything(), full=True)


def test_what_crashed_and_was_not_judged_is_an_error_of_junit():
    crashed = ElementTree.fromstring(render.junit(summary(CRASH, *KNOWN)))
    assert (crashed.get("errors"), crashed.get("failures"), crashed.get("skipped")) == ("1", "0", "1")


def test_nothing_from_a_file_becomes_markup():
    rows = changed(FINDING, message=EVIL, implementation=EVIL, case=EVIL, replay=EVIL)
    page = render.page(summary(*rows))
    assert page.count("<script") == 1 and page.count("</script>") == 1 and "&lt;script&gt;" in page
    assert EVIL not in page
    assert not re.search(r"https?://", page), "nothing is fetched"
    text = render.markdown(summary(declined("unsupported", "a|b `c` <img src=x> [d](e)\nnew")))
    (cell,) = [line for line in text.splitlines() if line.startswith("| policy")]
    assert len(re.findall(r"(?<!\\)\|", cell)) == 9 and "<img" not in text


def test_a_crash_is_not_given_the_reason_of_what_was_unsupported():
    rows = [declined("unsupported", "no bias parameter"), declined("crashed", "boom", case="policy-2")]
    text = render.markdown(summary(*rows))
    (cell,) = [line for line in text.splitlines() if line.startswith("| policy")]
    assert "CRASHED" in cell and "no bias" not in cell


def test_markdown_fits_a_comment():
    rows = [changed([GRADIENT], case=f"p-{k}", implementation=f"lib.loss{k}", message="x" * 300)[0] for k in range(150)]
    text = render.markdown(summary(*rows))
    assert len(text) < 65_536 and "… and 90 more." in text


def test_a_green_run_hides_no_severe_defect():
    """Of the ledger what holds with the run's versions, whether or not the run met it: by severity, a convention not counted."""
    of_run, results = summary(LOSS), "elsewhere/x.ndjson"
    in_order(
        shown(of_run, ending=render.Ending(results=results)),
        "trl 1.16.0, torch 2.13.0: 1 high, 1 medium known defects, 0 new\n",
        "known defects, 1 high: default or common settings",
        "Any trainer, `beta`: Every gradient is halved. Fix: `apply`. Releases: trl >=1.10.0.",
        "parity replay severe\n",
        "known defects, 1 medium: ",
        "parity replay middling\n",
        "known defects, 1 convention: parity findings\n",
        "the run ended with 0: nothing new disagrees",
        "next     parity report elsewhere/x.ndjson -v\n",
    )
    for other in (render.markdown(of_run), render.page(of_run)):
        in_order(other, "1 high, 1 medium known", "nothing new disagrees", "Every gradient is halved", "replay severe")
        assert "Doubled" not in other


def test_a_run_of_ones_own_losses_names_each_that_fails_and_no_defects_of_libraries():
    header = Header(run="r1", header=About(**ABOUT | {"asked": Asked(implementations=("mine.py:f*",))}))
    of = {"verdict": "disagree", "message": "all zero"}
    found = [row(f"policy-{i}", implementation=f"mine.py:f{i}", **of) for i in range(24)]
    text = shown(summary(*found, row("policy-9", verdict="disagree", known="K1"), header=header))
    assert text.startswith("24 new\n") and "known defects" not in text
    assert sorted(re.findall(r"^new \d+ · (\S+) ·", text, re.M)) == sorted(f"mine.py:f{i}" for i in range(24))


def test_each_of_a_few_of_ones_own_has_its_verdict_at_the_top():
    found = [
        row(f"policy-{i}", implementation=f"mine.py:f{i % 2}", verdict="disagree" if i % 2 else "agree")
        for i in range(5)
    ]
    lines = shown(summary(*found, row())).splitlines()[:5]
    assert "mine.py:f0: 3 compared · 3 agree" in lines and "mine.py:f1: 2 compared · 0 agree · 2 disagree" in lines


def test_a_run_of_named_families_names_their_defects_and_those_that_it_met():
    header = Header(
        run="r1", header=About(**ABOUT | {"asked": Asked(ledger=ABOUT["asked"].ledger, families=("logprobs",))})
    )
    text = shown(summary(row(family="logprobs"), header=header))
    assert "trl 1.16.0, torch 2.13.0: no known defects, 0 new\n" in text
    assert "\n2 other known defects, not met and of other families: parity findings\n" in text
    met = summary(row(family="logprobs", verdict="disagree", known="severe"), header=header)
    for text in (shown(met), render.markdown(met), render.page(met)):
        in_order(text, "1 high known defect, 0 new", "replay severe")
        assert "1 other known defect, not met and of other families: parity findings" in text
    of_it = summary(LOSS, header=header)
    assert (of_it.stack.others, len(of_it.stack.entries)) == (0, 3)


def test_each_part_of_the_protocol_has_a_headline_that_is_true_of_it():
    """A crash under another default dtype was headed as a change of what must be left alone."""
    said = "the call fails under another default dtype: crashed: RuntimeError"
    found = row(quantity="protocol", verdict="disagree", gate="protocol", headroom=None, message=said)
    text = shown(summary(found), full=True)
    assert "protocol: the call fails under another default dtype\n" in text
    assert "\nprotocol  the call fails under another default dtype\n" in text and "leave alone" not in text
    left = row(quantity="protocol", verdict="disagree", gate="protocol", headroom=None, message="rebound json.dumps")
    assert "protocol: the call changed what it must leave alone\n" in shown(summary(left))


def of_trainer(path, case="dpo-trainer-1", blame=None, **fields):
    blame = blame or ("reference" if path == "released" else "both")
    where = {"family": "dpo-trainer", "implementation": f"dpo-trainer.{path}", "blame": blame, "verdict": "disagree"}
    where |= {"settings": {"check": "losses", "loss": "ipo"}, "replay": f"parity replay {case} --implementation {path}"}
    return row(case, **where | fields)


def test_what_a_trainer_gets_wrong_as_released_and_with_the_fixes_is_told_once():
    """As released, which the next line replays too."""
    two = [of_trainer(path, f"dpo-trainer-{n}") for n in (1, 2) for path in ("fixed", "released")]
    of_run = summary(*two, of_trainer("fused", "dpo-trainer-2"))
    (found,) = of_run.findings
    assert [f.implementation for f in found.each] == ["dpo-trainer.released", "dpo-trainer.fixed", "dpo-trainer.fused"]
    text = shown(of_run)
    assert "1 new\n" in text and text.count("dpo-trainer.released · logic in loss") == 1
    assert "\n  settings: check=losses, loss=ipo\n" in text
    assert "wrong: the trainer as released · 2 cases, also with the fixes, also fused (1) · fp32" in " ".join(
        text.split()
    )
    assert text.endswith("next     parity replay dpo-trainer-1 --implementation released\n")
    for other in (render.markdown(of_run), render.page(of_run)):
        assert other.count("also with the fixes, also fused (1)") == 1 and "1 new" in other and "loss=ipo" in other
    assert render.junit(of_run).count("<failure") == 3


def test_the_settings_of_a_finding_are_those_that_none_of_its_cases_has_at_the_default():
    def said(*its):
        cases = (row(f"policy-{n}", verdict="disagree", settings={"B": n, "T": 3} | one) for n, one in enumerate(its))
        return summary(*cases).findings[0].settings

    every = [{"loss": name, "nll": 0.4, "flag": True} for name in "abcd"]
    assert said(*every[:1]) == every[0]
    assert said(*every[:3]) == {"loss": "a|b|c", "nll": 0.4, "flag": True}
    assert said(*every) == {"nll": 0.4, "flag": True}
    assert said(*every[:2], {"loss": "a", "nll": 0.4}) == {"loss": "a|b", "nll": 0.4}


@pytest.mark.parametrize(
    "fields",
    [
        {"case": "dpo-trainer-2", "blame": "candidate"},
        {"quantity": "grad_hidden"},
        {"implementation": "mine.py:Mine"},
        {"verdict": "nondeterministic"},
    ],
)
def test_what_is_not_the_same_there_is_told_apart(fields):
    of_run = summary(of_trainer("released"), of_trainer("fixed", **fields))
    first, second = of_run.findings
    assert first.implementation == "dpo-trainer.released" and not first.also + second.also


def test_of_the_shipped_ledger_a_part_counts_once():
    header = Header(run="r1", header=About(versions=ABOUT["versions"]))
    ids = ("trl-grpo-entropy-minus-inf", "trl-entropy-minus-inf", "gc-overwrite")
    seen = summary(*(changed([GRADIENT], known=id)[0] for id in ids), header=header).stack
    assert seen == summary(LOSS, header=header).stack and "gc-overwrite" in {e.id for e in seen.entries}


def test_devices_are_counted_apart():
    """An implementation on CUDA is a line of its own and no comparison on the CPU."""
    gpu = changed([LOSS, *changed([LOSS], case="c2")], device="cuda")
    text = shown(summary(LOSS, *gpu))
    in_order(text, "lib.loss (cpu)", "1 compared on CPU, 2 on CUDA")
    assert "lib.loss (cuda)" in text


def test_cells_tell_new_from_known():
    rows = [GRADIENT, KNOWN[1], *changed([GRADIENT], implementation="lib.huge", headroom=1e33)]
    table = shown(summary(*rows)).split("error ÷ allowed, at worst")[1]
    lines = {line.split()[0]: line.split()[1] for line in table.splitlines() if line.startswith("lib.")}
    assert (lines["lib.loss"], lines["lib.known"], lines["lib.huge"]) == ("85.25!", "(85.25)", ">1000!")


def test_one_name_of_two_families_is_told_apart():
    rows = [row(implementation="a.py:T"), row("t-1", implementation="a.py:T", family="grpo-trainer"), row()]
    table = shown(summary(*rows)).split("error ÷ allowed, at worst")[1]
    assert "a.py:T (policy)" in table and "a.py:T (grpo-trainer)" in table and "lib.loss (" not in table


@pytest.fixture(scope="module")
def large():
    """Ninety implementations, half of them idle for two reasons, forty new findings, as many known ones."""
    rows = changed([CRASH], message="x " * 300, implementation=LONG[:70])
    for k in range(45):
        rows += changed([LOSS], implementation=f"lib.loss{k}", family=f"family{k % 9}")
        rows += changed([UNSUPPORTED], implementation=f"lib.idle{k}", message=f"reason {'ab'[k % 2]} " + "long " * 20)
    for k in range(40):
        rows += changed([GRADIENT], implementation=f"lib.new{k}", case=f"new-{k}")
        rows += changed([GRADIENT], implementation=f"lib.old{k}", case=f"old-{k}", known=f"an-entry-of-the-ledger-{k}")
    return summary(*rows)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_it_fits_one_screen_and_breaks_no_word(large, width):
    text = shown(large, width, render.Ending(1, ["a reason " * 30] * 9))
    lines = text.splitlines()
    assert 30 < len(lines) <= 60
    assert max(len(line) for line in lines if "parity replay" not in line) <= min(width, 110)
    assert LONG[:70] in text and "lib.new0" in text
    assert text.count("\nidle  ") == 1 and "45 implementations compared nothing" in text
    in_order(text, "more new findings: parity report reports/results.ndjson -v", "more implementations: parity report")


def test_each_of_several_findings_has_its_replay_line():
    rows = [
        row for k in range(8) for row in changed([GRADIENT], implementation=f"my_kernel.py:f{k}", replay=f"replay {k}")
    ]
    text = shown(summary(*rows))
    assert "\nnew 8 · my_kernel.py:f7" in text
    assert all(f"  replay {k}\n" in text for k in range(8))


def test_known_defects_leave_room_for_the_names_of_new_findings():
    """Of the shipped ledger, whose severe ones would fill the screen."""
    versions = {name: found for name in ("trl", "transformers", "liger-kernel") if (found := installed(name))}
    header = Header(run="r1", header=About(**ABOUT | {"versions": versions, "asked": Asked()}))
    found = [r for k in range(24) for r in changed([GRADIENT], implementation=f"lib.f{k}")]
    text = shown(summary(*found, header=header))
    named = re.findall(r"^new \d+ · (\S+) ·", text, re.M)
    assert sorted(named) == sorted(f"lib.f{k}" for k in range(24)) and text.count("\n") <= render.LINES


def test_notes_leave_room_for_the_findings():
    """A user's twenty functions have a note each: what is new is shown, notes are counted."""
    rows = changed([GRADIENT], implementation="my_kernel.py:wrong")
    for k in range(20):
        rows += changed([UNSUPPORTED], implementation=f"my_kernel.py:f{k}", message=f"f{k} has no parameter bias")
        rows += changed([LOSS], implementation=f"my_kernel.py:f{k}", case=f"other-{k}")
    text = shown(summary(*rows))
    in_order(text, "\nnew 1 · my_kernel.py:wrong", "which it has not: bias", "more notes: parity report")
    assert "more new finding" not in text


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


def test_every_link_has_its_heading():
    found = Links(render.page(everything()))
    assert len(found.targets) > 5 and len(found.ids) == len(set(found.ids))
    assert {t.removeprefix("#") for t in found.targets} <= set(found.ids)


def test_a_finding_not_drawn_again_is_not_called_fixed_while_its_implementation_fails(tmp_path):
    side = row(quantity="grad_weight", headroom=1.3, verdict="disagree", case="policy-2")
    night(tmp_path, 0, [*GOOD, *BAD, side], 1)
    night(tmp_path, 1, now := [*GOOD, *BAD], 1)
    past, still = memory.runs(tmp_path), "not seen; its implementation still fails"
    text = render.page(summary(*now, header=about(1)), render.Ending(1, past=past))
    assert "fixed</a>" not in text.split("<nav>")[0] and still in text
    assert still in notify.body(trend.change(past[-1], past))
    night(tmp_path, 2, GOOD)
    text = render.page(summary(*GOOD, header=about(2)), render.Ending(past=memory.runs(tmp_path)))
    assert '<p>1 finding <a href="#fixed">fixed</a> since the run before.</p>' in text.split("<nav>")[0]


def test_a_run_that_was_not_kept_says_nothing_of_others(tmp_path):
    night(tmp_path, 0, GOOD)
    assert 'id="fixed"' not in render.page(summary(LOSS), render.Ending(past=memory.runs(tmp_path)))
