"""Inductor, deterministic algorithms, float32 master weights under bf16 autocast, and CUDA graphs."""

import contextlib
import dataclasses

import pytest
import torch

from cases.selftest.oracles import new, oracle_of
from parity.protocol.call import execute, fresh
from parity.registry import family, run_case, select
from parity.results.report.render import text_of

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SETTINGS = {
    "logprobs": {"B": 2, "T": 64, "V": 4_096, "H": 64},
    "policy": {"B": 2, "T": 32, "V": 2_048, "H": 64, "beta": 0.04},
    "divergence": {"B": 2, "T": 32, "V": 2_048, "H": 64},
}


def chosen(name):
    return [i for i in select(()) if i.family == name and not i.missing()]


COMPILED = [name for name in SETTINGS if any("compile" in i.contexts for i in chosen(name))]


def compiled(one):
    """The implementation as a region that Inductor compiles, by its leaves."""

    def call(x):
        names = []

        def on_leaves(*leaves):
            out = one.call(x.replace(**dict(zip(x.leaves, leaves, strict=True))))
            names[:] = list(out)
            return tuple(out.values())

        torch.compiler.reset()
        values = torch.compile(on_leaves)(*(x.tensors[name] for name in x.leaves))
        return dict(zip(names, values, strict=True))

    return dataclasses.replace(one, id=f"{one.id} under Inductor", call=call)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_inductor(name, dtype):
    case = family(name).case(1, dtype, SETTINGS[name])
    rows = list(run_case(case, [compiled(i) for i in chosen(name) if "compile" in i.contexts], "cuda", thorough=False))
    assert any(r.judged for r in rows) and not new(rows, case), text_of(rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_deterministic_algorithms(name, monkeypatch):
    """What torch refuses under them by name is no finding."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses every product
    case = family(name).case(1, "bf16", SETTINGS[name])
    some = [dataclasses.replace(i, around=deterministic) for i in chosen(name) if not i.interpreted]
    rows = list(run_case(case, some, "cuda", thorough=False))
    rows = [r for r in rows if "does not have a deterministic implementation" not in r.message]
    assert any(r.judged for r in rows) and not new(rows, case), text_of(rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_float32_master_weights_under_autocast(name):
    case = family(name).case(1, "fp32", SETTINGS[name] | {"context": "autocast"})
    rows = list(run_case(case, chosen(name), "cuda", thorough=False))
    assert any(r.judged for r in rows) and not new(rows, case), text_of(rows)


@pytest.mark.parametrize("one", [i for i in chosen("logprobs") if "compile" in i.contexts], ids=lambda i: i.id)
def test_a_captured_graph_gives_the_same(one):
    x = fresh(oracle_of(family("logprobs").case(1, "bf16", SETTINGS["logprobs"] | {"grad": ""}), "cuda").inputs)
    outcome = execute(one, x)
    if outcome.verdict == "unsupported":
        pytest.skip(outcome.message)
    eager = outcome.quantities["logps"]
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = one.call(x)["logps"]
    except RuntimeError as error:  # it waits for the device or copies from it
        if "captur" not in str(error):
            raise
        first = error.__context__ or error  # the end of the capture fails after the operation that broke it
        pytest.skip(f"cannot be captured: {str(first).splitlines()[0]}")
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, eager)
