"""A step of the optimizer, by itself: parameters of every kind, learning rates of every schedule."""

import copy

import pytest
import torch

from parity.watching.step import Step, at_top, rates


def model(*tensors):
    return torch.nn.ParameterList([torch.nn.Parameter(x, requires_grad=x.is_floating_point()) for x in tensors])


def lost(*tensors):
    """`Step.lost` of a step of 1e-4."""
    policy = model(*tensors)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-4)
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    step = Step(optimizer).before(policy, {})
    optimizer.step()
    return step.lost()


def test_parameters_without_elements_of_other_kinds_and_of_no_device_are_compared_or_left():
    """ZeRO-3 and FSDP leave a rank none of a small parameter, offloading none of any."""
    kinds = [
        torch.empty(0),
        torch.ones(3, dtype=torch.uint8),
        torch.ones(()),
        torch.ones(4, 2).t(),
        torch.ones(2).cfloat(),
    ]
    policy, reference = model(torch.ones(3)), model(*kinds, torch.empty(2, device="meta"))
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([*policy.parameters(), reference[3]], lr=0.1)
    reference[3].grad = torch.ones_like(reference[3])
    step = Step(optimizer).before(policy, {"reference": reference})
    optimizer.step()
    assert list(step.faults(False)) == ["the optimizer's step moves the reference too: 3"]


@pytest.mark.parametrize(
    ("lrs", "warm"),
    [
        ([0.0, 1e-5, 2e-5, 2e-5], [False, False, False, True]),
        ([3e-5, 2e-5], [False, True]),  # resumed behind the peak
        ([1e-6, 1e-5], [False, False]),  # one cycle, which begins at its initial learning rate
        ([0.0, 0.0], [False, False]),
    ],
)
def test_a_learning_rate_is_up_where_it_did_not_rise(lrs, warm):
    optimizer, last, found = torch.optim.SGD([torch.ones(1)], lr=1.0), [], []
    for lr in lrs:
        optimizer.param_groups[0]["lr"] = lr
        found.append(at_top(rates(optimizer), last))
        last = rates(optimizer)
    assert found == warm


def test_a_weight_counts_as_often_as_its_parameter_has_such():
    """A norm of ones is as many elements of a sample as a matrix that is a hundred times larger."""
    sizes, stay, move = ((8192,), (100, 8192)), torch.tensor(1.0).bfloat16(), torch.tensor(1e-3).bfloat16()
    assert not lost(stay.expand(sizes[0]).clone(), move.expand(sizes[1]).clone())
    assert "99% of the weights" in lost(move.expand(sizes[0]).clone(), stay.expand(sizes[1]).clone())


def test_only_dtypes_whose_weights_stay_are_said():
    stays, moves = torch.ones(300).bfloat16(), torch.ones(100)
    assert lost(stays, moves).endswith(
        "75% of the weights that have a gradient as they are: steps at lr 0.0001 round away in bfloat16"
    )


@pytest.mark.parametrize("lr, synced, found", [(0.1, False, True), (0.1, True, False), (0.0, False, False)])
def test_an_optimizer_that_has_none_of_the_parameters(lr, synced, found):
    """A copy's; one that has float32 copies puts them back."""
    policy = model(torch.ones(3))
    other = copy.deepcopy(policy)
    policy[0].grad, other[0].grad = torch.ones(3), torch.ones(3)
    optimizer = torch.optim.SGD(other.parameters(), lr=lr)
    step = Step(optimizer).before(policy, {})
    optimizer.step()
    if synced:
        policy.load_state_dict(other.state_dict())
    text = "the optimizer has none of the model's parameters, and its step moves none of them"
    assert list(step.faults(True)) == [text] * found
    assert not list(step.faults(False))
