"""DistillationTrainer calls the backbones past the forward that accelerate wraps in autocast: bf16, on by default, has no effect on
its passes. Type of the attention's queries, of a float32 model, in the passes of one step; GKD's beside it."""

import datasets
import torch
import transformers
from setup_distilled import said
from setup_tiny import options, tiny, tokenizer
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

transformers.utils.logging.set_verbosity_error()
DATA = datasets.Dataset.from_list([{**said([2, 3], [4, 5]), "prompt": "w2 w3"}] * 4)


def types(kind, config, **more):
    args = config(**options(per_device_train_batch_size=4, max_steps=1, **more))
    data = DATA if kind is GKDTrainer else DATA.select_columns(["prompt"])
    trainer = kind(tiny(), tiny(1), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    seen = {}

    def hook(name):
        def hooked(module, given, out):
            what = name if torch.is_grad_enabled() or name == "teacher" else "sampling"
            seen[what] = str(out.dtype).removeprefix("torch.")

        return hooked

    for name, model in (("student", trainer.model), ("teacher", trainer.teacher_model)):
        model.model.layers[0].self_attn.q_proj.register_forward_hook(hook(name))
    trainer.train()
    return seen


bad = 0
print("| trainer, setting | sampling | student | teacher |\n|---|---|---|---|")
for kind, config, own in (
    (GKDTrainer, GKDConfig, dict(lmbda=1.0, max_new_tokens=4)),
    (DistillationTrainer, DistillationConfig, dict(max_completion_length=4)),
):
    for more in ({"bf16": None}, {"bf16": False}):
        seen = types(kind, config, **own, **more)
        bad += more["bf16"] is None and seen["student"] != "bfloat16"
        setting = "default (bf16)" if more["bf16"] is None else "bf16=False"
        print(f"| {kind.__name__}, {setting} | {seen['sampling']} | {seen['student']} | {seen['teacher']} |")
raise SystemExit(int(bad > 0))
