"""A step of the optimizer, by itself: parameters of every kind, learning rates of every schedule."""

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
    step = Step(policy, {}, optimizer)
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
    step = Step(policy, {"reference": reference}, optimizer)
    optimizer.step()
    assert list(step.faults()) == ["the optimizer's step moves the reference too: 3"]


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
