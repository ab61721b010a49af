# transformers 5.23.0, peft 0.21.2: `weight_decay` with DoRA or IA3 (LoRA's kin that multiply): magnitudes and factors are pulled to 0, not to what the base model has, and with them the frozen weights
# transformers/trainer.py:Trainer.get_decay_parameter_names leaves out biases and norms alone; lora_magnitude_vector begins at the norms of W, ia3_l at 1
import warnings

import peft
import torch
import transformers
from setup_tiny import options, tiny

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
ROWS = [dict(input_ids=list(range(2 + i, 10 + i)), labels=[-100] * 8) for i in range(4)]
NAMES = ["q_proj", "v_proj", "up_proj", "down_proj"]
IDS = torch.arange(2, 20)[None]
KINDS = {
    "LoRA": peft.LoraConfig(target_modules=NAMES, task_type="CAUSAL_LM"),
    "DoRA": peft.LoraConfig(target_modules=NAMES, use_dora=True, task_type="CAUSAL_LM"),
    "IA3": peft.IA3Config(target_modules=NAMES, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
}


class Still(transformers.Trainer):
    """Gradients of 0: what moves is moved by the decay."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 0.0 * model(input_ids=inputs["input_ids"]).logits.sum()


def run(config, decay):
    """By 200 steps of rate 1e-2: the largest change of the logits; the norm of the merged weights, by that of the base model's."""
    model = peft.get_peft_model(tiny(), config)
    with torch.no_grad():
        before = model.eval()(input_ids=IDS).logits
    wanted = dict(per_device_train_batch_size=4, max_steps=200, learning_rate=1e-2, weight_decay=decay)
    args = transformers.TrainingArguments(**options(**wanted, lr_scheduler_type="constant"))
    trainer = Still(model, args, train_dataset=ROWS)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    with torch.no_grad():
        moved = float((model.eval()(input_ids=IDS).logits - before).abs().max())
    merged, base = model.merge_and_unload().state_dict(), tiny().state_dict()
    key = "model.layers.0.mlp.down_proj.weight"
    return moved, float(merged[key].norm() / base[key].norm())


print("| adapter | weight_decay | logits moved by | down_proj's norm, by the base model's |\n|---|---|---|---|")
wrong = False
for name, config in KINDS.items():
    for decay in (0.0, 0.1):
        moved, ratio = run(config, decay)
        print(f"| {name} | {decay} | {moved:.3f} | {ratio:.4f} |")
        wrong |= abs(ratio - 1) > 1e-2
raise SystemExit(int(wrong))
