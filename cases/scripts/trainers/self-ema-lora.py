"""SDFT with `teacher_model_kind="ema"`, a LoRA student at rest (learning rate 0): its average is itself, at every step.
Two students: a model that is trained on (full), and one that starts with a trained adapter (SDFTTrainer takes it)."""

import peft
import torch
import transformers
from setup_self import saved, sdft
from setup_tiny import tiny

IDS = torch.tensor([[2, 3, 7, 8, 9]])


def adapted():
    torch.manual_seed(0)
    model = peft.get_peft_model(
        saved(tiny()), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.5)
    return model


class At(transformers.TrainerCallback):
    def __init__(self):
        self.found = []

    def on_step_begin(self, args, state, control, **_):
        trainer = self.trainer
        with torch.no_grad():
            student = trainer.model(input_ids=IDS).logits
            with trainer._get_teacher_context_for_self_distillation():
                self.found.append(float((trainer.teacher_model(input_ids=IDS).logits - student).norm()))


def distances(model):
    at = At()
    trainer = sdft(model, ["w2 w3", "w4"] * 64, teacher_model_kind="ema", max_steps=41, num_train_epochs=1)
    trainer._generate = lambda ids: (ids, [[7, 8], [9, 10, 11]])
    at.trainer = trainer
    trainer.add_callback(at)
    trainer.train()
    return at.found


full, lora = distances(saved(tiny())), distances(adapted())
print("| optimizer steps | full: teacher's distance to the student (logits) | LoRA |\n|---|---|---|")
for t in (0, 1, 5, 20, 40):
    print(f"| {t} | {full[t]:.4g} | {lora[t]:.4g} |")
raise SystemExit(int(max(lora) > 1e-4))
