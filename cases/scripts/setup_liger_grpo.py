import torch

torch.manual_seed(0)
torch.set_num_threads(1)
B, T, H, V = 2, 4, 8, 16
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
ADVANTAGES = torch.tensor([1.0, -0.5])
HIDDEN, WEIGHT = torch.randn(B, T, H), torch.randn(V, H)
IDS = torch.randint(0, V, (B, T))


def log_probs(hidden, weight, temperature=1.0):
    return (hidden @ weight.T / temperature).log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
