# TRL 1.16: dataset_num_proc changes KTO's loss: each process rotates the completions of its own part of the dataset
# The KL is to be estimated from the completions of the batch, each beside another prompt. Of a part's last, shorter batch they
# are others, and one that is alone is its own.
import datasets
import torch
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import KTOConfig, KTOTrainer

transformers.utils.logging.set_verbosity_error()
ROWS = [{"prompt": f"w{2 + i}", "completion": f" w{10 + i} w{20 + i}", "label": i % 2 > 0} for i in range(10)]


def trained(processes):
    reference = tiny(1)
    with torch.no_grad():
        reference.lm_head.weight.mul_(10)  # a KL above 0
    logged = dict(logging_strategy="steps", logging_steps=1)
    args = KTOConfig(**options(per_device_train_batch_size=4, max_steps=1, dataset_num_proc=processes, **logged))
    data = datasets.Dataset.from_list(ROWS)
    trainer = KTOTrainer(tiny(), reference, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    first = [ids[0] for ids in trainer.train_dataset["KL_completion_ids"]]
    return first, trainer.state.log_history[0]


print("| dataset_num_proc | first token of the KL's completions | kl | loss |\n|---|---|---|---|")
bad, whole = False, None
for processes in (None, 2, 4):
    first, log = trained(processes)
    whole = whole or first
    bad |= first != whole
    print(f"| {processes} | {first} | {log['kl']:.4f} | {log['loss']:.6f} |")
raise SystemExit(int(bad))
