"""Shares of the drawn cases: each is drawn from all of them."""

import dataclasses

import pytest

from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.compare import stale_cache
from parity.implementations.implementation import Implementation
from parity.protocol.call import SECONDS
from parity.registry import NAMES, load, loss_family
from parity.running.plan import DTYPES
from parity.sampling.capabilities import HIDDEN, TOKENS, VOCABULARIES, left_out, repeated, second_pass, selected


def test_a_share_of_the_float32_cases_runs_with_tf32_products_on_cuda():
    plain = [Case("logprobs", seed, "fp32", {"V": 5}) for seed in range(200)]
    again = [c for case in plain for c in second_pass(case, "cuda")]
    assert 30 < len(again) < 70
    assert all(c.settings == {"V": 5, "context": "tf32"} for c in again)
    others = [Case("logprobs", 1, "bf16", {}), Case("logprobs", 1, "fp32", {"context": "autocast"})]
    assert not [c for case in others for c in second_pass(case, "cuda")]
    assert not [c for case in plain for c in second_pass(case, "cpu", long=True)]


@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_the_small_cases_has_a_real_vocabulary_in_long_profiles_on_cuda(name):
    fam = loss_family(name)
    drawn = list(draws(cases(fam, ("bf16",), "nightly"), f"real/{name}", 600))
    real = [c for case in drawn for c in second_pass(case, "cuda", long=True)]
    assert real and {c.settings["V"] for c in real} <= set(VOCABULARIES)
    for case in real:
        s = fam.full_settings(case)
        assert fam.sizes(s)[0] <= TOKENS and s.H <= HIDDEN
    assert not [c for case in drawn for c in second_pass(case, "cuda")]


def test_a_costly_implementation_gets_every_case_that_tests_what_it_alone_does():
    seeking = Implementation("a.b", "logprobs", "candidate", lambda x: {}, every=1 << 30, seeks=frozenset({"rare"}))
    found = list(draws(cases(loss_family("logprobs"), ("fp16",), "pr"), "seeks", 100))
    theirs = [case for case in found if selected(seeking, case, 1, "cpu")]
    assert [case for case in found if "rare" in case.settings] == theirs
    assert 1 < len(theirs) < 30


def test_a_share_of_a_share_is_drawn_from_all_of_it() -> None:
    """Costly implementations get some cases, some of these with repeated calls, and some of those a second case behind them:
    by hashes of the same id, no one of which decides another."""
    found = list(draws(cases(loss_family("logprobs"), DTYPES, "pr"), "shares a", 600))
    for name in ("liger.cross_entropy", "fixes.selective_log_probs.kept", "trl.logprob_entropy_kernel", "mine"):
        one = dataclasses.replace(load()["liger.cross_entropy"], id=name, every=4, interpreted=False)
        theirs = [case for case in found if selected(one, case, 1, "cpu")]
        again = [case for case in theirs if repeated(one, case, 1, "cpu")]
        assert len(theirs) / 40 < len(again) < len(theirs) / 8, name
        often = [case for case in found if repeated(dataclasses.replace(one, every=1), case, 4, "cpu")]
        followed = [case for case in often if not stale_cache.number(case) % stale_cache.ONE_IN]
        assert len(often) / 16 < len(followed) < len(often) / 4, name


@pytest.mark.parametrize("large", [{"T": 1 << 16}, {"V": 1 << 18}, {"V": 4096, "chunk_size": 5}])
def test_repeated_calls_are_made_on_small_cases(large):
    """A case that costs as much as ten has a tenth of them; a GPU's time is that of its launches."""
    one = load()["trl.selective_log_softmax"]
    small, dear = ([Case("logprobs", seed, "fp32", {"B": 1, **s}) for seed in range(800)] for s in ({}, large))
    assert 150 < sum(repeated(one, case, 4, "cpu") for case in small) < 250
    assert 0 < sum(repeated(one, case, 4, "cpu") for case in dear) < 60
    assert 150 < sum(repeated(one, case, 4, "cuda") for case in dear) < 250


def test_a_slow_function_gets_fewer_cases_and_each_left_out_is_said(monkeypatch):
    found = [Case("logprobs", seed, "fp32", {"V": 5}) for seed in range(200)]
    slow = Implementation("slow.py:f", "logprobs", "candidate", lambda x: {})
    monkeypatch.setitem(SECONDS, slow.id, [4.0, 4.1, 30.0])
    said = [left_out(slow, case) for case in found]
    assert 180 < sum(map(bool, said)) < 195  # one in eight stays
    assert next(filter(None, said)) == "left out: a call takes 4.1 s, so it gets one case in 8"
    quick = dataclasses.replace(slow, id="quick.py:f")
    often = {one.id: sum(repeated(one, case, 4, "cpu") for case in found) for one in (slow, quick)}
    assert often[slow.id] < 10 < often[quick.id]
    monkeypatch.setitem(SECONDS, slow.id, [0.1, 0.1, 30.0])  # compiled once
    assert not any(left_out(slow, case) for case in found)
