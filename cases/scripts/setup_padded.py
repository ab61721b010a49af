import torch


def log_probs(model, ids, left, positions=False):
    """Log-probs (1, T - 1) of ids (1, T) behind `left` of padding."""
    padded = torch.nn.functional.pad(ids, (left, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (left, 0))
    more = dict(position_ids=(mask.cumsum(1) - 1).clamp(min=0)) if positions else {}
    with torch.no_grad():
        logits = model(input_ids=padded, attention_mask=mask, use_cache=False, **more).logits[:, left:-1]
    return logits.double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def trained(model):
    """The model with weights as large as a trained one's."""
    for weight in model.parameters():
        if weight.dim() >= 2:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model
