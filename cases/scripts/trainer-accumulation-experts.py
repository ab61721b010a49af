# transformers 5.23.0: Trainer, a model of experts with output_router_logits: the load-balancing loss is multiplied by gradient_accumulation_steps
# the token loss is divided by the tokens of the whole window, the balancing loss of each micro-batch is added whole and never divided.
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

ids = torch.randint(
    3, 40, (6,), generator=torch.Generator().manual_seed(1)
)  # four equal rows: a batch and a window must agree exactly


def gradient(coefficient, batch, accumulation):
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=coefficient,
        )
    )
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        Trainer(model, args, train_dataset=[dict(input_ids=ids, labels=ids)] * 4).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


print(
    "| micro-batches | gradient norm of the balancing loss (coefficient 1 less coefficient 0) | of the token loss |\n|---|---|---|"
)
norms = []
for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
    tokens = gradient(0.0, batch, accumulation)
    norms.append(float((gradient(1.0, batch, accumulation) - tokens).norm()))
    print(f"| {accumulation} of {batch} | {norms[-1]:.5f} | {tokens.norm():.5f} |")
raise SystemExit(int(abs(norms[-1] / norms[0] - 1) > 1e-2))
