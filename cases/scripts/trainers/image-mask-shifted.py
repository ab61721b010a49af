# TRL 1.16.0, transformers 5.23.0: GRPO, RLOO, rows with images, Gemma 3: log-probs are computed with a mask that lies one token behind the images
# trl/trainer/grpo_trainer.py:_generate_and_score_completions, rloo_trainer.py: processing_class(images, text=prompts_text) puts a second <bos> before the template's own, so that token_type_ids are one longer than prompt_ids. An image is a number here, whose pixels are drawn; the processor does what Gemma3Processor does
import datasets
import torch
import transformers
from setup_images import IMAGE, gemma3, processor
from setup_tiny import options
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

said = [[{"role": "user", "content": text}] for text in ("w7 w8", "w9 w10 w11 w12 w13")]
ROWS = [{"prompt": said[i % 2], "images": [str(i)]} for i in range(8)]


def rewarded(completions, **_):
    return [float(i) for i in range(len(completions))]


def of_step(kind, config):
    """In the one step: input ids, token types and log-probs of the trainer, and log-probs with the tokens' own types."""
    sizes = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=4, max_steps=1, beta=0.0)
    data = datasets.Dataset.from_list(ROWS)
    args = config(**options(**sizes))
    trainer = kind(gemma3(), rewarded, args=args, train_dataset=data, processing_class=processor)
    computed, found = trainer._get_per_token_logps_and_entropies, []

    def watched(model, ids, mask, keep, *given, **more):
        out = computed(model, ids, mask, keep, *given, **more)
        with torch.no_grad():
            own = {"pixel_values": more["pixel_values"], "token_type_ids": (ids == IMAGE).long()}
            logits = model(input_ids=ids, attention_mask=mask, **own).logits[:, -keep - 1 : -1]
        right = torch.log_softmax(logits, -1).gather(-1, ids[:, -keep:, None])[..., 0]
        found.append((ids, more["token_type_ids"], out[0].detach(), right))
        return out

    trainer.remove_callback(transformers.PrinterCallback)
    trainer._get_per_token_logps_and_entropies = watched
    trainer.train()
    return found[-1]


bad = False
print("| trainer | image tokens | those of type 1 | log-probs off by up to, nats |\n|---|---|---|---|")
for kind, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
    ids, types, got, right = of_step(kind, config)
    places = [(row == value).nonzero().flatten().tolist() for row, value in ((ids[0], IMAGE), (types[0], 1))]
    off = float((got - right).abs().max())
    bad |= off > 1e-3
    print(f"| {kind.__name__} | {places[0]} | {places[1]} | {off:.3g} |")
raise SystemExit(int(bad))
