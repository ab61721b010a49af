"""Frozen cases, gradients of a trainer and a layout on the pretended device.

Values are the CPU's there, so nothing of this is a claim about CUDA; devices, dtypes and recipes are what it tests.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from fixtures.pretended_cuda import pretended
from parity import data
from parity.case.case import Case
from parity.judging.assess import CaseOracle, judge_all
from parity.protocol.call import execute
from parity.registry import facts, family, run_case, select
from parity.results.ledger import Ledger
from parity.results.report.render import text_of
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.training_step import Parameters, exact_step, gradients
from parity.trainers.execute import judge as judge_quantity
from parity.trainers.rig import stored_window
from parity.trainers.rig.stored_window import Window

BEYOND = {"cce.torch_compile"}
"""torch.compile sees through the pretended device."""


def chosen(name):
    return [i for i in select(()) if i.family == name and not i.interpreted and not i.missing() and i.id not in BEYOND]


FROZEN = """
one-token liger-logprob-autocast policy-empty-row policy-importance-ratio policy-window policy-sequence-ratio
trl-ratio-overflow-under-mask divergence-window divergence-server-mixture-floor divergence-teacher-padded
""".split()


def new(rows, case):
    ledger = Ledger.load(data.ledger_file())
    return [r for r in rows if r.failing and ledger.match(r, facts(case)) is None]


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


@pytest.mark.parametrize("name", FROZEN)
def test_frozen(name):
    path = next(p for p in data.frozen_cases() if p.stem == name)
    case, only = Case.load(path), json.loads(path.read_text()).get("implementations")
    with pretended():
        rows = list(run_case(case, [i for i in chosen(case.family) if only is None or i.id in only], "cuda", False))
    assert any(r.verdict == "agree" for r in rows) and not new(rows, case), text_of(rows)
    assert all(r.device == "cuda" for r in rows)


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
