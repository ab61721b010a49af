# TRL 1.16 (from 1.15 on): quantisation-aware training of lm_head is left out of log-probs
# add_fused_lm_head takes the weight of a torch.ao.nn.qat.Linear unquantised; generation and export use the quantised one.
import torch
from setup_head import compared
from setup_tiny import tiny
from torch.ao.quantization import QConfig, default_fake_quant, default_weight_fake_quant

model = tiny()
model.lm_head.weight.data *= 60
quantised = torch.ao.nn.qat.Linear(16, 32, bias=False, qconfig=QConfig(default_fake_quant, default_weight_fake_quant))
quantised.weight = model.lm_head.weight
quantised.weight_fake_quant(quantised.weight)  # the grid of these weights, kept
quantised.weight_fake_quant.disable_observer()
model.lm_head = quantised
raise SystemExit(compared(model))
