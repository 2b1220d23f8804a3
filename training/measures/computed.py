"""What measured acceptance would be worth at a GPU's costs: arithmetic (`hf_specgen.theory`), and no measurement.

A pass takes the longer of its arithmetic and of reading the weights, keys and values at the GPU's best speed, in two
bytes a number; launching kernels and everything on the host are left out. So this is what a well-made engine could come
near to, and more than a Python loop reaches with a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen.theory import Machine, Model, Roofline, speed_up

# By the makers' data sheets: dense half-precision operations and bytes from memory a second.
MACHINES = {
    "NVIDIA A100 80 GB": Machine(312e12, 2.04e12),
    "NVIDIA H100 SXM": Machine(989e12, 3.35e12),
    "NVIDIA RTX 4090": Machine(165e12, 1.01e12),
}
BYTES = 2


def speed_ups(
    target: PreTrainedModel, drafter: sg.Drafter, overall: Sequence[float], nodes: float, context: float
) -> list[dict[str, Any]]:
    """Tokens a second against plain decoding, one row, by machine.

    Args:
        target: the model.
        drafter: `Medusa`, `Eagle` or `DraftModel`.
        overall: by depth, the share of rounds that accept a node so deep.
        nodes: checked a round.
        context: tokens in the cache.
    """
    before = [1.0, *overall]
    acceptance = [later / earlier if earlier else 0.0 for earlier, later in pairwise(before)]
    deep = len(acceptance)
    rows = []
    for name, machine in MACHINES.items():
        plain = Roofline(_model(target), machine, context=context)
        drafting = _drafting_s(drafter, target, machine, deep) / plain.pass_s(1)
        checking = plain.verify(round(nodes))
        speed = speed_up(acceptance, deep, drafting / deep, lambda k, v=checking: v) if deep else 1.0  # type: ignore[misc]
        rows.append({"machine": name, "speedup": speed, "draft": drafting, "verify": checking})
    return rows


def _drafting_s(drafter: sg.Drafter, target: PreTrainedModel, machine: Machine, deep: int) -> float:
    """Seconds a round: Medusa's heads run once, others once for each depth."""
    weights = numbers(drafter, target)
    passes = 1 if isinstance(drafter, sg.Medusa) else deep
    return passes * Roofline(Model(weights, BYTES), machine).pass_s(1)


def numbers(drafter: sg.Drafter, target: PreTrainedModel) -> int:
    """Weights that a pass of the drafter reads, what it borrows included."""
    if isinstance(drafter, sg.DraftModel):
        return _read(drafter.model)
    head = drafter.heads if isinstance(drafter, sg.Medusa) else drafter.head if isinstance(drafter, sg.Eagle) else None
    if head is None:
        return 0
    lent = _size(target.get_output_embeddings()) if "LM head" in head.borrows else 0  # type: ignore[no-untyped-call]
    embeddings = sum(p.numel() for name, p in head.named_parameters() if name.startswith("embed_tokens."))
    return _size(head) - embeddings + lent


def _model(target: PreTrainedModel) -> Model:
    config = target.config.get_text_config(decoder=True).to_dict()
    layers, heads = config.get("num_hidden_layers") or 0, config.get("num_attention_heads") or 0
    size = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
    kept = (config.get("num_key_value_heads") or heads) * size
    return Model(_read(target), BYTES, cache_bytes=2 * layers * kept * BYTES, attention_flops=4 * layers * heads * size)


def _read(model: nn.Module) -> int:
    """All weights but the input embeddings, of which a token reads one row; tied ones are the LM head's."""
    inputs: Any = model.get_input_embeddings()  # type: ignore[operator]
    outputs: Any = model.get_output_embeddings()  # type: ignore[operator]
    tied = outputs is not None and outputs.weight is inputs.weight
    return _size(model) - (0 if tied else _size(inputs))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
