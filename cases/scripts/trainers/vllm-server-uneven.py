# TRL 1.16.0: GRPO with tools, vllm_mode="server", several processes: a process whose rows called fewer tools than another's goes on with that one's completions
# trl/generation/vllm_generation.py:VLLMGeneration.generate slices by process_index * len(prompts) of its own; trl/trainer/grpo_trainer.py:_tool_call_loop hands over the rows with a tool call
import os
import subprocess
import sys

import accelerate
from trl.generation.vllm_generation import VLLMGeneration

ROWS = {"as many": ([10, 11], [12, 13]), "3 and 1": ([10, 11, 12], [13]), "1 and 3": ([10], [11, 12, 13])}


class Server:
    """Answers each prompt with its own first token, so that one sees whose answer a row has."""

    def generate(self, prompts, n, **_):
        answers = [[prompt[0]] * 2 for prompt in prompts for _ in range(n)]
        logprobs = [[[0.0]] * 2 for _ in answers]
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": logprobs}


def answered(rows, accelerator):
    """What VLLMGeneration.generate gives to each row of this process, in the turn after a tool call."""
    sender = object.__new__(VLLMGeneration)
    names = "temperature top_p top_k min_p repetition_penalty max_completion_length logprobs structured_outputs_regex"
    vars(sender).update(dict.fromkeys((*names.split(), "generation_kwargs")))
    vars(sender).update(accelerator=accelerator, mode="server", vllm_client=Server())
    _, completions, _, _ = sender.generate([[row] * 3 for row in rows], None, num_generations=1)
    return [completion[0] for completion in completions]


if "RANK" in os.environ:
    accelerator = accelerate.Accelerator(cpu=True)
    for name, both in ROWS.items():
        rows = both[accelerator.process_index]
        print(f"ROW {name}: {accelerator.process_index}: {rows}: {answered(rows, accelerator)}", flush=True)
        accelerator.wait_for_everyone()
    os._exit(0)  # gloo's threads may abort an interpreter that ends
launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
command = [sys.executable, *launch, "--local-addr=127.0.0.1", sys.argv[0]]
told = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
lines = sorted(line[4:].split(": ") for line in told.stdout.splitlines() if line.startswith("ROW "))
if len(lines) != 6:
    raise SystemExit(told.stderr[-2000:])
print("| rows with a tool call | process | its rows | answers of the server to |\n|---|---|---|---|")
for line in lines:
    print("|", " | ".join(line), "|")
raise SystemExit(int(any(rows != found for _, _, rows, found in lines)))
