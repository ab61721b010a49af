# TRL 1.16.0, transformers 5.23.0: OnlineDPOTrainer, rows with images: token types reach neither generation nor loss: Gemma 3 masks an image causally, Qwen2.5-VL gives it a text's positions
# trl/experimental/online_dpo/online_dpo_trainer.py:_generate, _forward list the keys that they hand on, without token_type_ids and mm_token_type_ids. Log-probs beside those of the same model with the types
import datasets
import torch
import transformers
from setup_images import IMAGE, gemma3, processor, qwen, qwen_processor
from setup_tiny import options
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer


def rewarded(completions, **_):
    return [float(i) for i in range(len(completions))]


def off(model, processor, name):
    """How far the log-probs of the policy are from those of the model that knows where the images lie."""
    said = [[{"role": "user", "content": text}] for text in ("w7 w8", "w9 w10")]
    data = datasets.Dataset.from_list([{"prompt": p, "image": str(i)} for i, p in enumerate(said)])
    more = dict(per_device_train_batch_size=2, max_new_tokens=4, max_steps=1, max_length=64, disable_dropout=True)
    args = OnlineDPOConfig(**options(**more))
    trainer = OnlineDPOTrainer(model, reward_funcs=rewarded, args=args, train_dataset=data, processing_class=processor)
    trainer.remove_callback(transformers.PrinterCallback)
    computed, found = trainer._forward, []

    def watched(policy, prompt, prompt_mask, completion, completion_mask, sight):
        out = computed(policy, prompt, prompt_mask, completion, completion_mask, sight)
        ids = torch.cat([prompt, completion], 1)
        mask = torch.cat([prompt_mask, completion_mask], 1)
        with torch.no_grad():
            logits = policy(ids, attention_mask=mask, **sight, **{name: (ids == IMAGE).long()}).logits
        right = logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1).gather(-1, completion[..., None])[..., 0]
        found.append(float(((out - right) * completion_mask).abs().max()))
        return out

    trainer._forward = watched
    trainer.train()
    return found[0]


found = {
    "Gemma 3": off(gemma3(), processor, "token_type_ids"),
    "Qwen2.5-VL": off(qwen(), qwen_processor, "mm_token_type_ids"),
}
print("| model | log-probs of completions off by up to, nats |\n|---|---|")
for name, value in found.items():
    print(f"| {name} | {value:.3g} |")
raise SystemExit(int(max(found.values()) > 1e-3))
