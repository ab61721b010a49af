# peft 0.21.2, TRL 1.16.0: ensure_weight_tying: a second adapter, as TRL's "ref" of a PeftModel, is put on the embeddings and not on the tied head: the reference is another model
# peft/utils/other.py:_get_module_names_tied_with_embedding compares names with the wrapped layers of the first adapter, and finds none; a config's own fields are lost with it
import tempfile
import warnings

import peft
import torch
import transformers
from setup_lora import logged
from setup_self import saved
from trl import DPOConfig, DPOTrainer

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
WAYS = {
    "LoRA on embeddings": dict(target_modules=["embed_tokens"]),
    "embeddings in modules_to_save": dict(modules_to_save=["embed_tokens"]),
}
ids = torch.arange(2, 26).view(2, 12)


def model():
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    config = transformers.Qwen2Config(vocab_size=32, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, **size)
    return transformers.Qwen2ForCausalLM(config).eval()


def logits(one):
    with torch.no_grad():
        return one.eval()(input_ids=ids).logits


print(
    "| ensure_weight_tying | logits: loaded alone, as a second adapter | DPO's reward margin before the first step, right: 0 |\n|---|---|---|"
)
wrong = False
for name, more in WAYS.items():
    base = saved(model())
    config = peft.LoraConfig(**more, ensure_weight_tying=True, task_type="CAUSAL_LM")
    policy = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    right, folder = logits(policy), tempfile.mkdtemp()
    policy.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(model(), folder)
    alone = float((logits(again) - right).abs().max())
    again.load_adapter(folder, "second")
    again.set_adapter("second")
    second = float((logits(again) - right).abs().max())
    try:
        told = f"{logged(DPOTrainer, DPOConfig, policy, beta=1.0)[0]['rewards/margins']:.4f}"
    except AttributeError as error:
        told = f"AttributeError: {error}"
    print(f"| {name} | {alone:.4f} off, {second:.4f} off | {told} |")
    wrong |= second > 1e-3
raise SystemExit(int(wrong))
