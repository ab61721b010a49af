"""How far a run is: the figures, nothing to overwrite on a pipe, two live lines on a terminal."""

import io
import time

from rich.console import Console

from cases.selftest.results.runs import GRADIENT, LOSS, changed
from parity.cli import progress


def made(clock, **options):
    out = io.StringIO()
    return progress.Shown(Console(file=out, width=200, **options), clock), out


def test_the_figures():
    now = [0.0]
    shown, _ = made(lambda: now[0])
    shown([], 0, 400, 0 / 400, "lib.a on case-1")
    assert shown.line() == (
        "0 s: 0 % · 0 of 400 cases · time left not known yet · NEW none · KNOWN none · now lib.a on case-1"
    )
    now[0] = 10.0
    shown([], 11, 400, 11 / 400, "lib.a on case-1")
    assert shown.left() == "time left not known yet", "2.75 % is too early"
    rows = [LOSS, GRADIENT, *changed([GRADIENT], known="entry-1")]
    now[0] = 20.0
    shown(rows, 100, 400, 100 / 400, "lib.b on case-2")
    assert shown.line() == (
        "20 s: 25 % · 100 of 400 cases · about 60 s of cases left · NEW in lib.loss · KNOWN 1 · now lib.b on case-2"
    )


def test_no_more_time_is_said_to_be_left_than_the_run_has():
    now = [0.0]
    shown, _ = made(lambda: now[0])
    shown([], 0, 1000, 0 / 1000, "", 600.0)
    assert shown.left() == "at most 10 min left"
    now[0] = 300.0
    shown([], 100, 1000, 100 / 1000, "", 300.0)
    assert shown.left() == "about 5 min left", "2,700 s at its speed"
    now[0] = 601.0
    assert shown.left() == "its time is over"
    shown([], 1000, 1000, 1000 / 1000, "", 300.0)
    assert shown.left() == "finishing"
    shown([], 620, 1000, 620 / 1000, "", 1000.0)
    assert shown.left() == "about 6 min left", "slower than its time allows"


def test_an_estimate_that_has_passed_is_none():
    """The last shard of 732 took minutes, of which "about 0 s of cases left" was said."""
    now = [0.0]
    shown, _ = made(lambda: now[0])
    shown([], 0, 732, 0 / 732, "")
    now[0] = 60.0
    shown([], 731, 732, 731 / 732, "lib.a on case-1")
    assert shown.left() == "about 0 s left"
    now[0] = 90.0
    shown([], 731, 732, 731 / 732, "lib.a on case-2")
    assert shown.left() == "time left not known yet"


def test_the_time_left_is_that_of_the_work():
    now = [0.0]
    shown, _ = made(lambda: now[0])
    shown([], 0, 100, 0.0, "")
    now[0] = 60.0
    shown([], 78, 100, 0.5, "lib.a on case-1")
    assert shown.line().startswith("60 s: 50 % · 78 of 100 cases · about 60 s left")


def test_a_pipe_gets_lines(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    shown, out = made(lambda: 0.0)
    with shown:
        shown([], 3, 4, 3 / 4, "lib.a on case-1")
        while out.getvalue().count("\n") < 2:
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert "75 % · 3 of 4 cases" in lines[1]
    before = out.getvalue()
    shown.say("history")
    time.sleep(0.05)
    assert out.getvalue() == before + "history\n", "what runs after it is not reported as it"
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


def test_a_terminal_gets_live_lines():
    shown, out = made(lambda: 0.0, force_terminal=True)
    with shown:
        shown([], 3, 4, 3 / 4, "lib.a on case-1")
        shown.live._live.refresh()
    assert "75 % · 3 of 4 cases" in out.getvalue() and "lib.a on case-1" in out.getvalue()
    assert out.getvalue().rstrip("\r\n").endswith("\x1b[2K"), "nothing of it stays"
