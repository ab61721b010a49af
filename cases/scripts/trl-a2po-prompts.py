# TRL 1.16: A2PO cuts prompts at their end, and takes a tokenizer that pads on the right as it is
# It tokenizes with truncation=True and padding=True, which follow the tokenizer's sides.
import copy

import transformers
from setup_a2po import a2po
from setup_tiny import tiny, tokenizer

kept, generate = [], transformers.generation.GenerationMixin.generate


def watched(self, *given, **options):
    kept.append(options["input_ids"].tolist())
    return generate(self, *given, **options)


transformers.generation.GenerationMixin.generate = watched
a2po(tiny(), ["w2 w3 w4 w5 w6 w7"], per_device_train_batch_size=1, max_prompt_length=3).train()
print(
    f'| | found | right |\n|---|---|---|\n| prompt 2 3 4 5 6 7 in `max_prompt_length` 3 ("left-truncated") | {kept[-1][0]} | [5, 6, 7] |'
)
bad = kept[-1][0] != [5, 6, 7]


def log_probs(side):
    """Of each prompt's completion: the trainer's, and alone."""
    tok = copy.deepcopy(tokenizer)
    tok.padding_side = side
    trainer = a2po(tiny(), ["w2", "w4 w5 w6"], tok=tok)
    rows, compute = [], trainer.compute_loss

    def watch(model, inputs, **more):
        ids, mask, n = inputs["input_ids"], inputs["attention_mask"], inputs["logits_to_keep"]
        for i in range(len(ids)):
            own, length = ids[i][mask[i].bool()], int(mask[i][-n:].sum())
            alone = tiny().double()(own[None]).logits[0, :-1].log_softmax(-1)
            rows.append((float(inputs["ref_logps"][i]), float(alone.gather(-1, own[1:, None])[-length:, 0].sum())))
        return compute(model, inputs, **more)

    trainer.compute_loss = watch
    trainer.train()
    return rows


for side in ("left", "right"):
    for a, b in log_probs(side):
        bad |= abs(a - b) > 1e-3
        print(f"| log-prob, tokenizer that pads on the {side} | {a:.6g} | {b:.6g} |")
raise SystemExit(int(bad))
