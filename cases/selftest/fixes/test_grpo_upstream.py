"""`FusedLinearGRPOLoss` beside what it stands in for: Liger's loss; and two ranks."""

import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cases.selftest.fixes.test_grpo import LOSS_TYPES, draw, ours
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
            loss, metrics = module(
                leaves[0],
                leaves[1],
                case["ids"],
                case["mask"],
                case["advantages"],
                leaves[2],
                ref_per_token_logps=case["ref"],
                old_per_token_logps=case["old"],
                num_items_in_batch=torch.tensor(21),
            )
            clip = metrics[-1].item()
            values.append([loss.item(), clip, metrics[0].item() if beta else 0.0, *torch.autograd.grad(loss, leaves)])
        for a, b in zip(*values, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-6, msg=lambda m, kind=kind, beta=beta: f"{kind} {beta} {m}"
            )


def two_ranks(rank, path, queue):
    torch.set_num_threads(1)  # a forked OpenMP pool would hang
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    case = draw(13, torch.float64, shape=(4, 6))
    case["mask"][:2] = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    case["mask"][2:] = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    mine = {
        k: None if v is None else v if k in ("weight", "bias") else v[2 * rank : 2 * rank + 2] for k, v in case.items()
    }
    results = []
    for kind in ("dapo", "grpo"):
        settings = {"loss_type": kind, "top_entropy_quantile": 0.4}
        fused = FusedLinearGRPOLoss(**settings)
        loss, metrics = fused(
            mine["hidden"],
            mine["weight"],
            mine["ids"],
            mine["mask"],
            mine["advantages"],
            mine["bias"],
            mine["ref"],
            mine["old"],
        )
        results.append((loss.item(), {k: v.item() for k, v in metrics.items()}))
    queue.put((rank, results))
    dist.destroy_process_group()


def test_two_ranks_share_normaliser_quantile_and_metrics(tmp_path):
    """dapo: the mean over ranks (what data parallelism takes) is the loss of the joint batch; metrics are joint."""
    context = mp.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=two_ranks, args=(rank, tmp_path / "store", queue), daemon=True) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    results = dict(queue.get(timeout=20) for _ in workers)
    for worker in workers:
        worker.join(timeout=20)
    case = draw(13, torch.float64, shape=(4, 6))
    case["mask"][:2] = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    case["mask"][2:] = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    for index, kind in enumerate(("dapo", "grpo")):
        want, want_metrics, _ = ours(case, {"loss_type": kind, "top_entropy_quantile": 0.4})
        assert sum(results[rank][index][0] for rank in range(2)) / 2 == pytest.approx(want.item())
        for rank in range(2):
            for name, value in want_metrics.items():
                assert results[rank][index][1][name] == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name
