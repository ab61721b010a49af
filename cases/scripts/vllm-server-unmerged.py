# TRL 1.16.0, vLLM 0.31.0: with LoRA and vllm_mode="server" the last GB of the weights, all of a small model, reaches the server without its adapter
# trl/generation/vllm_generation.py:_iter_named_params unmerges when it is exhausted; vLLM's packed_tensor.py:pack_tensors copies its last buffer of views after that
import types
from unittest import mock

import peft
import torch
import trl.generation.vllm_client as client
from setup_lora import model
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration


def pack_tensors(iterator, size):
    """As vLLM's: views, until they exceed the size or there are no more; then one copy."""
    views, total = [], 0
    for _, tensor in iterator:
        views.append(tensor.contiguous().view(-1).view(torch.uint8))
        total += views[-1].numel()
        if total > size:
            break
    return torch.cat(views) if views else None


def received(policy, size):
    """What the server gets of VLLMGeneration.sync_weights, by name."""
    sender, got = object.__new__(VLLMGeneration), []

    def broadcast(iterator, **_):
        iterator = iter(iterator)
        while (chunk := pack_tensors(iterator, size)) is not None:
            got.append(chunk)

    accelerator = types.SimpleNamespace(is_main_process=True, state=types.SimpleNamespace(deepspeed_plugin=None))
    vars(sender).update(model=policy, accelerator=accelerator, mode="server", _weight_metadata=None)
    vars(sender).update(_dist=DistributedBackend(accelerator), enable_sleep_mode=False)
    sender.vllm_client = object.__new__(client.VLLMClient)
    vars(sender.vllm_client).update(_updating_weights=True, base_url="", communicator=None)
    silent = dict.fromkeys(("_post", "reset_prefix_cache"), lambda *_, **__: None)
    engine = dict(_HAS_STATEFUL_TRAINER_ENGINE=True, packed_nccl_broadcast_producer=broadcast)
    with mock.patch.multiple(client.VLLMClient, **silent), mock.patch.multiple(client, create=True, **engine):
        sender.sync_weights()
    shapes = [(name, shape) for name, _, shape in sender._weight_metadata]
    parts = torch.cat(got).view(torch.float32).split([torch.Size(s).numel() for _, s in shapes])
    return {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


ids, wrong = torch.arange(2, 26).view(2, 12), False
print(
    "| bytes of a buffer | layers with the adapter, right: 4 | log-prob: sampler, policy, base model |\n|---|---|---|"
)
for size in (1 << 30, 4096):
    policy = peft.get_peft_model(model(), peft.LoraConfig(init_lora_weights=False))
    sampler = model()
    sampler.load_state_dict(received(policy, size))
    changed = sum(not torch.allclose(p, q) for p, q in zip(sampler.parameters(), model().parameters(), strict=True))
    found = [-one.eval()(input_ids=ids, labels=ids).loss.item() for one in (sampler, policy, model())]
    print(f"| {size} | {changed} | {', '.join(f'{x:.4f}' for x in found)} |")
    wrong |= abs(found[0] - found[1]) > 1e-3
raise SystemExit(int(wrong))
