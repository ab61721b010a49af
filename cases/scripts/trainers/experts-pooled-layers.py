# transformers 5.23.0, `output_router_logits` (SFT's, DPO's, GRPO's router_aux_loss_coef): layers that collapse, each on other experts, count as balanced: the loss is at its minimum
# transformers/models/mixtral/modeling_mixtral.py:load_balancing_loss_func, of 30 models, adds counts and probabilities of all layers before it multiplies them; "as in Switch Transformer (4) - (6)", which has a loss for each layer
import torch
from setup_tiny import experts

IDS = torch.randint(2, 32, (4, 32), generator=torch.Generator().manual_seed(0))


def losses(*loved, strength=8.0):
    """The model's balance loss; the mean of each layer's by the paper's formula; by layer the share of its two most used experts."""
    model = experts().eval()

    def biased(favourites):
        def hook(_, __, output):  # what a trained gate would say
            extra = torch.zeros(4)
            extra[list(favourites)] = strength
            logits = output[0] + extra
            values, chosen = torch.topk(logits.softmax(-1), 2)
            return logits, values / values.sum(-1, keepdim=True), chosen

        return hook

    for layer, favourites in zip(model.model.layers, loved, strict=True):
        layer.mlp.gate.register_forward_hook(biased(favourites))
    with torch.no_grad():
        found = model(input_ids=IDS, output_router_logits=True, labels=IDS)
    each, used = [], []
    for logits in found.router_logits:
        p = logits.softmax(-1)
        f = torch.nn.functional.one_hot(p.topk(2).indices, 4).sum((0, 1)) / len(p)
        each.append(4 * (f * p.mean(0)).sum())
        used.append(float(f.topk(2).values.sum() / 2))
    return float(found.aux_loss), float(torch.stack(each).mean()), used


print(
    "| Mixtral, 2 of 4 experts, in two layers | share on a layer's two experts | aux_loss | the paper's, mean of layers |\n|---|---|---|---|"
)
rows = {
    "a fresh model": losses((), ()),
    "both layers on experts 0 and 1": losses((0, 1), (0, 1)),
    "layer 0 on 0 and 1, layer 1 on 2 and 3": losses((0, 1), (2, 3)),
}
for name, (loss, paper, used) in rows.items():
    print(f"| {name} | {used[0]:.2f}, {used[1]:.2f} | {loss:.3f} | {paper:.3f} |")
loss, paper, _ = rows["layer 0 on 0 and 1, layer 1 on 2 and 3"]
raise SystemExit(int(loss < 0.75 * paper))
