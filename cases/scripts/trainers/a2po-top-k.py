"""A2POConfig: "top_k: if `None` (default), top-k filtering is disabled". Ranks of the tokens that A2POTrainer samples."""

import torch
import transformers
from setup_a2po import a2po

torch.manual_seed(0)
size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
config = transformers.LlamaConfig(vocab_size=400, pad_token_id=0, eos_token_id=1, **size)


def ranks(**more):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    trainer = a2po(
        model,
        ["w2 w3", "w4 w5"],
        per_device_train_batch_size=2,
        num_value_samples=64,
        filter_all_incorrect=False,
        **more,
    )
    found, generate = [], transformers.generation.GenerationMixin.generate

    def watched(self, *given, **options):
        out = generate(self, *given, **options)
        with torch.no_grad():
            logits = self(out).logits
        for row, scores in zip(out, logits):
            n = options["input_ids"].shape[1]
            for t in range(n, len(row)):
                found.append(int((scores[t - 1] > scores[t - 1, row[t]]).sum()))
                if row[t] == 1:
                    break
        return out

    transformers.generation.GenerationMixin.generate = watched
    trainer.train()
    transformers.generation.GenerationMixin.generate = generate
    return found


none, zero = ranks(), ranks(top_k=0)
print("| top_k | sampled tokens | highest rank of 400 | share of ranks from 50 |\n|---|---|---|---|")
for name, found in (("None", none), ("0", zero)):
    print(f"| {name} | {len(found)} | {max(found)} | {sum(r >= 50 for r in found) / len(found):.3g} |")
raise SystemExit(int(max(none) < 50))
