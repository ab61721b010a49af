import tempfile

import datasets
import transformers
from setup_tiny import options, tokenizer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

transformers.utils.logging.disable_progress_bar()
datasets.disable_progress_bars()


def saved(model):
    """The model, loaded from a folder (the trainers load the teacher from there)."""
    path = tempfile.mkdtemp()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def quiet(trainer):
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def sdpo(model, reward, prompts=("w2 w3", "w4 w5 w6"), peft_config=None, **more):
    sizes = dict(per_device_train_batch_size=2, num_generations=2, max_completion_length=4, max_steps=1)
    args = SDPOConfig(**options(**sizes | more))
    data = datasets.Dataset.from_list([{"prompt": p} for p in prompts])
    return quiet(
        SDPOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer, peft_config=peft_config)
    )


def sdft(model, prompts=("w2 w3", "w4 w5 w6"), peft_config=None, **more):
    sizes = dict(
        per_device_train_batch_size=2, num_generations=1, max_completion_length=4, max_steps=1, distillation_topk=8
    )
    args = SDFTConfig(**options(**sizes | more))
    data = datasets.Dataset.from_list([{"prompt": p, "privileged_context": "w7 w8"} for p in prompts])
    return quiet(SDFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer, peft_config=peft_config))
