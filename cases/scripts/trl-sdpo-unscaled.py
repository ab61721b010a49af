# TRL 1.16: SDPO's scale_rewards="none" scales: advantages are divided by 1.0001
# The group's standard deviation is replaced by 1, and the small number that keeps it off 0 is added all the same.
from setup_sdpo import found, right

(_, y), (_, b) = right(scale=False), found(4, 1, scale_rewards="none")
print(f"| gradient norm | right | ratio |\n|---|---|---|\n| {b:.7g} | {y:.7g} | {b / y:.7g} |")
raise SystemExit(int(abs(b / y - 1) > 1e-5))
