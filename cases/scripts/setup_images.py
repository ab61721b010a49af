import datasets
import tokenizers
import torch
import transformers

transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
PAD, EOS, BOS, IMAGE, START, END, COUNT = 0, 1, 2, 60, 61, 62, 4
words = {f"w{i}": i for i in range(3, 60)} | {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, "<image>": IMAGE}
words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | {"<boi>": START, "<eoi>": END}, unk_token="<pad>"))
words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
words.post_processor = tokenizers.processors.TemplateProcessing(
    single="<bos> $A", pair="<bos> $A $B:1", special_tokens=[("<bos>", BOS)]
)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=words,
    pad_token="<pad>",
    eos_token="<eos>",
    bos_token="<bos>",
    padding_side="left",
    model_input_names=["input_ids", "attention_mask"],
    extra_special_tokens={"image_token": "<image>"},
)
tokenizer.chat_template = TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content is string %} {{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'text' %} {{ c.text }}{% else %} <boi>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


class Gemma3Processor(transformers.ProcessorMixin):
    """What transformers' Gemma3Processor does, without Pillow: an image is a number, from which its pixels are drawn."""

    def __init__(self, tokenizer, chat_template=None, **_):
        super().__init__(tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, return_tensors=None, **more):
        more = {k: v for k, v in more.items() if k in ("padding", "padding_side", "add_special_tokens")}
        texts = [text] if isinstance(text, str) else text
        picture = " ".join(["<boi>", *["<image>"] * COUNT, "<eoi>"])
        out = dict(self.tokenizer([t.replace("<boi>", picture) for t in texts], **more))
        out["token_type_ids"] = [[int(i == IMAGE) for i in row] for row in out["input_ids"]]
        if images:
            flat = [i for row in images for i in (row if isinstance(row, list) else [row])]
            made = [torch.Generator().manual_seed(int(i)) for i in flat]
            out["pixel_values"] = torch.stack([torch.randn(3, 8, 8, generator=g) for g in made])
        return transformers.BatchFeature(out, tensor_type=return_tensors)


processor = Gemma3Processor(tokenizer, chat_template=TEMPLATE)


def gemma3(scale=4):
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    text = dict(size, vocab_size=64, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=64)
    text |= dict(pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS)
    sight = dict(size, image_size=8, patch_size=4, model_type="siglip_vision_model", vision_use_head=False)
    ids = dict(image_token_id=IMAGE, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END)
    more = dict(pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS, mm_tokens_per_image=COUNT)
    config = transformers.Gemma3Config(text_config=text, vision_config=sight, **ids, **more)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            if name.endswith("mm_input_projection_weight"):  # 0 where it is made
                parameter.normal_()
    return model


class Qwen2_5_VLProcessor(Gemma3Processor):
    def __call__(self, images=None, **given):
        out = super().__call__(images=images, **given)
        out["mm_token_type_ids"] = out.pop("token_type_ids")
        if images:
            out["pixel_values"] = out["pixel_values"].view(-1, 24).repeat_interleave(2, 0)
            out["image_grid_thw"] = torch.tensor([[1, 4, 4]] * (len(out["pixel_values"]) // 16))
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


qwen_processor = Qwen2_5_VLProcessor(tokenizer, chat_template=TEMPLATE)
