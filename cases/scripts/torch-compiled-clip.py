# torch 2.13: a compiled clamp with a backward gets, from the third limit on, the program of the second
# the key of the cache of such programs has no value of a float that a function was called with.
import torch

clip = torch.compile(lambda x, limit: x.clamp(max=limit))
print("| limit | largest value of clamp(x, max=limit), compiled | eager |\n|---|---|---|")
wrong = False
for limit in (1.0, 2.0, 3.0):
    x = torch.arange(6.0, requires_grad=True)
    out = clip(x, limit)
    out.sum().backward()
    found, right = float(out.detach().max()), float(x.detach().clamp(max=limit).max())
    wrong |= found != right
    print(f"| {limit} | {found} | {right} |")
raise SystemExit(int(wrong))
