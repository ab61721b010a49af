"""`FusedLinearGRPOLoss` beside what it stands in for: TRL's own `_compute_loss`, Liger's loss, two ranks."""

import collections
import functools
import importlib
import inspect
import itertools
import math
import types

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from packaging import version

from cases.selftest.fixes.test_grpo import LOSS_TYPES, draw, log_probs, ours, settings_for
from parity.fixes import FusedLinearGRPOLoss


def trl_loss(leaves, case, s, items, training):
    """Loss and metrics of the installed TRL's own `_compute_loss`, fed with log-probs instead of a model."""
    trainer_class = importlib.import_module("trl").GRPOTrainer
    logps, entropies = log_probs(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, case["ids"], s)
    steps = s.get("current_gradient_accumulation_steps", 1)
    trainer = types.SimpleNamespace(
        # TRL draws its entropy threshold in float32: entropies that are exact there keep ties ties.
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, entropies.float().double(), None),
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
        accelerator=types.SimpleNamespace(
            num_processes=1,
            sync_gradients=False,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **kwargs: x,
        ),
        args=types.SimpleNamespace(
            delta=s.get("delta"),
            use_bias_correction_kl=s.get("use_bias_correction_kl", False),
            sapo_temperature_pos=s.get("sapo_temperature_pos", 1.0),
            sapo_temperature_neg=s.get("sapo_temperature_neg", 1.05),
            vespo_k_pos=s.get("vespo_k_pos", 2.0),
            vespo_lambda_pos=s.get("vespo_lambda_pos", 3.0),
            vespo_k_neg=s.get("vespo_k_neg", 3.0),
            vespo_lambda_neg=s.get("vespo_lambda_neg", 2.0),
            steps_per_generation=s.get("steps_per_generation", steps),
        ),
        model=types.SimpleNamespace(training=training),
        beta=s.get("beta", 0.04),
        loss_type=s["loss_type"],
        epsilon_low=s.get("epsilon_low", 0.2),
        epsilon_high=s.get("epsilon_high", 0.2),
        importance_sampling_level=s.get("importance_sampling_level", "token"),
        off_policy_mask_threshold=s.get("off_policy_mask_threshold"),
        top_entropy_quantile=s.get("top_entropy_quantile", 1.0),
        entropy_coef=s.get("entropy_coef", 0.0),
        _entropy_bonus_enabled=s.get("entropy_coef", 0.0) != 0.0,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        use_vllm=case["ratio"] is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=s.get("max_completion_length"),
        current_gradient_accumulation_steps=steps,
        _metrics={"train": collections.defaultdict(list), "eval": collections.defaultdict(list)},
    )
    trainer.get_high_entropy_mask = functools.partial(trainer_class.get_high_entropy_mask, trainer)
    mask = case["mask"]
    inputs = {
        "prompt_ids": case["ids"][:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": case["ids"],
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": case["advantages"].double(),
        "num_items_in_batch": torch.as_tensor(items),
        "old_per_token_logps": None if case["old"] is None else case["old"].double(),
        "ref_per_token_logps": case["ref"].double(),
    }
    if case["samp"] is not None:
        inputs["sampling_per_token_logps"] = case["samp"].double()
    if case["ratio"] is not None:
        # TRL's contract: the ratio is 1 where nothing is scored.
        neutral = (mask == 0) if case["ratio"].shape[1] > 1 else (mask == 0).all(1, keepdim=True)
        inputs["importance_sampling_ratio"] = case["ratio"].double().masked_fill(neutral, 1.0)
    loss = trainer_class._compute_loss(trainer, None, inputs)
    return loss, {k: v[-1] for k, v in trainer._metrics["train" if training else "eval"].items()}


@pytest.mark.parametrize("training", [True, False])
def test_agrees_with_the_trainer(training):
    """Against the code that users run, so that the definitions above cannot be misread in the same way twice."""
    trl = pytest.importorskip("trl")
    if version.parse(trl.__version__) < version.parse("1.16"):
        pytest.skip("written against trl 1.16")
    for seed in range(48):
        settings, options, items = settings_for(seed)
        items = 23 if items is None else items
        case = draw(seed, torch.float64, **options)
        case["samp"][0, ::2] = math.nan  # tokens that the sampler could not score count nothing
        case["samp"] = case["samp"] if seed % 3 else None
        case["old"] = case["old"] if seed % 5 else None
        loss, metrics, grads = ours(case, settings, items, training=training)
        leaves = [case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias") if case[x] is not None]
        want, want_metrics = trl_loss(leaves, case, settings, items, training)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-7, msg=lambda m, s=seed, x=settings: f"{s} {x} {m}")
        for g, w in zip(grads, torch.autograd.grad(want, leaves), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-7)
        assert set(metrics) == set(want_metrics), settings
        for name, value in want_metrics.items():
            assert metrics[name].item() == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (name, seed)


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
