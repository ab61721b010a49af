# TRL 1.16: an eos_token_id in generation_kwargs, documented to override, ends the sampling alone: GRPO, RLOO and online DPO cut
# completions at the ends of tokenizer and model, so that the padding behind such an end is trained on as if it were sampled
# Completions of 4 x 12 tokens with ten end tokens: tokens up to the first end, and those that count in the loss.

import datasets
import torch
import transformers
from setup_self import saved
from setup_tiny import options, tiny, tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

transformers.utils.logging.set_verbosity_error()
ENDS = list(range(20, 30))


def rewarded(prompts, completion_ids, **_):
    return [float(len(set(ids))) for ids in completion_ids]


def counted(kind, config, **more):
    sizes = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=12, max_steps=1, beta=0.0)
    model = saved(tiny())
    model.generation_config.eos_token_id = more.pop("model_eos", 1)
    data = datasets.Dataset.from_list([{"prompt": f"w{2 + i} w3"} for i in range(4)])
    args = config(**options(**sizes, **more))
    trainer = kind(model, reward_funcs=rewarded, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    seen, loss = [], trainer._compute_loss

    def watched(given, inputs):
        seen.append((inputs["completion_ids"], inputs["completion_mask"]))
        return loss(given, inputs)

    trainer._compute_loss = watched
    torch.manual_seed(0)
    trainer.train()
    ((ids, mask),) = seen
    end = torch.isin(ids, torch.tensor([1, *ENDS]))
    alive = end.cumsum(-1) - end.long() == 0
    return int((alive & mask.bool()).sum()), int(mask.sum())


print("| trainer, setting | tokens sampled | counted in the loss |\n|---|---|---|")
bad = 0
SETTINGS = {
    "generation_config of the model": dict(model_eos=[1, *ENDS]),
    "generation_kwargs": dict(generation_kwargs={"eos_token_id": [1, *ENDS]}),
}
for kind, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
    for name, more in SETTINGS.items():
        sampled, got = counted(kind, config, **more)
        bad += sampled != got
        print(f"| {kind.__name__}, {name} | {sampled} | {got} |")
raise SystemExit(int(bad > 0))
