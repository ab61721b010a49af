# TRL 1.16.0, transformers 5.23.0: SFT, rows of texts with images, PaliGemma: every token sees those behind it, the one that it is to predict among them
# trl/trainer/sft_trainer.py:_collate_language_modeling gives the text without a suffix, which the processor marks with token_type_ids 0, a prefix that is read both ways. Texts are of random words: at best 4.04 nats each. The processor does what PaliGemmaProcessor does, without Pillow
import datasets
import torch
import transformers
from setup_images import BOS, COUNT, EOS, IMAGE, PAD, gemma3, tokenizer
from setup_tiny import options
from trl import SFTConfig, SFTTrainer


class PaliGemmaProcessor(transformers.ProcessorMixin):
    """What transformers' PaliGemmaProcessor does, without Pillow: an image is a number, from which its pixels are drawn."""

    def __init__(self, tokenizer, chat_template=None, **_):
        super().__init__(tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, suffix=None, return_tensors=None, **more):
        more |= {"text_pair": [s + " <eos>" for s in suffix]} if suffix else {}
        more.pop("pad_to_multiple_of", None)
        texts = [f"{'<image> ' * COUNT}<bos> {t.replace('<image>', '')}" for t in text]
        out = dict(self.tokenizer(texts, return_token_type_ids=True, **more))
        made = [torch.Generator().manual_seed(int(i)) for row in images for i in row]
        out["pixel_values"] = torch.stack([torch.randn(3, 8, 8, generator=g) for g in made])
        return transformers.BatchFeature(out, tensor_type=return_tensors)


def paligemma():
    torch.manual_seed(0)
    config = gemma3().config
    text = dict(config.text_config.to_dict(), model_type="gemma", num_hidden_layers=2, layer_types=None)
    size = {k: text[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")}
    size |= dict(num_attention_heads=2, num_key_value_heads=2, model_type="gemma", pad_token_id=PAD)
    sight = config.vision_config.to_dict() | {"projection_dim": 32}
    ids = dict(image_token_id=IMAGE, image_token_index=IMAGE, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    made = transformers.PaliGemmaConfig(text_config=size, vision_config=sight, projection_dim=32, **ids)
    return transformers.PaliGemmaForConditionalGeneration(made)


def rows(count, seed):
    drawn = torch.Generator().manual_seed(seed)
    texts = torch.randint(3, 60, (count, 12), generator=drawn)
    return [{"text": " ".join(f"w{int(i)}" for i in row), "images": [str(n)]} for n, row in enumerate(texts)]


def learnt(processor):
    """Nats a word, of rows that were not trained on."""
    more = dict(per_device_train_batch_size=16, num_train_epochs=1, learning_rate=1e-2, gradient_checkpointing=False)
    args = SFTConfig(**options(max_length=None, remove_unused_columns=False, **more))
    data = datasets.Dataset.from_list(rows(2048, 0))
    trainer = SFTTrainer(paligemma(), args=args, train_dataset=data, processing_class=processor)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    batch = trainer.data_collator(rows(64, 1))
    with torch.no_grad():
        logits = trainer.model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits
    words = logits[:, COUNT:-1].flatten(0, 1), batch["input_ids"][:, COUNT + 1 :].flatten()
    return float(torch.nn.functional.cross_entropy(*words))


class Causal(PaliGemmaProcessor):
    """The words marked as what is to be predicted, as the processor marks a suffix."""

    def __call__(self, **given):
        out = super().__call__(**given)
        return out | {"token_type_ids": (out["input_ids"] > BOS).long() * (out["input_ids"] != IMAGE)}


found = {kind.__name__: learnt(kind(tokenizer)) for kind in (PaliGemmaProcessor, Causal)}
print("| processor | nats a word of texts of random words, at best 4.04 |\n|---|---|")
for name, nats in found.items():
    print(f"| {name} | {nats:.3g} |")
raise SystemExit(int(found["PaliGemmaProcessor"] < 3.9))
