"""A second device that is only a mark on tensors, for machines that have one."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

AWAY, HERE = torch.device("ipu", 0), torch.device("cpu")


class TwoDevices(TorchFunctionMode):
    """A second device that is only a mark on its tensors: a function that mixes the two fails, as on real ones.

    Attributes:
        moves: (to the second device?, shape) of each tensor that crossed over by `to`.
    """

    def __init__(self):
        super().__init__()
        self.moves = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:
            return AWAY if is_away(args[0]) else HERE
        inputs = tree_flatten((args, kwargs))[0]
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        devices = [value for value in inputs if isinstance(value, torch.device)]
        args, kwargs = tree_map(lambda value: HERE if isinstance(value, torch.device) else value, (args, kwargs or {}))
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("tolist", "item", "__bool__", "__int__", "__len__"):
            return output
        if name == "to" and devices:
            away = devices[0] == AWAY
            if away != is_away(tensors[0]):
                self.moves.append((away, tuple(tensors[0].shape)))
                output = output.clone()
        elif devices:
            away = devices[0] == AWAY
        else:
            # A number on the host mixes with any device.
            places = {is_away(tensor) for tensor in tensors if tensor.dim() or is_away(tensor)}
            assert len(places) < 2, f"{name} was given tensors of two devices"
            away = True in places
        for value in tree_flatten(output)[0]:
            if isinstance(value, torch.Tensor):
                value.is_away = away
        return output


def is_away(tensor):
    return getattr(tensor, "is_away", False)


def send_away(model):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.is_away = True
    return model
