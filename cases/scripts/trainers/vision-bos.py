# TRL 1.16.0: SFT, DPO, KTO, texts with images that are no conversations: no <bos>, which the same texts have without images
# trl/trainer/sft_trainer.py:DataCollatorForVisionLanguageModeling, and DPO's and KTO's: add_special_tokens=False, "to avoid adding the BOS twice"; only a chat template adds one. The first row of the dataloader
import datasets
import transformers
from setup_images import BOS, EOS, PAD, gemma3, processor, tokenizer
from setup_tiny import options
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

TEXTS = {"prompt": "w5 w6", "completion": " w7", "chosen": " w7", "rejected": " w8"}
KINDS = {
    "SFT": (SFTTrainer, SFTConfig, ("prompt", "completion"), {}, {}),
    "DPO": (DPOTrainer, DPOConfig, ("prompt", "chosen", "rejected"), {}, {}),
    "KTO": (KTOTrainer, KTOConfig, ("prompt", "completion"), {"label": True}, {"loss_type": "apo_zero_unpaired"}),
}


def llama():
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    ids = dict(pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **ids))


def sequence(name, made, handed, row):
    kind, config, _, _, more = KINDS[name]
    args = config(**options(max_length=None, gradient_checkpointing=False, **more))
    reference = {} if name == "SFT" else {"ref_model": made()}
    data = datasets.Dataset.from_list([row, row])
    trainer = kind(made(), args=args, train_dataset=data, processing_class=handed, **reference)
    ids = next(iter(trainer.get_train_dataloader()))["input_ids"][0].tolist()
    return tokenizer.decode([i for i in ids if i != PAD])


bad = False
print("| trainer | without images | with one | what the processor makes of the prompt |\n|---|---|---|---|")
for name, (_, _, columns, more, _) in KINDS.items():
    row = {k: v for k, v in TEXTS.items() if k in columns} | more
    plain = sequence(name, llama, tokenizer, row)
    seen = sequence(name, gemma3, processor, row | {"images": ["1"], "prompt": "<boi> " + row["prompt"]})
    own = tokenizer.decode(processor(text="<boi> " + row["prompt"])["input_ids"][0])
    bad |= plain.startswith("<bos>") and not seen.startswith("<bos>")
    print(f"| {name} | {plain} | {seen} | {own} |")
raise SystemExit(int(bad))
