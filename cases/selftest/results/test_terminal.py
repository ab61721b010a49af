"""The one-screen summary: what it opens and ends with, and that it stays one screen."""

import io
import json
import math

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
from parity.results.report import terminal


def shown(summary, width=100, ending=terminal.IN_ORDER):
    out = io.StringIO()
    terminal.render(summary, Console(file=out, width=width, color_system=None, highlight=False), ending)
    return out.getvalue()


def test_it_opens_with_what_is_new_and_ends_with_the_next_command():
    text = shown(everything(), ending=terminal.Ending(1, ["2 new failing rows of lib.loss", "ledger entry x is stale"]))
    assert text.startswith("NEW 2 · KNOWN 1 · 2 compared on CPU, none on CUDA\n")
    in_order(
        text,
        "new 1 · lib.loss · crashed",
        "new 2 · lib.loss · logic in grad_hidden",
        "wrong: the candidate lib.loss",
        f"  {BASE['replay']}\n",
        "policy",
        "bf16",
        "lib.known",
        "0.20",
        "lib.loss",
        "85.25!",
        "\nidle     1 implementation compared nothing (1: no softcap parameter)\n",
        "\nverdict  the run ended with 1: something disagrees that no ledger entry covers\n",
        "ledger entry x is stale",
        "\nnew      lib.loss (2)\n",
        "\nknown    trl-chunk-7\n",
        f"\nnext     {BASE['replay']}\n",
    )
    assert text.rstrip().splitlines()[-1].startswith("next ")
    assert "failing rows" not in text


def test_a_green_run():
    text = shown(summarise(HEADER, [LOSS]))
    assert text.startswith("NEW none · KNOWN none · 1 compared on CPU, none on CUDA\n")
    in_order(
        text, "the run ended with 0: nothing new disagrees", "new      none", "known    none", "next     parity report"
    )


def test_devices_are_counted_apart():
    """An implementation on CUDA is a line of its own and no comparison on the CPU."""
    gpu = rename([LOSS, LOSS | {"case": "c2"}], device="cuda")
    text = shown(summarise(HEADER, [LOSS, *gpu]))
    assert text.startswith("NEW none · KNOWN none · 1 compared on CPU, 2 on CUDA\n")
    in_order(text, "lib.loss (cpu)", "lib.loss (cuda)")


def test_cells_tell_new_from_known():
    rows = [GRADIENT, *KNOWN[1:], GRADIENT | {"implementation": "lib.huge", "headroom": 1e33}]
    lines = {line.split()[0]: line.split()[1] for line in shown(summarise(HEADER, rows)).splitlines() if "lib." in line}
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
    text = shown(large, width, terminal.Ending(1, ["a reason " * 30] * 9))
    lines = text.splitlines()
    assert 40 < len(lines) <= 60
    assert max(len(line) for line in lines if "parity replay" not in line) <= min(width, 110)
    assert LONG[:70] in text and "lib.new0" in text
    assert text.count("\nidle  ") == 1 and "45 implementations compared nothing" in text
    in_order(text, "more new findings: parity report -v", "implementations with at most")


def test_notes_leave_room_for_the_findings():
    """A user's twenty functions have a note each: what is new is shown, notes are counted."""
    rows = rename([GRADIENT], implementation="my_kernel.py:wrong")
    for k in range(20):
        rows += rename([UNSUPPORTED], implementation=f"my_kernel.py:f{k}", message=f"f{k} has no parameter bias")
        rows += rename([LOSS], implementation=f"my_kernel.py:f{k}", case=f"other-{k}")
    text = shown(summarise(HEADER, rows))
    in_order(
        text, "\nnew 1 · my_kernel.py:wrong", "which it has not: bias", "note     and 15 more notes: parity report -v"
    )
    assert "more new finding" not in text


def test_the_headroom_of_those_not_shown_is_of_what_is_not_known():
    rows = [*FINDING]
    for k in range(60):
        rows += rename([LOSS], implementation=f"lib.right{k}")
        rows += rename([GRADIENT], implementation=f"lib.old{k}", known="an-entry", headroom=math.inf)
    left = next(line for line in shown(summarise(HEADER, rows)).splitlines() if "with at most" in line)
    assert f"with at most {LOSS['headroom']:.2f}, unless known" in left


def test_an_id_wider_than_the_screen_is_left_whole():
    assert LONG in shown(summarise(HEADER, rename(FINDING, implementation=LONG)), 40).split("worst headroom")[0]


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.ndjson"
    path.write_text("".join(json.dumps(row) + "\n" for row in [HEADER, *FINDING, *KNOWN, UNSUPPORTED, CRASH]))
    return str(path)


def test_how_much_is_printed(results):
    def printed(*words):
        return CliRunner().invoke(commands.main, ["report", results, *words]).output

    assert printed("-q") == (
        "NEW 2 · KNOWN 1 · 2 compared on CPU, none on CUDA · "
        "the run ended with 1: something disagrees that no ledger entry covers\n"
    )
    found = json.loads(printed("--json"))
    assert [f["row"]["verdict"] for f in found["new"]] == ["crashed", "disagree"]
    assert found["known"][0]["row"]["known"] == "trl-chunk-7" and found["compared"] == {"cpu": 2}
    in_order(printed("-v"), "NEW 2", "worst entries of grad_hidden", "never: ", "\nnext ")
    assert "cannot be used together" in printed("-v", "-q")
