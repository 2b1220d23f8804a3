"""Does a trained head fit a target? Asked before the first pass, of Medusa's and of EAGLE's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.drafters.draft_model import refuse_other_ranks
from hf_specgen.heads.eagle import EagleHead
from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.heads.said import fault_of
from hf_specgen.ranks import is_fully_sharded, several
from hf_specgen.vocabulary import size

if TYPE_CHECKING:
    from hf_specgen.heads.layouts import Head


def refuse_misfit(head: Head, target: PreTrainedModel) -> None:
    """Warns of a head that was trained for a target with other weights.

    Raises:
        ValueError: it was made for a target of other sizes, its weights are not there, or it borrows a module that the
            target cannot lend.
    """
    _refuse_sizes(head, target)
    TargetRecord.from_dict(head.config.target or {}).check(target)
    _refuse_unloaded(head)
    _refuse_map(head, size(target))
    refuse_other_ranks(target, head)
    for what in head.borrows:
        _refuse_borrowing(head, target, what)


def lent(target: Any, what: str) -> torch.nn.Module:
    """The target's module that a head calls so in its `borrows`.

    Raises:
        ValueError: it has none.
    """
    find = target.get_input_embeddings if what == "embeddings" else target.get_output_embeddings
    module: torch.nn.Module | None = find()
    if module is None:
        raise ValueError(f"the head has no {what} of its own, and {type(target).__name__} has none to lend")
    return module


def _refuse_sizes(head: Head, target: PreTrainedModel) -> None:
    config = head.config
    read = config.target_hidden_size if isinstance(head, EagleHead) else config.hidden_size
    for what, ours, theirs in (
        ("hidden_size", target.config.get_text_config(decoder=True).hidden_size, read),
        ("vocab_size", size(target), config.vocab_size),
    ):
        if theirs is not None and ours != theirs:
            name = (config.target or {}).get("name")
            told = f" (it names {name})" if name else ""
            raise ValueError(
                f"{type(target).__name__} has {what}={ours} and the {_kind(head)} was made for {theirs}{told}: load "
                "the one that was trained for this target"
            )


def _refuse_unloaded(head: Head) -> None:
    held = {name: parameter for name, parameter in head.named_parameters() if not parameter.is_meta}
    # Offloaded weights are on meta too, and fetched by hooks.
    if len(held) < len(list(head.parameters())) and not any("_hf_hook" in vars(module) for module in head.modules()):
        raise ValueError(f"the {_kind(head)}'s weights are on the meta device, where they hold nothing: load them")
    # What was never loaded is NaN throughout, so that one entry tells; those of a device are read at once.
    first: dict[torch.device, list[Tensor]] = {}
    for parameter in held.values():
        first.setdefault(parameter.device, []).append(parameter.flatten()[:1].float())
    if any(bool(torch.cat(entries).isnan().any()) for entries in first.values()):
        lacking = [name for name, parameter in held.items() if bool(parameter.flatten()[:1].isnan().any())]
        raise ValueError(f"the {_kind(head)} has weights that were never loaded: {', '.join(lacking)}")


def _refuse_map(head: Head, vocabulary: int) -> None:
    ids = head.to_target
    if ids is not None and not ids.is_meta and (fault := fault_of(ids, vocabulary)):
        name = "d2t, which holds offsets to the target's ids," if isinstance(head, EagleHead) else "token_map"
        raise ValueError(f"the {_kind(head)}'s {name} {fault}; or it was never loaded")


def _refuse_borrowing(head: Head, target: PreTrainedModel, what: str) -> None:
    config, name, module = head.config, type(target).__name__, lent(target, what)
    mine = f"the {_kind(head)} has no {what} of its own"
    if isinstance(head, EagleHead) and config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"{mine}, and the target's are for states of {config.target_hidden_size} and not of {config.hidden_size}"
        )
    if several() and is_fully_sharded(target):
        raise ValueError(
            f"{mine}, and the target's weights are sharded by FSDP or ZeRO-3, where each pass needs one of every rank: "
            "load the target whole on each rank, or a head that has its own"
        )
    if any(weight.is_meta for weight in module.parameters()) and "_hf_hook" not in vars(module):
        raise ValueError(f"{mine}, and that of {name} is on the meta device, where it holds nothing: load it")


def _kind(head: Head) -> str:
    return "head" if isinstance(head, EagleHead) else "Medusa head"
