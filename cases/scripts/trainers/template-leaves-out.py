# TRL 1.16.0, SFT (without assistant_only_loss), DPO, conversations, templates that TRL knows: GLM-4-MoE's answers get no token that ends them; tool calls are left out, and an empty answer is trained on, for Llama 3, Gemma, Phi-3, Cohere and LFM2, without an error or a warning
# trl/chat_templates/glm4moe_training.jinja writes the end, and is taken for assistant_only_loss alone; GRPO asks trl.chat_template_utils.supports_tool_calling, SFT and DPO do not
import datasets
import transformers
from setup_bytes import of_bytes
from setup_tiny import options
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, chat_template_utils

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
tokenizer = of_bytes(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
SIZE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
ASKED = [{"role": "user", "content": "Weather?"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ANSWER, OTHER = ([{"role": "assistant", "content": text}] for text in ("Rain.", "Snow."))
CALLED = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


def trained(chosen, rejected):
    one, two = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, vocab_size=len(tokenizer))) for _ in range(2)
    )
    given = dict(processing_class=tokenizer)
    data = datasets.Dataset.from_list([{"prompt": ASKED, "completion": chosen}] * 2)
    sft = SFTTrainer(one, args=SFTConfig(**options()), train_dataset=data, **given).train_dataset[0]["labels"]
    data = datasets.Dataset.from_list([{"prompt": ASKED, "chosen": chosen, "rejected": rejected}] * 2)
    dpo = DPOTrainer(one, ref_model=two, args=DPOConfig(**options()), train_dataset=data, **given).train_dataset[0]
    return tokenizer.decode([i for i in sft if i >= 0]), tokenizer.decode(dpo["chosen_ids"])


print("| template | an answer, SFT | DPO | a tool call, SFT |\n|---|---|---|---|")
wrong = False
for name in ("qwen3", "glm4moe", "llama3", "llama3_1", "gemma", "phi3", "cohere", "lfm2"):
    tokenizer.chat_template = getattr(chat_template_utils, f"{name}_chat_template")
    said, called = trained(ANSWER, OTHER), trained(CALLED, OTHER)
    print(f"| {name} | `{said[0]!r}` | `{said[1]!r}` | `{called[0]!r}` |", flush=True)
    wrong |= "Rome" not in called[0] or said[0].endswith("Rain.")
raise SystemExit(int(wrong))
