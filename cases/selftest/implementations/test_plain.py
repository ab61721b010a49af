"""What adapters share that no library has."""

import pytest
import torch

from parity.implementations import plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rows_of_an_embedding_s_gradient_are_summed_in_float32(dtype):
    weight = torch.zeros(6, 2, dtype=dtype, requires_grad=True)
    ids, slopes = torch.arange(4097) % 6, torch.full((4097, 2), 1e-3, dtype=dtype)
    plain.embedded(ids, weight).backward(slopes)
    exact = torch.zeros(6, 2, dtype=torch.float64).index_add(0, ids, slopes.double())
    assert float((weight.grad.double() / exact - 1).abs().max()) <= torch.finfo(dtype).eps / 2
    assert weight.grad.dtype == dtype and torch.equal(plain.embedded(ids, weight), weight[ids])
