"""The model that a head was trained for, as the head's config remembers it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ENTRIES = 256
# Rounding to 4 bits turns one sign in twelve; of two unrelated models half of the signs differ.
TURNED = 0.25
# Coprime to the widths of embeddings, so that the entries do not all lie in a few columns.
STEP = 7919


@dataclass(frozen=True)
class TargetRecord:
    """What tells one target from another. What is None is not known, and not compared.

    Attributes:
        name: the path or hub id it was loaded from.
        hidden_size: of its states.
        vocab_size: token ids, padding included.
        num_layers: decoder layers.
        fingerprint: in hex, the signs of `ENTRIES` entries of its input embeddings, evenly spaced over the ids.
    """

    name: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    fingerprint: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetRecord:
        """The record of a model; without a wrapper such as PEFT's around it."""
        config = model.config.get_text_config(decoder=True)
        name = model.config.name_or_path or None
        if name is not None and Path(name).is_dir():
            name = Path(name).resolve().name  # where it lies is nobody's business to whom the head is given
        return cls(
            name=name,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            fingerprint=fingerprint(model),
        )

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> TargetRecord:
        """A record out of a head's config; what a later version may have added is passed over."""
        return cls(**{field.name: record.get(field.name) for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """The record as a head's config keeps it."""
        return asdict(self)

    def check(self, model: PreTrainedModel) -> None:
        """Compares a model with the one that was recorded.

        One that is the same but for its weights (fine-tuned, quantized, or another of the same size) still works, only
        less often, so that it is warned of and not refused.

        Args:
            model: the target; without a wrapper such as PEFT's around it.

        Raises:
            ValueError: its sizes are others; the message names both.
        """
        other = TargetRecord.of(model)
        known = self.name or "a model"
        this = " ".join(filter(None, (type(model).__name__, other.name)))
        for name in ("hidden_size", "vocab_size", "num_layers"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if None not in (ours, theirs) and ours != theirs:
                raise ValueError(
                    f"the head was trained for {known} with {name}={ours}; {this} has {name}={theirs}: load the head "
                    "that was trained for this model"
                )
        if self.fingerprint is not None and other.fingerprint is not None:
            turned = distance(self.fingerprint, other.fingerprint)
            if turned > TURNED:
                _warn(
                    f"the head was trained for {known}, whose embeddings differ from those of {this} in {turned:.0%} "
                    "of their signs: what it drafts will be accepted rarely"
                )
        elif self.name and other.name and not _alike(self.name, other.name):
            _warn(f"the head was trained for {self.name}, not for {other.name}: what it drafts may be accepted rarely")


@cache
def _warn(message: str) -> None:
    """Says a thing once, not in every call."""
    logger.warning(message)


def fingerprint(model: PreTrainedModel) -> str | None:
    """The signs of `ENTRIES` entries of a model's input embeddings, in hex; None where those cannot be read here."""
    embeddings = model.get_input_embeddings()
    ids, columns = _entries(model)
    rows = _rows(embeddings, ids)
    if rows is None or rows.dim() != 2 or rows.is_meta:
        return None
    entries = rows.float().cpu()[torch.arange(ENTRIES), columns % rows.shape[1]]
    bits = "".join("1" if entry > 0 else "0" for entry in entries.tolist())
    return f"{int(bits, 2):0{ENTRIES // 4}x}"


def distance(one: str, other: str) -> float:
    """The share of signs in which two fingerprints differ; 1 where they are not of one length."""
    return 1.0 if len(one) != len(other) else (int(one, 16) ^ int(other, 16)).bit_count() / (4 * len(one))


def _entries(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Ids, evenly spaced over the vocabulary, and a column for each."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    places = torch.arange(ENTRIES)
    return places * vocabulary // ENTRIES, places * STEP


def _rows(embeddings: torch.nn.Module, ids: Tensor) -> Tensor | None:
    """The embeddings of `ids`, through the module: that rounds back what is quantized and fetches what is offloaded."""
    weight = getattr(embeddings, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] <= int(ids.max()):
        return None  # a part of it, on one of several ranks
    device = torch.device("cpu") if weight.is_meta else weight.device
    try:
        with torch.no_grad():
            rows: Tensor = embeddings(ids.to(device))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        logger.debug("the embeddings cannot be read: %s", error)
        return None
    return rows


def _alike(one: str, other: str) -> bool:
    """Whether two names may be of one model: folders are often called after it, and something more."""
    ours, theirs = (name.rstrip("/").rsplit("/", 1)[-1].lower() for name in (one, other))
    return ours in theirs or theirs in ours
