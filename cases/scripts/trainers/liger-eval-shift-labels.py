# liger-kernel 0.8.5: patched InternVL, SmolVLM and Falcon-H1 drop shift_labels wherever the logits are computed, as in evaluation
# their forward pops shift_labels and hands loss_function the labels alone; in training the fused loss takes shift_labels.
import torch
from setup_patched import device, monkey_patch, small
from transformers import InternVLConfig, InternVLForConditionalGeneration

torch.manual_seed(0)
text = dict(model_type="qwen2", num_key_value_heads=2, **small)
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
        monkey_patch.apply_liger_kernel_to_internvl(rms_norm=False, layer_norm=False, model=model)
    batch = {"input_ids": ids, "labels": ids, "shift_labels": shifted}
    losses += [model.train(training)(**batch).loss.item() for training in (True, False)]
    print(f"| {'patched' if patched else 'unpatched'} | {losses[-2]:.6f} | {losses[-1]:.6f} |")
raise SystemExit(int(abs(losses[3] - losses[1]) > 1e-5))
