# liger-kernel 0.8.5: a model patched with the fused linear cross entropy ignores LoRA on its LM head: no effect on the loss, no gradient
# every patched forward multiplies by self.lm_head.weight, which of a LoRA (or DoRA) layer is the frozen base weight.
import torch
from setup_patched import device, ids, monkey_patch, small

# isort: split
from peft import LoraConfig, get_peft_model  # imports Triton
from transformers import Qwen2Config, Qwen2ForCausalLM

wrong = False
print("| | loss in training | in evaluation | gradient norm of the head's lora_B |\n|---|---|---|---|")
for dora in (False, True):
    losses = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **small,
                num_key_value_heads=2,
            )
        )
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], use_dora=dora)).to(device)
        head = model.base_model.model.lm_head
        torch.nn.init.normal_(head.lora_B["default"].weight)
        if patched:
            monkey_patch.apply_liger_kernel_to_qwen2(
                rope=False, rms_norm=False, swiglu=False, model=model.base_model.model
            )
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        grad = head.lora_B["default"].weight.grad
        losses.append(loss.item())
        print(
            f"| {'DoRA' if dora else 'LoRA'}, {'patched' if patched else 'unpatched'} | {losses[-1]:.5f} | {model.eval()(input_ids=ids, labels=ids).loss.item():.5f} | {grad if grad is None else f'{grad.norm():.4f}'} |"
        )
    wrong |= abs(losses[1] - losses[0]) > 1e-4
raise SystemExit(int(wrong))
