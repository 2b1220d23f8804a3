"""Attention of grouped-query models under a mask, without copying keys and values.

With a mask and more than one query, transformers' sdpa function first copies K and V out to all query heads, in every
layer (`repeat_kv`). Here the queries of a group are laid one after the other on the query axis instead,
`(batch, kv_heads, groups * queries, dim)`, against K and V as they are, with the mask repeated `groups` times. The
result is equal to rounding. Grouped queries: arXiv 2305.13245.

Milliseconds a layer at SmolLM2's shape (9 heads on 3, dim 64, float32, additive mask, K and V slices of a larger
buffer, one row), one thread of an AMD EPYC with AVX-512, torch 2.13, medians:

    context, queries     stock   packed   enable_gqa   matmul, softmax, matmul
    100, 8                0.10     0.06         0.05                      0.07
    2,000, 1, no mask     0.26     0.22         0.25                      0.25
    2,000, 2              5.4      0.27         0.41                      0.32
    2,000, 8              5.4      0.62         0.73                      0.69
    2,000, 16             2.1      1.3          1.2                       1.4
    2,000, 32             3.1      2.4          2.3                       2.6
    8,000, 8             24        3.7          5.5                       4.1
    8,000, 32            20       12           12                        12

Most of stock's time goes into fresh memory for the copies; a heap that has kept it from the last layer turns 5.4 into 1
to 2. `enable_gqa=True` copies nothing either, but takes the query heads one at a time: packing makes one product of a
group's, which counts where queries are few. (32 heads on 8, dim 128, 2,000 keys, one query, no mask: stock, which is
`enable_gqa` there, takes 9.2, packed 2.3; in bfloat16 22 and 1.7.) The mask's copy is 1 to 4 % of the packed time, too
little to share one between layers. At 512 queries nothing is gained any more, and a long prompt's mask would be large:
above `MAX_QUERIES` the stock function runs.

On CUDA a masked pass packs for the same reason and with the same kernels; without a mask stock's flash kernel already
reads grouped heads as they are.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_jit_tracing, is_torchdynamo_exporting

NAME = "hf_specgen"
MAX_QUERIES = 128

# Code that asks for stock's name takes another branch under ours (Gemma 4 and the sparse indexers do).
_ASKS_FOR_SDPA = re.compile(r"_attn_implementation\w*\s*(?:==|!=|in\b|not\s+in\b)[^\n]*[\"']sdpa[\"']")


def grouped_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Equal to transformers' `sdpa_attention_forward` to rounding, and called as it is.

    Args:
        module: the attention module.
        query: `(batch, heads, queries, dim)`.
        key: `(batch, kv_heads, length, dim)`, any strides.
        value: `(batch, kv_heads, length, value_dim)`, any strides.
        attention_mask: `(batch or 1, 1 or heads, queries, length)`, bool (True: visible) or additive; None is causal.
        scaling: of the scores; None is `dim ** -0.5`.
        **kwargs: as in stock, `dropout` among them; what packing does not serve goes there unchanged, errors and
            warnings included.

    Returns:
        `(batch, queries, heads, value_dim)`, contiguous, and None in the place of the attention weights.
    """
    if kwargs.get("dropout") or not _packs(query, key, attention_mask, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    rows = heads // kv_heads * queries
    mask = attention_mask
    if mask is not None and mask.shape[1] == heads:
        mask = mask.reshape(mask.shape[0], kv_heads, rows, mask.shape[-1])
    elif mask is not None and queries > 1:
        mask = torch.cat([mask] * (heads // kv_heads), dim=2)
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, rows, dim), key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


def _packs(query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether packing is right and gains for these shapes."""
    batch, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    if heads == kv_heads or heads % kv_heads or key.shape[0] != batch:
        return False
    if is_torchdynamo_exporting() or is_jit_tracing():  # an exported graph must not depend on how many queries
        return False
    if any(kwargs.get(name) is not None for name in ("position_bias", "softcap")) or kwargs.get("output_attentions"):
        return False
    if mask is None:
        return queries == 1 and query.device.type == "cpu"
    return (
        query.device.type in ("cpu", "cuda")
        and queries <= MAX_QUERIES
        and isinstance(mask, Tensor)
        and mask.ndim == 4
        and mask.shape[1] in (1, heads)
        and mask.shape[2] == queries
    )


def install(model: nn.Module) -> bool:
    """Sets the function where a model reads grouped heads through stock sdpa; everything else stays as it is.

    It is set on the configs that those attention modules read, one by one, so that in a composite model the encoders
    keep theirs. Left alone are: eager, flash, flex and foreign implementations, heads that are not grouped, attention
    written without transformers' `AttentionInterface`, models whose code asks for "sdpa" by name (Gemma 4 does), and
    everything where the process has another function registered as "sdpa".

    The name lives in the config's memory only: transformers writes it neither to JSON nor with `save_pretrained`.
    Transformers' continuous batching knows no name but its own: uninstall before `generate_batch`.

    Args:
        model: a transformers model, or a module that wraps one.

    Returns:
        Whether anything was set.
    """
    configs = _takers(model)
    for config in configs:
        config._attn_implementation = {"": NAME}  # the dict form leaves the sub-configs alone
    return bool(configs)


def would_install(model: nn.Module) -> bool:
    """Whether `install` would set anything; nothing is set."""
    return bool(_takers(model))


def is_installed(model: nn.Module) -> bool:
    """Whether the function is set anywhere in a model."""
    return any(config._attn_implementation == NAME for config, _ in _readers(model))


def _takers(model: nn.Module) -> list[PreTrainedConfig]:
    """The configs whose modules `install` serves."""
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:
        return []
    return [config for config, all_ in _readers(model) if config._attn_implementation == "sdpa" and _accepts(all_)]


def uninstall(model: nn.Module) -> None:
    """Undoes `install`. It needs no memory of it: all that `install` sets was on "sdpa", in a copied model as well."""
    for config, _ in _readers(model):
        if config._attn_implementation == NAME:
            config._attn_implementation = {"": "sdpa"}


def _readers(model: nn.Module) -> list[tuple[PreTrainedConfig, list[nn.Module]]]:
    """Each config in use with the modules that read it; by identity, since configs cannot be hashed."""
    found: dict[int, tuple[PreTrainedConfig, list[nn.Module]]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found.setdefault(id(config), (config, []))[1].append(module)
    return list(found.values())


def _accepts(readers: list[nn.Module]) -> bool:
    """Whether the attention among these modules is grouped and looks its function up; none asks for stock's name."""
    grouped = {type(module) for module in readers if getattr(module, "num_key_value_groups", 1) > 1}
    try:
        return (
            bool(grouped)
            and all("ALL_ATTENTION_FUNCTIONS" in _source(kind) for kind in grouped)
            and not any(_ASKS_FOR_SDPA.search(_source(kind)) for kind in {type(module) for module in readers})
        )
    except (OSError, TypeError, KeyError):  # no source to be sure from
        return False


def _source(kind: type[nn.Module]) -> str:
    """The text of the files that define a module class and its bases, torch's own left out."""
    files = {base.__module__ for base in kind.__mro__ if issubclass(base, nn.Module)}
    return "\n".join(inspect.getsource(sys.modules[file]) for file in sorted(files) if file.split(".")[0] != "torch")


# On import, so that a pickled or copied model finds the name wherever this package is.
AttentionInterface.register(NAME, grouped_query_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
