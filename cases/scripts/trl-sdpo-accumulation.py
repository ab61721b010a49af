# TRL 1.16: SDPO's policy loss of type dapo is a mean over each micro-batch, not over "the global accumulated batch" (SDPOConfig)
# It is divided by the micro-batch's tokens, then by the accumulation steps.
from setup_sdpo import found, right

bad, (x, y) = 0, right(scale=True)
print("| micro-batches | loss | right | gradient norm | right |\n|---|---|---|---|---|")
for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
    a, b = found(batch, accumulation)
    bad |= abs(b / y - 1) > 1e-3
    print(f"| {accumulation} of {batch} | {a:.6g} | {x:.6g} | {b:.6g} | {y:.6g} |", flush=True)
raise SystemExit(int(bad))
