"""BEMACallback(update_ref_model=True) of bema_for_ref_model: with precompute_ref_log_probs it overwrites the policy."""

import tempfile

import datasets
import peft
import transformers
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig
from trl.experimental.bema_for_ref_model import BEMACallback, DPOTrainer

tokenizer.bos_token = "<eos>"
transformers.utils.logging.disable_progress_bar()


def saved(model):
    path = tempfile.mkdtemp()
    model.save_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path)


class Watch(transformers.TrainerCallback):
    def on_optimizer_step(self, args, state, control, model=None, **_):
        self.after = {n: p.detach().clone() for n, p in model.named_parameters()}


def moved(ref=True, lora=False, **more):
    """What the callback changes in the policy and in the reference at the end of a step: distances."""
    args = DPOConfig(
        **options(per_device_train_batch_size=4, max_steps=3, num_train_epochs=3, **more) | dict(learning_rate=1e-2)
    )
    watch = Watch()
    bema = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
    trainer = DPOTrainer(
        saved(tiny()),
        args=args,
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=tokenizer,
        callbacks=[watch, bema],
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4) if lora else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    last = {n: p.detach() for n, p in trainer.model.named_parameters()}
    policy = sum(float((last[n] - watch.after[n]).square().sum()) for n in last) ** 0.5
    initial = dict(tiny().named_parameters())
    reference = (
        "none"
        if trainer.ref_model is None
        else sum(float((p - initial[n]).square().sum()) for n, p in trainer.ref_model.named_parameters()) ** 0.5
    )
    return policy, reference


print("| setting | callback moves the policy by | reference has moved by |\n|---|---|---|")
bad = 0
for name, more in (
    ("a reference model", {}),
    ("precompute_ref_log_probs", dict(precompute_ref_log_probs=True)),
    ("LoRA", dict(lora=True)),
):
    try:
        policy, reference = moved(**more)
        bad |= policy > 1e-6
        print(f"| {name} | {policy:.5g} | {reference} |", flush=True)
    except Exception as error:
        print(f"| {name} | {type(error).__name__}: {str(error)[:200]} | |", flush=True)
raise SystemExit(int(bad))
