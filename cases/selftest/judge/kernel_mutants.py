"""Twelve mistakes in every operation, judged on drawn inputs, beside fixed tolerances on the same inputs.

python -m cases.selftest.judge.kernel_mutants      prints the table of docs/measured/kernels.md
"""

import dataclasses
import sys

import torch

from cases.selftest.judge.operations import OPERATIONS
from parity.judge.problem import Problem, call, cotangent, named

CASES, LARGEST = 24, 130


class Through(torch.autograd.Function):
    """The value itself, with another gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.change(g), None


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
    "gradient of the first input 1.005 times": on_input(0, lambda x: Through.apply(x, lambda g: g * 1.005)),
    "gradient of the first input lost": on_input(0, lambda x: x.detach() + 0 * x),
    "gradient of the last input added twice": on_input(-1, lambda x: Through.apply(x, lambda g: 2 * g)),
    "gradient transposed to the wrong row": on_input(0, lambda x: Through.apply(x, lambda g: g.roll(1, 0))),
    "columns behind the last multiple of 16 lost": on_input(0, without_tail),
    "strides ignored": on_input(0, as_contiguous),
    "storage offset ignored": on_input(0, from_the_start),
    "rows in the wrong order": on_input(0, swapped_rows),
    "upstream gradient limited to 300": on_outputs(lambda o: Through.apply(o, lambda g: g.clamp(-300, 300))),
    "inputs rounded to 8 bits": on_input(None, lambda x: x + (x.bfloat16().to(x.dtype) - x).detach()),
}
NOT_WRONG = {
    ("bf16", "inputs rounded to 8 bits"),
    *((d, "gradient of the first input 1.005 times") for d in ("bf16", "fp16")),
}
NOT_WRONG |= {(d, "outputs 1.002 times") for d in ("bf16",)}
"""Within the rounding of a single entry of that dtype: a biased one shows only over many."""


def drawn(name, dtype):
    whole = OPERATIONS[name].drawn
    sizes = {n: (low, min(high, LARGEST)) for n, (low, high) in whole.sizes.items()}
    return dataclasses.replace(whole, sizes=sizes, dtypes=(dtype,)).cases(CASES)


def judged(function, definition, case):
    return case.check_parity(function, definition, protocol="none").agrees


def close(function, definition, case):
    """`torch.testing.assert_close` with its default tolerances, outputs and gradients, beside the definition in float64."""
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
            torch.testing.assert_close(value.detach(), exact[name].to(value.dtype), equal_nan=True)
    except AssertionError:
        return False
    return True


def killed(name, mutant, dtype, agrees):
    """Whether one of the drawn inputs shows the mistake."""
    operation = OPERATIONS[name]
    function = MUTANTS[mutant](operation.all_styles()["wide"])
    return any(not agrees(function, operation.definition, case) for case in drawn(name, dtype))


def alarms(name, dtype, agrees):
    """Right calls that are called wrong, of all."""
    operation = OPERATIONS[name]
    return sum(not agrees(operation.all_styles()["wide"], operation.definition, case) for case in drawn(name, dtype))


def row(name, dtype):
    """(mistakes, killed by the judge, survivors, killed by fixed tolerances, right calls, called wrong by each)."""
    wrong = [m for m in MUTANTS if (dtype, m) not in NOT_WRONG]
    survivors = [m for m in wrong if not killed(name, m, dtype, judged)]
    fixed = sum(killed(name, m, dtype, close) for m in wrong)
    return (
        len(wrong),
        len(wrong) - len(survivors),
        survivors,
        fixed,
        CASES,
        alarms(name, dtype, judged),
        alarms(name, dtype, close),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(OPERATIONS)
    print(
        "| operation | dtype | mistakes | caught | by assert_close | right calls wrong | by assert_close | not caught |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for name in names:
        for dtype in ("fp32", "fp16", "bf16"):
            count, caught, survivors, fixed, calls, ours, theirs = row(name, dtype)
            cells = (
                name,
                dtype,
                count,
                caught,
                fixed,
                f"{ours} of {calls}",
                f"{theirs} of {calls}",
                ", ".join(survivors),
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
