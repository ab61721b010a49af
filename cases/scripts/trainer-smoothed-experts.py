# transformers 5.23.0: Trainer, label_smoothing_factor, a model of experts with output_router_logits: the load-balancing loss is not trained
# transformers/trainer.py:Trainer.compute_loss takes the labels from the model and the smoothed loss of its logits; what else the model adds to its loss is left out
import transformers
from setup_processes import norm
from setup_tiny import experts, options

ROWS = [dict(input_ids=list(range(2 + i, 10 + i)), labels=list(range(2 + i, 10 + i))) for i in range(4)]


def run(smoothing, coefficient):
    """The gradient's norm of a step."""
    model = experts()
    model.config.output_router_logits = True
    model.router_aux_loss_coef = model.config.router_aux_loss_coef = coefficient
    wanted = dict(per_device_train_batch_size=4, max_steps=1, label_smoothing_factor=smoothing)
    args = transformers.TrainingArguments(**options(**wanted))
    return norm(transformers.Trainer(model, args, train_dataset=ROWS))


print("| label_smoothing_factor | gradient norm, router_aux_loss_coef 0 | 100 |\n|---|---|---|")
found = {smoothing: (run(smoothing, 0.0), run(smoothing, 100.0)) for smoothing in (0.0, 0.1)}
for smoothing, (without, balanced) in found.items():
    print(f"| {smoothing} | {without:.6f} | {balanced:.6f} |")
raise SystemExit(int(found[0.1][0] == found[0.1][1] and found[0.0][0] != found[0.0][1]))
