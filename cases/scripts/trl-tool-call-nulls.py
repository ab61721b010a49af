# TRL 1.16.0, SFT, DPO, KTO: a tool call in a dataset of Dataset.from_list (or of a Parquet file) is trained with `null` for each argument that another row's call has: Arrow fills them in
# Up to 0.29 the trainers took these None out (remove_none_values); from 1.0 on this is left to the user, by with_transform(remove_none_values), which SFT refuses, and which map undoes
import datasets
import transformers
from setup_bytes import of_bytes
from setup_tiny import options
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer, chat_template_utils

try:
    from trl.trainer.utils import remove_none_values
except ImportError:  # where it has another name
    remove_none_values = None

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
tokenizer = of_bytes(eos_token="<|im_end|>", pad_token="<|endoftext|>")
tokenizer.chat_template = chat_template_utils.qwen3_chat_template
SIZE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)


def model():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZE, head_dim=8, vocab_size=len(tokenizer)))


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]


WEATHER, SEND = call("weather", city="Rome"), call("send", to="Ann", text="hello")
ASKED = [{"role": "user", "content": "Please."}]
SFT = [{"prompt": ASKED, "completion": WEATHER}, {"prompt": ASKED, "completion": SEND}]
DPO = [{"prompt": ASKED, "chosen": WEATHER, "rejected": SEND}, {"prompt": ASKED, "chosen": SEND, "rejected": WEATHER}]
KTO = [row | {"label": True} for row in SFT]
given = dict(processing_class=tokenizer)


def told(ids):
    text = tokenizer.decode(ids)
    return text[text.index('"arguments": ') : text.index("\n</tool_call>")] if '"arguments"' in text else text


def shown(name, right, data, kind, args, column):
    try:
        reference = {} if kind is SFTTrainer else {"ref_model": model()}
        trainer = kind(model(), args=args(**options()), train_dataset=data, **given, **reference)
        found = told(trainer.train_dataset[0][column])
    except ValueError as error:
        found = f"ValueError: {str(error)[:74]}…"
    print(f"| {name} | `{found}` | {'yes' if found == right else 'no'} |", flush=True)
    return found == right


right = told(tokenizer.apply_chat_template(ASKED + WEATHER, tokenize=True)["input_ids"])
print(f"The call is `{right}`, another row's has `to` and `text`.\n\n| | trained on | right |\n|---|---|---|")
sft = (SFTTrainer, SFTConfig, "input_ids")
plain = shown("SFT, from_list", right, datasets.Dataset.from_list(SFT), *sft)
shown("DPO, from_list", right, datasets.Dataset.from_list(DPO), DPOTrainer, DPOConfig, "chosen_ids")
shown("KTO, from_list", right, datasets.Dataset.from_list(KTO), KTOTrainer, KTOConfig, "completion_ids")
if remove_none_values:
    cleaned = datasets.Dataset.from_list(SFT)
    shown("SFT, with_transform, as its note says", right, cleaned.with_transform(remove_none_values), *sft)
    shown("SFT, map(remove_none_values)", right, cleaned.map(remove_none_values), *sft)
as_json = datasets.Dataset.from_list(SFT, on_mixed_types="use_json")
shown('SFT, from_list(on_mixed_types="use_json")', right, as_json, *sft)
raise SystemExit(int(not plain))
