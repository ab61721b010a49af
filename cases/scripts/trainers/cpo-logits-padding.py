"""CPO and ORPO: logits/chosen and logits/rejected are means over every position of the batch, padding too: a chosen completion's number
depends on the rejected one's length. TPO's and DPO's are over the completions."""

import datasets
import transformers
from setup_self import saved
from setup_tiny import options, tiny, tokenizer, torch
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
PAIR = {"prompt": "w2 w3", "chosen": " w4 w5", "rejected": " w7 w8"}
LONGER = PAIR | {"rejected": " w7" + " w8" * 20}


def logged(kind, config, row):
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    rows = [row | {"reference": " w4"} if kind is TPOTrainer else row]
    data = datasets.Dataset.from_list(rows)
    args = config(**options())
    trainer = kind(saved(model), args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer.evaluate()["eval_logits/chosen"]


off = {}
print("| eval_logits/chosen of one completion | beside one of its length | beside one of 21 tokens |\n|---|---|---|")
for kind, config in ((TPOTrainer, TPOConfig), (CPOTrainer, CPOConfig), (ORPOTrainer, ORPOConfig)):
    even, padded = logged(kind, config, PAIR), logged(kind, config, LONGER)
    print(f"| {kind.__name__} | {even:.4f} | {padded:.4f} |")
    off[kind.__name__] = abs(even - padded)
raise SystemExit(int(off["TPOTrainer"] < 1e-5 and max(off.values()) > 1e-3))
