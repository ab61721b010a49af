# TRL 1.16.0, SFT, DPO, KTO, Reward, the templates of DeepSeek-R1-Distill and DeepSeek-V3: what an answer has up to `</think>` is not trained on (of `messages` without a word); DPO's pairs that differ in their reasoning are pairs of the same tokens
# trl/trainer/sft_trainer.py takes trl/chat_templates/deepseek_r1_distill_training.jinja, which keeps reasoning, for assistant_only_loss alone; deepseekv3_training.jinja drops it there too
import datasets
import transformers
from setup_bytes import of_bytes
from setup_tiny import options
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, chat_template_utils

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
tokenizer = of_bytes(bos_token="<s>", eos_token="<｜end▁of▁sentence｜>", pad_token="<pad>")
SIZE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
ASKED = [{"role": "user", "content": "2*2?"}]
GOOD, BAD = ([{"role": "assistant", "content": f"<think>\n{why}\n</think>\n\n4"}] for why in ("2+2.", "Cats."))
ROWS = {"messages": {"messages": ASKED + GOOD}, "prompt, completion": {"prompt": ASKED, "completion": GOOD}}


def trainer(kind, args, row, **more):
    model, reference = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, vocab_size=len(tokenizer))) for _ in range(2)
    )
    given = {"ref_model": reference} if kind is DPOTrainer else {}
    data = datasets.Dataset.from_list([row] * 2)
    return kind(model, args=args(**options(**more)), train_dataset=data, processing_class=tokenizer, **given)


print("| template | columns | trained on | with reasoning |\n|---|---|---|---|")
wrong = False
for name in ("deepseek_r1_distill", "deepseekv3"):
    tokenizer.chat_template = getattr(chat_template_utils, f"{name}_chat_template")
    for columns, row in ROWS.items():
        for more in ({}, {"assistant_only_loss": True}):
            labels = trainer(SFTTrainer, SFTConfig, row, **more).train_dataset[0]["labels"]
            text = tokenizer.decode([label for label in labels if label >= 0])
            told = "".join(f", {key}" for key in more)
            print(f"| {name} | {columns}{told} | `{text!r}` | {'yes' if '2+2.' in text else 'no'} |", flush=True)
            wrong |= "2+2." not in text
    pair = trainer(DPOTrainer, DPOConfig, {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}).train_dataset[0]
    same = pair["chosen_ids"] == pair["rejected_ids"]
    print(
        f"| {name} | DPO, chosen beside rejected | {'the same tokens' if same else 'two'} | {'no' if same else 'yes'} |"
    )
raise SystemExit(int(wrong))
