# liger-kernel 0.8.5: patching a loaded sequence classifier binds the causal LM's forward to it: AttributeError
# A classifier has no LM head, whose weight that forward multiplies by.
import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
from liger_kernel.transformers import apply_liger_kernel_to_qwen2
from transformers import Qwen2Config, Qwen2ForSequenceClassification

small = dict(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = Qwen2ForSequenceClassification(Qwen2Config(**small, num_labels=3, pad_token_id=0)).to(device)
batch = dict(input_ids=torch.arange(3, 19, device=device).view(2, 8), labels=torch.tensor([0, 1], device=device))
print(f"unpatched: {model(**batch).loss.item():.4f}")
apply_liger_kernel_to_qwen2(
    rope=False, rms_norm=False, swiglu=False, model=model
)  # as Trainer(use_liger_kernel=True) does
try:
    print(f"patched: {model(**batch).loss.item():.4f}")
except AttributeError as error:
    print(f"patched: AttributeError: {error}")
    raise SystemExit(1) from None
