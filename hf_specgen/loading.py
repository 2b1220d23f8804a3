"""Trained drafters and draft models, loaded from a folder, a file or the hub."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen.draft import Drafter
from hf_specgen.drafters.draft_model import DraftModel
from hf_specgen.drafters.eagle import Eagle
from hf_specgen.drafters.medusa import Medusa
from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.eagle import EagleHead
from hf_specgen.heads.layouts import Head, Layout, layout_of, unknown
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.prompt import generative, input_device

# What transformers raises for a folder or repository that it cannot make a model of.
UNLOADABLE = (OSError, ValueError, RuntimeError, KeyError, ImportError)


@dataclass(frozen=True)
class Location:
    """Where a drafter is published.

    Attributes:
        path: a folder or file, absolute; or a hub id.
        revision: of a hub id; None for its main branch.
        trust_remote_code: whether a repository's own code may run.
        as_model: it is a causal LM, whatever heads it may have besides.
    """

    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    as_model: bool = False

    @classmethod
    def of(cls, path_or_id: str | PathLike[str], **settings: Any) -> Location:
        """A location by the name that a user gives it."""
        path = Path(path_or_id).expanduser()
        # Path.exists raises for a name that is too long for a file.
        return cls(str(path.absolute()) if os.path.exists(path) else str(path_or_id), **settings)

    def stamp(self) -> tuple[Any, ...]:
        """Changes when files on this machine are saved anew. What the hub has for a revision is asked for once."""
        path = Path(self.path)
        if not os.path.exists(path):
            return ()
        files = sorted(path.iterdir()) if path.is_dir() else [path, path.parent / "config.json"]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
        return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


@dataclass(frozen=True)
class Loaded:
    """A drafter that was loaded.

    Attributes:
        drafter: proposes.
        method: what vLLM calls its kind: "medusa", "eagle", "eagle3" or "draft_model".
        origin: what it was recognised as, its sizes and what it was trained for, in words.
    """

    drafter: Medusa | Eagle | DraftModel
    method: str
    origin: str


@dataclass(eq=False)
class _Shelf:
    """What was loaded for one target."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    held: dict[Location, tuple[tuple[Any, ...], Loaded]] = field(default_factory=dict)


_shelves: WeakKeyDictionary[PreTrainedModel, _Shelf] = WeakKeyDictionary()
_shelves_lock = threading.Lock()


def load_assistant(
    path_or_id: str | PathLike[str],
    target: torch.nn.Module,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Drafter:
    """Loads a trained drafter: Medusa or EAGLE heads in any published layout, or a causal LM.

    What it is is read off the checkpoint's config and keys. It is put on the target's device, in the target's dtype.
    `assistant=path_or_id` does the same, once for each live target.

    Args:
        path_or_id: a folder, a file of weights, or a hub id. Of a model with Medusa heads, the heads.
        target: the model that it is to draft for, or a wrapper around it.
        revision: of a hub id: a branch, a tag or a commit.
        trust_remote_code: whether a causal LM's own code, out of its repository, may run. Heads never need it, and
            pickles are read as tensors only.

    Returns:
        `Medusa`, `Eagle` or `DraftModel`.

    Raises:
        ValueError: there is nothing of that name; no layout fits, and it is no causal LM either; weights are missing;
            or it was trained for a model of other sizes.
    """
    if not isinstance(path_or_id, str | PathLike) or not isinstance(target, torch.nn.Module):
        raise ValueError(
            f"load_assistant takes a path or hub id and the target, not a {type(path_or_id).__name__} and a "
            f"{type(target).__name__}; a loaded model or head is an assistant= as it is"
        )
    location = Location.of(path_or_id, revision=revision, trust_remote_code=trust_remote_code)
    return load(location, generative(target)).drafter


def load_once(location: Location, target: PreTrainedModel) -> Loaded:
    """The same, kept for as long as the target lives: loaded again where files or the target's place have changed."""
    with _shelves_lock:
        shelf = _shelves.setdefault(target, _Shelf())
    with shelf.lock:
        stamp = (location.stamp(), input_device(target), target.dtype)
        known = shelf.held.get(location)
        if known is None or known[0] != stamp:
            shelf.held.pop(location, None)  # before another takes its memory
            shelf.held[location] = known = (stamp, load(location, target))
        return known[1]


def load(location: Location, target: PreTrainedModel) -> Loaded:
    """Reads a location; see `load_assistant`."""
    if location.as_model:
        return _model_only(location, target)
    checkpoint = Checkpoint.open(location.path, location.revision)
    layout = layout_of(checkpoint)
    if layout is None:
        try:
            return drafter_of(_causal_lm(location, target))
        except UNLOADABLE as error:
            raise ValueError(f"{unknown(checkpoint)}. And it is no causal LM: {error}") from error
    head: Any = layout.head(checkpoint)
    TargetRecord.from_dict(head.config.target or {}).check(target)
    loaded = drafter_of(head.to(device=input_device(target), dtype=target.dtype))
    return Loaded(loaded.drafter, loaded.method, f"{layout.name}: {loaded.origin}")


def drafter_of(model: torch.nn.Module) -> Loaded:
    """The drafter that a loaded model or head makes."""
    size = f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
    if isinstance(model, MedusaHeads):
        return Loaded(Medusa(model), "medusa", f"{model.config.num_heads} Medusa heads, {size}{_trained_for(model)}")
    if isinstance(model, EagleHead):
        config = model.config
        layers = f"{config.num_hidden_layers} layer{'s' if config.num_hidden_layers > 1 else ''}"
        return Loaded(Eagle(model), config.method, f"an {config.method} head of {layers}, {size}{_trained_for(model)}")
    return Loaded(DraftModel(model), "draft_model", f"the causal LM {type(model).__name__}, {size}")


def _trained_for(head: Head) -> str:
    record = TargetRecord.from_dict(head.config.target or {})
    sizes = {"{} layers": record.num_layers, "hidden size {}": record.hidden_size, "{} token ids": record.vocab_size}
    told = ", ".join(words.format(size) for words, size in sizes.items() if size is not None)
    if not record.name and not told:
        return "; it does not say what it was trained for"
    return f"; trained for {record.name or 'a model'}" + (f" ({told})" if told else "")


def _model_only(location: Location, target: PreTrainedModel) -> Loaded:
    """A causal LM, of which heads that are kept with it are left out."""
    try:
        return drafter_of(_causal_lm(location, target))
    except UNLOADABLE as error:
        if (layout := _layout_if_any(location)) is None:
            raise ValueError(f"{location.path} cannot be loaded as a causal LM: {error}") from error
        raise ValueError(
            f"method='draft_model', but {location.path} is no causal LM: its layout is {layout.name!r}; leave the "
            "method out to have it loaded as that"
        ) from error


def _layout_if_any(location: Location) -> Layout | None:
    try:
        return layout_of(Checkpoint.open(location.path, location.revision))
    except ValueError:
        return None


def _causal_lm(location: Location, target: PreTrainedModel) -> torch.nn.Module:
    """A whole model.

    Raises:
        ValueError: some of its weights are not there, so that it would draft noise.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        location.path,
        revision=location.revision or "main",
        trust_remote_code=location.trust_remote_code,
        dtype=target.dtype,
        output_loading_info=True,
    )
    model, told = loaded
    if missing := sorted(told["missing_keys"]):
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(
            f"{location.path} lacks the weights {', '.join(missing[:8])}{more} of a {type(model).__name__}"
        )
    whole: torch.nn.Module = model.to(input_device(target))
    return whole
