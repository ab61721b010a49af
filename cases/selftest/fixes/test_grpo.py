"""`FusedLinearGRPOLoss` against the losses' definitions in float64, written out here a token at a time."""

import math
import random

import pytest
import torch

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
