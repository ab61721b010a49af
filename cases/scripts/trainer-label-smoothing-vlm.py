# transformers 5.23.0: Trainer(label_smoothing_factor=…) does not shift the labels of most image-text models: the target of a token is itself
# the smoother shifts only where the class name is in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES; Qwen2.5-VL, LLaVA, Llama 4, Mistral 3, … are not in it.
import tempfile

import torch
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2Config,
    Trainer,
    TrainingArguments,
)

epsilon, small = 0.1, dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
ids = torch.arange(5, 17).view(2, 6)


def logged(model, factor):
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            max_steps=1,
            logging_steps=1,
            label_smoothing_factor=factor,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = Trainer(model, args, train_dataset=[dict(input_ids=row, labels=row) for row in ids])
        trainer.train()
    return next(log["loss"] for log in trainer.state.log_history if "loss" in log)


def model():
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=Qwen2Config(vocab_size=20, num_key_value_heads=2, initializer_range=0.5, **small),
        vision_config=CLIPVisionConfig(image_size=8, patch_size=4, **small),
        image_token_index=19,
        initializer_range=0.5,
    )
    return LlavaForConditionalGeneration(config)


def smoothed(log_probs, labels):
    nll = -log_probs.gather(-1, labels[..., None]).mean()
    return float((1 - epsilon) * nll - epsilon * log_probs.mean())


with torch.no_grad():
    log_probs = model()(input_ids=ids).logits.double().log_softmax(-1)
right, unshifted = smoothed(log_probs[:, :-1], ids[:, 1:]), smoothed(log_probs, ids)
found = logged(model(), epsilon)
print(
    f"| | loss |\n|---|---|\n| Trainer, label_smoothing_factor={epsilon} | {found:.5f} |\n| next token | {right:.5f} |\n| the token itself | {unshifted:.5f} |\n| that · 12/10, as the count is shifted | {unshifted * 1.2:.5f} |"
)
print(
    f"| Trainer, label_smoothing_factor=1e-9 | {logged(model(), 1e-9):.5f} |\n| Trainer, label_smoothing_factor=0 | {logged(model(), 0):.5f} |"
)
raise SystemExit(int(abs(found - right) > 1e-3))
