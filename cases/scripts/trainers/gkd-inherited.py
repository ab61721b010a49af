"""GKD and GOLD: settings of SFTConfig, which their configs inherit and refer to.

`max_length=None` is "no truncation", `truncation_mode` "keep_start" is the default, and `router_aux_loss_coef` is the weight of the
load-balancing loss of experts in the training loss.
"""

import tempfile

import datasets
import transformers
from setup_distilled import said, tokenized
from setup_tiny import experts, options, tiny, tokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
LONG = [2] + [5] * 1489
KINDS = {"GKD": (GKDTrainer, GKDConfig), "GOLD": (GOLDTrainer, GOLDConfig)}


def built(name, row, model=tiny, **more):
    kind, config = KINDS[name]
    teacher = model(1)
    teacher.config._name_or_path = tempfile.mkdtemp()
    tokenizer.save_pretrained(teacher.config._name_or_path)
    sizes = {"max_new_tokens" if name == "GKD" else "max_completion_length": 4}
    sizes |= dict(per_device_train_batch_size=1, max_steps=1, lmbda=0.0, logging_strategy="steps", logging_steps=1)
    args = config(**options(**sizes | more))
    data = datasets.Dataset.from_list([row])
    trainer = kind(model(0), teacher, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


bad = False
print("| trainer | max_length | tokens, of 1,500 | first token, of 2 |\n|---|---|---|---|")
for name, row in (("GKD", said(LONG, [6] * 10)), ("GOLD", tokenized(LONG, [6] * 10))):
    for length in (2048, None, 100):
        ids = next(iter(built(name, row, max_length=length).get_train_dataloader()))["input_ids"]
        bad |= ids.shape[1] != min(length or 1500, 1500) or int(ids[0, 0]) != 2
        print(f"| {name} | {length} | {ids.shape[1]} | {int(ids[0, 0])} |")
print("\n| trainer | router_aux_loss_coef | loss | gradient norm |\n|---|---|---|---|")
for name in KINDS:
    norms = []
    for coefficient in (0.0, 1.0):
        trainer = built(name, tokenized([2, 3], [4, 5, 6]), experts, router_aux_loss_coef=coefficient)
        trainer.train()
        log = trainer.state.log_history[0]
        norms.append(log["grad_norm"])
        print(f"| {name} | {coefficient} | {log['loss']:.4g} | {norms[-1]:.4g} |")
    bad |= norms[0] == norms[1]
raise SystemExit(int(bad))
