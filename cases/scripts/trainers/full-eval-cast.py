# transformers 5.23.0: bf16_full_eval, evaluate() or predict() outside train(): the weights stay bfloat16, are saved so, and a train() that follows loses small steps
# transformers/trainer.py:Trainer.evaluation_loop casts the model itself, and never back; the argument "only applies during evaluation"
import tempfile

import safetensors.torch
import torch
import transformers
from setup_tiny import options, tiny

ROWS = [dict(input_ids=torch.arange(2, 9) + i, labels=torch.arange(2, 9) + i) for i in range(4)]


def run(*calls):
    """The saved weights' type, the largest difference that 20 steps made, and the share of weights that they moved."""
    wanted = dict(per_device_train_batch_size=4, max_steps=20, learning_rate=1e-5, bf16_full_eval=True)
    args = transformers.TrainingArguments(**options(**wanted))
    trainer = transformers.Trainer(tiny(), args, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.remove_callback(transformers.PrinterCallback)
    before = None
    for call in calls:
        if call == "train":
            before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        getattr(trainer, call)()
    moved = sum(int((value != before[name]).sum()) for name, value in trainer.model.state_dict().items())
    folder = tempfile.mkdtemp()
    trainer.save_model(folder)
    saved = safetensors.torch.load_file(f"{folder}/model.safetensors")
    return {str(value.dtype) for value in saved.values()}, moved / sum(value.numel() for value in before.values())


transformers.logging.disable_progress_bar()
print("| bf16_full_eval, calls | saved as, right: float32 | weights that 20 steps moved |\n|---|---|---|")
wrong = False
for calls in (("train",), ("train", "evaluate"), ("evaluate", "train")):
    types, moved = run(*calls)
    told = "every one is rounded" if calls[-1] == "evaluate" else f"{moved:.0%}"
    print(f"| {', '.join(calls)} | {', '.join(types)} | {told} |")
    wrong |= types != {"torch.float32"}
raise SystemExit(int(wrong))
