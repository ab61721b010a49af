"""OnlineDPOTrainer, rows with images: the processor's token types, which say where the images lie, reach no forward pass.

Without them Gemma 3 masks an image causally, and Qwen2.5-VL (Qwen2-VL, Qwen3-VL, GLM-4V) counts an image's positions as a
text's. Both generate so and are trained so. Images and processors are stand-ins: what counts is where the images lie.
"""

import datasets
import torch
import transformers
from setup_images import BOS, COUNT, EOS, IMAGE, PAD, Gemma3Processor, gemma3, processor, tokenizer
from setup_tiny import options
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer


class Qwen2_5_VLProcessor(Gemma3Processor):
    def __call__(self, images=None, **given):
        out = super().__call__(images=images, **given)
        out["mm_token_type_ids"] = out.pop("token_type_ids")
        if images:
            out["pixel_values"] = out["pixel_values"].view(-1, 24).repeat_interleave(2, 0)
            out["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(images))
        return out


def qwen():
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    text = dict(size, vocab_size=64, rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3]})
    text |= dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    sight = dict(hidden_size=32, intermediate_size=64, depth=2, num_heads=2, out_hidden_size=32, patch_size=2)
    sight |= dict(temporal_patch_size=2, spatial_merge_size=2, window_size=8, fullatt_block_indexes=[1])
    ids = dict(image_token_id=IMAGE, video_token_id=59, vision_start_token_id=61, vision_end_token_id=62)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=sight, **ids)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def off(model, processor, name):
    """How far the log-probs of the policy are from those of the model that knows where the images lie."""
    said = [[{"role": "user", "content": text}] for text in ("w7 w8", "w9 w10")]
    data = datasets.Dataset.from_list([{"prompt": p, "image": str(i)} for i, p in enumerate(said)])
    more = dict(per_device_train_batch_size=2, max_new_tokens=4, max_steps=1, max_length=64, disable_dropout=True)
    args = OnlineDPOConfig(**options(**more))
    rewarded = lambda completions, **_: [float(i) for i in range(len(completions))]
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
    "Qwen2.5-VL": off(qwen(), Qwen2_5_VLProcessor(tokenizer, chat_template=processor.chat_template), "mm_token_type_ids"),
}
print("| model | log-probs of completions off by up to, nats |\n|---|---|")
for name, value in found.items():
    print(f"| {name} | {value:.3g} |")
raise SystemExit(int(max(found.values()) > 1e-3))
