"""The shard of a run: a new finding is minimised, frozen and reported once; what the ledger knows is not."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from cases.selftest.results.runs import ledger_of
from parity import data
from parity.case.case import Case, Frozen
from parity.case.profiles import Profile
from parity.compare import hint, one_case
from parity.compare.result_rows import empty_row
from parity.implementations.implementation import Implementation
from parity.implementations.limits import require
from parity.judge.escalation import CONFIRMATION
from parity.protocol.call import SECONDS
from parity.registry import from_file, load, select
from parity.results import recorded
from parity.results.ledger import Ledger
from parity.results.report.summary import summarise
from parity.results.row import About, Header
from parity.running import shard as shard_module
from parity.running.findings import Findings
from parity.running.outcome import judge_run, stale_entries
from parity.running.plan import At, Confirmed, Judged, Options, Shard, Started
from parity.running.shard import Session

KERNELS = "fixtures/kernels.py"
FIRST = ["logprobs-a3d28913ce", "logprobs-bc0ceaa0e2", "logprobs-61a77ec991"]
PROFILE = Profile(shrink_seconds=900.0, minimise_seconds=900.0, findings=2)
FROZEN = Shard(family="logprobs", kind="frozen", count=1, seed=1)


def drawn_shard(count, seed, **fields):
    return Shard(**{"family": "logprobs", "kind": "drawn", "count": count, "of": count, "seed": seed} | fields)


def session(name, tmp_path) -> tuple[Session, list]:
    events: list = []
    own = Session(
        implementations=[*from_file(f"{KERNELS}:{name}")],
        profile_name="quick",
        profile=PROFILE,
        dtypes=("fp32",),
        device="cpu",
        ledger=Ledger((), tmp_path),
        emit=events.append,
    )
    return own, events


def frozen(own, tmp_path, case, entry=(), **of_file):
    """Give a session this frozen case and a ledger with one entry about it, whose path is returned."""
    (tmp_path / "mine.json").write_text(json.dumps(case.to_json()))
    fields = {"implementations": [own.implementations[0].id], "case": "mine.json"} | dict(entry)
    path = ledger_of(tmp_path / "ledger.toml", fields)
    own.ledger, own.frozen = Ledger.load(path), {fields["case"]: Frozen(case, **of_file)}
    return path


def rows(events):
    return [e.row for e in events if isinstance(e, Judged)]


def numbers(events):
    return [e.number for e in events if isinstance(e, At)]


def looked_for(own, events, shard, **limits):
    """The findings of a shard that was run, and the shards in which they are looked for again."""
    found = [replace(row, shard=shard.name) for row in rows(events)]
    findings = Findings(found, dataclasses.replace(own.profile, **limits), 1, Options())
    return found, findings, findings.sought([shard], {})


def test_a_new_finding_of_a_trainer_says_what_its_model_gets_wrong_alone(tmp_path, monkeypatch):
    own, _ = session("right", tmp_path)
    monkeypatch.setattr(shard_module.catalogue, "of_model", lambda case, known: "its model")
    case = Case("sft-trainer", 0, "fp32", {"check": "twins"})
    row = empty_row(shard_module.catalogue.family("sft-trainer"), case, "sft-trainer.released", "cpu", message="off")
    row = replace(row, verdict="disagree", quantity="loss")
    own._mark(row, case, "", set())
    assert row.message == "off; its model"


def test_news_of_a_trainer_says_its_settings_and_each_failure_once():
    def row(path, case, **fields):
        told = (
            {"check": "losses", "loss": case},
            {"verdict": "disagree", "quantity": "loss", "cls": "logic", "gate": "scalar"},
        )
        one = empty_row(
            shard_module.catalogue.family("dpo-trainer"), Case("dpo-trainer", 0, "fp32", told[0]), path, "cpu"
        )
        return replace(one, headroom=4.0, **told[1] | fields)

    fixed = {"blame": "both", "against": "dpo-trainer.released"}
    rows = [
        row("dpo-trainer.released", "ipo"),
        row("dpo-trainer.fixed", "ipo", **fixed),
        row("mine.py:A", "ipo", **fixed),
    ]
    news = Findings([], Profile(), 1, Options()).news
    told = list(news([*rows, row("dpo-trainer.fixed", "sft", blame="candidate")]))
    assert [line.split(" · ")[:2] for line in told] == [
        [f"NEW {who}: logic in loss, gate scalar: 4.00 times the allowed error", f"check=losses, loss={loss}"]
        for who, loss in (("dpo-trainer.released", "ipo"), ("mine.py:A", "ipo"), ("dpo-trainer.fixed", "sft"))
    ]


def test_a_slow_function_gets_a_share_of_its_cases_and_the_summary_says_so(tmp_path, monkeypatch):
    own, events = session("right", tmp_path)
    name = own.implementations[0].id
    monkeypatch.setitem(SECONDS, name, [3.0] * 100)
    own.run(drawn_shard(40, 1))
    left = [r for r in rows(events) if r.message.startswith("left out: a call takes 3.0 s")]
    judged = {r.case for r in rows(events) if r.judged}
    assert len(left) >= 2 * len(judged) > 0 and not judged & {r.case for r in left}
    notes = summarise(Header(header=About()), rows(events)).notes
    assert f"{name}: {len(left)} cases left out: a call takes 3.0 s, so it gets one case in 6" in notes


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A session that has run a kernel that is wrong beyond a vocabulary of eight, and the cases in which recipes were looked for.
    Asked a second time about a case, a slow function would be left out."""
    own, events = session("wrong_beyond_eight", tmp_path_factory.mktemp("wrong"))
    shard, asked, searched, original = drawn_shard(60, 10), [], [], hint.undeclared

    def counted(oracle, *about):
        searched.append(oracle.inputs.case.id)
        return original(oracle, *about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "left_out", lambda i, case: "left out" if case in asked else asked.append(case))
        patch.setattr(hint, "undeclared", counted)
        own.run(shard)
    return own, tuple(events), shard, searched


def test_three_cases_of_what_is_wrong_are_judged_once_more_and_not_left_out(wrong):
    _, events, _, searched = wrong
    failing = {r.case for r in rows(events) if r.failing}
    assert failing and not [r for r in rows(events) if r.message == "left out"]
    assert len({*searched}) == len(searched) < len(failing) and {*searched} <= failing, "recipes are looked for once"
    assert len(searched) >= shard_module.AGAIN


def heard(own, shard):
    """The events of one more shard."""
    events = []
    own.emit = events.append
    own.run(shard)
    return events


def test_what_is_left_until_the_limit_of_a_run_is_all_that_its_findings_get(wrong):
    own, events, shard, _ = wrong
    found, findings, _ = looked_for(own, events, shard)
    assert 0 < sum(one.sought.seconds for one in findings.sought([shard], {}, 3.0)) <= 3.0
    assert not findings.sought([shard], {}, 0.0) and [row for row in found if row.minimised is False]


def test_a_finding_is_minimised_and_frozen(wrong, tmp_path):
    own, events, shard, _ = wrong
    assert any(r.verdict == "disagree" and r.cls == "logic" for r in rows(events))
    _, findings, (first, *_) = looked_for(own, events, shard)
    found = [r for r in rows(heard(own, first)) if r.minimised is True and r.quantity == first.sought.subjects[0][0]]
    assert found, "no minimised finding"
    assert found[0].settings["V"] == 9, "the smallest vocabulary that shows it"
    assert found[0].settings["B"] == found[0].settings["T"] == 1
    assert found[0].verdict == "disagree"
    findings.folder = tmp_path / "findings"
    findings.freeze(found[0])
    (frozen,) = findings.folder.glob("*.json")
    assert found[0].replay.split()[2].endswith(str(frozen)) and Case.load(frozen).id == found[0].case
    assert json.loads(frozen.read_text())["implementation"] == "fixtures/kernels.py:wrong_beyond_eight"


def test_the_smallest_case_fails_in_all_that_the_finding_fails_in(tmp_path):
    """Log-probs off by 0.5 fail at V = 1 too, where the gradients, half again too large, are zero."""
    own, events = session("right", tmp_path)

    def call(x):
        return {"logps": 1.5 * log_probs(x) + 0.5}

    own.implementations = [Implementation("lib.logps", "logprobs", "candidate", call)]
    shard = drawn_shard(20, 6)
    own.run(shard)
    _, _, (first, *_) = looked_for(own, events, shard)
    lead = next(r for r in rows(events) if r.quantity == "grad_hidden" and r.new)
    case = next(e.data for e in events if isinstance(e, Started) and e.case == lead.case)
    sought = replace(first.sought, subjects=[("logps", lead.cls)], cases=[case])
    found = {r.quantity: r for r in rows(heard(own, replace(first, sought=sought))) if r.minimised is True and r.new}
    assert found.keys() >= {"logps", "grad_hidden"}
    assert found["logps"].settings["V"] == 2


def log_probs(x):
    z = x.hidden @ x.weight.T * x.settings.logit_scale
    require(x.bias is None and x.settings.softcap is None and not (x.ids < 0).any(), "kept short")
    return torch.log_softmax(z / x.settings.temperature, -1).gather(-1, x.ids.long().unsqueeze(-1)).squeeze(-1)


def test_what_there_is_no_time_to_minimise_is_reported_as_drawn(wrong):
    for limit in ({"minimise_seconds": 0.0}, {"findings": 0}):
        found, _, again = looked_for(*wrong[:3], **limit)
        first = [r for r in found if r.minimised is not UNSET]
        assert first and not any(r.minimised for r in first) and not again
        assert len({(r.implementation, r.quantity, r.cls) for r in first}) == len(first), "each finding once"


def test_the_time_for_minimising_is_one_for_all_findings(wrong):
    _, _, again = looked_for(*wrong[:3], findings=9, minimise_seconds=40.0)
    assert [s.sought.seconds for s in again] == [40.0]
    assert len(again[0].sought.subjects) > 1, "what fails in the same case is one finding"


def test_a_finding_counts_once_a_fresh_process_shows_it(wrong):
    own, events, shard, _ = wrong
    found, findings, (first, *_) = looked_for(own, events, shard, derandomised=False, minimise_seconds=0.0)
    assert first.sought.fresh and len(first.sought.cases) == 3
    assert [e for e in heard(own, first) if isinstance(e, Confirmed)] == [Confirmed(first.sought.subjects)]
    right = replace(first.sought, cases=[Case("logprobs", 1, "fp32", {"V": 3}).to_json()])
    assert heard(own, replace(first, sought=right))[-1] == Confirmed([])
    findings.confirmed(first, first.sought.subjects)
    assert not any(r.verdict == "nondeterministic" for r in found)
    findings.confirmed(first, first.sought.subjects[1:])
    marked = [r for r in found if r.verdict == "nondeterministic"]
    assert marked and {r.quantity for r in marked} == {first.sought.subjects[0][0]}
    assert marked[0].message.startswith("a fresh process does not show it in 3 of its cases") and marked[0].new


def test_the_cases_of_a_stream_do_not_depend_on_its_shards():
    """Nor on who has drawn them: the ids are those of the present draws."""
    own, _ = session("right", Path("/nonexistent"))
    whole = [c.id for c in own._cases(drawn_shard(120, 4, index=1))]
    parts = [drawn_shard(40, 4, index=1, start=start, of=120) for start in (80, 0, 40)]
    cut = {shard.start: [c.id for c in session("right", Path("/nonexistent"))[0]._cases(shard)] for shard in parts}
    assert whole == cut[0] + cut[40] + cut[80] and len(set(whole)) == 120
    assert whole[:3] == FIRST


def test_a_case_that_no_candidate_takes_is_not_run(tmp_path, monkeypatch):
    own, _ = session("right", tmp_path)
    reference = dataclasses.replace(select(["trl.GRPOTrainer"])[0], family=own.implementations[0].family)
    (candidate,) = own.implementations
    never = dataclasses.replace(candidate, role="candidate", limits=(lambda s: "takes nothing",))
    case = Case(candidate.family, 3, "fp32", {})
    for chosen, ran in (([reference, never], []), ([reference, candidate], [2]), ([reference], [1])):
        own.implementations, seen = chosen, []
        monkeypatch.setattr(own, "_run", lambda case, chosen, *rest, seen=seen: iter([seen.append(len(chosen))][:0]))
        own._drawn(case, drawn_shard(1, 5))
        assert seen == ran


def test_what_an_implementation_gets_besides_is_nothing_where_it_was_left_out(tmp_path):
    own, events = session("right", tmp_path)
    own.implementations = []
    assert own.run(drawn_shard(1, 5, kind="besides", implementations=("costly",))) == 1 and not rows(events)


def test_a_user_s_trainer_gets_cases_of_a_loss_besides_as_a_loss_alone(tmp_path, monkeypatch):
    """Its implementations of the trainer and of the loss have one id: the former ended the worker."""
    own, _ = session("right", tmp_path)
    own.implementations, asked = from_file("fixtures/trainers.py:Same"), []
    assert {i.family for i in own.implementations} == {"policy", "grpo-trainer"}
    monkeypatch.setattr(shard_module, "besides", lambda i, *_: asked.append(i.family) or ([], 0, iter(())))
    own.run(drawn_shard(1, 5, family="policy", kind="besides", implementations=("fixtures/trainers.py:Same",)))
    assert asked == ["policy"]


@pytest.mark.parametrize(("name", "given"), [("lib.logps", 400), ("own.py:logps", 700)])
def test_draws_that_a_library_is_not_given_are_none_of_its_cases(tmp_path, monkeypatch, name, given):
    own, _ = session("right", tmp_path)
    own.profile_name, own.implementations = "pr", [Implementation(name, "logprobs", "candidate", log_probs)]
    asked = {}
    monkeypatch.setattr(
        shard_module,
        "besides",
        lambda i, drawn, gets, *_: asked.update({c.id: gets(c) for c in drawn}) or ([], 0, iter(())),
    )
    own.run(drawn_shard(1, 5, kind="besides", implementations=(name,)))
    assert given - 10 <= sum(asked.values()) <= given, "some cases are in both streams"


def test_a_resumed_shard_leaves_out_what_was_done(tmp_path):
    own, events = session("right", tmp_path)
    own.run(drawn_shard(12, 5, resume=8))
    assert numbers(events) == [8, 9, 10, 11]


def test_a_shard_that_is_late_says_how_far_it_came(tmp_path):
    own, events = session("right", tmp_path)
    own.deadline = 1.0
    assert own.run(drawn_shard(12, 5)) == 0 and not events


SCOPES = {
    "its scope": ({}, True, ""),
    "a typing error": ({"settings": {"bais": "banned"}}, True, "covers nothing of what fails in its case"),
    "another quantity": ({"quantities": ["logps"]}, True, "covers nothing of what fails in its case"),
    "a case that agrees": ({}, False, "no longer reproduces, its case agrees; delete the entry if that is mended"),
}


@pytest.mark.parametrize("change, bias, said", SCOPES.values(), ids=SCOPES)
def test_an_entry_that_covers_nothing_is_named_with_its_line(tmp_path, change, bias, said):
    case = Case.load(data.cases_dir() / "regressions" / "trl-entropy-minus-inf.json")
    if not bias:
        case = dataclasses.replace(case, settings={k: v for k, v in case.settings.items() if k != "bias"})
    own, events = session("right", tmp_path)
    own.implementations = [load()["trl.selective_log_softmax"]]
    path = frozen(own, tmp_path, case, {"quantities": ["entropy"]} | change, fast=True)
    own.run(FROZEN)
    reasons = judge_run(Options(ledger=path), rows(events), [], "cpu")[1]
    assert [r for r in reasons if "ledger" in r] == ([f"ledger entry one {said}: {path} line 3"] if said else [])


def test_a_case_that_agrees_is_asked_again_as_a_fresh_process_compiles_it(tmp_path):
    """On torch 2.15 a program that earlier shapes left hid what cut-cross-entropy's compiled loss does in its frozen case."""
    own, events = session("right", tmp_path)
    (right,) = own.implementations
    case, factor = Case("logprobs", 1, "fp32", {}), 1.0

    def backend(graph, inputs):
        by = factor
        return lambda *given: tuple(out * by for out in graph(*given))

    program = torch.compile(lambda x: x * 1.0, backend=backend)

    def call(x):
        return {"logps": program(right.call(x)["logps"])}

    own.implementations = [dataclasses.replace(right, call=call)]
    frozen(own, tmp_path, case, fast=True)
    own.run(FROZEN)
    assert {row.verdict for row in rows(events)} == {"agree"}
    events.clear()
    factor = 1.5  # of a program that is compiled from here on
    own.run(FROZEN)
    assert {row.known for row in rows(events) if row.failing} == {"one"}


@pytest.fixture
def known(tmp_path):
    """A wrong kernel whose finding the ledger knows; a function that runs its frozen case, measured so."""

    def ran(*records):
        own, events = session("scaled", tmp_path)
        own.measuring = not records
        kept = tuple(to_builtins(one) for one in records)
        path = frozen(own, tmp_path, Case("logprobs", 1, "fp32", {}), fast=True, recorded=kept)
        own.run(FROZEN)
        return [row for row in rows(events) if row.failing], path

    return ran


def measured(ran):
    """The record of the case as it is, whose it is, and what fails."""
    gave = recorded.of(ran()[0], "cpu", {})
    ((who, failing),) = gave.failing.items()
    return gave, who, failing


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda failing: failing, ""),
        (lambda failing: failing | {"logps": ("logic", failing["logps"][1] / 2.9)}, ""),
        (lambda failing: failing | {"logps": ("logic", failing["logps"][1] / 3.1)}, "headroom"),
        (lambda failing: failing | {"logps": ("precision", failing["logps"][1])}, "class logic, which was precision"),
        (lambda failing: {q: v for q, v in failing.items() if q != "logps"}, "logps fails, which it did not"),
        (lambda failing: {}, "logps fails, which it did not"),
    ],
)
def test_a_known_finding_that_is_not_what_its_frozen_case_gave_is_new(known, change, said):
    gave, who, failing = measured(known)
    found, path = known(replace(gave, failing={who: change(failing)}))
    new = {row.quantity: row.message for row in found if row.new}
    assert (said in new.get("logps", "")) if said else not new
    code, _ = judge_run(Options(ledger=path), found, [], "cpu")
    assert code == (1 if said else 0)
    for message in new.values():
        assert f"one is known ({path} line 3)" in message
        remedy = "it is another mistake, or a larger one; only if you know better: parity ledger measure mine"
        assert message.endswith(f"; {remedy} --implementation {who}")


def test_what_was_measured_elsewhere_says_nothing(known):
    gave, who, failing = measured(known)
    small = replace(gave, failing={who: failing | {"logps": ("logic", 1e-9)}})
    for other in (replace(small, device="cuda"), replace(small, versions={"torch": "999"})):
        assert not [row for row in known(other)[0] if row.new]
    assert [row for row in known(small)[0] if row.new]
    assert not [row for row in known(small, gave)[0] if row.new]


def test_what_an_implementation_extends_runs_before_it(tmp_path, monkeypatch):
    """So that what that one does right on the same case is not inherited as known."""
    own, _ = session("right", tmp_path)
    (first,) = own.implementations
    later = dataclasses.replace(first, id="later")
    order = []
    monkeypatch.setattr(shard_module, "run_case", lambda case, chosen, *_: order.extend(i.id for i in chosen) or ())
    list(own._run(Case("logprobs", 1, "fp32", {}), [dataclasses.replace(first, extends="later"), later], None, False))
    assert order == ["later", first.id]


@pytest.mark.parametrize(("listed", "measuring"), [(True, False), (True, True), (False, False)])
def test_a_run_says_of_a_failing_row_whether_the_ledger_has_it(tmp_path, monkeypatch, listed, measuring):
    """A check of a trainer is run again for the others, and for all whose frozen case is measured."""
    own, _ = session("wrong_beyond_eight", tmp_path)
    case, asked = Case("logprobs", 1, "fp32", {"V": 9}), []
    row = next(r for r in own._run(case, own.implementations, None, False) if r.failing)
    own.measuring = measuring
    if listed:
        frozen(own, tmp_path, case)
    monkeypatch.setattr(shard_module, "run_case", lambda *given: asked.append(given[-1](row)) or ())
    list(own._run(case, own.implementations, None, False))
    assert asked == [listed and not measuring]


@pytest.mark.parametrize(("whole", "drifts"), [(True, True), (False, True), (False, False)])
def test_a_short_run_repeats_calls_of_a_frozen_case_where_nothing_else_shows_what_is_known(tmp_path, whole, drifts):
    own, events = session("right", tmp_path)
    (right,) = own.implementations
    case, calls = Case("logprobs", 1, "fp32", {}), []

    def call(x):
        calls.append(1)
        return {"logps": right.call(x)["logps"] * (1.5 if drifts and len(calls) > 1 else 1.0)}

    own.implementations = [dataclasses.replace(right, call=call)]
    frozen(own, tmp_path, case, {"verdicts": ["disagree", "nondeterministic"]})
    own.profile = dataclasses.replace(PROFILE, frozen_whole=whole)
    own.run(FROZEN)
    assert {row.known for row in rows(events) if row.failing} == ({"one"} if drifts else set())
    assert any(row.subject.startswith("relation") for row in rows(events)) == drifts
    assert bool([*stale_entries(own.ledger, rows(events), "cpu")]) == (not drifts)


def sometimes(right, wrong, numbers):
    """An implementation whose calls of these numbers, counted from 1, do what `wrong` does with a log-prob."""
    calls = []

    def call(x):
        calls.append(1)
        logps = right.call(x)["logps"]
        return {"logps": wrong(logps) if len(calls) in numbers else logps}

    return dataclasses.replace(right, call=call)


def raises(logps):
    raise RuntimeError("queue full")


@pytest.mark.parametrize(
    ("wrong", "numbers", "subject", "verdict", "told"),
    [
        (lambda logps: logps * 1.5, {1}, "logps", "nondeterministic", ""),
        (lambda logps: logps * 1.5, {4}, "protocol", "nondeterministic", ""),
        (
            lambda logps: logps if torch.is_grad_enabled() else logps * 1.5,
            {*range(999)},
            "protocol",
            "disagree",
            "no_grad",
        ),
        (raises, {1}, "crashed", "crashed", "queue full"),
        (lambda logps: logps * (1 + 6e-7), {1}, "", "", ""),
        (lambda logps: logps * (1 + 6e-7), {4}, "", "", ""),
    ],
)
def test_what_few_calls_do_wrong_is_not_forgotten_when_a_case_is_judged_once_more(
    tmp_path, wrong, numbers, subject, verdict, told
):
    own, events = session("right", tmp_path)
    own.implementations = [sometimes(own.implementations[0], wrong, numbers)]
    own.profile = dataclasses.replace(PROFILE, frozen_whole=True)
    own.frozen = {"mine.json": Frozen(Case("logprobs", 1, "fp32", {}))}
    own.run(FROZEN)
    found = [row for row in rows(events) if row.failing]
    assert {(row.subject, row.verdict) for row in found} >= ({(subject, verdict)} if subject else set())
    assert bool(found) == bool(subject) and all(told in row.message for row in found if row.subject == subject)
    assert verdict == "disagree" or all(row.verdict == verdict for row in found)
    drifting = [row for row in found if row.verdict == "nondeterministic"]
    assert all(row.cls is None for row in drifting)
    assert all("by chance" in row.message for row in drifting if row.quantity == "protocol")


def test_what_more_replicas_allow_is_no_drift(tmp_path, monkeypatch):
    own, events = session("right", tmp_path)
    own.implementations = [sometimes(own.implementations[0], lambda logps: logps * 1.5, {1})]
    judged = one_case.confirmed

    def confirmed(oracle, implementation, outcome):
        found = judged(oracle, implementation, outcome)
        return found if oracle.most else {n: dataclasses.replace(j, gates={"bound": 0.0}) for n, j in found.items()}

    monkeypatch.setattr(one_case, "confirmed", confirmed)
    own.frozen = {"mine.json": Frozen(Case("logprobs", 1, "fp32", {}))}
    own.run(FROZEN)
    assert not [row for row in rows(events) if row.failing]


@pytest.mark.parametrize("kind", ["frozen", "drawn"])
@pytest.mark.parametrize(("headroom", "known", "whole"), [(50.0, True, False), (2.0, True, True), (50.0, False, True)])
def test_what_a_loss_clearly_shows_again_takes_few_replicas(tmp_path, monkeypatch, kind, headroom, known, whole):
    own, events = session("wrong_beyond_eight", tmp_path)
    case, calls = Case("logprobs", 1, "fp32", {"V": 9}), []
    (row,) = [r for r in own._run(case, own.implementations, None, False) if r.quantity == "logps"]
    (one,) = own.implementations
    reference = dataclasses.replace(one, id="reference", role="reference")
    own.implementations = [one, dataclasses.replace(one, id="right"), reference]

    def run_case(of, chosen, device, thorough, started, most, known):
        calls.append(([i.id for i in chosen], most))
        wrong = replace(row, headroom=headroom if most else headroom + 1)
        return [wrong if i is one else replace(row, implementation=i.id, verdict="agree") for i in chosen]

    monkeypatch.setattr(shard_module, "run_case", run_case)
    monkeypatch.setattr(Session, "_mark", lambda _, row, *more: setattr(row, "known", "one" if known else None))
    own.frozen = {"mine.json": Frozen(case)}
    own.run(Shard(family="logprobs", kind=kind, count=1, of=1, seed=1))
    first = [one.id, "right", "reference"], CONFIRMATION
    assert calls == [first, ([one.id, "reference"], None)] if whole else calls == [first]
    told = sorted((r.implementation, r.headroom) for r in rows(events))
    assert told == sorted([(one.id, headroom + whole), ("right", row.headroom), ("reference", row.headroom)])
