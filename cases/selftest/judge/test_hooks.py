"""The judge in the hooks that others have: an autotuner's accuracy check, a benchmark's verification, a generated module."""

import pytest
import torch

from parity.testing import ParityError, assert_parity, definitions

X = {"x": torch.linspace(-3, 3, 96).reshape(4, 24).bfloat16(), "weight": torch.linspace(0.5, 1.5, 24).bfloat16()}


def kernel(x, weight, wrong=False):
    out = definitions.rms_norm(x.float(), weight.float()).to(x.dtype)
    return torch.cat([out[:, :-1], out[:, -2:-1]], -1) if wrong else out


def test_helion_autotune_baseline_accuracy_check():
    """`@helion.kernel(autotune_baseline_accuracy_check_fn=check)`: (actual, expected), raises where a configuration is wrong."""

    def check(actual, expected):
        assert_parity(definition=definitions.rms_norm, inputs=X, actual={"output": actual})

    check(kernel(**X), expected=None)
    with pytest.raises(AssertionError, match="only at index 23"):
        check(kernel(**X, wrong=True), expected=None)


def test_hugging_face_kernels_benchmark_verification():
    """A `Benchmark` of `kernels benchmark`: `verify_base` returns what `benchmark_base` should have left in `self.out`."""

    class RMSNormBenchmark:
        wrong = False

        def setup(self):
            self.x, self.weight = X["x"], X["weight"]

        def benchmark_base(self):
            self.out = kernel(self.x, self.weight, self.wrong)

        def verify_base(self):
            assert_parity(definition=definitions.rms_norm, inputs=X, actual={"output": self.out})
            return self.out

    benchmark = RMSNormBenchmark()
    benchmark.setup()
    benchmark.benchmark_base()
    assert benchmark.verify_base() is benchmark.out
    benchmark.wrong = True
    benchmark.benchmark_base()
    with pytest.raises(ParityError):
        benchmark.verify_base()


def test_a_kernel_bench_problem():
    """`Model` defines, `ModelNew` is generated, both with `get_init_inputs`' arguments: outputs, gradients, five seeds."""

    class Model(torch.nn.Module):
        def __init__(self, features):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((features,), 0.7))

        def forward(self, x):
            return definitions.rms_norm(x, self.weight)

    class ModelNew(Model):
        def forward(self, x):
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)

    class ModelZeros(Model):
        def forward(self, x):
            return 0 * x * self.weight

    def evaluate(model, new):
        for seed in range(5):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
            assert_parity(new(24), model(24), {"x": x}, seed=seed)

    evaluate(Model, ModelNew)
    with pytest.raises(ParityError, match="all zero where the definition is not"):
        evaluate(Model, ModelZeros)
