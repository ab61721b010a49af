"""`FusedLinearGRPOLoss` against the losses' definitions in float64, written out here a token at a time."""

import collections
import functools
import importlib
import inspect
import itertools
import math
import random
import types

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from packaging import version

from parity.fixes import FusedLinearGRPOLoss

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def log_probs(hidden, weight, bias, ids, s):
    z = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    z = z * s.get("logit_scale", 1.0)
    if s.get("softcap"):
        z = s["softcap"] * torch.tanh(z / s["softcap"])
    table = torch.log_softmax(z / s.get("temperature", 1.0), -1)
    return table.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(table.exp() * table).sum(-1)


def definition(hidden, weight, bias, ids, mask, advantages, s, old=None, ref=None, samp=None, ratio=None, items=None):
    """Loss and metrics, one token after the other; s holds the settings away from their defaults."""
    kind, level = s["loss_type"], s.get("importance_sampling_level", "token")
    beta, low, high = s.get("beta", 0.04), s.get("epsilon_low", 0.2), s.get("epsilon_high", 0.2)
    steps = s.get("current_gradient_accumulation_steps", 1)
    lp, entropy = log_probs(hidden, weight, bias, ids, s)
    rows, columns = mask.shape
    old = lp.detach() if old is None else old
    samp = old if samp is None else samp
    tokens = [[t for t in range(columns) if mask[b, t]] for b in range(rows)]
    count = sum(map(len, tokens))
    everyone = sorted(entropy[b, t].item() for b in range(rows) for t in tokens[b])
    threshold = -math.inf
    if s.get("top_entropy_quantile", 1.0) < 1.0 and everyone:
        threshold = float(torch.quantile(torch.tensor(everyone, dtype=torch.float64), 1 - s["top_entropy_quantile"]))
    zero = lp.sum() * 0.0
    totals, means, kls, lows, highs, kept_entropy = [], [], [], [], [], []
    for b in range(rows):
        length = max(len(tokens[b]), 1)
        total = zero
        sequence_d = sum((lp[b, t] - old[b, t] for t in tokens[b]), zero) / length
        drift = sum((samp[b, t] - lp[b, t]).item() for t in tokens[b] if not math.isnan(samp[b, t])) / length
        log_w = sum((lp[b, t] - old[b, t]).clamp(-20, 20).item() for t in tokens[b])
        if ratio is not None:
            places = tokens[b] if ratio.shape[1] > 1 else [0] * bool(tokens[b])
            clamped = (max(math.log(max(float(ratio[b, t]), 1e-300)), math.log(1e-8)) for t in places)
            log_w += sum(min(x, 20.0) for x in clamped)
        log_w = min(max(log_w, math.log(1e-8)), 20.0)
        clipped_low, clipped_high = [], []
        for t in tokens[b]:
            a = float(
                advantages[b, t]
                if advantages.dim() == 2 and advantages.shape[1] > 1
                else advantages.reshape(rows, -1)[b, 0]
            )
            w = torch.exp(sequence_d if level == "sequence" else lp[b, t] - old[b, t])
            if kind == "cispo":
                value = -min(w.item(), high) * a * lp[b, t]
                clipped_high.append(w.item() > high and a > 0)
            elif kind == "sapo":
                tau = s.get("sapo_temperature_pos", 1.0) if a > 0 else s.get("sapo_temperature_neg", 1.05)
                value = -4 / tau * torch.sigmoid(tau * (w - 1)) * a
            elif kind == "vespo":
                sign = "pos" if a >= 0 else "neg"
                k = s.get(f"vespo_k_{sign}", {"pos": 2.0, "neg": 3.0}[sign])
                rate = max(s.get(f"vespo_lambda_{sign}", {"pos": 3.0, "neg": 2.0}[sign]), 1e-4)
                phi = math.exp(rate + k * log_w - rate * math.exp(log_w))
                value = -phi * a * lp[b, t]
            else:
                free = w if s.get("delta") is None else w.clamp(max=s["delta"])
                value = -torch.min(free * a, w.clamp(1 - low, 1 + high) * a)
                clipped_low.append(w.item() < 1 - low and a < 0)
                clipped_high.append(w.item() > 1 + high and a > 0)
            if s.get("off_policy_mask_threshold") is not None and a < 0 and drift > s["off_policy_mask_threshold"]:
                value = value * 0.0
            if entropy[b, t].item() < threshold:
                value = value * 0.0
            else:
                kept_entropy.append(entropy[b, t])
            if ratio is not None and kind != "vespo":
                value = value * float(ratio[b, t] if ratio.shape[1] > 1 else ratio[b, 0])
            if beta:
                x = ref[b, t] - lp[b, t]
                kl = (torch.exp(x) - x - 1) * (w if s.get("use_bias_correction_kl") else 1.0)
                kls.append(kl.item())
                value = value + beta * kl
            total = total + value
        totals.append(total)
        lows.append(clipped_low)
        highs.append(clipped_high)
        means.append(total / length)
    if kind in ("grpo", "sapo"):
        loss = sum(means, zero) / rows
    elif kind == "bnpo":
        loss = sum(totals, zero) / max(count, 1)
    elif kind == "dr_grpo":
        loss = sum(totals, zero) / (rows * s["max_completion_length"])
    elif kind == "luspo":
        loss = sum(totals, zero) / rows
    else:
        share = 1.0 if items is None else 1 / s.get("steps_per_generation", steps)
        loss = sum(totals, zero) / (max(count if items is None else int(items), 1) * share * steps)
    metrics = {"entropy": sum(entropy[b, t].item() for b in range(rows) for t in tokens[b]) / max(count, 1)}
    if s.get("entropy_coef"):
        metrics["policy_loss"] = loss.item()
    if kind not in ("dapo", "cispo", "vespo"):
        loss = loss / steps
    if s.get("entropy_coef"):
        loss = loss - s["entropy_coef"] * sum(kept_entropy, zero) / max(len(kept_entropy), 1) / steps
    if beta:
        metrics["kl"] = sum(kls) / max(count, 1)
    if level == "sequence" and (advantages.dim() == 1 or advantages.shape[1] == 1):
        lows, highs = ([[x[0]] if x else [False] for x in y] for y in (lows, highs))
    n = max(sum(map(len, highs)), 1)
    if kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        metrics["clip_ratio/low_mean"] = sum(map(sum, lows)) / n
        metrics["clip_ratio/high_mean"] = sum(map(sum, highs)) / n
        metrics["clip_ratio/region_mean"] = (sum(map(sum, lows)) + sum(map(sum, highs))) / n
        metrics["clip_ratio/low_min"] = min((sum(x) / len(x) for x in lows if x), default=math.nan)
        metrics["clip_ratio/high_max"] = max((sum(x) / len(x) for x in highs if x), default=math.nan)
    elif kind == "cispo":
        metrics["cispo_clip_ratio"] = sum(map(sum, highs)) / n
    return loss, metrics


def draw(seed, dtype, *, bias=True, token_advantages=False, ratio=None, shape=(3, 6), vocab=37, size=5):
    g = torch.Generator().manual_seed(seed)
    rows, columns = shape
    case = {
        "hidden": torch.randn(rows, columns, size, generator=g).to(dtype),
        "weight": torch.randn(vocab, size, generator=g).to(dtype),
        "bias": torch.randn(vocab, generator=g).to(dtype) if bias else None,
        "ids": torch.randint(vocab, shape, generator=g),
        "mask": (torch.rand(shape, generator=g) < 0.8).long(),
        "advantages": torch.randn(shape if token_advantages else shape[:1], generator=g),
    }
    if rows > 1:
        case["mask"][-1] = 0
    base, _ = log_probs(
        *(x if x is None else x.double() for x in (case["hidden"], case["weight"], case["bias"])), case["ids"], {}
    )
    for name in ("old", "ref", "samp"):
        case[name] = (base + 0.4 * torch.randn(shape, generator=g, dtype=torch.float64)).float()
    case["ratio"] = None if ratio is None else torch.rand((rows, columns if ratio == "token" else 1), generator=g) * 2
    return case


def both(case, settings, items=None, *, training=True):
    """Ours and the definition: loss, gradients, metrics."""
    leaves = [case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias") if case[x] is not None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    fused = FusedLinearGRPOLoss(**{"beta": 0.04} | settings).train(training)
    loss, metrics = fused(
        leaves[0],
        leaves[1],
        case["ids"],
        case["mask"],
        case["advantages"],
        *leaves[2:] or [None],
        ref_per_token_logps=case["ref"],
        old_per_token_logps=case["old"],
        sampling_per_token_logps=case["samp"],
        vllm_is_ratio=case["ratio"],
        num_items_in_batch=items,
    )
    grown = {k: None if case[k] is None else case[k].double() for k in ("old", "ref", "samp", "ratio")}
    expected = settings | ({} if training else {"current_gradient_accumulation_steps": 1, "steps_per_generation": 1})
    want, want_metrics = definition(
        wide[0],
        wide[1],
        wide[2] if len(wide) > 2 else None,
        case["ids"],
        case["mask"],
        case["advantages"],
        expected,
        **grown,
        items=items,
    )
    return (loss, metrics, torch.autograd.grad(loss, leaves)), (want, want_metrics, torch.autograd.grad(want, wide))


def assert_same(got, want, dtype):
    loss, metrics, grads = got
    true, true_metrics, true_grads = want
    slack = 3e-6 if dtype != torch.float64 else 1e-12
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == ()
    assert abs(loss.item() - true.item()) <= slack * (1 + abs(true.item()))
    for g, w in zip(grads, true_grads, strict=True):
        assert g.dtype == dtype
        assert (g.double() - w).norm() <= (UNIT[dtype] + 2 * slack) * w.norm() + slack * 1e-3
    assert {k for k in true_metrics if k not in metrics} == set()
    assert set(metrics) - set(true_metrics) <= {"vespo/phi_seq_mean"}
    for name, value in true_metrics.items():
        assert metrics[name].item() == pytest.approx(value, rel=2e-5, abs=2e-6, nan_ok=True), name
        assert not metrics[name].requires_grad
        assert metrics[name].shape == ()


def settings_for(seed):
    """Every setting away from its default somewhere, and many together."""
    r = random.Random(seed)
    kind = LOSS_TYPES[seed % 8]
    s = {
        "loss_type": kind,
        "max_completion_length": 9 if kind == "dr_grpo" else None,
        "beta": r.choice([0.0, 0.3]),
        "epsilon_high": 1.3 if kind == "cispo" else r.choice([0.2, 0.28]),
        "importance_sampling_level": r.choice(["token", "sequence"]),
        "use_bias_correction_kl": r.random() < 0.5,
        "delta": r.choice([None, 1.4]),
        "off_policy_mask_threshold": r.choice([None, 0.05]),
        "top_entropy_quantile": r.choice([1.0, 0.6]),
        "entropy_coef": r.choice([0.0, 0.2]),
        "temperature": r.choice([1.0, 0.8]),
        "softcap": r.choice([None, 3.0]),
        "logit_scale": r.choice([1.0, 0.5]),
        "current_gradient_accumulation_steps": r.choice([1, 3]),
        "chunk_size": r.choice([None, 1]),
    }
    if r.random() < 0.3:
        s["steps_per_generation"] = 4
    if kind == "sapo":
        s |= {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.3}
    if kind == "vespo" and r.random() < 0.7:
        s |= {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.2, "vespo_lambda_neg": r.choice([0.0, 1.1])}
    options = {
        "bias": r.random() < 0.5,
        "token_advantages": r.random() < 0.4,
        "ratio": r.choice([None, "token", "sequence"]),
    }
    return s, options, r.choice([None, 23, torch.tensor(31)])


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("block", range(4))
def test_agrees_with_the_definition(block, dtype):
    for seed in range(block * 24, block * 24 + 24):
        settings, options, items = settings_for(seed)
        case = draw(seed, dtype, **options)
        case["samp"] = case["samp"] if seed % 3 else None
        case["old"] = case["old"] if seed % 5 else None
        if seed % 7 == 0 and not options["token_advantages"]:
            case["advantages"] = case["advantages"].unsqueeze(1)
        assert_same(*both(case, settings, items), dtype)


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_defaults_of_an_on_policy_step(kind):
    """No old log-probs, no reference: the first micro-batch of a run."""
    case = draw(1, torch.float32) | {"old": None, "samp": None}
    settings = {"loss_type": kind, "max_completion_length": 8, "beta": 0.0}
    assert_same(*both(case, settings), torch.float32)


def test_evaluation_divides_by_no_accumulation():
    for kind in ("grpo", "dapo"):
        case = draw(2, torch.float32)
        settings = {
            "loss_type": kind,
            "current_gradient_accumulation_steps": 4,
            "entropy_coef": 0.1,
            "steps_per_generation": 2,
        }
        assert_same(*both(case, settings, items=40, training=False), torch.float32)


def test_the_call_overrides_the_accumulation():
    case = draw(2, torch.float32)
    arguments = (case["hidden"], case["weight"], case["ids"], case["mask"], case["advantages"])
    fused = FusedLinearGRPOLoss(beta=0.0, loss_type="bnpo")
    once, _ = fused(*arguments, old_per_token_logps=case["old"])
    fourth, _ = fused(*arguments, old_per_token_logps=case["old"], current_gradient_accumulation_steps=4)
    assert fourth.item() == pytest.approx(once.item() / 4)


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
        case["samp"] = case["samp"] if seed % 3 else None
        case["old"] = case["old"] if seed % 5 else None
        (loss, metrics, grads), _ = both(case, settings, items, training=training)
        leaves = [case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias") if case[x] is not None]
        want, want_metrics = trl_loss(leaves, case, settings, items, training)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-7, msg=lambda m, s=seed, x=settings: f"{s} {x} {m}")
        for g, w in zip(grads, torch.autograd.grad(want, leaves), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-7)
        assert set(metrics) == set(want_metrics), settings
        for name, value in want_metrics.items():
            assert metrics[name].item() == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (name, seed)


@pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo"])
def test_micro_batches_sum_to_the_batch(kind):
    case = draw(5, torch.float64, shape=(4, 7))
    window = int(case["mask"].sum())
    settings = {"loss_type": kind, "current_gradient_accumulation_steps": 2}
    whole, _ = both(case, {"loss_type": kind}, items=window)
    parts = [
        both(
            {k: None if v is None else v[i : i + 2] if k not in ("weight", "bias") else v for k, v in case.items()},
            settings,
            items=window,
        )[0]
        for i in (0, 2)
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(parts[0][2][1] + parts[1][2][1], whole[2][1])


def test_the_ratio_never_touches_the_kl():
    case = draw(3, torch.float32, ratio="token")
    case["ratio"] = torch.zeros_like(case["ratio"])
    case["advantages"][:] = 1.0
    (loss, metrics, _), _ = both(case, {"loss_type": "bnpo", "beta": 0.5})
    assert loss.item() == pytest.approx(0.5 * metrics["kl"].item())
    assert metrics["kl"] > 0


@pytest.mark.parametrize("kind", LOSS_TYPES)
@pytest.mark.parametrize(
    "extra", [{}, {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "off_policy_mask_threshold": 0.1}]
)
def test_all_masked_is_zero_with_zero_gradients(kind, extra):
    case = draw(4, torch.float32, ratio="sequence")
    case["mask"][:] = 0
    settings = {"loss_type": kind, "max_completion_length": 8} | extra
    (loss, metrics, grads), _ = both(case, settings)
    assert loss.item() == 0
    assert all((g == 0).all() for g in grads)
    assert all(v.isfinite() for k, v in metrics.items() if k not in ("clip_ratio/low_min", "clip_ratio/high_max"))


def test_what_stands_under_the_mask_never_matters():
    settings, _, _ = settings_for(8 * 5)
    settings |= {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6, "entropy_coef": 0.2, "beta": 0.3}
    for kind in LOSS_TYPES:
        settings |= {"loss_type": kind, "max_completion_length": 9}
        case = draw(40, torch.float32, ratio="token")
        (loss, metrics, grads), _ = both(case, settings)
        hidden_from_view = case["mask"] == 0
        for name, garbage in (
            ("hidden", math.nan),
            ("ids", -5),
            ("old", math.inf),
            ("ref", math.nan),
            ("samp", math.inf),
            ("ratio", math.nan),
        ):
            case[name] = case[name].clone()
            case[name][hidden_from_view] = garbage
        case["advantages"] = case["advantages"].clone()
        case["advantages"][-1] = math.nan
        fused = FusedLinearGRPOLoss(**settings)
        leaves = [case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias")]
        again, other = fused(
            leaves[0],
            leaves[1],
            case["ids"],
            case["mask"].bool(),
            case["advantages"],
            leaves[2],
            case["ref"],
            case["old"],
            vllm_is_ratio=case["ratio"],
            sampling_per_token_logps=case["samp"],
        )
        assert torch.equal(loss, again)
        assert all(torch.equal(metrics[k], other[k]) for k in metrics)
        for g, w in zip(torch.autograd.grad(again, leaves), grads, strict=True):
            assert torch.equal(g, w)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_a_weight_beyond_every_number_spoils_nothing(kind, level):
    """w = e^2000 where clipping, an advantage of 0 or a mask leave nothing of it: finite, and no gradient but the KL's."""
    case = draw(2, torch.float64, shape=(3, 6))
    case["mask"][:] = 1
    case["ref"] = log_probs(*(case[x].double() for x in ("hidden", "weight", "bias")), case["ids"], {})[0]
    case["old"] = case["ref"] - 2000.0
    case["advantages"] = torch.tensor([1.0, 0.0, -2.0])  # the last sequence is masked for being off policy, or bounded
    for extra in ({"off_policy_mask_threshold": -1.0}, {"delta": 4.0, "use_bias_correction_kl": True, "beta": 0.0}):
        if "delta" in extra and kind in ("cispo", "sapo", "vespo"):
            continue
        settings = {
            "loss_type": kind,
            "importance_sampling_level": level,
            "max_completion_length": 6,
            "epsilon_high": 0.5,
        }
        leaves = [case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias")]
        fused = FusedLinearGRPOLoss(**{"beta": 0.04} | settings | extra)
        arguments = (case["ids"], case["mask"], case["advantages"], leaves[2], case["ref"], case["old"])
        loss, _ = fused(leaves[0], leaves[1], *arguments, sampling_per_token_logps=case["ref"])
        assert loss.isfinite()
        weight = {"cispo": 0.5, "vespo": 0.0}.get(kind)
        for gradient in torch.autograd.grad(loss, leaves):
            assert gradient.isfinite().all()
            assert weight == 0.5 or gradient.abs().max() < 1e-12


def test_a_weight_beyond_every_number_that_counts_is_not_hidden():
    """Neither clipped nor masked: the loss is infinite, and its gradient is not the 0 of a clamp."""
    hidden, mask = torch.randn(1, 3, 4, requires_grad=True), torch.ones(1, 3)
    old = torch.full((1, 3), -2000.0)
    arguments = (torch.randn(7, 4), torch.zeros(1, 3, dtype=torch.long), mask, torch.tensor([-1.0]))
    loss, _ = FusedLinearGRPOLoss(beta=0.0, loss_type="bnpo")(hidden, *arguments, old_per_token_logps=old)
    assert loss == math.inf
    assert not torch.autograd.grad(loss, hidden)[0].isfinite().any()


def test_unscored_sampler_tokens_count_nothing():
    case = draw(6, torch.float32)
    case["samp"][0] = math.nan
    case["samp"][1, ::2] = math.nan
    for kind in ("grpo", "sapo"):
        assert_same(*both(case, {"loss_type": kind, "off_policy_mask_threshold": 0.02}), torch.float32)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 9)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_narrow_batches(shape, level):
    for kind in LOSS_TYPES:
        case = draw(7, torch.float32, shape=shape, token_advantages=True, vocab=3)
        settings = {"loss_type": kind, "max_completion_length": 8, "importance_sampling_level": level}
        assert_same(*both(case, settings), torch.float32)


def test_reference_from_hidden_states():
    case = draw(9, torch.float32)
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(3, 6, 5, generator=g),
        torch.randn(37, 5, generator=g),
        torch.randn(37, generator=g),
    )
    fused = FusedLinearGRPOLoss(beta=0.3, loss_type="grpo", softcap=4.0, temperature=0.8)
    arguments = (case["hidden"], case["weight"], case["ids"], case["mask"], case["advantages"], case["bias"])
    a, _ = fused(*arguments, ref_input=hidden, ref_weight=weight, ref_bias=bias)
    ref, _ = log_probs(
        hidden.double(), weight.double(), bias.double(), case["ids"], {"softcap": 4.0, "temperature": 0.8}
    )
    b, _ = fused(*arguments, ref_per_token_logps=ref.float())
    assert a.item() == pytest.approx(b.item(), rel=1e-5)


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_narrow_ids(dtype):
    """A vocabulary beyond what the dtype of the ids holds, and -100 at padding, wrap around nowhere."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 6, 4, generator=g), torch.randn(40000, 4, generator=g)
    ids, mask = torch.randint(120, (2, 6), generator=g), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    hidden[:, 4:] = math.nan
    found = [FusedLinearGRPOLoss(beta=0.0)(hidden, weight, x, mask, torch.ones(2))[1] for x in (ids, ids.to(dtype))]
    assert torch.equal(found[0]["entropy"], found[1]["entropy"])
    assert found[0]["entropy"].isfinite()


def test_flat_hidden_states_and_frozen_head():
    case = draw(11, torch.float32)
    hidden = case["hidden"].reshape(-1, 5).clone().requires_grad_()
    fused = FusedLinearGRPOLoss(beta=0.0)
    loss, _ = fused(
        hidden, case["weight"], case["ids"], case["mask"], case["advantages"], old_per_token_logps=case["old"]
    )
    loss.backward()
    want, _ = fused(
        case["hidden"], case["weight"], case["ids"], case["mask"], case["advantages"], old_per_token_logps=case["old"]
    )
    assert torch.equal(loss, want)
    assert hidden.grad.shape == (18, 5)
    assert case["weight"].grad is None


def test_inside_compile_and_autocast():
    case = draw(12, torch.float32)
    fused = FusedLinearGRPOLoss(beta=0.1, entropy_coef=0.1, top_entropy_quantile=0.5)
    leaves = [case[x].clone().requires_grad_() for x in ("hidden", "weight", "bias")]

    def step(h, w, b):
        return fused(h * 1.0, w, case["ids"], case["mask"], case["advantages"], b, case["ref"], case["old"])[0] * 2

    plain, compiled = step(*leaves), torch.compile(step, backend="eager")(*leaves)
    torch.testing.assert_close(compiled, plain)
    for g, w in zip(torch.autograd.grad(compiled, leaves), torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(g, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = step(*leaves)
        grads = torch.autograd.grad(low, leaves)
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(plain.item(), rel=0.1, abs=0.05)
    assert all(g.dtype == torch.float32 for g in grads)


def test_an_empty_sequence_counts_as_unclipped_at_sequence_level():
    """TRL's `low_min` at sequence level: one value a sequence, also for one without a token."""
    case = draw(3, torch.float32, shape=(2, 4))
    case["mask"] = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    case["old"], case["advantages"] = case["old"] + 5.0, torch.tensor([-1.0, -1.0])
    for level, lowest in (("sequence", 0.0), ("token", 1.0)):
        (_, metrics, _), _ = both(case, {"loss_type": "dapo", "importance_sampling_level": level, "beta": 0.0})
        assert metrics["clip_ratio/low_min"].item() == lowest


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
        _, (want, want_metrics, _) = both(case, {"loss_type": kind, "top_entropy_quantile": 0.4})
        assert sum(results[rank][index][0] for rank in range(2)) / 2 == pytest.approx(want.item())
        for rank in range(2):
            for name, value in want_metrics.items():
                assert results[rank][index][1][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type='ppo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word'"),
        ({"loss_type": "dr_grpo"}, "max_completion_length=None"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"delta": -1.0}, "delta=-1.0"),
        ({"sapo_temperature_pos": 0}, "sapo_temperature_pos=0"),
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile=1.5"),
        ({"epsilon_low": math.nan}, "epsilon_low=nan"),
        ({"use_ref_model": False}, "use_ref_model=False with beta=0.04"),
        ({"chunk_size": 1.5}, "chunk_size=1.5: must be a whole number"),
        ({"temperature": None}, "temperature=None: must be a number"),
        ({"epsilon_high": None}, "epsilon_high=None: must be a number"),
        ({"beta": "0.1"}, "beta='0.1': must be a number"),
        ({"temperature": 1e-38}, "logit_scale=1.0, temperature=1e-38: logit_scale / temperature is beyond 2..64"),
        ({"softcap": 1e39}, "softcap=1e.39, temperature=1.0: softcap / temperature is beyond 2..64"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"beta": math.nan}, "beta=nan"),
        ({"entropy_coef": math.inf}, "entropy_coef=inf"),
        ({"vespo_k_neg": math.nan}, "vespo_k_neg=nan"),
        ({"off_policy_mask_threshold": math.nan}, "off_policy_mask_threshold=nan"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FusedLinearGRPOLoss(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": torch.full((3, 6), math.nan)}, "vllm_is_ratio: contains nan"),
        ({"ratio": torch.full((3, 1), -1.0)}, "vllm_is_ratio: contains -1"),
        ({"ratio": torch.ones(2, 6)}, r"vllm_is_ratio of shape \(2, 6\)"),
        ({"advantages": torch.full((3,), math.inf)}, "advantages: contains inf"),
        ({"advantages": torch.ones(3, 5)}, r"advantages of shape \(3, 5\)"),
        ({"old": torch.full((3, 6), math.nan)}, "old_per_token_logps: contains nan"),
        ({"old": torch.zeros(3, 5)}, r"old_per_token_logps of shape \(3, 5\)"),
        ({"ref": None}, "beta=0.04: needs ref_per_token_logps"),
        ({"mask": torch.full((3, 6), 0.5)}, "attention_mask: contains 0.5"),
        ({"mask": torch.ones(3, 5)}, r"attention_mask of shape \(3, 5\)"),
        ({"ids": torch.full((3, 6), 99)}, r"selected_token_ids: contains 99, outside \[0, 37\)"),
        ({"ids": torch.full((3, 6), -100)}, r"selected_token_ids: contains -100, outside \[0, 37\)"),
        ({"ids": torch.ones(3, 6)}, "selected_token_ids of dtype torch.float32"),
        ({"hidden": torch.zeros(3, 6, 4)}, r"_input of shape \(3, 6, 4\)"),
        ({"hidden": torch.zeros(4, 6, 5)}, r"selected_token_ids of shape \(3, 6\)"),
        ({"weight": torch.zeros(37, 5, dtype=torch.long)}, "lin_weight of dtype torch.int64"),
        ({"bias": torch.zeros(4)}, r"bias of shape \(4,\)"),
        ({"items": -1}, "num_items_in_batch: contains -1"),
        ({"items": math.nan}, "num_items_in_batch: contains nan"),
        ({"items": torch.ones(2)}, r"num_items_in_batch of shape \(2,\)"),
        ({"items": "all"}, "num_items_in_batch='all': must be a number"),
        ({"hidden": None}, "_input=None: must be a tensor"),
        ({"ids": [[1]]}, r"selected_token_ids=\[\[1\]\]: must be a tensor"),
        ({"advantages": 1.0}, r"advantages=1\.0: must be a tensor"),
        ({"ratio": 1.0}, r"vllm_is_ratio=1\.0: must be a tensor"),
        ({"old": 0.0}, r"old_per_token_logps=0\.0: must be a tensor"),
        ({"samp": torch.full((3, 6), math.inf)}, "sampling_per_token_logps: contains inf"),
    ],
)
def test_bad_input_is_named(change, message):
    case = draw(14, torch.float32) | {"items": None} | change
    if case["mask"] is not None and case["mask"].shape == (3, 6) and not case["mask"].is_floating_point():
        case["mask"][0] = 1
    with pytest.raises(ValueError, match=message):
        FusedLinearGRPOLoss()(
            case["hidden"],
            case["weight"],
            case["ids"],
            case["mask"],
            case["advantages"],
            case["bias"],
            case["ref"],
            case["old"],
            vllm_is_ratio=case["ratio"],
            num_items_in_batch=case["items"],
            sampling_per_token_logps=case["samp"],
        )


def test_settings_changed_between_calls_are_checked_again():
    case = draw(14, torch.float32)
    arguments = (case["hidden"], case["weight"], case["ids"], case["mask"], case["advantages"])
    fused = FusedLinearGRPOLoss(beta=0.0)
    for name in ("current_gradient_accumulation_steps", "steps_per_generation"):
        with pytest.raises(ValueError, match=f"{name}=-1"):
            fused(*arguments, **{name: -1})
    fused.delta = 0.0
    with pytest.raises(ValueError, match=r"delta=0\.0"):
        fused(*arguments)
