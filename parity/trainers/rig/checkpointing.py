"""A model with its own checkpointing function; if that is replaced, the numbers change.

Modelled on what Unsloth installs for Gemma-4, whose layers read state that an earlier layer left behind: the wrapper
hands that state through, the stock function of `gradient_checkpointing_enable` does not know it. Here every decoder
layer adds a vector carried beside the hidden states. Plain forward and the wrapper agree to the last bit; under the
stock function the vector does not arrive.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from parity.errors import Unsupported
from parity.trainers.rig.drawn import normal


class Carrying:
    """The checkpointing function: marks its own calls, so that a layer can tell it from the stock one."""

    inside = calls = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls += 1

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.inside -= 1

        return torch.utils.checkpoint.checkpoint(marked, *args, use_reentrant=False, **kwargs)


def install(model: Any, checkpoint: bool = True) -> Carrying:
    """Give every decoder layer its carried vector and, with `checkpoint`, the model its wrapper, switched on; the wrapper."""
    wrapper = Carrying()

    def carry(layer: Any, carried: Any, module: Any, inputs: Any, output: Any) -> Any:
        lost = layer.gradient_checkpointing and layer.training and not wrapper.inside
        return output if lost else output + carried.to(output)

    for name, layer in layers(model):
        carried = normal(1, f"carried {name.rpartition('.')[2]}", (model.config.get_text_config().hidden_size,))
        _added_to_the_residual(layer).register_forward_hook(functools.partial(carry, layer, carried))
    if checkpoint:
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = wrapper
                module.gradient_checkpointing = True
    return wrapper


def _added_to_the_residual(layer: Any) -> Any:
    """The projection of a layer whose output goes into the residual stream: its MLP's where that has one, else attention's."""
    inside = dict(layer.named_modules())
    for suffix in ("down_proj", "fc2", "mlp.Wo", "o_proj"):
        for name, module in inside.items():
            if name.endswith(suffix):
                return module
    raise Unsupported(f"{type(layer).__name__} has no projection that the custom checkpointing wrapper knows")


def layers(model: Any) -> list[tuple[str, Any]]:
    """The decoder layers by name: the modules that checkpoint one by one."""
    found = [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2].isdigit() and ".layers." in f".{n}"]
    return [(n, m) for n, m in found if hasattr(m, "gradient_checkpointing") and "vision" not in n]


def wrapped(model: Any, wrapper: Carrying) -> list[str]:
    """The layers whose checkpointing function is no longer the wrapper."""
    return [n for n, m in layers(model) if m._gradient_checkpointing_func is not wrapper]
