"""Twelve mistakes in every operation, judged on drawn inputs."""

import dataclasses

import torch

from cases.selftest.judge.operations import OPERATIONS
from cases.selftest.mutants.steps import through

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


def agrees(function, name, case):
    return case.check_parity(function, OPERATIONS[name].definition, protocol="none").agrees


def killed(name, mutant, dtype):
    """Whether one of the drawn inputs shows the mistake, where right code agrees."""
    right = OPERATIONS[name].all_styles()["wide"]
    wrong = MUTANTS[mutant](right)
    return any(not agrees(wrong, name, c) and agrees(right, name, c) for c in drawn(name, dtype))


def survivors(name, dtype):
    return [m for m in MUTANTS if (dtype, m) not in NOT_WRONG and not killed(name, m, dtype)]


def alarms(name, dtype):
    """Right calls that are called wrong."""
    right = OPERATIONS[name].all_styles()["wide"]
    return [str(c) for c in drawn(name, dtype) if not agrees(right, name, c)]
