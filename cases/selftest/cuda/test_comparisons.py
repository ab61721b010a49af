"""Every family, every torch path and the frozen cases on the pretended device: what is right agrees, what is wrong is caught.

Values are the CPU's there, so nothing of this is a claim about CUDA; devices, dtypes and recipes are what it tests.
"""

import collections
import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from cases.selftest.controls.correct import control
from fixtures.pretended_cuda import pretended
from parity import data
from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.judging.assess import CaseOracle, judge_all
from parity.protocol.call import execute
from parity.registry import facts, family, run_case, select
from parity.results.ledger import Ledger
from parity.results.report.render import text_of
from parity.tools import replay
from parity.trainers.catalogue import is_trainer
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.training_step import Parameters, exact_step, gradients
from parity.trainers.execute import judge as judge_quantity
from parity.trainers.rig import stored_window
from parity.trainers.rig.stored_window import Window

BEYOND = {"cce.torch_compile"}
"""torch.compile sees through the pretended device."""
FAMILIES = ("logprobs", "policy", "divergence")
LARGEST = 600
"""Logits of a case; larger ones show no other device."""


def chosen(name):
    return [i for i in select(()) if i.family == name and not i.interpreted and not i.missing() and i.id not in BEYOND]


def small(case):
    s = family(case.family).full_settings(case)
    return s.context not in ("compile", "tf32") and s.B * s.T * s.V <= LARGEST


def new(rows, case):
    ledger = Ledger.load(data.ledger_file())
    return [r for r in rows if r.failing and ledger.match(r, facts(case)) is None]


def shown(case):
    """The settings that a case moves from their defaults, its dtype and call context: what a move to a device could break."""
    fam = family(case.family)
    moved = {n for n, v in case.settings.items() if n not in fam.shapes and fam.settings[n].default != v}
    return {(case.family, what) for what in (*moved, case.dtype, fam.full_settings(case).context)}


def covering(found):
    """The frozen cases that show all that any of them shows, those first that show most; the others run on the CPU."""
    left, seen, out = list(found), set(), []
    while left:
        best = max(left, key=lambda one: len(shown(one[1]) - seen))
        if not shown(best[1]) - seen:
            break
        seen |= shown(best[1])
        left.remove(best)
        out.append(best)
    return sorted(out)


FROZEN = covering(
    (path, case)
    for path in data.frozen_cases()
    if not is_trainer((case := Case.load(path)).family) and case.family in FAMILIES and small(case)
)


ADDED = {"divergence": (family("divergence").case(3, "fp32", {"sparse": "topk", "beta": 0.0}),)}
"""For implementations that the few drawn cases miss."""


@pytest.fixture(scope="module")
def judged():
    return collections.Counter()


@pytest.mark.parametrize(("path", "case"), FROZEN, ids=lambda p: getattr(p, "stem", ""))
def test_frozen(path, case, judged):
    only = json.loads(path.read_text()).get("implementations")
    with pretended():
        rows = list(run_case(case, [i for i in chosen(case.family) if only is None or i.id in only], "cuda", False))
    judged.update(r.implementation for r in rows if r.verdict == "agree")
    assert not new(rows, case), text_of(rows)
    assert all(r.device == "cuda" for r in rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_drawn_with_protocol_and_relations(name, judged):
    """The repeated calls and relations for the reference and one candidate: they are the harness's, the same for all."""
    drawn = (
        c for c in draws(cases(family(name), ("fp32", "fp16", "bf16"), "quick"), f"3/pretended/{name}", 40) if small(c)
    )
    deep = collections.Counter()
    some = chosen(name)
    deeply = {next(i.id for i in some if i.role == role) for role in ("reference", "candidate")}
    for case in [*itertools.islice(drawn, 1), *ADDED.get(name, ())]:
        with pretended():
            rows = list(run_case(case, some, "cuda", thorough=lambda i: i.id in deeply))
        judged.update(r.implementation for r in rows if r.verdict == "agree")
        deep.update(r.gate for r in rows)
        assert not new(rows, case), text_of(rows)
    assert deep["protocol"] and deep["relation"]


def test_every_torch_path_was_judged(judged):
    if not judged:
        pytest.skip("alone: the tests before this one count")
    claimed = {i.id for name in FAMILIES for i in chosen(name)} - {"trl.GRPOTrainer.liger"}  # removed in TRL 1.15
    assert claimed <= set(judged), claimed - set(judged)


def scaled(implementation, by):
    """The implementation with everything that it hands out too large."""
    call = implementation.call
    return dataclasses.replace(implementation, id="wrong", call=lambda x: {k: v * (1 + by) for k, v in call(x).items()})


@pytest.mark.parametrize(
    ("base", "by"),
    [("control.logprobs.plain", 1e-3), ("control.policy.plain", 1e-3), ("control.divergence.stored", 1e-3)],
)
def test_a_wrong_one_is_caught(base, by):
    honest = control(base)
    case = family(honest.family).case(3, "fp32", {"V": 11, "H": 5, "bias": "random", "layout": "strided"})
    with pretended():
        rows = list(run_case(case, [honest, scaled(honest, by)], "cuda", thorough=lambda i: i is honest))
    assert {r.verdict for r in rows if r.implementation == base} == {"agree"}, text_of(rows)
    assert any(r.verdict == "disagree" and r.cls == "logic" for r in rows if r.implementation == "wrong")


def test_replay(monkeypatch, capsys):
    monkeypatch.setattr(replay, "prepare", lambda device, threads: None)  # for CUDA it would leave the interpreter
    path = next(p for p in data.frozen_cases() if p.stem == "trl-metrics-one-position")
    with pretended():
        assert replay.replay(str(path), ["trl.GRPOTrainer"], "cuda", False, Console(quiet=True)) == replay.DISAGREES


def test_gradients_of_a_trainer():
    """What a trainer on a GPU leaves in `.grad` against the definition's on the CPU."""
    loss = Loss(Window.of("sft-trainer"), SimpleNamespace(model="llama", loss="nll"))
    step = exact_step(stored_window.policy("llama", torch.float64), loss)
    with pretended():
        right = {n: g.float().cuda() for n, g in Parameters(step).exact.items()}
        wrong = {n: g * (2.0 if "q_proj" in n else 1.0) for n, g in right.items()}
        result = gradients(step, wrong)
    told = f"{sum('q_proj' in n for n in right)} of {len(right)} parameters disagree"
    message = judge_quantity(result).message
    assert message.startswith(told) and "is 2 times the definition's" in message


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("logprobs", "trl.ChunkedLogProbFunction"),
        ("policy", "trl.GRPOTrainer"),
        ("divergence", "trl.ChunkedDivergenceFunction"),
    ],
)
def test_a_softcap_of_trls_kernels(name, id):
    """Their tanh is 2σ(2x) - 1, off by an absolute amount near 0: small logits show it, and the recipe has it."""
    settings = {"V": 9, "H": 4, "T": 6, "softcap": 50.0, "peak": 0.05, "temperature": 0.001}
    case = family(name).case(3, "fp32", settings)
    with pretended():
        oracle = CaseOracle.of(family(name), case, "cuda")
        one = next(i for i in chosen(name) if i.id == id)
        recipe = one.recipe_for(oracle.inputs)
        assert recipe.tanh == "sigmoid"
        outcome = execute(one, oracle.inputs)
        right = judge_all(oracle, one, outcome, recipe)
        ieee = judge_all(oracle, one, outcome, dataclasses.replace(recipe, tanh="ieee"))
    assert max(j.headroom for j in right.values()) < 0.8
    if name == "logprobs":  # at this temperature a divergence has errors far larger than that of a tanh
        assert max(j.headroom for j in ieee.values()) > 2 * max(j.headroom for j in right.values())
