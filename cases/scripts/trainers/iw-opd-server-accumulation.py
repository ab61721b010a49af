"""IW-OPD's JSD to a teacher behind a server, under accumulation: completions of one length, so every cut has one mean."""

import datasets
import torch
import trl.generation.vllm_client
from setup_distilled import said
from setup_processes import norm
from setup_tiny import options, tiny, tokenizer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

TEACHER = tiny(1)


class Client:
    """A server's answers, from a local teacher."""

    def __init__(self, *given, **more):
        pass

    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature, **more):
        out = {"actual_logprobs": [], "logprobs": [], "logprob_token_ids": []}
        for ids, n in zip(sequences, prompt_lengths):
            with torch.no_grad():
                own = TEACHER(torch.tensor([ids])).logits[0, n - 1 : -1].div(temperature).log_softmax(-1)
            top = own.topk(top_logprobs)
            out["actual_logprobs"].append(own.gather(-1, torch.tensor(ids[n:])[:, None]).tolist())
            out["logprobs"].append(top.values.tolist())
            out["logprob_token_ids"].append(top.indices.tolist())
        return out


trl.generation.vllm_client.VLLMClient = Client
ROWS = [said([2 + i, 3], [4 + i, 9 + i, 12]) for i in range(4)]


def found(batch, accumulation, **more):
    args = IWOPDConfig(
        **options(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            lmbda=0.0,
            max_length=32,
            max_completion_length=4,
            use_teacher_server=True,
            teacher_model_server_url="http://localhost:1",
            distillation_objective="jsd",
            logging_strategy="steps",
            logging_steps=1,
            **more,
        )
    )
    trainer = IWOPDTrainer(
        tiny(), None, args=args, train_dataset=datasets.Dataset.from_list(ROWS), processing_class=tokenizer
    )
    gradient = norm(trainer)
    return trainer.state.log_history[0]["loss"], gradient


bad = 0
print("| beta | micro-batches | logged loss | gradient norm |\n|---|---|---|---|")
for beta, more in ((0.5, dict(loss_top_k=1)), (0.0, dict(loss_top_k=4))):
    norms = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        loss, gradient = found(batch, accumulation, beta=beta, **more)
        norms.append(gradient)
        print(f"| {beta} | {accumulation} of {batch} | {loss:.6g} | {gradient:.6g} |", flush=True)
    bad |= abs(norms[2] / norms[0] - 1) > 1e-3
raise SystemExit(int(bad))
