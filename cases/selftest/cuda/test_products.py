"""tf32, split sums, and cut-cross-entropy's gradients as CUDA sums them, block by block in 16 bits: emulated on the pretended
device, honest ones agree, those where tf32 is off are named and wrong ones are caught."""

import dataclasses

import pytest
import torch

from cases.selftest.controls.correct import control
from fixtures.pretended_cuda import pretended
from parity.implementations import cce
from parity.implementations.implementation import Implementation
from parity.judge import products
from parity.judge.products import CutOperands, Products, cut
from parity.judge.recipe import TF32, TF32_TRUNCATED, Recipe
from parity.judge.shaken import Shaken
from parity.judging.assess import CaseOracle, _on, confirmed, judge_all
from parity.protocol.call import execute
from parity.registry import family, load, run_case
from parity.results.report.render import text_of
from parity.running.provenance import header

BOTH = (TF32, TF32_TRUNCATED)


def test_the_grid_of_tf32():
    x = torch.tensor([products.PROBE, 1 + 2.0**-11, -products.PROBE, 3.0, 1e-30, torch.inf, 0.0])
    step = 2.0**-10
    assert cut(x, TF32)[:4].tolist() == [1 + step, 1.0, -1 - step, 3.0]
    assert cut(x, TF32_TRUNCATED)[:4].tolist() == [1.0, 1.0, -1.0, 3.0]
    assert cut(x, TF32)[4:].tolist() == pytest.approx([1e-30, torch.inf, 0.0], rel=2.0**-10)


def test_the_noise_of_a_product_knows_the_newer_switch_of_tf32(monkeypatch):
    x, matmul = torch.ones(8, 64), torch.backends.cuda.matmul
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    before, off = matmul.fp32_precision, []
    try:
        for value in ("ieee", "tf32"):
            matmul.fp32_precision = value
            with Shaken(0):
                off.append(float((x @ x.T - 64).abs().max()))
    finally:
        matmul.fp32_precision = before
    assert 0 < 100 * off[0] < off[1]


class SplitSums(CutOperands):
    """A device that adds the parts of a long 16-bit product in 16 bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].dtype in (torch.float16, torch.bfloat16):
            parts = [p.to(args[0].dtype) for p in products.split(args[0].float(), args[1].float(), 8)]
            return torch.stack([p.float() for p in parts]).sum(0).to(args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("precision", ["ieee", *BOTH])
def test_the_probe_finds_what_a_device_does(precision, monkeypatch):
    monkeypatch.setattr(products, "products", products.products.__wrapped__)
    with pretended(), SplitSums(precision) if precision != "ieee" else pretended():
        found = products.products("cuda")
    assert found.tf32 == precision
    assert found.reduced == (frozenset() if precision == "ieee" else {"fp16", "bf16"})
    assert set(found.described()) == {"tf32", "reduced", *found.values} and len(found.values) == 3


def test_the_header_of_a_run_keeps_what_the_probes_found(monkeypatch):
    monkeypatch.setattr(products, "products", lambda device: Products("tf32", frozenset({"bf16"}), {"a probe": 0.5}))
    with pretended():
        about = header("run", "cuda", "quick", 0).header
    assert about.products == {"tf32": "tf32", "reduced": ["bf16"], "a probe": 0.5} and about.device_name == "pretended"


def reordered(name: str) -> Implementation:
    return control(f"control.{name}.{'ieee' if name == 'divergence' else 'reordered'}")


def rows_of(case, one: Implementation):
    """On the pretended device."""
    with pretended():
        return list(run_case(case, [one], "cuda", thorough=False))


def multiplying(base: Implementation, precision: str) -> Implementation:
    """An honest implementation on a device, or in a kernel, whose products are tf32's; forward and backward."""
    return dataclasses.replace(base, id=f"{precision}.{base.id}", around=lambda: CutOperands(precision))


CASES = [
    ("logprobs", 5, {"V": 41, "H": 64, "T": 8, "bias": "random"}),
    ("logprobs", 6, {"V": 300, "H": 7, "peak": 12.0, "temperature": 0.7}),
    ("logprobs", 7, {"V": 9, "H": 100, "softcap": 3.0, "logit_scale": 0.3}),
    ("policy", 8, {"V": 41, "H": 33, "T": 6, "beta": 0.04}),
    ("divergence", 9, {"V": 33, "H": 16, "T": 6}),
]


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize(("name", "seed", "settings"), CASES)
def test_honest_tf32_agrees_where_it_is_on(name, seed, settings, precision, monkeypatch):
    monkeypatch.setattr(products, "products", lambda device: Products(precision))
    case = family(name).case(seed, "fp32", settings | {"context": "tf32"})
    rows = rows_of(case, multiplying(reordered(name), precision))
    assert {r.verdict for r in rows} == {"agree"}, text_of(rows)


def test_a_users_products_may_be_torchs_or_those_of_a_kernel(monkeypatch):
    """On an H100 torch rounds operands, and `tl.dot` truncates them."""
    monkeypatch.setattr(products, "products", lambda device: Products(TF32))
    case = family("logprobs").case(8, "fp32", {"V": 60, "H": 128, "T": 4, "peak": 12.0, "context": "tf32"})
    base = multiplying(reordered("logprobs"), TF32_TRUNCATED)
    rows, known = (rows_of(case, dataclasses.replace(base, id=id)) for id in ("k.py:mine", "one of ours"))
    assert {r.verdict for r in rows} == {"agree"}, text_of(rows)
    assert "disagree" in {r.verdict for r in known}


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize(("name", "seed", "settings"), CASES[::2])
def test_tf32_where_it_is_off_is_named(name, seed, settings, precision):
    case = family(name).case(seed, "fp32", settings)
    wrong, honest = (rows_of(case, i) for i in (multiplying(reordered(name), precision), reordered(name)))
    assert {r.verdict for r in honest} == {"agree"}
    failing = [r for r in wrong if r.verdict == "disagree"]
    assert failing and all(r.cls == "logic" for r in failing)
    said = "truncated" if precision == TF32_TRUNCATED else "rounded"
    named = [r for r in failing if f"tf32 although it is off: products of operands {said}" in r.message]
    assert len(named) * 2 > len(failing), [(r.quantity, r.message) for r in failing]


def test_another_error_of_that_size_is_not_called_tf32():
    base = reordered("logprobs")
    scaled = dataclasses.replace(base, call=lambda x: {k: v * (1 + 2.0**-11) for k, v in base.call(x).items()})
    rows = rows_of(family("logprobs").case(5, "fp32", {"V": 41, "H": 64, "T": 8}), scaled)
    assert any(r.verdict == "disagree" for r in rows)
    assert not any("tf32" in r.message for r in rows)


@pytest.mark.parametrize(("reduced", "allowed"), [(frozenset({"bf16"}), True), (frozenset(), False)])
def test_16_bit_split_sums_are_allowed_where_they_are_on(reduced, allowed, monkeypatch):
    """Sums of 2,048 products whose parts are far larger than their total, as a device that splits them would add them."""
    monkeypatch.setattr(products, "products", lambda device: Products(reduced=reduced))

    def call(x):
        h, w = x.hidden.flatten(0, 1), x.weight
        z = _SplitLogits.apply(h, w)
        return {"logps": torch.log_softmax(z.float(), -1).gather(-1, x.ids.flatten()[:, None]).view(x.ids.shape)}

    one = Implementation("split", "logprobs", "candidate", call, Recipe(logits="input", dlogits="input"))
    made = family("logprobs").build(family("logprobs").case(3, "bf16", {"V": 17, "H": 2048, "grad": "hidden"}))
    sign = torch.tensor([1.0, -1.0]).repeat_interleave(1024)
    apart = {"hidden": (made.hidden + 2 * sign).bfloat16(), "weight": (made.weight / 16 + 1).bfloat16()}
    x = made.replace(**apart)
    with pretended():
        oracle = CaseOracle.at(family("logprobs"), _on(x, "cuda"))
        found = confirmed(oracle, one, execute(one, oracle.inputs))
    assert found["logps"].agrees == allowed


class _SplitLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(w)
        parts = [p.to(h.dtype).float() for p in products.split(h.float(), w.mT.float(), 16)]
        return torch.stack(parts).sum(0).to(h.dtype)

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.saved_tensors[0], None


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_cudas_log_softmax_is_not_charged_for_the_cpus_rounding(dtype):
    """Its sum and logarithm stay in float32; a recipe that rounds them as the CPU's does would hide an error of that size."""
    one = control("control.logprobs.narrow")
    case = family("logprobs").case(3, dtype, {"V": 300, "H": 8, "T": 6})
    with pretended():
        oracle = CaseOracle.of(family("logprobs"), case, "cuda")
        recipe = one.recipe_for(oracle.inputs)
        outcome = execute(one, oracle.inputs)
        judged = judge_all(oracle, one, outcome, recipe)
        found = [oracle.oracle.replicas(r, 400) for r in (recipe, dataclasses.replace(recipe, log_sum=None))]
        spreads = [(each["logps"] - oracle.exact["logps"]).square().mean().sqrt() for each in found]
    assert recipe.log_sum == "fp32" and all(j.agrees for j in judged.values())
    assert float(spreads[0]) < 0.95 * float(spreads[1])


class Blocks(torch.autograd.Function):
    """-cross entropy of h Wᵀ with float32 logits; gradients of 128 logits or tokens at a time added to 16-bit memory."""

    @staticmethod
    def forward(ctx, h, w, ids, order, factor):
        logps = torch.log_softmax(h.float() @ w.float().mT, -1)
        ctx.save_for_backward(h, w, ids, logps)
        ctx.order, ctx.factor = order, factor
        return logps.gather(-1, ids[:, None])[:, 0]

    @staticmethod
    def backward(ctx, g):
        h, w, ids, logps = ctx.saved_tensors
        d = -logps.exp()
        d.scatter_add_(1, ids[:, None], torch.ones_like(g)[:, None])
        d = (d * g[:, None]).to(h.dtype)
        return ctx.factor * added(d, w, ctx.order), added(d.mT, h, ctx.order), None, None, None


def added(d, b, order):
    parts = [x.float() @ y.float() for x, y in zip(d.split(cce.BLOCK, 1), b.split(cce.BLOCK), strict=True)]
    total = torch.zeros_like(parts[0], dtype=b.dtype)
    for part in parts[::order]:
        total = total + part.to(b.dtype)
    return total


def kernel(order=1, factor=1.0):
    def call(x):
        logps = Blocks.apply(x.hidden.flatten(0, 1), x.weight, x.ids.flatten(), order, factor)
        return {"logps": logps.view(x.ids.shape)}

    return Implementation("blocks", "logprobs", "candidate", call, cce._kernel)


@pytest.mark.parametrize(
    ("seed", "size", "width", "peak"), [(3, 8_200, 64, 4.0), (4, 32_769, 16, 4.0), (3, 32_769, 4, 12.0)]
)
def test_a_tenth_of_a_gradient_is_caught_at_any_vocabulary(seed, size, width, peak):
    """In bfloat16; with hundreds of blocks where few of them carry the gradient: honest kernels err by several percent else."""
    fam = family("logprobs")
    settings = {"B": 1, "T": 1, "V": size, "H": width, "peak": peak, "targets": "random", "grad": "hidden"}
    case = fam.case(seed, "bf16", settings)
    with pretended():
        oracle = CaseOracle.of(fam, case, "cuda")
        *honest, wrong = (  # whichever block comes last
            judge_all(oracle, one, execute(one, oracle.inputs), one.recipe_for(oracle.inputs))
            for one in (kernel(1), kernel(-1), kernel(factor=0.9))
        )
    for found in honest:
        assert all(j.headroom < 0.7 for j in found.values()), {n: j.gates for n, j in found.items()}
    assert not wrong["grad_hidden"].agrees


def test_the_kernel_under_cudas_recipe_in_the_interpreter():
    """A temperature folded into the hidden states: the kernel stores ∂loss/∂logits before the factor 58, and where float16
    flushes that to 0 no row of the head has a gradient."""
    settings = {"B": 2, "T": 4, "V": 128, "H": 5, "temperature": 0.01729, "peak": 0.4, "grad": "weight"}
    fam, one = family("logprobs"), load()["cce.unfiltered"]
    oracle = CaseOracle.of(fam, fam.case(0, "fp16", settings))
    on_cuda = dataclasses.replace(cce._kernel(oracle.inputs), logits="fp32", partials=2, partial_terms=cce.BLOCK)
    recipe = on_cuda.resolve("fp16")
    outcome = execute(one, oracle.inputs)
    found, unfolded = (judge_all(oracle, one, outcome, r) for r in (recipe, dataclasses.replace(recipe, folded=1.0)))
    assert all(j.headroom < 0.5 for j in found.values()), {n: j.gates for n, j in found.items()}
    assert unfolded["grad_weight"].headroom > 1.0
