# liger-kernel 0.8.5: patching a loaded sequence classifier binds the causal LM's forward to it: AttributeError
# A classifier has no LM head, whose weight that forward multiplies by.
import torch
from setup_patched import device, ids, monkey_patch, small
from transformers import Qwen2Config, Qwen2ForSequenceClassification

torch.manual_seed(0)
config = Qwen2Config(**small, num_key_value_heads=2, num_labels=3, pad_token_id=0)
model = Qwen2ForSequenceClassification(config).to(device)
batch = dict(input_ids=ids, labels=torch.tensor([0, 1], device=device))
print(f"unpatched: {model(**batch).loss.item():.4f}")
monkey_patch.apply_liger_kernel_to_qwen2(
    rope=False, rms_norm=False, swiglu=False, model=model
)  # as Trainer(use_liger_kernel=True) does
try:
    print(f"patched: {model(**batch).loss.item():.4f}")
except AttributeError as error:
    print(f"patched: AttributeError: {error}")
    raise SystemExit(1) from None
