# TRL 1.16.0, transformers 5.23.0: GOLDTrainer on images, lmbda above 0: the student generates without the token types that it is trained with
# trl/experimental/gold/gold_trainer.py:generate_on_policy_outputs drops them: "generate recomputes them from `input_ids`", which it does not. What the first token is drawn from beside what the loss computes there
import copy

import datasets
import torch
import transformers
from setup_images import gemma3, processor, qwen, qwen_processor
from setup_tiny import options
from trl.experimental.gold import GOLDConfig, GOLDTrainer

said = [[{"role": "user", "content": text}] for text in ("w7 w8", "w9 w10")]
ROWS = [
    {"prompt": p, "completion": [{"role": "assistant", "content": "w11 w12"}], "images": [str(i)]}
    for i, p in enumerate(said)
]


def off(model, processor):
    """How far what the first token is drawn from is from what the loss computes there."""
    more = dict(per_device_train_batch_size=2, max_steps=1, lmbda=1.0, max_completion_length=4, max_length=64)
    args = GOLDConfig(**options(**more, disable_dropout=True, gradient_checkpointing=False))
    data = datasets.Dataset.from_list(ROWS)
    trainer = GOLDTrainer(model, copy.deepcopy(model), args=args, train_dataset=data, processing_class=processor)
    trainer.remove_callback(transformers.PrinterCallback)
    made, computed, seen = model.generate, trainer.compute_loss, {}

    def watched(**given):
        out = made(**given, output_logits=True)
        seen["drawn from"] = out.logits[0].log_softmax(-1)
        seen["place"] = given["input_ids"].shape[1] - 1
        return out

    def loss(policy, inputs, *given, **more):
        handed = dict(trainer._get_model_forward_kwargs(inputs))
        with torch.no_grad():
            logits = policy(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **handed).logits
        seen["trained"] = logits[:, seen["place"]].log_softmax(-1)
        return computed(policy, inputs, *given, **more)

    model.generate, trainer.compute_loss = watched, loss
    trainer.train()
    return float((seen["drawn from"] - seen["trained"]).abs().max())


found = {"Gemma 3": off(gemma3(), processor), "Qwen2.5-VL": off(qwen(), qwen_processor)}
print("| model | log-probs of the first token, drawn from and trained: off by up to, nats |\n|---|---|")
for name, value in found.items():
    print(f"| {name} | {value:.3g} |")
raise SystemExit(int(max(found.values()) > 1e-3))
