"""`apply` under DeepSpeed's ZeRO-3: what it says of models in shards, and that training is as without it."""

import importlib.util
import json
import os
import subprocess
import sys
import types

import pytest
import torch

from parity.fixes import patches
from parity.fixes.kernel import use_selective_log_probs
from parity.trainers.rig import models, ranks, zero

trl_utils = pytest.importorskip("trl.trainer.utils")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not hasattr(trl_utils, "FusedCausalLMOutput"), reason="this TRL has no fused LM head in a model"
    ),
]


def partitioned(model):
    """As ZeRO-3 leaves a model before training: every parameter empty, what it was in a shard beside it."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.ds_tensor = parameter.detach().flatten()[::2].clone()
        parameter.data = parameter.data.new_empty(0)
    return model


def pair():
    both = [models.model("llama") for _ in range(2)]
    for model in both:
        trl_utils.add_fused_lm_head(model)
        partitioned(model)
    return types.SimpleNamespace(model=both[0], ref_model=both[1])


def gathering(module, inputs):
    """A hook as DeepSpeed's engine puts on every module."""


gathering.__module__ = "deepspeed.runtime.zero.parameter_offload"


def test_what_cannot_be_tried_in_shards_is_said_and_the_hooks_of_deepspeed_are_no_difference():
    trainer = pair()
    trainer.ref_model.lm_head.register_forward_pre_hook(gathering)
    said = patches.compare_heads(trainer)
    assert not said.warning
    alike = "ZeRO-3 holds weights in shards; class, hooks and shards of the heads are alike"
    assert said.reason.startswith(f"{alike}, their logits could not be compared (RuntimeError: ")
    assert (
        patches.use_model_logits(trainer).reason == "ZeRO-3 holds LlamaForCausalLM in shards, and no token can be tried"
    )
    assert use_selective_log_probs(trainer).reason == "ZeRO-3 holds the LM head in shards: TRL's kernel stays"


@pytest.mark.parametrize("difference", ["weights", "shape", "hook", "class"])
def test_heads_in_shards_that_differ_are_said(difference):
    trainer = pair()
    head = trainer.ref_model.lm_head
    if difference == "weights":
        head.weight.ds_tensor[3] += 1e-3
    elif difference == "shape":
        head.weight.ds_shape = torch.Size((65, 32))
    elif difference == "hook":
        head.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    else:
        trainer.ref_model.lm_head = torch.nn.Sequential(head)
    with pytest.warns(UserWarning, match="policy and reference have different heads"):
        said = patches.compare_heads(trainer).warning
    told = {"hook": "policy's head has none, the reference's 1 forward hook", "class": "Sequential"}
    assert told.get(difference, "their weights differ") in said


def test_a_whole_policy_beside_a_reference_in_shards():
    """Whether the weights differ cannot be seen, and is not claimed."""
    trainer = pair()
    trainer.model = models.model("llama")
    said = patches.compare_heads(trainer)
    assert said.reason.startswith(
        "ZeRO-3 holds weights in shards; class and hooks of the heads are alike, their logits"
    )


IDS = torch.tensor([[2, 7, 9, 12, 30, 41, 5, 3], [2, 8, 22, 31, 17, 6, 50, 0]])


def scored(model):
    """Log-probs of a fused head, and the head's gradient, whole."""
    out = model(input_ids=IDS, labels=IDS, fused_lm_head=True)
    out.loss.backward()
    gradient = model.lm_head.weight.grad
    return out.log_probs.detach(), gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def sharded_by_fsdp(rank, path, queue):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)  # a forked OpenMP pool would hang
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole, policy, reference = (models.model("llama") for _ in range(3))
    for model in (whole, policy):
        trl_utils.add_fused_lm_head(model)
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.01)
    for module in (policy.lm_head, policy):  # a head in a unit of its own is in shards again behind the forward
        fully_shard(module, mesh=mesh)
    said = patches.compare_heads(types.SimpleNamespace(model=policy, ref_model=reference)).warning
    assert use_selective_log_probs(whole) and use_selective_log_probs(policy)
    same = [torch.equal(a, b) for a, b in zip(scored(whole), scored(policy), strict=True)]
    queue.put((said, same, float(whole.lm_head.weight.grad.norm())))
    torch.distributed.destroy_process_group()


def test_a_policy_of_fsdp2(tmp_path):
    """Two processes over gloo: a whole reference is compared with it, and our kernel computes as on a whole model."""
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=sharded_by_fsdp, args=(rank, tmp_path / "store", queue), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(timeout=20)
    for said, same, norm in found:
        assert "of the same hidden states: their weights differ. " in said
        assert same == [True, True]
        assert norm > 0


ZERO = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install deepspeed"
)


@ZERO
@pytest.mark.parametrize("stage", [2, 3])
def test_training_in_shards_is_as_without_it(tmp_path, stage):
    """GRPO, two processes over gloo, beside TRL's kernel: step-1 KL 0.

    In ZeRO-3 policy and reference are loaded in shards, TRL's kernel stays, gradients are those to the last bit. In ZeRO-2
    ours scores both, in float32.
    """
    port = ranks._free_port()
    running = []
    for rank in range(2):
        joining = dict(zip(ranks.JOINING, map(str, (rank, rank, 2, 2, "127.0.0.1", port)), strict=True))
        with open(tmp_path / f"{rank}.log", "wb") as log:
            running.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(tmp_path), str(stage)],
                    env=os.environ | joining | zero.SETTINGS | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = [process.wait(timeout=240) for process in running]
    assert codes == [0, 0], (tmp_path / "0.log").read_text()[-2000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["kl"] == [0.0, 0.0] and found["norm"] > 0
        if stage == 3:
            assert found["sharded"] > 10 and found["apart"] == 0.0 and found["calls"] == 0
            assert "shards of the heads are alike" in found["said"]
        else:
            assert found["sharded"] == 0 and found["calls"] >= 2
            assert found["apart"] < 1e-5 * found["norm"]
            assert "make the same logits of the same hidden states" in found["said"]


def trained_as_a_rank(folder, stage):
    """Trains for a step as released and after `apply`; writes how far apart the gradients are."""
    from parity.fixes import apply, kernel
    from parity.process import prepare
    from parity.trainers.rig import drive

    prepare("cpu", 1)
    joining = {name: os.environ.pop(name) for name in ranks.JOINING}  # with them a model is saved on one rank alone
    path = models.saved("llama")
    os.environ.update(joining)
    settings = {"gradient_checkpointing": False, "beta": 0.1, "num_generations": 2, "per_device_train_batch_size": 2}
    config = zero.CONFIG if stage == "3" else zero.STAGE_2
    gradients, kl, said, sharded, calls = [], [], "", 0, []
    ours = kernel.selective_log_probs
    kernel.selective_log_probs = lambda *a, **k: calls.append(1) or ours(*a, **k)
    for applied in (False, True):
        with zero.recorded() as stepped:
            args = drive.arguments(drive.config("GRPOTrainer"), "cpu", settings | config)
            trainer = drive.build("GRPOTrainer", str(path), args)
            assert (trainer.model.lm_head.weight.numel() == 0) == (stage == "3")
            said = str(apply(trainer)) if applied else ""
            torch.manual_seed(joining["RANK"] == "1")
            kl.append(drive.train(trainer)["kl"])
        sharded = stepped[0][0]
        gradients.append(stepped[0][1])
    apart = max(float((gradients[0][n] - g).abs().max()) for n, g in gradients[1].items())
    norm = max(float(g.norm()) for g in gradients[1].values())
    found = {"sharded": sharded, "apart": apart, "norm": norm, "kl": kl, "said": said, "calls": len(calls)}
    with open(f"{folder}/{joining['RANK']}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    trained_as_a_rank(*sys.argv[1:])
