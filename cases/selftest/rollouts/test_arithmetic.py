"""The importance ratio of the installed TRL, to the last bits; the definition by hand; and that a change of TRL's is seen."""

import inspect
import math
import textwrap

import pytest
import torch

from parity.errors import Unsupported
from parity.rollouts import arithmetic
from parity.rollouts.arithmetic import MODES, Given, definition
from parity.upstream import trl


@pytest.fixture(scope="module")
def found():
    try:
        return list(arithmetic.compared())
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_trl_to_a_few_ulp(found, mode):
    mine = [r for r in found if r.mode == mode]
    assert len(mine) == 13 * len(arithmetic.BOUNDS)
    wrong = [(r.given.name, r.bounds, r.headroom) for r in mine if not r.headroom <= 1]
    assert not wrong, wrong


def test_a_sequence_of_trl_is_the_sum_and_not_the_mean(found):
    (r,) = [r for r in found if (r.mode, r.bounds) == ("sequence_mask", (None, math.inf)) and "half" in r.given.name]
    assert (arithmetic.ulps(r.found, definition(r.given, r.mode, *r.bounds, "mean")) > 1e4).sum() >= 6


def test_the_cases_reach_what_they_name(found):
    values = {r.given.name: r.found for r in found if r.mode == "sequence_truncate" and r.bounds == (None, math.inf)}
    assert values["beyond 20 nats"].log().abs().max() > 20 and values["equal"].eq(1).all()
    assert values["impossible at the sampler"].isinf().any() and values["impossible at the trainer"].eq(0).any()
    assert values["impossible at both"].eq(1).all() and values["empty rows"][0] == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.exp(logps_diff)", "torch.exp(logps_diff * 1.000003)"),
        ("vllm_importance_sampling_ratio > max_val", "vllm_importance_sampling_ratio >= max_val"),
        ("vllm_importance_sampling_ratio < min_val", "vllm_importance_sampling_ratio <= min_val"),
        ("per_token_logps_diff.sum(dim=-1, keepdim=True)", "per_token_logps_diff.mean(dim=-1, keepdim=True)"),
        ("torch.nan_to_num(per_token_logps_diff, nan=0.0)", "torch.nan_to_num(per_token_logps_diff, nan=0.1)"),
        ("completion_mask * tool_mask", "completion_mask"),
        ("(old_per_token_logps - sampling_per_token_logps)", "(sampling_per_token_logps - old_per_token_logps)"),
    ],
)
def test_a_changed_line_of_trl_is_seen(before, after, monkeypatch):
    kind = trl.class_named("GRPOTrainer")
    source = textwrap.dedent(inspect.getsource(kind._generate_and_score_completions))
    if before not in source:
        pytest.skip("the installed version does not have the line")
    space = dict(vars(inspect.getmodule(kind)))
    exec(source.replace(before, after), space)
    monkeypatch.setattr(kind, "_generate_and_score_completions", space["_generate_and_score_completions"])
    assert any(not r.headroom <= 1 for r in arithmetic.compared())


def test_vespo_folds_the_ratio_in():
    weights = list(arithmetic.folded())
    assert len(weights) >= 26 and {w.owner for w in weights} <= {"trl", "liger"}
    wrong = [(w.name, w.owner, w.headroom) for w in weights if not w.headroom <= 1]
    assert not wrong, wrong
    assert any(0.01 < float(x) < 1 for w in weights for x in w.exact)


def test_the_definition_by_hand():
    inf = math.inf
    old = torch.tensor([[0.0, -1.0, -2.0, -inf], [0.0, -1.0, 0.0, 0.0]])
    sampler = torch.tensor([[-inf, -1.0, -2.5, -1.0], [-0.5, math.nan, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    token = definition(Given("", old, sampler, mask), "token_truncate", None, 2.0)
    half = math.exp(0.5)
    expected = torch.tensor([[2.0, 1.0, half, 0.0], [half, 1.0, 1.0, 1.0]])
    assert torch.allclose(token.float(), expected)
    masked = definition(Given("", old, sampler, mask), "token_mask", 0.5, 2.0)
    assert torch.allclose(masked.float(), torch.tensor([[0.0, 1.0, half, 0.0], [half, 1.0, 1.0, 1.0]]))
    sequence = definition(Given("", old[1:], sampler[1:], mask[1:]), "sequence_mask", None, 2.0)
    assert float(sequence) == pytest.approx(half)
    mean = definition(Given("", old[1:], sampler[1:], mask[1:]), "sequence_mask", None, 2.0, "mean")
    assert float(mean) == pytest.approx(math.exp(0.25))
