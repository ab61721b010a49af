# trl 1.16: SFT and GRPO end with an AttributeError on models whose config calls the number of experts num_local_experts: Granite MoE, Phi-MoE, Llama 4, DeepSeek-V4
# trl/trainer/utils.py:add_fused_lm_head reads text_config.num_experts for the load-balancing loss, which a config's own router_aux_loss_coef of 0.001 switches on
import transformers
from setup_grpo import datasets, options, rewarded, tokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SIZE = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
SIZE |= dict(intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
SIZE |= dict(pad_token_id=0, eos_token_id=1, bos_token_id=1)
ROWS = [{"prompt": f"w{i} w{i + 1}", "completion": f"w{i + 2} w{i + 3}"} for i in range(2, 10)]


def run(name, grpo, coefficient):
    """How a step ends."""
    config = transformers.AutoConfig.for_model(name, **SIZE)
    model = transformers.AutoModelForCausalLM.from_config(config)
    wanted = dict(per_device_train_batch_size=4, max_steps=1, router_aux_loss_coef=coefficient)
    data = datasets.Dataset.from_list(ROWS)
    given = dict(model=model, train_dataset=data, processing_class=tokenizer)
    if grpo:
        args = GRPOConfig(**options(**wanted, num_generations=2, max_completion_length=4))
        trainer = GRPOTrainer(reward_funcs=rewarded, args=args, **given)
    else:
        trainer = SFTTrainer(args=SFTConfig(**options(**wanted)), **given)
    try:
        trainer.train()
    except AttributeError as error:
        return str(error)
    return "a step"


print("| model | trainer | router_aux_loss_coef | result |\n|---|---|---|---|")
failed = False
for name in ("qwen3_moe", "granitemoe", "phimoe"):
    for grpo in (False, True):
        for coefficient in (None, 0.0):
            found = run(name, grpo, coefficient)
            failed |= found != "a step"
            print(f"| {name} | {'GRPO' if grpo else 'SFT'} | {coefficient} | {found} |", flush=True)
raise SystemExit(int(failed))
