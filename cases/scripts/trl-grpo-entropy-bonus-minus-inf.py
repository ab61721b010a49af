# TRL 1.16: with GRPO's entropy bonus on, every gradient is NaN as soon as one token is banned (logit -inf)
# probability 0 times log-probability -inf is NaN in the entropy of the fused LM head, and the bonus adds it to the loss (Trainer logs a NaN as 0).
from setup_grpo import banning, grpo, logged
from setup_tiny import tiny

NAMES = ("loss", "grad_norm")
found = logged(grpo(banning(tiny(), -float("inf")), entropy_coef=0.1, max_steps=1), *NAMES)
right = logged(grpo(banning(tiny(), -1e4), entropy_coef=0.1, max_steps=1), *NAMES)
print("| step | loss, bias -inf | bias -1e4 | gradient norm, bias -inf | bias -1e4 |\n|---|---|---|---|---|")
for step, (a, b) in enumerate(zip(found, right)):
    print(f"| {step + 1} | {a[0]} | {b[0]} | {a[1]} | {b[1]} |")
raise SystemExit(int(found != right))
