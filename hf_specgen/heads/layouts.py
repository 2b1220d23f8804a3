"""The layouts of trained heads that can be read, in one table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hf_specgen.heads import eagle_layouts as eagle
from hf_specgen.heads import medusa_layouts as medusa
from hf_specgen.heads.checkpoint import Checkpoint

if TYPE_CHECKING:
    from hf_specgen.heads.eagle import EagleHead
    from hf_specgen.heads.medusa import MedusaHeads

Head: TypeAlias = "MedusaHeads | EagleHead"

SHOWN = 24  # kinds of keys that an error lists
# More layers or heads than any model has: whoever wrote so many would have us build them.
MOST_PLACES = 1_000
COUNTS = re.compile(r"num_(\w*_)?(layers|heads)|\w+_num_(layers|heads)")
# What reading raises where a value in a config, or a tensor, is of a kind that nobody would write there.
MALFORMED = (TypeError, KeyError, IndexError, AttributeError, StopIteration, RuntimeError, OverflowError)
PLACE = re.compile(r"(?<![^.])#(?![^.])")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Layout:
    """How one publisher names a head's weights.

    Attributes:
        name: what it is called.
        recognises: tells it by the checkpoint's config and keys; no tensor is read.
        read: makes the head; raises ValueError listing keys that are missing or left over.
        seen_in: what writes it or reads it.
    """

    name: str
    recognises: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint], Head]
    seen_in: str

    def head(self, checkpoint: Checkpoint) -> Head:
        """Reads a checkpoint that this layout recognises.

        Raises:
            ValueError: keys are missing or left over, or something in it is not what it should be.
        """
        _refuse_endless(checkpoint)
        try:
            return self.read(checkpoint)
        except MALFORMED as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"{checkpoint.where} is malformed for the layout {self.name!r}: {told}") from error


# The first that recognises a checkpoint reads it.
LAYOUTS = (
    Layout("hf_specgen's Medusa", medusa.is_own, medusa.read_own, "MedusaHeads.save_pretrained"),
    Layout("Medusa-1", medusa.is_medusa_1, medusa.read_medusa_1, "FasterDecoding and TGI: medusa_lm_head.*"),
    Layout("Medusa-2", medusa.is_medusa_2, medusa.read_medusa_2, "FasterDecoding: a model and its heads in one"),
    Layout("ModelOpt's Medusa", medusa.is_modelopt, medusa.read_modelopt, "NVIDIA: a model and its heads in one"),
    Layout("vLLM's Medusa", medusa.is_vllm, medusa.read_vllm, "vLLM: model_type medusa"),
    Layout("hf_specgen's EAGLE", eagle.is_own, eagle.read_own, "EagleHead.save_pretrained"),
    Layout("speculators' EAGLE-3", eagle.is_speculators_eagle3, eagle.read_speculators_eagle3, "Red Hat's library"),
    Layout(
        "speculators' EAGLE-1", eagle.is_speculators_eagle, eagle.read_speculators_eagle, "Red Hat's library, to 0.5"
    ),
    Layout("vLLM's EAGLE-1", eagle.is_vllm_eagle, eagle.read_vllm_eagle, "vLLM: model_type eagle"),
    Layout("EAGLE-3", eagle.is_eagle3, eagle.read_eagle3, "the original, SpecForge, AngelSlim, ModelOpt"),
    Layout("EAGLE-1/2", eagle.is_eagle, eagle.read_eagle, "the original, HASS"),
)


def layout_of(checkpoint: Checkpoint) -> Layout | None:
    """The layout that a checkpoint has, if it is one of `LAYOUTS`."""
    return next((layout for layout in LAYOUTS if layout.recognises(checkpoint)), None)


def read_head(checkpoint: Checkpoint) -> Head:
    """Loads a head, on the CPU and in the dtype of its file.

    Args:
        checkpoint: where its weights are.

    Raises:
        ValueError: no layout recognises it: the message lists the keys seen and the layouts known; or a layout does,
            and keys are missing or left over.
    """
    layout = layout_of(checkpoint)
    if layout is None:
        raise ValueError(unknown(checkpoint))
    return layout.head(checkpoint)


def _refuse_endless(checkpoint: Checkpoint) -> None:
    for name, count in checkpoint.config.items():
        if COUNTS.fullmatch(name) and isinstance(count, int) and count > MOST_PLACES:
            raise ValueError(f"the config of {checkpoint.where} says {name}={count}, more than any head has")
    for key in checkpoint.shapes:
        if any(len(number) > 9 or int(number) > MOST_PLACES for number in NUMBER.findall(key)):
            raise ValueError(f"{checkpoint.where} has the key {key}, a place that no model has")


def unknown(checkpoint: Checkpoint) -> str:
    """What to say of a checkpoint that no layout recognises."""
    kinds = abbreviated(checkpoint.shapes)
    more = f", and {len(kinds) - SHOWN} more kinds" if len(kinds) > SHOWN else ""
    kind = checkpoint.config.get("model_type") or checkpoint.config.get("speculators_model_type")
    known = "; ".join(f"{layout.name} ({layout.seen_in})" for layout in LAYOUTS)
    return (
        f"{checkpoint.where} is no head of a known layout. Its config says model_type={kind!r}, architectures="
        f"{checkpoint.config.get('architectures')}; its keys are {', '.join(kinds[:SHOWN])}{more}. Known are: {known}"
    )


def abbreviated(keys: Iterable[str]) -> list[str]:
    """Keys that differ in the numbers of layers and heads only, put together: `layers.{0..31}.weight`."""
    kinds: dict[str, list[list[str]]] = {}
    for key in keys:
        kinds.setdefault(NUMBER.sub("#", key), []).append(NUMBER.findall(key))
    return [_spanned(kind, zip(*seen, strict=True)) for kind, seen in kinds.items()]


def _spanned(kind: str, places: Iterable[tuple[str, ...]]) -> str:
    """A key with each place for a number filled by all the numbers that it takes."""
    spans = iter([sorted(set(map(int, place))) for place in places])
    return PLACE.sub(lambda _: _span(next(spans)), kind)


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{{{numbers[0]}..{numbers[-1]}}}"
