# TRL 1.16.0, SFT, data in ShareGPT's form (`conversations`, `from`: human, gpt; `value`): it is taken for conversations, and the messages are left out: Qwen2.5 is trained on its system prompt alone, Qwen3 on nothing, DeepSeek-V3 on <bos>; Llama 3 on roles that it does not know
# trl/data_utils.py:maybe_convert_to_chatml renames the keys `from` and `value`, and keeps human and gpt as roles, which are user and assistant; these templates write nothing for a role that they do not know
import datasets
import transformers
from setup_bytes import of_bytes
from setup_tiny import options
from trl import SFTConfig, SFTTrainer, chat_template_utils

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
tokenizer = of_bytes(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
SIZE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
TEXTS = ("Who is it?", "It is Ann.")
SHARED = {"conversations": [{"from": one, "value": text} for one, text in zip(("human", "gpt"), TEXTS, strict=True)]}
SAID = {"messages": [{"role": one, "content": text} for one, text in zip(("user", "assistant"), TEXTS, strict=True)]}


def trained(row):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, vocab_size=len(tokenizer)))
    given = dict(train_dataset=datasets.Dataset.from_list([row] * 2), processing_class=tokenizer)
    data = SFTTrainer(model, args=SFTConfig(**options()), **given).train_dataset
    return tokenizer.decode(data[0]["input_ids"]) if len(data) else "no row is left"


print("| template | of the same messages with the roles user and assistant | trained on |\n|---|---|---|")
wrong = False
for name in ("qwen2_5", "qwen3", "phi3", "deepseekv3", "glm4moe", "llama3"):
    tokenizer.chat_template = getattr(chat_template_utils, f"{name}_chat_template")
    found, right = trained(SHARED), trained(SAID)
    print(f"| {name} | `{right[-80:]!r}` | `{found[-80:]!r}` |", flush=True)
    wrong |= found != right
raise SystemExit(int(wrong))
