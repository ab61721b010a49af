# TRL 1.16: GMPO has no code for entropy_coef, off_policy_mask_threshold and router_aux_loss_coef
# GMPOConfig "inherits every parameter from GRPOConfig; it only changes the meaning and default of the clipping range".
from setup_gmpo import compared
from setup_tiny import experts

CASES = {
    "entropy_coef 0; 1": [dict(entropy_coef=0.0), dict(entropy_coef=1.0)],
    "off_policy_mask_threshold None; 1e-6": [{}, dict(off_policy_mask_threshold=1e-6)],
    "experts, router_aux_loss_coef 0; 1": [dict(model=experts, router_aux_loss_coef=c) for c in (0.0, 1.0)],
}
raise SystemExit(int(compared(CASES)))
