"""BEMACallback in a resumed run: its θ₀ and its average are in no checkpoint, the weights at the checkpoint stand in for both."""

import tempfile

import datasets
import transformers
from setup_tiny import options, tiny, tokenizer, torch
from trl import BEMACallback, SFTConfig, SFTTrainer

transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
DATA = datasets.Dataset.from_list([{"text": f"w{i} w{i + 1} w{i + 2}"} for i in range(2, 18)])


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(folder, resume=None):
    more = dict(max_steps=20, save_strategy="steps", save_steps=10, output_dir=folder, learning_rate=1e-2)
    args, bema = SFTConfig(**options(per_device_train_batch_size=2, **more)), BEMACallback(update_freq=1)
    trainer = SFTTrainer(tiny(), args=args, train_dataset=DATA, processing_class=tokenizer, callbacks=[bema])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return flat(trainer.model), flat(bema.running_model)


folder = tempfile.mkdtemp()
whole, resumed = run(folder), run(folder, f"{folder}/checkpoint-10")
apart = [float((a - b).abs().max()) for a, b in zip(whole, resumed)]
print("| resumed behind step 10 of 20, from the whole run | largest distance of a weight |\n|---|---|")
print(f"| the model | {apart[0]:.2g} |\n| BEMA's | {apart[1]:.2g} |")
print(f"| BEMA's from the model, in the whole run | {float((whole[1] - whole[0]).abs().max()):.2g} |")
raise SystemExit(int(apart[0] < 1e-6 and apart[1] > 1e-4))
