"""A view of a model: the same modules with fewer decoder layers, or layers without their attention or their MLP.

Only what holds the list of layers is copied, and nothing is written to the model. Every weight is shared.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specgen.cache import has_recurrent, new_cache

# What decoder layers call their two halves.
ATTENTION, MLP = ("self_attn", "attn", "attention", "self_attention"), ("mlp", "feed_forward")


@dataclass(frozen=True)
class SkipSet:
    """What of a model's decoder layers a view leaves out.

    Args:
        attention: indices of layers without their attention.
        mlp: indices of layers without their MLP. A layer in both is left out altogether.
        layers: how many layers the model has that the set was found for; None for a set written by hand.
        model: its name.
        acceptance: the share of tokens on which the view agreed with the model.
        cost: the share of the weights that a pass of the view reads.
        speed: what those two promise, 1.0 being plain decoding. See `search_skip_set`.
        evaluations: how many sets were tried.
        seed: of the search.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    layers: int | None = None
    model: str = ""
    acceptance: float | None = None
    cost: float | None = None
    speed: float | None = None
    evaluations: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Sorts the indices, so that equal sets are equal; raises ValueError for what is no index."""
        for name in ("attention", "mlp"):
            indices = sorted(set(getattr(self, name)))
            if not all(isinstance(index, int) for index in indices):
                raise ValueError(f"{name} must be indices of layers, not {indices}")
            object.__setattr__(self, name, tuple(indices))

    @classmethod
    def whole(cls, layers: Iterable[int]) -> SkipSet:
        """Whole layers."""
        indices = tuple(layers)
        return cls(indices, indices)

    @classmethod
    def load(cls, path: str | Path) -> SkipSet:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} was not written by SkipSet.save: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @property
    def both(self) -> frozenset[int]:
        """The layers that are left out altogether."""
        return frozenset(self.attention) & frozenset(self.mlp)


@dataclass(frozen=True)
class Decoder:
    """Where a model keeps its decoder layers.

    Attributes:
        module: holds the list.
        path: its dotted name in the model; empty for the model itself.
        name: of the list in it.
    """

    module: nn.Module
    path: str
    name: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Decoder:
        """Finds the one list of as many modules as the config says there are layers.

        Raises:
            ValueError: there is none.
        """
        module: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        config = model.config.get_text_config(decoder=True)
        count = config.num_hidden_layers
        found = [
            name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) == count
        ]
        path = next((name for name, other in model.named_modules() if other is module), None)
        if len(found) != 1 or path is None or getattr(module, "config", None) is None:
            raise ValueError(
                f"{type(model).__name__} does not keep its {count} decoder layers in one list that could be shortened; "
                "draft with another model or with PromptLookup"
            )
        return cls(module, path, found[0])

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers."""
        layers: Any = getattr(self.module, self.name)
        return list(layers)


def why_not_skipped(model: PreTrainedModel, skip: SkipSet) -> str | None:
    """Why a view without these cannot be made, in words; None if it can."""
    decoder, config = Decoder.of(model), model.config.get_text_config(decoder=True)
    layers = decoder.layers
    count, left_out = len(layers), {*skip.attention, *skip.mlp}
    if skip.layers not in (None, count):
        return f"the skip set was found for {skip.layers} layers ({skip.model}), and the model has {count}"
    if strange := sorted(index for index in left_out if not 0 <= index < count):
        return f"there is no layer {strange[0]}: the model has {count}, counted from 0"
    if len(skip.both) == count:
        return f"nothing is left of its {count} layers"
    if getattr(config, "hidden_size_per_layer_input", None):
        return "each of its layers has an embedding of its own"
    last = left_out == skip.both == set(range(min(left_out), count))
    if not last and has_recurrent(new_cache(model.config)):
        return "some of them are recurrent, so that only the last ones can be left out: take exit_layer="
    readers = set(range(_sharing(config), count)) - set(skip.attention)
    if readers and (missed := sorted(index for index in skip.attention if index < _sharing(config))):
        return f"layer {min(readers)} reads keys and values that layers before it keep, and {missed[0]} may be one"
    for index in sorted(left_out - skip.both):
        name, half = ("attention", ATTENTION) if index in skip.attention else ("MLP", MLP)
        if _half(layers[index], half) is None:
            return f"layer {index} ({type(layers[index]).__name__}) has no {name} that could be left out by itself"
    return None


def view_of(model: PreTrainedModel, skip: SkipSet) -> PreTrainedModel:
    """The model without what a set names; `why_not_skipped` must have nothing against it.

    The layers that run keep their index, and so their place in a cache of the whole model. Where only the last layers
    are left out, the config of the view is that of a model without them.

    Args:
        model: in eval mode; it is not written to.
        skip: what to leave out.

    Raises:
        ValueError: something was put over the forward of a module that holds the layers.
    """
    decoder = Decoder.of(model)
    run = [index for index in range(len(decoder.layers)) if index not in skip.both]
    layers = [_part(decoder.layers[index], index, skip) for index in run]
    view = twin = _twin(model)
    for name in decoder.path.split(".") if decoder.path else []:
        below = _twin(twin.get_submodule(name))
        twin._modules[name] = below
        twin = below
    twin._modules[decoder.name] = _twin(twin._modules[decoder.name])
    twin._modules[decoder.name]._modules = {str(place): layer for place, layer in enumerate(layers)}
    whole: Any = decoder.module.config
    vars(twin)["config"] = _shortened(whole, run)
    if run == list(range(len(run))):
        vars(view)["config"] = _replaced(model.config, whole, twin.config)
    shorter: PreTrainedModel = view
    return shorter


def _twin(module: Any) -> Any:
    """A copy of a module that holds the same children and parameters."""
    twin = copy.copy(module)
    state = vars(twin)
    state["_modules"] = dict(module._modules)
    for name, value in vars(module).items():
        # What accelerate puts over a forward calls the module it was put on.
        if isinstance(value, MethodType) and value.__self__ is module:
            state[name] = MethodType(value.__func__, twin)
        elif isinstance(value, functools.partial) and value.args[:1] == (module,):
            bound = functools.partial(value.func, twin, *value.args[1:], **value.keywords)
            state[name] = functools.update_wrapper(bound, value)  # its signature is asked for
        elif name == "forward":
            raise ValueError(
                f"the forward of {type(module).__name__} was replaced by {value!r}, as torch.compile does, and would "
                "run all layers: leave it, or draft with another drafter"
            )
    return twin


def _part(layer: nn.Module, index: int, skip: SkipSet) -> nn.Module:
    """A layer with both halves, or with one."""
    if index not in skip.attention and index not in skip.mlp:
        return layer
    half = _half(layer, ATTENTION if index in skip.attention else MLP)
    assert half is not None
    twin: nn.Module = _twin(layer)
    name, count = half
    twin._modules[name] = Nothing(count).eval()
    return twin


def _half(layer: nn.Module, names: Sequence[str]) -> tuple[str, int] | None:
    """The name of a half of a layer and how many things the layer takes from it, 0 for a tensor; None if unknown.

    Annotations of what attention returns are wrong in many models; what the layer unpacks is not.
    """
    name = next((name for name in names if name in layer._modules), None)
    if name is None:
        return None
    try:
        source = inspect.getsource(type(layer))
    except (OSError, TypeError):
        return None
    taken = {found.count(",") for found in re.findall(rf"^ *([\w, ]+?) *=[^=\n]*self\.{name}\(", source, re.MULTILINE)}
    if len(taken) != 1:
        return None
    commas = taken.pop()
    # Attention that is not unpacked may return a tuple all the same.
    return (name, commas + 1 if commas else 0) if commas or names is MLP else None


def halves(layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """A layer's attention and its MLP, each None where it cannot be left out by itself."""
    attention, mlp = _half(layer, ATTENTION), _half(layer, MLP)
    return (
        None if attention is None else layer._modules[attention[0]],
        None if mlp is None else layer._modules[mlp[0]],
    )


class Nothing(nn.Module):
    """In the place of a half that is left out: it adds nothing to the residual stream.

    Args:
        count: how many things the half returns; 0 for a tensor by itself.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Zeros like the hidden states."""
        zeros = torch.zeros_like(hidden_states)
        return (zeros, *[None] * (self.count - 1)) if self.count else zeros


def _shortened(config: PreTrainedConfig, run: Sequence[int]) -> PreTrainedConfig:
    """The config of a decoder that has these layers only. It is not asked for what hooks on shared layers collect."""
    short = copy.copy(config)
    short.num_hidden_layers = len(run)
    kinds = getattr(config, "layer_types", None)
    # Some configs derive the kinds from the count.
    if kinds is not None and list(short.layer_types) != (wanted := [kinds[index] for index in run]):
        short.layer_types = wanted
    if getattr(config, "num_kv_shared_layers", None):
        short.num_kv_shared_layers = sum(index >= _sharing(config) for index in run)
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if getattr(config, name, False):
            setattr(short, name, False)
    return short


def _sharing(config: PreTrainedConfig) -> int:
    """The first layer that reads the keys and values of layers before it; the count of layers if none does."""
    shared: int = getattr(config, "num_kv_shared_layers", None) or 0
    return int(config.num_hidden_layers) - shared


def _replaced(config: PreTrainedConfig, old: PreTrainedConfig, new: PreTrainedConfig) -> PreTrainedConfig:
    """A config with another text config in it, or in the place of it."""
    if config is old:
        return new
    twin = copy.copy(config)
    for name, value in vars(config).items():
        if value is old:
            setattr(twin, name, new)
    return twin
