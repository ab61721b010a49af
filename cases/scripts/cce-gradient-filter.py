# cut-cross-entropy 25.1.1: the gradient of rare tokens is dropped by default
# gradient filtering leaves out blocks whose softmax is below eps / 32 of the dtype; filter_eps=None keeps them.
from setup_cce import device, linear_cross_entropy, torch

hidden, weight = torch.randn(8, 32, device=device).half(), torch.randn(512, 32, device=device).half()
hidden[:, 0], weight[:, 0] = 6.0, 0.0
weight[:16, 0] = 4.0  # the first 16 of 512 tokens are likely, the others have probabilities about 1e-10
ids = torch.arange(8, device=device)
norms = {}
for name, more in (("default", {}), ("filter_eps=None", {"filter_eps": None})):
    head = weight.clone().requires_grad_()
    (1024 * linear_cross_entropy(hidden, head, ids, impl="cce", **more)).backward()
    norms[name] = head.grad.double()[16:].norm().item() / 1024
head = weight.double().requires_grad_()
torch.nn.functional.cross_entropy(hidden.double() @ head.T, ids).backward()
right = head.grad[16:].norm().item()
print("| gradient of the head at rare tokens | norm |\n|---|---|")
for name, norm in (*norms.items(), ("definition", right)):
    print(f"| {name} | {norm:.4g} |")
raise SystemExit(int(abs(norms["default"] / right - 1) > 0.5))
