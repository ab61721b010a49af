# trl 1.16: a GPT-2 scores completions at positions shifted by the padding of their prompts
# The trainer gives the model input_ids and attention_mask; GPT2Model then counts positions from the first padding token.
import transformers
from setup_grpo import datasets, options, rewarded, tokenizer, torch
from trl import GRPOConfig, GRPOTrainer

torch.manual_seed(0)
size = dict(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **dropout, pad_token_id=0, eos_token_id=1))
prompts = [" ".join(f"w{2 + (i + k) % 30}" for k in range(n)) for i, n in enumerate((1, 9, 5, 3))]
trainer = GRPOTrainer(
    model,
    reward_funcs=rewarded,
    args=GRPOConfig(**options(per_device_train_batch_size=8, num_generations=2, max_completion_length=4, max_steps=1)),
    train_dataset=datasets.Dataset.from_list([{"prompt": p} for p in prompts]),
    processing_class=tokenizer,
)
score, off = trainer._get_per_token_logps_and_entropies, {}


def watched(model, ids, mask, width, *more, **options):
    out = score(model, ids, mask, width, *more, **options)
    logps = out["logps"] if isinstance(out, dict) else out[0]
    for row, seen, found in zip(ids, mask, logps.detach()):
        left = int(seen.argmax())
        with torch.no_grad():
            alone = (
                model(input_ids=row[None, left:], attention_mask=seen[None, left:])
                .logits[0, -width - 1 : -1]
                .log_softmax(-1)
            )
        own = alone.gather(-1, row[-width:, None])[:, 0]
        off[left] = max(off.get(left, 0.0), float(((found - own) * seen[-width:]).abs().max()))
    return out


trainer._get_per_token_logps_and_entropies = watched
trainer.train()
print(
    "| padding tokens on the left | log-probs of the completion, largest difference to the prompt alone |\n|---:|---:|"
)
for left, found in sorted(off.items()):
    print(f"| {left} | {found:.3g} |")
raise SystemExit(int(max(off.values()) > 1e-3))
