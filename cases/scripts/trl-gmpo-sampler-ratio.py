# TRL 1.16: GMPO computes and logs the importance ratios of vLLM's log-probs, and multiplies its loss by none
# GMPOConfig "inherits every parameter from GRPOConfig"; vllm_importance_sampling_correction is on by default. Ratios of sequences.
from setup_gmpo import compared

CASES = {"ratios 1; 0, 1, 0, 1": [dict(ratio=[1.0] * 4), dict(ratio=[0.0, 1.0, 0.0, 1.0])]}
raise SystemExit(int(compared(CASES)))
