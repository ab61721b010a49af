# transformers 5.23.0, Youtu-LLM with a pad_token_id, as TRL's trainers write into the config: from_pretrained sets the row of the padding token to 0, in the tied head too; where it is <eos>, the model that is loaded ends its answers by chance
# transformers/models/youtu/modeling_youtu.py:YoutuPreTrainedModel._init_weights does not ask whether the weight was loaded (`_is_hf_initialized`) before it writes to a slice, as 14 other models do; BLT, Funnel and Chinese-CLIP have the line too
import tempfile

import torch
import transformers

transformers.logging.set_verbosity_error()
SIZE = dict(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
TIED = dict(eos_token_id=1, bos_token_id=2, tie_word_embeddings=True)
KINDS = {"Llama": {}, "DeepseekV3": LATENT | dict(first_k_dense_replace=2), "Youtu": LATENT}
IDS = torch.arange(3, 23)[None]


def log_probs(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.double().log_softmax(-1)


print("| model | pad_token_id | a saved model that is loaded: log-probs off by | of <eos> |\n|---|---|---|---|")
wrong = False
for name, more in KINDS.items():
    for pad in (None, 1):
        torch.manual_seed(0)
        kind = getattr(transformers, f"{name}ForCausalLM")
        model = kind(kind.config_class(**SIZE | TIED | more, num_key_value_heads=4))
        for weight in model.parameters():
            if weight.dim() >= 2:
                torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        model.config.pad_token_id = pad  # as SFTTrainer does with a tokenizer whose padding token is <eos>
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            off = (log_probs(kind.from_pretrained(folder)) - log_probs(model)).abs()
        print(f"| {name} | {pad} | {float(off.max()):.2g} | {float(off[..., 1].max()):.2g} |", flush=True)
        wrong |= float(off.max()) > 1e-4
raise SystemExit(int(wrong))
