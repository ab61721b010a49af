"""SFT, DPO and KTO on rows with images: the column "tools" has no effect, nor SFT's "chat_template_kwargs", and texts that are
no conversations get no <eos>. Without images all of it is there.

The processor makes tokens alone: what an image becomes is not looked at.
"""

import tempfile

import datasets
import transformers
from setup_tiny import options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% if think %}w8 {% endif %}{% for m in messages %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% endif %}{% endfor %}{% endif %} <eos> {% endfor %}"
)


class Processor(transformers.ProcessorMixin):
    def __init__(self, tokenizer, chat_template=None, **_):
        super().__init__(tokenizer, chat_template=chat_template)

    def __call__(self, text=None, images=None, return_dict=None, **more):
        return self.tokenizer([text] if isinstance(text, str) else text, **more)


tokenizer.chat_template = TEMPLATE
tokenizer.image_token = "w31"
processor = Processor(tokenizer, chat_template=TEMPLATE)
folder = tempfile.mkdtemp()
tiny().save_pretrained(folder)
tool = {"type": "function", "function": {"name": "w9", "description": "", "parameters": {"type": "object"}}}
told = {"tools": [tool], "chat_template_kwargs": {"think": True}}
said = {
    name: [{"role": "user" if name == "prompt" else "assistant", "content": text}]
    for name, text in (("prompt", "w2 w3"), ("completion", "w4"), ("chosen", "w4"), ("rejected", "w5"))
}
texts = {"prompt": "w2 w3", "completion": " w4", "chosen": " w4", "rejected": " w5"}
KINDS = {
    "SFT": (SFTTrainer, SFTConfig, ("prompt", "completion"), {}, {}),
    "DPO": (DPOTrainer, DPOConfig, ("prompt", "chosen", "rejected"), {}, {}),
    "KTO": (KTOTrainer, KTOConfig, ("prompt", "completion"), {"label": True}, {"loss_type": "apo_zero_unpaired"}),
}


def sequence(name, row):
    kind, config, _, _, more = KINDS[name]
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    args = config(**options(max_length=None, gradient_checkpointing=False, **more))
    data = datasets.Dataset.from_list([row, row])
    trainer = kind(model, args=args, train_dataset=data, processing_class=processor)
    ids = next(iter(trainer.get_train_dataloader()))["input_ids"][0].tolist()
    return tokenizer.decode([i for i in ids if i])


bad = False
print("| trainer | row | without images | with |\n|---|---|---|---|")
for name, (_, _, columns, more, _) in KINDS.items():
    for what, given in (("conversation", said | told), ("texts", texts)):
        row = {k: v for k, v in given.items() if k in (*columns, *told)} | more
        plain, seen = sequence(name, row), sequence(name, row | {"images": ["a picture"]})
        bad |= plain.split() != seen.split()
        print(f"| {name} | {what} | {plain} | {seen} |")
raise SystemExit(int(bad))
