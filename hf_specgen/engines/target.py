"""The target as an export needs it: a name to start an engine with, sizes, and weights that some layouts repeat."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.heads.said import lm_head_of

# Model types whose embeddings are multiplied as they are looked up.
SCALING = ("gemma3", "gemma4")


@dataclass(frozen=True)
class Target:
    """The model that a drafter is to draft for.

    Attributes:
        name: the path or hub id that the engine loads it by.
        config: None where only the name is known, from the drafter's own record.
        model: the loaded one, if it was given so.
    """

    name: str
    config: PreTrainedConfig | None = None
    model: PreTrainedModel | None = None

    @classmethod
    def of(cls, target: str | PathLike[str] | PreTrainedModel | None, recorded: TargetRecord) -> Target:
        """The target that a user names, or else the one that the drafter remembers.

        Raises:
            ValueError: there is none, it has no name, cannot be found, or is of other sizes than the drafter remembers.
        """
        if target is None:
            if not recorded.name:
                raise ValueError("the drafter does not say what it was trained for: pass target= (a path or hub id)")
            return cls(recorded.name)
        if isinstance(target, PreTrainedModel):
            if not (name := target.config.name_or_path):
                raise ValueError("the target was never loaded from anywhere: pass its path or hub id as target=")
            found = cls(name, target.config, target)
        else:
            try:
                found = cls(fspath(target), AutoConfig.from_pretrained(target))
            except (OSError, ValueError) as error:
                raise ValueError(f"the target {fspath(target)!r} has no config that can be read: {error}") from error
        found._check(recorded)
        return found

    def _check(self, recorded: TargetRecord) -> None:
        text = self._text()
        names = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_layers": "num_hidden_layers"}
        for ours, theirs in names.items():
            known, found = getattr(recorded, ours), getattr(text, theirs, None)
            if None not in (known, found) and known != found:
                raise ValueError(
                    f"the drafter was trained for {recorded.name or 'a model'} with {ours}={known}; the target "
                    f"{self.name} has {ours}={found}"
                )

    def _text(self) -> Any:
        return None if self.config is None else self.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int | None:
        """Token ids, where its config is known."""
        return None if self.config is None else int(self._text().vocab_size)

    @property
    def num_layers(self) -> int | None:
        """Decoder layers, where its config is known."""
        return None if self.config is None else int(self._text().num_hidden_layers)

    @property
    def architectures(self) -> list[str]:
        """Names of its classes, where its config is known."""
        return list((self.config and self.config.architectures) or ())

    def lm_head(self, why: str) -> Tensor:
        """`(vocabulary, hidden)` of its LM head.

        Args:
            why: what it is needed for, for the message.

        Raises:
            ValueError: it is not known or has a bias.
        """
        if self.model is not None:
            module = lm_head_of(self.model)
            if getattr(module, "bias", None) is not None:
                raise ValueError(f"the target's LM head has a bias, and {why}, which has none")
            return _floats(module.weight, why)
        tied = self.config is not None and bool(getattr(self._text(), "tie_word_embeddings", False))
        return self._read(("lm_head.weight", *(("embed_tokens.weight",) if tied else ())), why)

    def embeddings(self, why: str) -> Tensor:
        """`(vocabulary, hidden)` of its input embeddings, scaled as it scales them; see `lm_head`."""
        if self.model is not None:
            module: Any = self.model.get_input_embeddings()
            _floats(module.weight, why)
            with torch.no_grad():
                return _floats(module(torch.arange(len(module.weight), device=module.weight.device)), why)
        if self.config is not None and str(self._text().model_type).startswith(SCALING):
            raise ValueError(f"{why}, and {self.name} scales its own: pass the loaded model as target=")
        return self._read(("embed_tokens.weight",), why)

    def _read(self, names: tuple[str, ...], why: str) -> Tensor:
        if self.config is None:
            raise ValueError(f"{why}: pass target= (a path, a hub id or the loaded model)")
        checkpoint = Checkpoint.open(self.name)
        for name in names:
            keys = [key for key in checkpoint.shapes if key == name or key.endswith(f".{name}")]
            if len(keys) == 1:
                return _floats(checkpoint.tensors(keys)[keys[0]], why)
        raise ValueError(f"{why}, and {checkpoint.where} has no single {names[0]}: pass the loaded model as target=")


def _floats(weight: Any, why: str) -> Tensor:
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.element_size() < 2 or weight.is_meta:
        raise ValueError(f"{why}, and the target's are quantized or not whole: pass the unquantized target as target=")
    with torch.no_grad():
        return weight.detach().cpu().clone()
