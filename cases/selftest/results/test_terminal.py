"""The one-screen summary: what it opens and ends with, and that it stays one screen."""

import io
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from cases.selftest.results.test_report import (
    BASE,
    CRASH,
    FINDING,
    GRADIENT,
    HEADER,
    KNOWN,
    LONG,
    LOSS,
    UNSUPPORTED,
    everything,
    in_order,
    rename,
    summarise,
)
from parity.cli import commands
from parity.results.report import render


def shown(summary, width=100, ending=render.IN_ORDER):
    out = io.StringIO()
    render.terminal(summary, Console(file=out, width=width, color_system=None, highlight=False), ending)
    return out.getvalue()


def test_it_opens_with_the_stack_and_ends_with_the_next_command():
    text = shown(everything(), ending=render.Ending(1, ["2 new failing rows of lib.loss", "ledger entry x is stale"]))
    assert text.startswith("trl 1.16.0, torch 2.13.0: 1 unranked known defect seen, 2 new\n")
    in_order(
        text,
        "new 1 · lib.loss · crashed",
        "new 2 · lib.loss · logic in grad_hidden",
        "wrong: the candidate lib.loss",
        f"  {BASE['replay']}\n",
        "known defects, unranked",
        "parity replay trl-chunk-7",
        "bf16",
        "lib.loss",
        "85.25!",
        "lib.known",
        "0.20",
        "2 compared on CPU, none on CUDA",
        "\nidle     1 implementation compared nothing (1: no softcap parameter)\n",
        "\nverdict  the run ended with 1: something disagrees that no ledger entry covers\n",
        "ledger entry x is stale",
        f"\nnext     {BASE['replay']}\n",
    )
    assert text.rstrip().splitlines()[-1].startswith("next ")
    assert "failing rows" not in text


def test_a_green_run_hides_no_severe_defect():
    """Those of the shipped ledger, in a user's words and by severity; a part counts once, a convention not at all."""
    ids = ("cce-gradient-filter", "trl-grpo-entropy-minus-inf", "trl-entropy-minus-inf", "gc-overwrite")
    rows = [GRADIENT | {"known": id, "case": f"policy-{id}", "replay": ""} for id in ids]
    summary, results = summarise(HEADER, [LOSS, *rows]), "elsewhere/x.ndjson"
    text = shown(summary, ending=render.Ending(results=results))
    in_order(
        text,
        "1 high, 1 low known defects seen, 0 new",
        "high: default or common settings",
        "Generation replaces it",
        "Fix: `apply`. Since: trl 0.22.0 on.",
        "parity replay gc-overwrite\n",
        "low: extremes",
        "parity replay trl-entropy-minus-inf\n",
        "convention: ",
        "the run ended with 0: nothing new disagrees",
        "next     parity report elsewhere/x.ndjson -v\n",
    )
    for other in (render.markdown(summary), render.page(summary)):
        in_order(other, "1 high, 1 low known", "nothing new disagrees", "Generation replaces it", "gc-overwrite")


def test_devices_are_counted_apart():
    """An implementation on CUDA is a line of its own and no comparison on the CPU."""
    gpu = rename([LOSS, LOSS | {"case": "c2"}], device="cuda")
    text = shown(summarise(HEADER, [LOSS, *gpu]))
    in_order(text, "lib.loss (cpu)", "1 compared on CPU, 2 on CUDA")
    assert "lib.loss (cuda)" in text


def test_cells_tell_new_from_known():
    rows = [GRADIENT, *KNOWN[1:], GRADIENT | {"implementation": "lib.huge", "headroom": 1e33}]
    table = shown(summarise(HEADER, rows)).split("error ÷ allowed, at worst")[1]
    lines = {line.split()[0]: line.split()[1] for line in table.splitlines() if line.startswith("lib.")}
    assert (lines["lib.loss"], lines["lib.known"], lines["lib.huge"]) == ("85.25!", "(85.25)", ">1000!")


@pytest.fixture(scope="module")
def large():
    """Ninety implementations, half of them idle for two reasons, forty new findings, as many known ones."""
    rows = [CRASH | {"message": "x " * 300, "implementation": LONG[:70]}]
    for k in range(45):
        rows += rename([LOSS], implementation=f"lib.loss{k}", family=f"family{k % 9}")
        rows += rename([UNSUPPORTED], implementation=f"lib.idle{k}", message=f"reason {'ab'[k % 2]} " + "long " * 20)
    for k in range(40):
        rows += rename([GRADIENT], implementation=f"lib.new{k}", case=f"new-{k}")
        rows += rename([GRADIENT], implementation=f"lib.old{k}", case=f"old-{k}", known=f"an-entry-of-the-ledger-{k}")
    return summarise(HEADER, rows)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_it_fits_one_screen_and_breaks_no_word(large, width):
    text = shown(large, width, render.Ending(1, ["a reason " * 30] * 9))
    lines = text.splitlines()
    assert 30 < len(lines) <= 60
    assert max(len(line) for line in lines if "parity replay" not in line) <= min(width, 110)
    assert LONG[:70] in text and "lib.new0" in text
    assert text.count("\nidle  ") == 1 and "45 implementations compared nothing" in text
    in_order(text, "more new findings: parity report reports/results.ndjson -v", "more implementations: parity report")


def test_notes_leave_room_for_the_findings():
    """A user's twenty functions have a note each: what is new is shown, notes are counted."""
    rows = rename([GRADIENT], implementation="my_kernel.py:wrong")
    for k in range(20):
        rows += rename([UNSUPPORTED], implementation=f"my_kernel.py:f{k}", message=f"f{k} has no parameter bias")
        rows += rename([LOSS], implementation=f"my_kernel.py:f{k}", case=f"other-{k}")
    text = shown(summarise(HEADER, rows))
    in_order(text, "\nnew 1 · my_kernel.py:wrong", "which it has not: bias", "more notes: parity report")
    assert "more new finding" not in text


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.ndjson"
    path.write_text("".join(json.dumps(row) + "\n" for row in [HEADER, *FINDING, *KNOWN, UNSUPPORTED, CRASH]))
    return str(path)


def test_how_much_is_printed(results):
    def printed(*words):
        return CliRunner().invoke(commands.main, ["report", results, *words]).output

    assert printed("-q") == (
        "trl 1.16.0, torch 2.13.0: 1 unranked known defect seen, 2 new · "
        "the run ended with 1: something disagrees that no ledger entry covers\n"
    )
    found = json.loads(printed("--json"))
    assert [f["row"]["verdict"] for f in found["new"]] == ["crashed", "disagree"]
    assert found["known"][0]["row"]["known"] == "trl-chunk-7" and found["compared"] == {"cpu": 2}
    in_order(printed("-v"), "2 new", "worst entries of grad_hidden", "not compared, and why", "\nnext ")
    assert "cannot be used together" in printed("-v", "-q")
