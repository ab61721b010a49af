# TRL 1.16.0, RewardTrainer, LoRA without task_type (LoraConfig's default): the new, random head is not trained, and not saved: a saved reward model has another head each time that it is loaded. `trl reward --use_peft`, whose task_type is CAUSAL_LM, is an AttributeError
# trl/trainer/reward_trainer.py:RewardTrainer.__init__ hands peft_config on, with no word of it; peft adds `score` to modules_to_save for SEQ_CLS alone
import tempfile

import datasets
import peft
import torch
import transformers
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import ModelConfig, RewardConfig, RewardTrainer, get_peft_config

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
IDS = torch.arange(2, 30).view(2, 14)
base = tempfile.mkdtemp()
tiny().save_pretrained(base)
tokenizer.save_pretrained(base)


def scores(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.squeeze(-1)


def trained(config):
    """How far the head moved, and the scores of the trained model beside those of the saved one, loaded twice."""
    args = RewardConfig(**options(learning_rate=0.01, max_steps=5))
    given = dict(train_dataset=datasets.Dataset.from_list(PAIRS), processing_class=tokenizer)
    trainer = RewardTrainer(base, args=args, peft_config=config, **given)
    heads = [p for n, p in trainer.model.named_parameters() if "score" in n and "original" not in n]
    before = heads[0].detach().clone()
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    saved, found = tempfile.mkdtemp(), []
    trainer.save_model(saved)
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        model.config.pad_token_id = tokenizer.pad_token_id
        found.append(scores(peft.PeftModel.from_pretrained(model, saved)).tolist())
    moved = float((heads[0].detach() - before).abs().max())
    return moved, scores(trainer.model).tolist(), found


def told(values):
    return ", ".join(f"{value:.3f}" for value in values)


print("| peft_config | the head moved by | scores of two texts | loaded | loaded again |\n|---|---|---|---|---|")
wrong = False
modules = dict(r=4, target_modules=["q_proj", "v_proj"])
for name, config in {
    "trl reward --use_peft": get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["q_proj", "v_proj"])),
    "LoraConfig()": peft.LoraConfig(**modules),
    'LoraConfig(task_type="SEQ_CLS")': peft.LoraConfig(**modules, task_type="SEQ_CLS"),
}.items():
    try:
        moved, right, found = trained(config)
    except AttributeError as error:
        print(f"| {name} | AttributeError: {error} | | | |")
        continue
    print(f"| {name} | {moved:.2g} | {told(right)} | {' | '.join(told(one) for one in found)} |", flush=True)
    wrong |= moved == 0
raise SystemExit(int(wrong))
