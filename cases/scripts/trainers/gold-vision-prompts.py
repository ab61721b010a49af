"""GOLD on images, max_length: the prompts that the student goes on from are filled up on the left and cut on the right. A short
prompt beside a long one loses its end to its own padding.

The collator alone; the processor makes tokens alone.
"""

import transformers
from setup_tiny import tokenizer
from trl.experimental.utils import DataCollatorForVisionLanguageChatML


class Processor(transformers.ProcessorMixin):
    def __init__(self, tokenizer, **_):
        super().__init__(tokenizer)

    def __call__(self, text=None, images=None, **more):
        return self.tokenizer(text, **more)


short, long = "w2 w3 w4 w5 w6", " ".join(["w30"] * 20)
bad = False
print("| max_length | beside | the student goes on after | right |\n|---|---|---|---|")
for length in (64, 17, 12):
    rows = [{"prompt": prompt, "completion": " w9", "images": ["a picture"]} for prompt in (short, long)]
    batch = DataCollatorForVisionLanguageChatML(Processor(tokenizer), max_length=length)(rows)
    found = tokenizer.decode(batch["prompts"][0][batch["prompt_attention_mask"][0].bool()])
    bad |= found != short
    print(f"| {length} | 20 tokens | {found} | {short} |")
raise SystemExit(int(bad))
