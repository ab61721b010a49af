# torch 2.13.0 on a CPU: the gradient of batch_norm's input is wrong where the weight has a stride: it is read as contiguous memory
# the backward pass takes weight.data_ptr() and a step of 1; the forward pass reads the weight as it lies.
import torch

torch.manual_seed(0)
x, upstream, memory = torch.randn(64, 63), torch.randn(64, 63), torch.rand(126) + 1
print("| weight | training | largest error of the input's gradient |\n|---|---|---|")
wrong = []
for training in (True, False):
    for name, weight in (("contiguous", memory[::2].clone()), ("every second entry", memory[::2])):
        found = []
        for dtype in (torch.float64, torch.float32):
            given, dense = x.to(dtype).clone().requires_grad_(), weight.to(dtype)
            dense = dense.contiguous() if dtype == torch.float64 else dense
            zeros, ones = torch.zeros(63, dtype=dtype), torch.ones(63, dtype=dtype)
            out = torch.nn.functional.batch_norm(given, zeros, ones, dense, zeros.clone(), training)
            out.backward(upstream.to(dtype))
            found.append(given.grad.double())
        wrong.append(float((found[1] - found[0]).abs().max()))
        print(f"| {name} | {training} | {wrong[-1]:.3g} |")
raise SystemExit(int(max(wrong) > 1e-4))
