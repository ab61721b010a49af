import copy

import datasets
import transformers
from setup_tiny import options, tokenizer
from trl.experimental.a2po import A2POConfig, A2POTrainer

transformers.utils.logging.disable_progress_bar()


def half(prompts, completions, **_):
    return [float(i % 2) for i in range(len(prompts))]


def a2po(model, prompts, tok=None, reward=half, **more):
    sizes = dict(per_device_train_batch_size=2, max_completion_length=4, max_steps=1)
    trainer = A2POTrainer(
        model,
        reward,
        args=A2POConfig(**options(**sizes | more)),
        processing_class=tok or copy.deepcopy(tokenizer),
        train_dataset=datasets.Dataset.from_list([{"prompt": p} for p in prompts]),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer
