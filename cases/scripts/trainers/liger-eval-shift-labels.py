# liger-kernel 0.8.5: patched InternVL, SmolVLM and Falcon-H1 drop shift_labels wherever the logits are computed, as in evaluation
# their forward pops shift_labels and hands loss_function the labels alone; in training the fused loss takes shift_labels.
import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # its interpreter hands float arguments over as Python floats
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda x: (
        tl.tensor(interpreter.TensorHandle(np.array([x], np.float32), tl.float32), tl.float32)
        if isinstance(x, float)
        else convert(x)
    )
from liger_kernel.transformers import apply_liger_kernel_to_internvl
from transformers import InternVLConfig, InternVLForConditionalGeneration

small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
torch.manual_seed(0)
text = dict(model_type="qwen2", vocab_size=37, num_key_value_heads=2, **small)
model = InternVLForConditionalGeneration(
    InternVLConfig(
        text_config=text, vision_config=dict(image_size=[8, 8], patch_size=[4, 4], **small), image_token_id=36
    )
).to(device)
model.lm_head.weight.data.normal_()
ids = torch.arange(3, 19, device=device).view(1, 16)
shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].clone()
shifted[:, 7] = -100  # two documents in one row: nothing predicts the first token of the second
print("| | training | evaluation |\n|---|---|---|")
losses = []
for patched in (False, True):
    if patched:
        apply_liger_kernel_to_internvl(rms_norm=False, layer_norm=False, model=model)
    batch = {"input_ids": ids, "labels": ids, "shift_labels": shifted}
    losses += [model.train(training)(**batch).loss.item() for training in (True, False)]
    print(f"| {'patched' if patched else 'unpatched'} | {losses[-2]:.6f} | {losses[-1]:.6f} |")
raise SystemExit(int(abs(losses[3] - losses[1]) > 1e-5))
