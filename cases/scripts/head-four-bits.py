# TRL 1.16 (from 1.15 on) with bitsandbytes 0.50: a 4-bit LM head raises RuntimeError in every trainer
# add_fused_lm_head takes the packed weight of a Linear4bit for a matrix instead of calling the head.
import datasets
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import SFTConfig, SFTTrainer

model = tiny()
weight = model.lm_head.weight.detach()
model.lm_head = Linear4bit(16, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
model.lm_head.weight = Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
model.lm_head.to("cpu")  # the move is what quantises
rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
args = SFTConfig(**options(per_device_train_batch_size=4, max_steps=3))
trainer = SFTTrainer(model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
try:
    print("three steps of training:", trainer.train().global_step, "done")
except RuntimeError as error:
    print("three steps of training:", type(error).__name__, str(error)[:120])
    raise SystemExit(1)
