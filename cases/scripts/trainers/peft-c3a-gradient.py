# peft 0.21.2, C3A: the gradient of the adapter's input is wrong: all that lies below an adapted layer learns from it
# peft/tuners/c3a/utils.py:BlockCircularConvolution.backward correlates the gradient with the kernel where the forward pass calls for a convolution (the kernel's own gradient is right)
import peft
import torch
import transformers
from peft.tuners.c3a import utils
from setup_tiny import tiny

transformers.logging.set_verbosity_error()
IDS = torch.arange(2, 30)[None]


def forward(x, w):
    """The same outputs, of torch's own operations."""
    return x @ utils.get_circulant_fast(w).T


def gradients(model):
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}


torch.manual_seed(0)
x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
w = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
upstream = torch.randn(3, 16, dtype=torch.float64)
print("| the operation, float64 | relative distance from torch's |\n|---|---|")
one, two = utils.BlockCircularConvolution.apply(x, w), forward(x, w)
found, right = (torch.autograd.grad(out, (x, w), upstream) for out in (one, two))
print(f"| output | {float((one - two).norm() / two.norm()):.2g} |")
off = [float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]
print(f"| gradient of the input | {off[0]:.2g} |\n| gradient of the kernel | {off[1]:.2g} |\n")

config = peft.C3AConfig(
    block_size=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
)
model = peft.get_peft_model(tiny(), config)
for value in model.parameters():
    if value.requires_grad:
        torch.nn.init.normal_(value)
given = gradients(model)
utils.BlockCircularConvolution.apply = staticmethod(forward)
asked = gradients(model)
print("| Llama, gradients of the kernels | relative distance, largest |\n|---|---|")
for layer in range(2):
    pairs = [(given[name], asked[name]) for name in given if f"layers.{layer}." in name]
    print(f"| layer {layer} | {max(float((a - b).norm() / b.norm()) for a, b in pairs):.2g} |")
raise SystemExit(int(off[0] > 1e-6))
