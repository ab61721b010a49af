# TRL 1.16.0: disable_dropout=True, the default of DPO, KTO, CPO, ORPO and others, leaves the dropout between layers on in OPT, XGLM, BioGPT, GPT-BigCode and Seed-OSS
# trl/trainer/utils.py:disable_dropout_in_model looks for nn.Dropout; these models call nn.functional.dropout with a share of their config. Of attention alone: trl-disable-dropout
import peft
import transformers
from setup_lora import logged, model
from trl import DPOConfig, DPOTrainer

SIZE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, pad_token_id=0)
OFF = dict(attention_dropout=0.0)
KINDS = {
    "GPT-2, resid_pdrop=0.1": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, attn_pdrop=0.0)
    ),
    "OPT, dropout=0.1": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(ffn_dim=32, word_embed_proj_dim=16, **SIZE, **OFF)
    ),
    "Seed-OSS, residual_dropout=0.1": lambda: transformers.SeedOssForCausalLM(
        transformers.SeedOssConfig(intermediate_size=32, num_key_value_heads=2, head_dim=8, **SIZE, **OFF)
    ),
}
print(
    "| model, its default, learning rate 0 | log-prob of the chosen completions in step 1 | step 2, right: as step 1 |"
)
print("|---|---|---|")
bad = False
for name, made in KINDS.items():
    lora = peft.LoraConfig(target_modules=["c_attn"] if "GPT-2" in name else ["q_proj", "v_proj"])
    first, second = (row["logps/chosen"] for row in logged(DPOTrainer, DPOConfig, model(made), lora, max_steps=2))
    bad |= abs(first - second) > 1e-3
    print(f"| {name} | {first:.4f} | {second:.4f} |")
raise SystemExit(int(bad))
