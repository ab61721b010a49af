"""Time goes to what is new first, to what has failed lately next, to what never failed last; nothing gets none."""

import datetime

import pytest

from parity.nightly import budget
from parity.results.memory import Run, Seen
from parity.results.step import CommandOutcome

NOW = [("trl.f", "policy"), ("liger.f", "policy"), ("trl.g", "logprobs"), ("trl.h", "divergence")]


def night(findings=(), compared=NOW, steps=None, trl="1.0", device="cpu", cut=()):
    seen = [Seen(f, "trl.f", f, "disagree", None, "", [], None, 1, None, "", "") for f in findings]
    started = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
    done = [CommandOutcome(n, "", code, 1.0, "", "3 of 9" if n in cut else "") for n, code in (steps or {}).items()]
    told = {"versions": {"trl": trl}, "counts": [(i, f, device, 9) for i, f in compared], "findings": seen}
    return Run(id="id", started=started, profile="nightly", device=device, steps=done, **told)


def test_families():
    def weights(past, trl="1.0"):
        return budget.families(past, "cpu", NOW, {"trl": trl})

    assert set(weights([]).values()) == {budget.NEW}, "the first night"
    assert set(weights([night()]).values()) == {budget.QUIET}
    assert weights([night(["logprobs"]), *[night()] * 3])["logprobs"] == budget.FAILED
    assert weights([night(["logprobs"]), *[night()] * 7])["logprobs"] == budget.QUIET, "a week ago"
    assert weights([night(compared=NOW[1:])])["policy"] == budget.NEW, "an implementation that was never compared"
    assert weights([night()], trl="1.1") == {"policy": 4.0, "logprobs": 4.0, "divergence": 4.0}, "a library moved"
    assert set(weights([night(device="cuda")]).values()) == {budget.NEW}, "on another device only"


def test_commands():
    usual = {"run": 0.7, "history": 0.2, "mutants": 0.1}
    assert budget.parts([], usual) == pytest.approx(usual)
    quiet = {"history": 0, "mutants": 0}
    assert budget.parts([night(steps=quiet)], usual) == pytest.approx(usual), "the long run is none of the steps"
    assert budget.parts([night(["policy"], steps=quiet)], usual)["run"] > 0.7, "it found something"
    failed = budget.parts([night(steps=quiet | {"mutants": 1}), night(steps=quiet)], usual)
    assert next(iter(failed)) == "mutants" and failed["mutants"] > 0.1 and min(failed.values()) > 0.08
    stopped = budget.parts([night(steps=quiet | {"history": None})], usual)
    assert next(iter(stopped)) == "history", "its time was over: it may have found something"
    new = budget.parts([night(steps={"history": 0})], usual)
    assert next(iter(new)) == "mutants" and new["mutants"] > failed["mutants"] * 0.9
    assert sum(new.values()) == pytest.approx(1.0)


def test_what_the_last_night_cut_comes_first():
    usual = {"run": 0.6, "history": 0.2, "mutants": 0.1, "sweep": 0.1}
    every = dict.fromkeys(list(usual)[1:], 0)
    first = night(steps=every, cut=["history", "mutants"])
    assert list(budget.parts([first], usual))[:2] == ["history", "mutants"]
    second = night(steps=every, cut=["mutants"])
    assert list(budget.parts([first, second], usual))[:2] == ["mutants", "history"]
