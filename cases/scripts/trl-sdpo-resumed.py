# TRL 1.16: the averaged teacher of SDPO (default) and SDFT is lost in a resumed run
# No checkpoint has it. A run of four steps, and the same run resumed behind step 2.
import tempfile

import peft
import torch
import transformers
from setup_processes import Keep
from setup_self import saved, sdft, sdpo
from setup_tiny import tiny

COMPLETIONS = [[7, 8], [9, 10, 11]]
LORA = dict(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])


def teacher(trainer):
    """What the teacher adds to the initial model, its logits of a prompt less the initial ones'."""
    ids = torch.tensor([[2, 3, 7, 8]])
    with torch.no_grad(), trainer._get_teacher_context_for_self_distillation():
        return trainer.teacher_model(input_ids=ids).logits - tiny()(input_ids=ids).logits


def run(kind, folder, lora, resume=None):
    more = dict(
        output_dir=folder,
        max_steps=4,
        learning_rate=1e-1,
        lr_scheduler_type="constant",
        teacher_model_kind="ema",
        save_strategy="steps",
        save_steps=2,
        shuffle_dataset=False,
        num_train_epochs=1,
    )
    more |= dict(peft_config=peft.LoraConfig(**LORA)) if lora else {}
    if kind == "SDPO":
        trainer = sdpo(saved(tiny()), lambda prompts, **_: [1.0, 1.0], ["w2 w3"] * 8, **more)
    else:
        trainer = sdft(saved(tiny()), ["w2 w3", "w4"] * 8, distillation_mode="full_logits", **more)
    trainer._generate = lambda ids: (ids, COMPLETIONS)
    keep, state = Keep(), {}

    class Stop(transformers.TrainerCallback):
        def on_step_begin(self, args, state_, control, **_):
            state.setdefault("teacher", {})[state_.global_step] = teacher(trainer)

    trainer.add_callback(keep)
    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)
    return keep.norms, state["teacher"]


bad = 0
print(
    "| trainer | LoRA | step 3, whole run: teacher's distance to the initial model | resumed | gradient norm, whole | resumed |\n|---|---|---|---|---|---|"
)
for kind in ("SDPO", "SDFT"):
    for lora in (False, True):
        folder = tempfile.mkdtemp()
        whole, teachers = run(kind, folder, lora)
        checkpoint = f"{folder}/checkpoint-2"
        try:
            again, second = run(kind, folder, lora, checkpoint)
            a, b = float(teachers[2].norm()), float(second[2].norm())
            bad |= abs(b / a - 1) > 1e-3
            print(
                f"| {kind} | {'yes' if lora else 'no'} | {a:.5g} | {b:.5g} | {whole[2]:.5g} | {again[0]:.5g} |",
                flush=True,
            )
        except Exception as error:
            bad = 1
            print(f"| {kind} | {'yes' if lora else 'no'} | {type(error).__name__}: {str(error)[:300]} |", flush=True)
raise SystemExit(int(bad))
