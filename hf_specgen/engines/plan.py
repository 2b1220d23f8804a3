"""What an engine is asked to load: the folder's contents, and the words that start it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.engines.target import Target

Head = TypeVar("Head", bound=PreTrainedModel)


@dataclass(frozen=True)
class Job:
    """What is wanted, beside the drafter.

    Attributes:
        engine: what the engine is called, for messages.
        target: the model that it is to draft for.
        folder: where the files will lie.
        num_speculative_tokens: how deep the engine is to draft; None for the usual depth of the drafter's kind.
    """

    engine: str
    target: Target
    folder: Path
    num_speculative_tokens: int | None

    def depth(self, usual: int) -> int:
        """How deep to draft where `usual` is the kind's own depth."""
        return usual if self.num_speculative_tokens is None else self.num_speculative_tokens


@dataclass(frozen=True)
class Plan:
    """What is written, and how the engine is started with it.

    Attributes:
        command: words of a shell command.
        speculative: the engine's own speculative config, by its own names.
        config: of the drafter; None where there are no weights.
        tensors: by the engine's names.
        file: that holds the tensors.
        head: what the tensors are, by our names; read back, the folder must give it again. A causal LM is itself.
        texts: other files, by name.
        notes: what a person should know: versions, and settings that the engine decides for itself.
    """

    command: tuple[str, ...]
    speculative: Mapping[str, Any]
    config: Mapping[str, Any] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    file: str = "model.safetensors"
    head: PreTrainedModel | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join(self.command)


# What an engine takes: for each kind of drafter, by vLLM's names, how it is written.
Takes: TypeAlias = Mapping[str, Callable[[Any, Job], Plan]]


def refuse_others(job: Job, what: str, config: Any, takes: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a head with a setting that the engine's network does not have.

    Args:
        job: names the engine.
        what: the kind of head, in words.
        config: the head's.
        takes: for each field of it that matters, the values that the engine can run.

    Raises:
        ValueError: of these fields one has another value.
    """
    wrong = {name: values for name, values in takes.items() if getattr(config, name) not in values}
    if wrong:
        told = "; ".join(
            f"{name}={getattr(config, name)!r} (only {', '.join(map(repr, values))})" for name, values in wrong.items()
        )
        raise ValueError(f"{job.engine} cannot run this {what}, it has no words for {told}")


def weights_of(head: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """A head's tensors on the CPU, floats in `dtype`.

    Raises:
        ValueError: some are not loaded, or no engine computes in their dtype.
    """
    held = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    floats = {name: tensor for name, tensor in held.items() if tensor.is_floating_point()}
    if unset := [name for name, tensor in floats.items() if tensor.is_meta or bool(tensor.isnan().any())]:
        raise ValueError(f"{', '.join(unset[:8])} of {type(head).__name__} hold no numbers: load or train them first")
    cast = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in floats.items()}
    if strange := {tensor.dtype for tensor in cast.values()} - {torch.float32, torch.float16, torch.bfloat16}:
        raise ValueError(
            f"no engine computes in {', '.join(sorted(map(str, strange)))}: pass dtype= 'bfloat16', 'float16' or "
            "'float32'"
        )
    return {name: tensor.cpu() for name, tensor in {**held, **cast}.items()}


def rebuilt(head: Head, tensors: Mapping[str, Tensor], **changed: Any) -> Head:
    """A head like another one, with other fields in its config and with these tensors."""
    config = type(head.config).from_dict({**head.config.to_dict(), **changed})
    with torch.device("meta"):
        new = type(head)(config)
    new.load_state_dict(dict(tensors), assign=True)
    return new


def dtype_of(tensors: Mapping[str, Tensor]) -> str:
    """The name of the floats' dtype, as configs have it."""
    return str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")
