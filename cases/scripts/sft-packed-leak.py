# transformers 5.23.0, TRL 1.16.0: SFT with packing or padding_free: GPT-OSS (eager, its default), Falcon, OPT, Bloom, MPT, AFMoE, Qwen2.5-VL, Mamba, Jamba, MiniMax, RWKV, RecurrentGemma: sequences read those before them
# e.g. transformers/models/gpt_oss/modeling_gpt_oss.py:GptOssModel.forward gives create_causal_mask no position_ids; recurrent layers take no seq_idx, nor refuse; trl/trainer/sft_trainer.py asks for no attention
import datasets
import torch
import transformers
from setup_tiny import options, tokenizer
from trl import SFTConfig, SFTTrainer

SIZE = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
SIZE |= dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
ROPE = dict(num_key_value_heads=1, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))
KINDS = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": dict(head_dim=8, num_key_value_heads=1),
    "GptOssForCausalLM": dict(head_dim=8, num_key_value_heads=1, num_local_experts=4),
    "FalconForCausalLM": {},
    "OPTForCausalLM": dict(ffn_dim=32, word_embed_proj_dim=16, dropout=0.0),
    "BloomForCausalLM": dict(n_head=2, n_layer=2),
    "MptForCausalLM": dict(d_model=16, n_heads=2, n_layers=2),
    "AfmoeForCausalLM": dict(
        head_dim=8, num_key_value_heads=1, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8
    ),
    "MambaForCausalLM": dict(state_size=4),
    "JambaForCausalLM": dict(num_key_value_heads=1, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
    "MiniMaxForCausalLM": dict(head_dim=8, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1),
    "RwkvForCausalLM": {},
    "Qwen2_5_VLForConditionalGeneration": dict(
        text_config=SIZE | ROPE, vision_config=dict(depth=1, out_hidden_size=16)
    ),
    "RecurrentGemmaForCausalLM": dict(head_dim=8, num_key_value_heads=1, block_types=["recurrent", "attention"]),
}
TEXTS = ("w2 w3 w4 w5 w6", "w7 w8 w9", "w10 w11 w12 w13", "w14 w15 w16")


def loss(name, more, **packing):
    """What SFT logs of the four texts, in one step."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZE | more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    args = SFTConfig(**options(per_device_train_batch_size=4, max_steps=1, **packing))
    args.logging_strategy, args.logging_steps = "steps", 1
    data = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    trainer = SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["loss"], model.config._attn_implementation


transformers.logging.set_verbosity_error()
print("| SFT, the same texts | attention | loss, padded | packed |\n|---|---|---|---|")
wrong = False
for name, more in KINDS.items():
    (alone, attention), (packed, _) = loss(name, more), loss(name, more, packing=True, max_length=32)
    print(f"| {name} | {attention} | {alone:.4f} | {packed:.4f} |")
    wrong |= abs(packed / alone - 1) > 1e-4
raise SystemExit(int(wrong))
