# TRL 1.16.0, CPO, ORPO, KTO and others: a tool call in a dataset of Dataset.from_list (or of a Parquet file) has `null` for each argument that another row's call has
# trl/experimental/cpo/cpo_trainer.py hands the rows to maybe_apply_chat_template as Arrow made them, in TRL 0.29 too, where SFT and DPO took the None out
import datasets
from setup_tiny import tokenizer
from trl import maybe_apply_chat_template

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments'] | tojson }}"
tokenizer.chat_template = TEMPLATE + "{% endfor %}{% endfor %}"
ASKED = [{"role": "user", "content": "w2 "}]


def call(**arguments):
    function = {"name": "w3", "arguments": arguments}
    return [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]


ROWS = [
    {"prompt": ASKED, "chosen": one, "rejected": other}
    for one, other in ((call(city=1), call(to=2)), (call(to=2), call(city=1)))
]
print("| dataset | chosen |\n|---|---|")
wrong = False
for name, more in (("from_list", {}), ('from_list(on_mixed_types="use_json")', {"on_mixed_types": "use_json"})):
    data = datasets.Dataset.from_list(ROWS, **more)
    text = maybe_apply_chat_template(data[0], tokenizer)["chosen"]  # as CPOTrainer and ORPOTrainer do
    print(f"| {name} | `{text}` |")
    wrong |= "null" in text
raise SystemExit(int(wrong))
