# TRL 1.16: with top_entropy_quantile below 1, GRPO's policy loss vanishes as soon as one token is banned (logit -inf)
# the entropy is NaN there, so its quantile is NaN and no token passes "entropy >= quantile": loss and gradient are 0.
from setup_grpo import banning, grpo, logged
from setup_tiny import tiny

NAMES = ("loss", "grad_norm")
found = logged(grpo(banning(tiny(), -float("inf")), top_entropy_quantile=0.5), *NAMES)
right = logged(grpo(banning(tiny(), -1e4), top_entropy_quantile=0.5), *NAMES)
print("| step | loss, bias -inf | bias -1e4 | gradient norm, bias -inf | bias -1e4 |\n|---|---|---|---|---|")
for step, (a, b) in enumerate(zip(found, right)):
    print(f"| {step + 1} | {a[0]} | {b[0]} | {a[1]} | {b[1]} |")
raise SystemExit(int(found != right))
