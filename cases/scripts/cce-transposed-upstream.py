# cut-cross-entropy 25.1.1: the backward pass raises where the upstream gradient is a transposed tensor
# LinearCrossEntropyFunction.backward takes grad_out.view(-1), which refuses it; reshape(-1) would serve.
from setup_cce import device, linear_cross_entropy, torch

hidden, weight = torch.randn(2, 3, 32, device=device).half(), torch.randn(256, 32, device=device).half()
hidden.requires_grad_()
ids = torch.randint(0, 256, (2, 3), device=device)
losses = linear_cross_entropy(hidden, weight, ids, reduction="none", impl="cce")
upstream = torch.ones(3, 2, dtype=losses.dtype, device=device)
try:
    losses.backward(upstream.T.contiguous(), retain_graph=True)
    print("contiguous upstream gradient: gradient norm", hidden.grad.norm().item())
    losses.backward(upstream.T)
    print("transposed upstream gradient: done")
except RuntimeError as error:
    print("transposed upstream gradient:", type(error).__name__, str(error).splitlines()[0])
    raise SystemExit(1) from None
