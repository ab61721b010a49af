# TRL 1.16 (from 1.15 on): a forward hook on lm_head has no effect on log-probs
# add_fused_lm_head multiplies by lm_head.weight itself and never calls lm_head, while generation goes through the hook.
from setup_head import compared
from setup_tiny import tiny

model = tiny()
model.lm_head.weight.data *= 20
model.lm_head.register_forward_hook(lambda module, given, out: out * 0.5)
raise SystemExit(compared(model))
