"""Hints: where the wrong rows of a result are, if one simple place holds them and all others are right."""

import pytest
import torch

from cases.selftest.oracles import oracle_of
from parity.case.family import Family
from parity.case.inputs import Inputs, Setting
from parity.compare.hint import hints
from parity.compare.one_case import rows_of
from parity.implementations.implementation import Implementation
from parity.judge.hints import patterns
from parity.judge.values import normal
from parity.judging.assess import CaseOracle
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.registry import family


@pytest.fixture(scope="module")
def oracle():
    found = oracle_of(family("logprobs").case(3, "fp32", {"B": 2, "T": 10, "V": 23, "H": 4, "grad": "hidden weight"}))
    uses = found.inputs.ids.flatten().bincount(minlength=23)
    assert (uses > 1).any() and (uses == 1).any() and (uses == 0).any()
    return found


def said(oracle, name, wrong):
    value = oracle.exact[name].clone().float()
    value[wrong] += torch.arange(1, value[wrong].numel() + 1).view(value[wrong].shape) % 3 + 1.0
    return [h for h in hints(oracle, name, Outcome("ran", {name: value})) if h.startswith(("only where", "only from"))]


def test_rows_and_tokens_of_an_id_that_repeats(oracle):
    ids = oracle.inputs.ids
    uses = ids.flatten().bincount(minlength=23)
    assert said(oracle, "grad_weight", uses > 1) == ["only where an id repeats"]
    assert said(oracle, "grad_hidden", uses[ids] > 1) == ["only where an id repeats"]
    once = (uses == 1) & (torch.arange(23) == (uses == 1).int().argmax())
    assert said(oracle, "grad_weight", (uses > 1) | once) == []
    first = (uses > 1) & (torch.arange(23) == (uses > 1).int().argmax())
    assert said(oracle, "grad_weight", first) == [], "the rows of other ids that repeat are right"


def test_where_nearly_all_ids_repeat_the_wrong_rows_are_no_sign():
    found = oracle_of(family("logprobs").case(5, "fp32", {"B": 2, "T": 12, "V": 9, "H": 4, "grad": "hidden weight"}))
    uses = found.inputs.ids.flatten().bincount(minlength=9)
    assert 1 <= int((uses == 1).sum()) <= 2
    assert said(found, "grad_weight", uses > 1) == []


def test_all_from_one_on(oracle):
    late = torch.arange(20).view(2, 10) >= 16
    assert said(oracle, "logps", late) == ["only from token 16 on, the last 4 of 20"]
    assert said(oracle, "grad_weight", torch.arange(23) >= 16) == ["only from row 16 on, the last 7 of 23"]
    late = (torch.arange(10) >= 8).repeat(2, 1)
    assert said(oracle, "logps", late) == ["only from position 8 on, the last 2 of 10"]
    gap = torch.arange(23).ge(16) & torch.arange(23).ne(19)
    assert said(oracle, "grad_weight", gap) == []


def test_a_token_of_each_chunk_that_a_mask_drops():
    """Nearly the factor 0.93 was all that a loss said which left out the last token of each chunk of 4."""
    found = oracle_of(family("policy").case(3, "fp32", {"B": 2, "T": 16, "V": 997, "old": "absent"}))
    grad = found.exact["grad_hidden"].clone().float()
    grad[:, 3::4] = 0.0
    value = {"loss": 0.93 * found.exact["loss"], "grad_hidden": grad}
    long = torch.ones(2, 160, 4).double()
    assert patterns(long * (torch.arange(160) % 8 < 7).view(160, 1), long, {}) == [
        "nearly all at index 7, 15, 23, 31, 39, 47… of dimension 1, which has 160"
    ]
    far = long * (torch.arange(160) != 9).view(160, 1)
    assert patterns(far, long, {}, (0, 9, 2)) == ["nearly all at index 9 of dimension 1, which has 160"]
    assert patterns(far, long, {}, (0, 8, 2)) == []  # what fails a gate is elsewhere
    used = (torch.arange(160) % 8 == 7).view(160, 1)  # the only rows with a value: spread over all of these
    assert patterns(long * used * (1 + torch.rand(2, 160, 4) / 100), long * used, {})[1:] == []
    assert hints(found, "loss", Outcome("ran", value)) == []
    assert hints(found, "grad_hidden", Outcome("ran", value)) == [
        "nearly all at index 3, 7, 11, 15 of dimension 1, which has 16"
    ]


def test_a_definition_that_is_zero_but_for_its_rounding_has_no_factor():
    """The gradient of the weights of a router that takes one expert, which has them all."""
    value = torch.tensor([0.75, -0.5, -0.25])
    assert patterns(value, 2.0**-53 * value.double(), {}) == []
    assert patterns(value, 2.0**-20 * value.double(), {}) == ["1.049e+06 times the definition"]


TWO = {"accumulation": 2, "temperature": 0.5}
LENGTHS = {"B": 3, "T": 5, "lengths": [4, 0, 2], "loss_type": "dr_grpo", "max_completion_length": 16}


@pytest.mark.parametrize(
    ("settings", "factor", "label"),
    [
        (TWO, 2, "1 ÷ (temperature) or B or accumulation"),
        (TWO, 4, "(B)² or (accumulation)²"),
        (LENGTHS, 16 / 5, "max_completion_length ÷ T"),
        (LENGTHS, 1.5, "B ÷ sequences with a loss token"),
        ({"method": "dpo", "B": 6}, 3, "T or pairs"),
        ({"method": "kto", "loss_type": "kto", "B": 6}, 3, "T"),
    ],
)
def test_every_number_that_a_factor_may_be_is_named(settings, factor, label):
    """Two sequences in two micro-batches: a loss that forgets to divide by the latter is no hint at the former alone."""
    name = "preference" if "method" in settings else "policy"
    found = oracle_of(family(name).case(3, "fp32", settings))
    says = hints(found, "loss", Outcome("ran", {"loss": factor * found.exact["loss"]}))
    assert says == [f"{factor:.6g} times the definition, which is {label}"]


def test_a_gradient_through_a_teacher_that_is_the_student():
    found = oracle_of(family("divergence").case(3, "fp16", {"gap": "near", "beta": 0.0, "peak": 12.0, "V": 64, "H": 4}))
    assert found.inputs.shared == {"teacher_weight": "weight"}

    def call(x):
        heads = (x.hidden, x.weight), (x.teacher_hidden, x.teacher_weight)
        lp, teacher = ((h.float() @ weight.float().T).log_softmax(-1) for h, weight in heads)
        return {"loss": (teacher.exp() * (teacher - lp)).sum(-1).mean()}

    def detached(x):
        """The loss is right, and its gradient too large, which has nothing to do with the teacher's."""
        right = call(x.replace(teacher_weight=x.teacher_weight.detach()))["loss"]
        return {"loss": right + 0.5 * (right - right.detach())}

    says = "teacher_weight is the same tensor here: no gradient goes through it by definition"

    def told(function, name):
        implementation = Implementation("own.jsd", "divergence", "candidate", function)
        outcome = execute(implementation, found.inputs)
        return says in hints(found, name, outcome, implementation=implementation)

    assert told(call, "grad_weight")
    assert not told(call, "grad_hidden") and not told(call, "loss")
    assert not told(detached, "grad_weight")


def test_a_family_of_ones_own_may_call_a_tensor_ids():
    """Only the losses of an LM head have token ids at (sequence, position), a temperature and a mask beside them."""

    def build(case):
        weight = normal(case.seed, "weight", (5, 3))
        tensors = {"ids": torch.tensor([3, 0, 3]), "weight": weight, "mask": torch.ones(3)}
        return Inputs(case, embedding.full_settings(case), tensors, ("weight",), {"entropy": torch.ones(3, 3)})

    def looked_up(x):
        return {"entropy": x.weight[..., x.ids, :] * x.settings.scale}

    settings, outputs = {"scale": Setting(3.0, "factor")}, {"entropy": "required"}
    embedding = Family("embedding", settings, build, looked_up, outputs)
    forgotten = Implementation("forgotten", "embedding", "candidate", lambda x: {"entropy": x.weight[x.ids]})
    rows = rows_of(CaseOracle.of(embedding, embedding.case(1, "fp32", {})), forgotten, thorough=False)
    first = next(row for row in rows if row.quantity == "entropy")
    assert first.verdict == "disagree"
    assert "1 ÷ (scale)" in first.message


def test_labels_that_are_all_ignored_have_no_hint():
    family_of = family("divergence")
    oracle = oracle_of(family_of.case(0, "fp32", {"B": 1, "T": 3, "ignored": "all", "grad": "hidden"}))
    assert said(oracle, "grad_hidden", (0, 1)) == []
