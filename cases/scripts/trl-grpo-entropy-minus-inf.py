# TRL 1.16: GRPO's logged entropy is NaN (written as None) as soon as one token is banned by a logit of -inf
# probability 0 times log-probability -inf is NaN in the entropy of the fused LM head; 0·log 0 counts as 0.
from setup_grpo import banning, grpo, logged
from setup_tiny import tiny

found = logged(grpo(banning(tiny(), -float("inf"))), "entropy")
right = logged(grpo(banning(tiny(), -1e4)), "entropy")
print("| step | logged entropy, bias -inf | bias -1e4 |\n|---|---|---|")
for step, (a, b) in enumerate(zip(found, right)):
    print(f"| {step + 1} | {a[0]} | {b[0]} |")
raise SystemExit(int(found != right))
