"""`FusedLinearGRPOLoss` beside what it stands in for: Liger's loss; and two ranks."""

import inspect
import itertools

import pytest
import torch

from cases.selftest.fixes.ranks import of_two
from cases.selftest.fixes.test_grpo import LOSS_TYPES, call, draw, ours
from parity.fixes import FusedLinearGRPOLoss


def test_the_signature_of_liger():
    """Its constructor and its call, by position and by name: ours only adds to them, by name."""
    liger = pytest.importorskip("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    for method in ("__init__", "forward"):
        theirs, ours = (inspect.signature(getattr(cls, method)).parameters for cls in (liger, FusedLinearGRPOLoss))
        assert list(ours)[: len(theirs)] == list(theirs)
        assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :])
        moved = {name for name in theirs if theirs[name].default != ours[name].default}
        assert moved <= {"chunk_size"}


def test_drop_in_for_liger():
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    case = draw(10, torch.float32)
    for kind, beta in itertools.product(LOSS_TYPES, (0.0, 0.1)):
        # Liger 0.8.5 averages luspo over T without the mask unless the loss has one value a sequence; TRL does not.
        level = "sequence" if kind == "luspo" else "token"
        if kind == "luspo" and beta:
            continue
        settings = {
            "beta": beta,
            "loss_type": kind,
            "max_completion_length": 8,
            "use_ref_model": beta != 0,
            "epsilon_high": 0.25,
            "importance_sampling_level": level,
        }
        values = []
        for cls in (liger.LigerFusedLinearGRPOLoss, FusedLinearGRPOLoss):
            leaves = [case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias")]
            module = cls(**settings, compiled=False, chunk_size=1)
            arguments = (case["ids"], case["mask"], case["advantages"], leaves[2])
            given = {"ref_per_token_logps": case["ref"], "old_per_token_logps": case["old"]}
            loss, metrics = module(*leaves[:2], *arguments, **given, num_items_in_batch=torch.tensor(21))
            clip = metrics[-1].item()
            values.append([loss.item(), clip, metrics[0].item() if beta else 0.0, *torch.autograd.grad(loss, leaves)])
        for a, b in zip(*values, strict=True):
            said = f"{kind} {beta}"
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, said=said: f"{said} {m}")


def joint():
    """A batch of four sequences, of which each rank has two."""
    case = draw(13, torch.float64, shape=(4, 6))
    case["mask"][:2] = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    case["mask"][2:] = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    return case


def settings_of(kind):
    return {"loss_type": kind, "top_entropy_quantile": 0.4}


def losses(rank):
    shared = ("weight", "bias", "ratio")
    mine = {k: v if k in shared else v[2 * rank : 2 * rank + 2] for k, v in joint().items()}
    found = [call(FusedLinearGRPOLoss(**settings_of(kind)), mine) for kind in ("dapo", "grpo")]
    return [(loss.item(), {k: v.item() for k, v in metrics.items()}) for loss, metrics in found]


def test_two_ranks_share_normaliser_quantile_and_metrics(tmp_path):
    """dapo: the mean over ranks (what data parallelism takes) is the loss of the joint batch; metrics are joint."""
    results = of_two(losses, tmp_path)
    for index, kind in enumerate(("dapo", "grpo")):
        want, want_metrics, _ = ours(joint(), settings_of(kind))
        assert sum(results[rank][index][0] for rank in range(2)) / 2 == pytest.approx(want.item())
        for rank in range(2):
            for name, value in want_metrics.items():
                assert results[rank][index][1][name] == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name
