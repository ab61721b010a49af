"""GRPO, environment_factory: an environment's get_reward is appended to the caller's own list of reward functions, so that the second
trainer that is given the list counts it twice."""

import pathlib

import datasets
import tokenizers
import transformers
import trl
from setup_tiny import options, tiny
from trl import GRPOConfig, GRPOTrainer

transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
words = {"<pad>": 0, "<|im_end|>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 32)}}
whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<|im_end|>")
tokenizer.chat_template = (pathlib.Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


class Environment:
    def reset(self, **_):
        return None

    def look(self) -> str:
        """Look around."""
        return "nothing"

    def get_reward(self) -> float:
        return 1.0


def nothing(completions, **_):
    return [0.0 for _ in completions]


def reward(functions):
    sizes = dict(per_device_train_batch_size=2, num_generations=2, max_completion_length=4, max_steps=1)
    args = GRPOConfig(**options(**sizes) | dict(logging_strategy="steps", logging_steps=1))
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "w5 w6"}]}])
    more = dict(processing_class=tokenizer, environment_factory=Environment)
    trainer = GRPOTrainer(tiny(), functions, args, data, **more)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["reward"]


functions = [nothing]
found = [reward(functions) for _ in range(3)]
print("| trainer given the same list | reward | right |\n|---|---|---|")
for number, value in enumerate(found, 1):
    print(f"| {number} | {value:g} | 1 |")
raise SystemExit(int(found != [1.0] * 3))
