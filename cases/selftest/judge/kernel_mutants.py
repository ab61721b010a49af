"""Twelve mistakes in every operation, judged on drawn inputs, beside fixed tolerances on the same inputs.

python -m cases.selftest.judge.kernel_mutants      prints the table of docs/measured/kernels.md
"""

import dataclasses
import functools
import sys

import torch

from cases.selftest.judge.operations import OPERATIONS
from cases.selftest.mutants.steps import through
from parity.judge.problem import Problem, call, cotangent, named

CASES, LARGEST = 24, 130
DTYPES = ("fp32", "fp16", "bf16")


def floats(given):
    return [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]


def on_outputs(change):
    def mutate(function):
        def mutant(**given):
            out = function(**given)
            many = out if isinstance(out, tuple) else (out,)
            many = tuple(change(o) if o.is_floating_point() and o.numel() else o for o in many)
            return many if isinstance(out, tuple) else many[0]

        return mutant

    return mutate


def on_input(which, change):
    def mutate(function):
        def mutant(**given):
            names = floats(given) if which is None else [floats(given)[which]]
            return function(**given | {n: change(given[n]) for n in names if given[n].numel()})

        return mutant

    return mutate


def without_last(x):
    return torch.cat([x[..., :-1], 0 * x[..., -1:]], -1) if x.dim() else x * 1.01


def without_tail(x):
    kept = x.shape[-1] // 16 * 16
    return torch.cat([x[..., :kept], 0 * x[..., kept:]], -1)


def as_contiguous(x):
    memory = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    read = memory[x.storage_offset() : x.storage_offset() + x.numel()]
    return x if read.numel() < x.numel() else x + (read.view(x.shape) - x).nan_to_num().detach()


def from_the_start(x):
    memory = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)[: x.numel()]
    return x + (memory.view(x.shape) - x).nan_to_num().detach() if x.is_contiguous() else x


def swapped_rows(x):
    return torch.cat([x[:32], x[32:].flip(0)]) if x.dim() > 1 and x.shape[0] > 33 else x.flip(0) if x.dim() > 1 else x


MUTANTS = {
    "outputs 1.002 times": on_outputs(lambda o: o * 1.002),
    "last column of an output lost": on_outputs(without_last),
    "gradient of the first input 1.005 times": on_input(0, lambda x: through(x, lambda g: g * 1.005)),
    "gradient of the first input lost": on_input(0, lambda x: x.detach() + 0 * x),
    "gradient of the last input added twice": on_input(-1, lambda x: through(x, lambda g: 2 * g)),
    "gradient transposed to the wrong row": on_input(0, lambda x: through(x, lambda g: g.roll(1, 0))),
    "columns behind the last multiple of 16 lost": on_input(0, without_tail),
    "strides ignored": on_input(0, as_contiguous),
    "storage offset ignored": on_input(0, from_the_start),
    "rows in the wrong order": on_input(0, swapped_rows),
    "upstream gradient limited to 300": on_outputs(lambda o: through(o, lambda g: g.clamp(-300, 300))),
    "inputs rounded to 8 bits": on_input(None, lambda x: x + (x.bfloat16().to(x.dtype) - x).detach()),
}
NOT_WRONG = {("bf16", mutant) for mutant in ("inputs rounded to 8 bits", "outputs 1.002 times")}
NOT_WRONG |= {(d, "gradient of the first input 1.005 times") for d in ("bf16", "fp16")}
"""Within the rounding of a single entry of that dtype: a biased one shows only over many."""


def drawn(name, dtype):
    whole = OPERATIONS[name].drawn
    sizes = {n: (low, min(high, LARGEST)) for n, (low, high) in whole.sizes.items()}
    return dataclasses.replace(whole, sizes=sizes, dtypes=(dtype,)).cases(CASES)


def judged(function, definition, case):
    return case.check_parity(function, definition, protocol="none").agrees


LIGER = {
    "rms_norm": ("rms_norm.py", {"fp32": (1e-4, 1e-6), "bf16": (2e-1, 2e-2)}),
    "gemma_rms_norm": ("rms_norm.py", {"fp32": (1e-4, 1e-6), "bf16": (2e-1, 2e-2)}),
    "layer_norm": ("layer_norm.py", {"fp32": (1e-5, 1e-5), "bf16": (2e-2, 2e-2)}),
    "group_norm": ("group_norm.py", {"fp32": (1e-4, 1e-4)}),
    "rope": ("rope.py", {"fp32": (1e-5, 1e-5), "fp16": (1e-2, 1e-5), "bf16": (1e-1, 1e-5)}),
    "swiglu": ("swiglu.py", {"fp32": (2e-4, 1e-4), "fp16": (1e-2, 1e-2), "bf16": (1e-2, 1e-2)}),
    "geglu": ("geglu.py", {"fp32": (1e-5, 1e-5), "bf16": (1e-2, 1e-2)}),
    "softmax": ("softmax.py", {"fp32": (1e-5, 1e-5), "bf16": (5e-2, 5e-2)}),
    "cross_entropy": ("cross_entropy.py", {"fp32": (1e-8, 1e-6), "bf16": (1e-8, 5e-2)}),
    "plain_cross_entropy": ("cross_entropy.py", {"fp32": (1e-8, 1e-6), "bf16": (1e-8, 5e-2)}),
    "linear_cross_entropy": ("fused_linear_cross_entropy.py", {"fp32": (1e-5, 5e-4), "bf16": (5e-3, 5e-2)}),
    "kl": ("kl_div.py", {"fp32": (1e-8, 1e-6), "fp16": (1e-3, 1e-3), "bf16": (1e-8, 5e-2)}),
    "jsd": ("jsd.py", {"fp32": (1e-7, 1e-6), "fp16": (1e-3, 1e-3), "bf16": (1e-7, 5e-2)}),
    "tvd": ("tvd.py", {"fp32": (1e-8, 1e-6), "bf16": (1e-8, 1e-6)}),
    "embedding": ("embedding.py", {"fp32": (1e-6, 1e-5)}),
    "moe_combine": ("fused_moe.py", {"fp32": (1e-3, 1e-4), "bf16": (1e-1, 1e-2)}),
}
"""Operation -> the file test/transformers/test_… of liger-kernel 0.8.5, and its (atol, rtol) by dtype; of the mean where it has
several, and of the operation itself where a whole layer has wider ones."""


def close(function, definition, case, atol=None, rtol=None):
    """`torch.testing.assert_close`, with its default tolerances or others, outputs and gradients, beside the definition in
    float64."""
    leaves = [n for n, t in case.description.tensors.items() if t.below is None]
    leaves = leaves if case.grad == "all" else [n for n in leaves if n == case.grad]
    problem = Problem(definition, case.inputs, {}, tuple(leaves), seed=case.seed)
    exact = problem.oracle.exact
    x = {n: t.detach().requires_grad_(n in leaves) for n, t in problem.tensors.items()}
    outputs = named(call(function, case.inputs, x, ()))
    pairs = {n: o for n, o in outputs.items() if o.requires_grad}
    if pairs and leaves:
        torch.autograd.backward(list(pairs.values()), [cotangent(n, o, case.seed).to(o) for n, o in pairs.items()])
    found = outputs | {f"grad_{n}": x[n].grad for n in leaves if x[n].grad is not None}
    try:
        for name, value in found.items():
            wanted = exact[name].to(value.dtype)
            torch.testing.assert_close(value.detach(), wanted, equal_nan=True, atol=atol, rtol=rtol)
    except AssertionError:
        return False
    return True


def killed(name, mutant, dtype, agrees):
    """Whether one of the drawn inputs shows the mistake, where right code agrees."""
    operation = OPERATIONS[name]
    right, definition = operation.all_styles()["wide"], operation.definition
    wrong = MUTANTS[mutant](right)
    return any(not agrees(wrong, definition, c) and agrees(right, definition, c) for c in drawn(name, dtype))


def alarms(name, dtype, agrees):
    """Right calls that are called wrong, of all."""
    operation = OPERATIONS[name]
    return sum(not agrees(operation.all_styles()["wide"], operation.definition, case) for case in drawn(name, dtype))


def wrong(dtype):
    return [m for m in MUTANTS if (dtype, m) not in NOT_WRONG]


def survivors(name, dtype, agrees):
    return [m for m in wrong(dtype) if not killed(name, m, dtype, agrees)]


def row(name):
    """The mistakes that the judge lets pass; then by dtype those that each tolerance catches, and right calls called wrong."""
    cells = [name, ", ".join(f"{m} ({d})" for d in DTYPES for m in survivors(name, d, judged)) or "all"]
    for dtype in DTYPES:
        own = LIGER.get(name, ("", {}))[1].get(dtype)
        for way in (close, functools.partial(close, atol=own[0], rtol=own[1]) if own else None):
            caught = way and len(wrong(dtype)) - len(survivors(name, dtype, way))
            cells.append(f"{caught}; {alarms(name, dtype, way)}" if way else "")
    return cells


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(OPERATIONS)
    heads = [f"{way}, {dtype}" for dtype in DTYPES for way in ("assert_close", "Liger's")]
    print(f"| operation | judge | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 2) + "|")
    for name in names:
        print(f"| {' | '.join(row(name))} |", flush=True)
