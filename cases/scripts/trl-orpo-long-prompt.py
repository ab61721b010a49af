# TRL 1.16: CPO and ORPO, max_length: a prompt that fills it stays whole, with an empty completion, whose mean log-prob is 0 / 0: the
# gradients of ORPO, and of CPO's ipo, simpo and alphapo, are NaN, and the log shows a loss of 0
# A batch of three pairs, of which one has a prompt of 30 tokens, max_length=20; DPO and TPO drop that pair.

import datasets
import transformers
from setup_self import saved
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

transformers.utils.logging.set_verbosity_error()
ROWS = [{"prompt": " ".join(["w2"] * 30), "chosen": " w3 w4", "rejected": " w5"}, *PAIRS[:2]]
ROWS = [row | {"reference": row["chosen"]} for row in ROWS]


def run(kind, config, **more):
    columns = ["prompt", "chosen", "rejected"] + ["reference"] * (kind is TPOTrainer)
    data = datasets.Dataset.from_list(ROWS).select_columns(columns)
    steps = dict(per_device_train_batch_size=3, max_steps=1, max_length=20, logging_strategy="steps", logging_steps=1)
    model = saved(tiny())
    args = config(**options(**steps, **more) | {"learning_rate": 1e-3})
    trainer = kind(model, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    row = trainer.state.log_history[0]
    nan = sum(int(p.isnan().sum()) for p in model.parameters())
    return len(trainer.train_dataset), row["loss"], row["grad_norm"], nan


bad = 0
print("| trainer | pairs kept | logged loss | gradient norm | NaN weights after the step |\n|---|---|---|---|---|")
for kind, config, more in (
    (DPOTrainer, DPOConfig, {}),
    (TPOTrainer, TPOConfig, dict(loss_type="tpo-l")),
    (CPOTrainer, CPOConfig, {}),
    (CPOTrainer, CPOConfig, dict(loss_type="simpo", cpo_alpha=0.0)),
    (ORPOTrainer, ORPOConfig, {}),
):
    kept, loss, norm, nan = run(kind, config, **more)
    bad += nan > 0
    print(f"| {kind.__name__} {more.get('loss_type', '')} | {kept} | {loss:.4f} | {norm:.4f} | {nan} |")
raise SystemExit(int(bad > 0))
