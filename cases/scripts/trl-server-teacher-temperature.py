# Distillation from a vLLM server at a temperature other than 1: the student is divided by it, the teacher is not
# vLLM applies a temperature to sampled tokens alone: "prompt tokens skip sampling processors, so processed_* and raw_* yield
# the same scores here" (0.33.0, v1/worker/gpu_model_runner.py _get_prompt_logprobs_dict). The server below answers so. Student
# and teacher are one model: each divergence is 0 by definition, its gradient too.

from unittest import mock

import datasets
import torch
import transformers
from setup_tiny import options, tiny, tokenizer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
from trl.generation import vllm_client

tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
asked = []


class Client(vllm_client.VLLMClient):
    def __init__(self, **_):
        self.base_url, self.model, self.teacher = "", "teacher", bold()

    def _post(self, url, json):
        asked.append(json)
        with torch.no_grad():
            scores = [self.teacher(input_ids=torch.tensor([ids])).logits[0] for ids in json["prompt"]]
        return {"choices": [{"prompt_logprobs": listed(z.log_softmax(-1), json)} for z in scores]}


def listed(logps, json):
    top = [row.topk(json["prompt_logprobs"]) for row in logps[:-1]]
    rows = [zip(t.indices.tolist(), t.values.tolist()) for t in top]
    return [None] + [{str(i): {"logprob": x, "rank": k + 1} for k, (i, x) in enumerate(row)} for row in rows]


def bold():
    model = tiny()
    model.lm_head.weight.data *= 40
    return model


def trained(temperature):
    turns = [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4 w5 w6"}]
    data = datasets.Dataset.from_list([{"messages": turns, "prompt": turns[:1], "completion": turns[1:]}] * 2)
    more = dict(per_device_train_batch_size=2, max_steps=1, beta=0.0, loss_top_k=32, max_completion_length=4)
    args = ServerDistillationConfig(
        **options(temperature=temperature, teacher_model_server_url="http://127.0.0.1", **more)
    )
    with mock.patch.object(vllm_client, "VLLMClient", Client):
        trainer = ServerDistillationTrainer(bold(), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    losses, norms, compute_loss = [], [], trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: losses.append(compute_loss(*a, **k)) or losses[-1]
    clip = trainer.accelerator.clip_grad_norm_
    trainer.accelerator.clip_grad_norm_ = lambda *a, **k: norms.append(float(clip(*a, **k))) or norms[-1]
    trainer.train()
    return float(losses[0].detach()), norms[0]


print("| temperature | sent to the server | loss, right: 0 | gradient's norm, right: 0 |\n|---|---|---|---|")
wrong = False
for temperature in (1.0, 0.7, 2.0):
    loss, norm = trained(temperature)
    wrong |= abs(loss) > 1e-3
    print(f"| {temperature} | {asked[-1].get('temperature')} | {loss:.3f} | {norm:.3f} |")
raise SystemExit(int(wrong))
