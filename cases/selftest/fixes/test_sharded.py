"""`apply` on models in shards, of DeepSpeed's ZeRO-3 and of FSDP2: what it says, and what our kernel computes there."""

import types

import pytest
import torch
from trl.trainer import utils as trl_utils

from cases.selftest.fixes.ranks import of_two
from cases.selftest.fixes.test_logits import IDS
from parity.fixes import patches
from parity.fixes.kernel import use_selective_log_probs
from parity.trainers.rig import models

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def partitioned(model):
    """As ZeRO-3 leaves a model before training: every parameter empty."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
        parameter.data = parameter.data.new_empty(0)
    return model


def pair():
    both = [models.model("llama") for _ in range(2)]
    for model in both:
        trl_utils.add_fused_lm_head(model)
        partitioned(model)
    return types.SimpleNamespace(model=both[0], ref_model=both[1])


def test_what_cannot_be_tried_in_shards_is_said():
    trainer = pair()
    assert (
        patches.use_model_logits(trainer).reason == "ZeRO-3 holds LlamaForCausalLM in shards, and no token can be tried"
    )
    assert use_selective_log_probs(trainer).reason == "ZeRO-3 holds the LM head in shards: TRL's kernel stays"


def scored(model):
    """Log-probs of a fused head, and the head's gradient, whole."""
    out = model(input_ids=IDS, labels=IDS, fused_lm_head=True)
    out.loss.backward()
    gradient = model.lm_head.weight.grad
    return out.log_probs.detach(), gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def sharded_by_fsdp(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    whole, policy = models.model("llama"), models.model("llama")
    for model in (whole, policy):
        trl_utils.add_fused_lm_head(model)
    for module in (policy.lm_head, policy):  # a head in a unit of its own is in shards again behind the forward
        fully_shard(module, mesh=mesh)
    assert use_selective_log_probs(whole) and use_selective_log_probs(policy)
    same = [torch.equal(a, b) for a, b in zip(scored(whole), scored(policy), strict=True)]
    return same, float(whole.lm_head.weight.grad.norm())


def test_a_policy_of_fsdp2(tmp_path):
    """Two processes over gloo: our kernel computes as on a whole model."""
    for same, norm in of_two(sharded_by_fsdp, tmp_path):
        assert same == [True, True]
        assert norm > 0
