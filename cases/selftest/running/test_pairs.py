"""Pairs of settings: those that an implementation takes are all met, and the others are told with the reason."""

import dataclasses
import itertools

import pytest

from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.profiles import PROFILES, streams
from parity.implementations.implementation import Implementation, require
from parity.registry import load, loss_families, loss_family
from parity.results.ledger import Ledger
from parity.running import shard as shard_module
from parity.running.accepting import Accepting, Draws
from parity.running.events import Apart, Judged
from parity.running.pairs import ALONE, NO_PAIR, Pairs
from parity.running.plan import DTYPES, Options, Shard, planned
from parity.running.shard import Session

TAKEN = {"temperature", "softcap", "rare", "head_dtype", "ids_dtype", "chunk_size"}
TOGETHER = "either a temperature or a softcap"


def narrow(x):
    """Right, and takes few settings; two of them only one at a time."""
    moved = {name for name in x.case.settings if name not in ("B", "T", "V", "H")}
    require(moved <= TAKEN | {"targets", "cotangent", "grad", "peak"}, "few parameters")
    require(not {"temperature", "softcap"} <= moved, TOGETHER)
    return load()["trl.selective_log_softmax"].call(x)


@pytest.fixture
def few(monkeypatch):
    """Forty draws of family logprobs."""
    family = dataclasses.replace(loss_family("logprobs"), drawn={"pr": 40})
    monkeypatch.setattr(shard_module, "loss_family", lambda name: family)
    return streams(40, "cpu")


def session(tmp_path, implementation):
    events: list = []
    own = Session([implementation], "pr", PROFILES["pr"], DTYPES, "cpu", Ledger((), tmp_path), tmp_path, events.append)
    return own, events


def met(events):
    """The pairs of settings, and the settings, away from the default in what was compared."""
    away = [{*e.row.settings} & TAKEN for e in events if isinstance(e, Judged) and e.row.verdict == "agree"]
    return {p for one in away for p in itertools.combinations(sorted(one), 2)}, set().union(*away)


def test_all_pairs_that_are_taken_are_met_and_the_others_are_told_with_the_reason(tmp_path, few):
    kernel = Implementation("own.narrow", "logprobs", "candidate", narrow, load()["trl.selective_log_softmax"].recipe)
    own, events = session(tmp_path, kernel)
    for index, of in enumerate(few):
        own.run(Shard(family="logprobs", kind="drawn", seed=1, count=of, index=index, of=of))
    by_draws, _ = met(events)
    shard = Shard(family="logprobs", kind="pairs", seed=1, count=1, implementation=kernel.id)
    before = len(events)
    assert own.run(shard) == 1
    pairs, settings = met(events)
    assert settings == TAKEN
    (told,) = [e for e in events if isinstance(e, Apart)]
    assert ("bias", "", ALONE) in told.pairs
    assert {(a, b): why for a, b, why in told.pairs if {a, b} <= TAKEN} == {
        ("rare", "softcap"): NO_PAIR,
        ("rare", "temperature"): NO_PAIR,
        ("softcap", "temperature"): TOGETHER,
    }
    every = set(itertools.combinations(sorted(TAKEN), 2))
    assert pairs == every - {(a, b) for a, b, _ in told.pairs}
    assert not pairs <= by_draws
    added = [e.row for e in events[before:] if isinstance(e, Judged)]
    assert {row.verdict for row in added} == {"agree"} and len({row.case for row in added}) < len(pairs - by_draws)

    fresh, alone = session(tmp_path, kernel)  # what a worker that was dealt nothing else adds
    fresh.run(shard)
    again = [e.row for e in alone if isinstance(e, Judged)]
    assert [(row.case, row.quantity) for row in again] == [(row.case, row.quantity) for row in added]


def test_a_draw_that_is_refused_shows_no_pair():
    takes = Accepting(Implementation("own.narrow", "logprobs", "candidate", narrow), "cpu")
    takes.announce = lambda case: True
    moved = ({"temperature": 0.7, "softcap": 5.0}, {"temperature": 0.7, "ids_dtype": "int32"})
    drawn = [Case("logprobs", seed, "fp32", settings) for seed, settings in enumerate(moved)]
    pairs = Pairs(takes, Draws(lambda: drawn, lambda case: True, 1))
    assert pairs.missing() == [("ids_dtype", "softcap"), ("softcap", "temperature")]
    assert [{*case.settings} for case in pairs.cases()] == [{"ids_dtype", "softcap"}]
    assert pairs.apart == [("softcap", "temperature", TOGETHER)]


def test_no_draw_holds_what_says_nothing():
    for name in loss_families():
        family = loss_family(name)
        for case in draws(cases(family, DTYPES, "pr"), f"settled/{name}", 150):
            full = vars(family.full_settings(case))
            assert family.settled(case.dtype, dict(full)) == full


def test_every_implementation_of_a_run_has_a_shard_for_its_pairs_except_in_a_short_profile():
    chosen = Options(families=("divergence",), implementations=("liger.fused_linear_kl_div",))
    kinds = [(s.kind, s.name) for s in planned(chosen, "cpu", 1).shards if s.kind == "pairs"]
    assert ("pairs", "divergence pairs liger.fused_linear_kl_div") in kinds
    quick = dataclasses.replace(chosen, profile="quick")
    assert not [s for s in planned(quick, "cpu", 1).shards if s.kind == "pairs"]
