import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if (
    device == "cpu"
):  # Triton's interpreter, read when it is imported, lacks rsqrt, and hands float arguments over as Python floats
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)
    convert = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda x: (
        tl.tensor(interpreter.TensorHandle(np.array([x], np.float32), tl.float32), tl.float32)
        if isinstance(x, float)
        else convert(x)
    )
from liger_kernel.transformers import monkey_patch  # noqa: F401

ids = torch.arange(3, 19, device=device).view(2, 8)
small = dict(vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
