"""`FusedLinearGRPOLoss` beside what it stands in for: Liger's loss; and two ranks."""

import inspect

import pytest
import torch

from cases.selftest.fixes.ranks import of_two
from cases.selftest.fixes.test_grpo import call, draw, ours
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


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_metrics_are_read_by_place_as_ligers_are(beta):
    _, metrics = call(FusedLinearGRPOLoss(beta=beta), draw(10, torch.float32))
    assert metrics[-1] is metrics["clip_ratio/region_mean"] and (not beta or metrics[0] is metrics["kl"])


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
