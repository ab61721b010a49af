# TRL 1.16 (from 1.15 on): every trainer leaves RecurrentGemma's softcap out of log-probs
# add_fused_lm_head reads the softcap under the name final_logit_softcapping alone; this model calls it logits_soft_cap.
from setup_head import compared
from setup_recurrent_gemma import recurrent_gemma

model = recurrent_gemma(logits_soft_cap=3.0)
model.lm_head.weight.data *= 50  # logits that reach the cap, as a trained model's do
raise SystemExit(compared(model))
