"""`FusedLinearGRPOLoss` in what drawn cases of family `policy` do not ask of it; beside Liger's loss; and on two ranks."""

import inspect

import pytest
import torch

from cases.selftest.fixes.ranks import of_two
from cases.selftest.fixes.test_logprobs import definition
from parity.fixes import FusedLinearGRPOLoss


def exact(case, **settings):
    """Log-probs of a case in float64."""
    hidden, weight, bias = (case[x].double() for x in ("hidden", "weight", "bias"))
    return definition(hidden, weight, case["ids"], bias, **settings)[0]


def draw(seed, dtype, *, ratio=None, shape=(3, 6), vocab=37, size=5):
    g = torch.Generator().manual_seed(seed)
    rows, columns = shape
    case = {
        "hidden": torch.randn(rows, columns, size, generator=g).to(dtype),
        "weight": torch.randn(vocab, size, generator=g).to(dtype),
        "bias": torch.randn(vocab, generator=g).to(dtype),
        "ids": torch.randint(vocab, shape, generator=g),
        "mask": (torch.rand(shape, generator=g) < 0.8).long(),
        "advantages": torch.randn(shape[:1], generator=g),
    }
    if rows > 1:
        case["mask"][-1] = 0
    base = exact(case)
    for name in ("old", "ref", "samp"):
        case[name] = (base + 0.4 * torch.randn(shape, generator=g, dtype=torch.float64)).float()
    case["ratio"] = None if ratio is None else torch.rand((rows, columns if ratio == "token" else 1), generator=g) * 2
    return case


def call(fused, case, items=None, **more):
    """Loss and metrics of everything that a case has."""
    arguments = [case[x] for x in ("hidden", "weight", "ids", "mask", "advantages", "bias", "ref", "old")]
    more |= {"vllm_is_ratio": case["ratio"], "sampling_per_token_logps": case["samp"], "num_items_in_batch": items}
    return fused(*arguments, **more)


def ours(case, settings):
    """Loss, metrics and gradients of a case."""
    leaves = {x: case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias")}
    loss, metrics = call(FusedLinearGRPOLoss(**{"beta": 0.04} | settings), case | leaves)
    return loss, metrics, torch.autograd.grad(loss, list(leaves.values()))


@pytest.mark.parametrize("kind", ["bnpo", "dapo"])
def test_the_call_overrides_the_accumulation(kind):
    """Without a token count a window has as many tokens as this micro-batch, times the accumulation steps."""
    case, fused = draw(2, torch.float32), FusedLinearGRPOLoss(beta=0.0, loss_type=kind)
    once, _ = call(fused, case)
    fourth, _ = call(fused, case, current_gradient_accumulation_steps=4)
    assert fourth.item() == pytest.approx(once.item() / 4)


def test_reference_from_hidden_states():
    case = draw(9, torch.float32)
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(shape, generator=g) for shape in ((3, 6, 5), (37, 5), (37,)))
    settings = {"softcap": 4.0, "temperature": 0.8}
    fused = FusedLinearGRPOLoss(beta=0.3, loss_type="grpo", **settings)
    a, _ = call(fused, case | {"ref": None}, ref_input=hidden, ref_weight=weight, ref_bias=bias)
    ref = exact(case | {"hidden": hidden, "weight": weight, "bias": bias}, **settings)
    b, _ = call(fused, case | {"ref": ref.float()})
    assert a.item() == pytest.approx(b.item(), rel=1e-5)


def test_flat_hidden_states_and_frozen_head():
    case = draw(11, torch.float32)
    hidden = case["hidden"].reshape(-1, 5).clone().requires_grad_()
    fused = FusedLinearGRPOLoss(beta=0.0)
    loss, _ = call(fused, case | {"hidden": hidden})
    loss.backward()
    want, _ = call(fused, case)
    assert torch.equal(loss, want)
    assert hidden.grad.shape == (18, 5)
    assert case["weight"].grad is None


def test_inside_compile():
    case = draw(12, torch.float32)
    fused = FusedLinearGRPOLoss(beta=0.1, entropy_coef=0.1, top_entropy_quantile=0.5)
    leaves = [case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias")]

    def step(h, w, b):
        return call(fused, case | {"hidden": h * 1.0, "weight": w, "bias": b})[0] * 2

    plain, compiled = step(*leaves), torch.compile(step, backend="eager")(*leaves)
    torch.testing.assert_close(compiled, plain)
    for g, w in zip(torch.autograd.grad(compiled, leaves), torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(g, w)


def test_an_empty_sequence_counts_as_unclipped_at_sequence_level():
    """TRL's `low_min` at sequence level: one value a sequence, also for one without a token."""
    case = draw(3, torch.float32, shape=(2, 4))
    case["mask"] = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    case["old"], case["advantages"] = case["old"] + 5.0, torch.tensor([-1.0, -1.0])
    for level, lowest in (("sequence", 0.0), ("token", 1.0)):
        _, metrics, _ = ours(case, {"loss_type": "dapo", "importance_sampling_level": level, "beta": 0.0})
        assert metrics["clip_ratio/low_min"].item() == lowest


def test_the_signature_of_liger():
    """Its constructor and its call, by position and by name: ours only adds to them, by name."""
    liger = pytest.importorskip("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    for method in ("__init__", "forward"):
        theirs, mine = (inspect.signature(getattr(cls, method)).parameters for cls in (liger, FusedLinearGRPOLoss))
        assert list(mine)[: len(theirs)] == list(theirs)
        assert all(mine[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(mine)[len(theirs) :])
        moved = {name for name in theirs if theirs[name].default != mine[name].default}
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
