"""Reduced cross entropies: the log-prob of each position from calls that count several labels."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from parity.families.head import IGNORE_INDEX
from parity.implementations.reduced import each_reduced
from parity.registry import family


def test_a_mean_by_the_labels_of_a_chunk_shows():
    x = family("logprobs").build(family("logprobs").case(0, "fp32", {}))
    z = x.hidden.flatten(0, 1) @ x.weight.T
    want = z.log_softmax(-1).gather(-1, x.ids.long().flatten().unsqueeze(-1)).view(x.ids.shape)

    def mean(rows: torch.Tensor, ids: torch.Tensor, by_chunk: bool = False) -> torch.Tensor:
        total = torch.zeros(())
        for row, label in zip(rows.split(4), ids.split(4), strict=True):
            counted = ((label if by_chunk else ids) != IGNORE_INDEX).sum()
            total += cross_entropy(row @ x.weight.T, label, ignore_index=IGNORE_INDEX, reduction="sum") / counted.clamp(
                min=1
            )
        return total

    torch.testing.assert_close(each_reduced(x, mean, "mean")["logps"], want)
    wrong = each_reduced(x, lambda rows, ids: mean(rows, ids, by_chunk=True), "mean")["logps"]
    assert not torch.isclose(wrong, want).any()
    unseen = each_reduced(x, lambda rows, ids: mean(rows, ids, by_chunk=True), "sum")["logps"]
    torch.testing.assert_close(unseen, want)  # one label is its own count


@pytest.mark.parametrize(
    ("dtype", "cotangent", "rows"), [("fp16", "ones", 1), ("fp16", "scaled", 4), ("bf16", "ones", 4)]
)
def test_a_mean_in_float16_has_a_divisor_where_the_loss_is_scaled(dtype, cotangent, rows):
    x = family("logprobs").build(family("logprobs").case(0, dtype, {"cotangent": cotangent}))
    counted = []
    each_reduced(x, lambda _, ids: counted.append(int((ids != IGNORE_INDEX).sum())) or torch.zeros(()), "mean")
    assert set(counted) == {rows}
