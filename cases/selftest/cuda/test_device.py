"""On the pretended device: frozen cases, a trainer's gradients, layouts, the oracle; and a case inside a large batch.

Values are the CPU's there, so nothing of this is a claim about CUDA; devices, dtypes and recipes are what it tests.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from cases.selftest.controls.correct import control
from cases.selftest.controls.soak import soak
from cases.selftest.oracles import new
from fixtures.large import embedded
from fixtures.pretended_cuda import pretended
from parity import data
from parity.case.case import Case
from parity.fixes import selective_log_probs
from parity.judge.recipe import Recipe
from parity.judging import assess
from parity.judging.assess import CaseOracle, judge_all
from parity.protocol.call import execute
from parity.registry import family, load, run_case, select
from parity.results.report.render import text_of
from parity.testing import draw, index, tensor
from parity.trainers import catalogue
from parity.trainers.catalogue import judge as judge_quantity
from parity.trainers.check import CHECKS, holds
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.training_step import exact_step, gradients, slopes
from parity.trainers.rig import stored_window
from parity.trainers.rig.stored_window import Window

BEYOND = {"cce.torch_compile"}
"""torch.compile sees through the pretended device."""


def chosen(name):
    return [i for i in select(()) if i.family == name and not i.interpreted and not i.missing() and i.id not in BEYOND]


FROZEN = "liger-logprob-autocast policy-window trl-ratio-overflow-under-mask divergence-teacher-padded".split()


def test_gradients_of_a_trainer():
    """What a trainer on a GPU leaves in `.grad` against the definition's on the CPU."""
    loss = Loss(Window.of("sft-trainer"), SimpleNamespace(model="llama", loss="nll"))
    step = exact_step(stored_window.policy("llama", torch.float64), loss)
    with pretended():
        right = {n: g.float().cuda() for n, g in slopes(step).items()}
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


DIVERGENCE = "trl.ChunkedDivergenceFunction"


@pytest.mark.parametrize(
    ("name", "id"),
    {"logprobs": "trl.ChunkedLogProbFunction", "policy": "trl.GRPOTrainer", "divergence": DIVERGENCE}.items(),
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


def test_a_word_of_a_small_gradient_beside_large_ones():
    """In float16 the gradients of a token's logits, from 2·10⁵ down to 5·10⁻⁴, fill the range as far as it goes (H100)."""
    settings = {"B": 1, "T": 7, "V": 30, "H": 5, "peak": 50.0, "targets": "likely", "temperature": 0.9, "old": "inside"}
    settings |= {"cotangent": "scaled", "holes": True, "loss_type": "luspo", "epsilon_high": 0.28, "sampler": "nan"}
    case = family("policy").case(432, "fp16", settings | {"advantages": "negative", "chunk_size": 2})
    one = load()["fixes.FusedLinearGRPOLoss"]
    with pretended():
        oracle = CaseOracle.of(family("policy"), case, "cuda")
        found = judge_all(oracle, one, execute(one, oracle.inputs), one.recipe_for(oracle.inputs))
    assert found["grad_weight"].headroom < 0.5, found["grad_weight"].gates


def test_drawn_inputs_are_on_the_gpu_where_there_is_one():
    drawn = {"x": tensor("N", "H"), "ids": index("N", below="H"), "scale": lambda case: torch.ones(case.sizes["H"])}
    spec, held = draw(**drawn), draw(**drawn, device="cpu")
    for case, same in zip(spec.cases(8), held.cases(8), strict=True):
        here = case.inputs
        with pretended():
            there, stays = case.inputs, same.inputs
            moved = {name: x.cpu() for name, x in there.items()}
        assert all(x.device.type == "cuda" for x in there.values())
        assert str(case) == str(same) and all(x.device.type == "cpu" for x in stays.values())
        for name, x in here.items():
            assert there[name].stride() == x.stride()
            torch.testing.assert_close(moved[name], x, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.fixture
def device():
    with pretended():
        yield


def test_tensors_of_two_devices_do_not_mix(device):
    x = torch.ones(3, device="cuda")
    here = torch.ones(3)
    for mixed in (lambda: x + here, lambda: torch.where(x > 0, x, here), lambda: here[x > 0]):
        with pytest.raises(RuntimeError, match="device|indices"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert torch.equal((x * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))  # a number may stay on the CPU
    assert x[torch.tensor([0, 2])].device == torch.device("cuda", 0)


ORACLES = [
    ("logprobs", {"V": 9, "softcap": 3.0, "entropy": "gradient", "ignored": "some", "bias": "banned"}),
    ("policy", {"V": 9, "beta": 0.04, "lengths": [3, 1]}),
    ("divergence", {"V": 9, "beta": 0.5, "temperature": 0.9}),
]


@pytest.mark.parametrize(("name", "settings"), ORACLES)
def test_on_the_device_as_on_the_cpu(name, settings, monkeypatch):
    fam, recipe = family(name), Recipe(logits="bf16", dlogits="bf16", accumulate="bf16", partials=4)
    case = fam.case(3, "bf16", settings)
    here = CaseOracle.of(fam, case)
    monkeypatch.setattr(assess, "ON_DEVICE", 1)
    with pretended():
        there = CaseOracle.of(fam, case, "cuda")
        assert there.home.device.type == "cuda"
        pairs = [(there.exact, here.exact), (there.oracle.replicas(recipe, 12), here.oracle.replicas(recipe, 12))]
    for found, right in pairs:
        assert found.keys() == right.keys()
        for quantity, value in found.items():
            assert value.device.type == "cpu" and type(value) is torch.Tensor
            torch.testing.assert_close(value, right[quantity], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(("moves", "used"), [(False, "cpu"), (True, "cuda")])
def test_a_row_has_the_device_that_its_check_was_given(moves, used, monkeypatch):
    load()
    seen = []

    def run(call):
        seen.append(call.device)
        yield holds("something", True)

    case = next(c for c in catalogue.cases("grpo-trainer", "pr", 0) if c.settings["check"] == "step-one")
    monkeypatch.setitem(CHECKS, "step-one", dataclasses.replace(CHECKS["step-one"], run=run, moves=moves))
    ways = [i for i in catalogue.implementations().values() if i.id == "grpo-trainer.released"]
    rows = list(run_case(case, ways, "cuda"))
    assert seen == [used] and [r.device for r in rows] == [used]


def test_a_case_in_a_large_batch():
    """A case inside a batch too large for its definition is judged as itself."""
    honest = control("control.logprobs.plain")
    case = family("logprobs").case(3, "fp32", {"V": 9, "T": 4, "ignored": "some"})

    def wraps(x):
        """An index that overflows beyond 500 rows."""
        return {"logps": honest.call(x)["logps"][:, torch.arange(x.ids.shape[1]) % 500]}

    wrong = dataclasses.replace(honest, id="wraps", call=wraps)
    verdicts: dict[str, set[str]] = {}
    for row in run_case(case, [embedded(honest, 1000), embedded(wrong, 500), embedded(wrong, 1000)], thorough=False):
        verdicts.setdefault(row.implementation, set()).add(row.verdict)
    assert verdicts.pop("wraps in 1000 rows") >= {"disagree"}
    assert len(verdicts) == 2 and all(v == {"agree"} for v in verdicts.values()), verdicts


def test_small_gradients_beside_large_ones():
    """Tokens of one batch whose gradients differ by ten orders of magnitude, in 16 bits as tensor cores take them: those of the
    small ones are as right as alone."""
    random = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 8, generator=random).half() for n in (6, 40))
    ids, upstream = torch.arange(6), torch.tensor([7e8, 1e-2, 1.0, 1e2, 1e-1, 1.0])
    alone = [h.double().requires_grad_() for h in (hidden, weight)]
    logps = torch.log_softmax(alone[0] @ alone[1].T, -1).gather(-1, ids[:, None])[:, 0]
    logps.backward(upstream.double())
    with pretended():
        leaf = hidden.cuda().requires_grad_()
        selective_log_probs(leaf, weight.cuda(), ids.cuda()).backward(upstream.cuda())
        got = leaf.grad.cpu().double()
    error = (got - alone[0].grad).norm(dim=1) / alone[0].grad.norm(dim=1)
    assert error[1:].max() < 2.0**-10, error


def test_controls_under_autocast():
    """None leaves the autocast of its device on by having switched off the CPU's."""
    settings = {"B": 3, "T": 2, "V": 58, "H": 14, "context": "autocast", "temperature": 0.1}
    case = family("logprobs").case(610, "fp32", settings)
    with pretended():
        found = soak([case], device="cuda")
    assert found.total > 5 and found.alarms == []
