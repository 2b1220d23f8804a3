"""Several processes that decode together: what they have to agree on, and when they may stop.

Ranks that hold parts of one computation (tensor parallel) decode one text. Their sums may differ in the last bit and
their clocks always do, so the first rank of the group decides: drafts, choices, verdicts. Ranks that gather each
other's weights pass by pass (FSDP, ZeRO-3) decode texts of their own, and each keeps making passes until all have
finished. Ranks that merely run beside one another are left alone, and so is a single process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_specgen.draft import Draft

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that a call has to keep in step with. Without any, every method hands back what it is given.

    Attributes:
        deciders: groups within which all ranks decode the same text, one for each dimension of the mesh; the first rank
            of each decides.
        gathering: groups within which a pass of one rank needs a pass of every other; None stands for all processes.
        device: where tensors are exchanged.
    """

    deciders: tuple[ProcessGroup, ...] = ()
    gathering: tuple[ProcessGroup | None, ...] = ()
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, model: torch.nn.Module, device: torch.device, synced_gpus: bool | None = None) -> Ranks:
        """The ranks over which a model's weights are spread; none in a single process.

        Args:
            model: the target, or a model that drafts.
            device: where its inputs are.
            synced_gpus: transformers' argument: whether ranks need each other's passes. None: if the weights are
                fully sharded.
        """
        if not several():
            return cls()
        fully, split = is_fully_sharded(model), _split_over(model)
        # Fully sharded weights are whole in a pass: only the tensor-parallel dimension remains.
        together = [group for (name, _), group in split.items() if not fully or name == "tp"]
        if synced_gpus is None:
            synced_gpus = fully or is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
        everyone = tuple(split.values()) if fully and split else (None,)
        return cls(tuple(together), everyone if synced_gpus else (), device)

    @property
    def members(self) -> list[list[int]]:
        """The ranks of each deciding group."""
        return [dist.get_process_group_ranks(group) for group in self.deciders]

    def agree(self, tensor: Tensor) -> Tensor:
        """What the deciding rank has for `tensor`, whole numbers or bools of one shape on all ranks."""
        if not self.deciders:
            return tensor
        shared = tensor.to(self.device, torch.long, copy=True).contiguous()
        for group in self.deciders:
            dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
        return shared.to(tensor.device, tensor.dtype)

    def agree_on(self, number: int) -> int:
        """What the deciding rank has for `number`."""
        return int(self.agree(torch.tensor(number))) if self.deciders else number

    def agree_on_draft(self, draft: Draft) -> Draft:
        """The deciding rank's draft; this very one if it is the same, so that its session knows it again."""
        if not self.deciders:
            return draft
        nodes, is_chain = self.agree(torch.tensor([draft.nodes, draft.is_chain])).tolist()
        if nodes == 0:
            return Draft.empty(draft.tokens.shape[0], draft.tokens.device) if draft.nodes else draft
        mine = torch.cat([draft.tokens, draft.parents], dim=1)
        same = draft.nodes == nodes
        agreed = self.agree(mine if same else mine.new_empty((mine.shape[0], 2 * nodes)))
        if same and torch.equal(agreed, mine):
            return draft
        # Without probabilities: the deciding rank judges by its own.
        return Draft(agreed[:, :nodes], agreed[:, nodes:], is_chain=bool(is_chain))

    def anyone(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank that needs this one's passes."""
        if not self.gathering:
            return flag
        flags = torch.tensor(int(flag), device=self.device)
        for group in self.gathering:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return bool(flags)


def several() -> bool:
    """Whether this is one of several processes of torch.distributed."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether the ranks gather each other's weights pass by pass; for one of several processes."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        return True
    # The mark that DeepSpeed leaves on a parameter it has partitioned.
    return any("ds_id" in vars(parameter) for parameter in model.parameters())


def _split_over(model: torch.nn.Module) -> dict[tuple[str, tuple[int, ...]], ProcessGroup]:
    """The groups over which some parameter is split, by the name of the mesh's dimension and the ranks."""
    from torch.distributed.tensor import DTensor, Replicate

    groups: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names = mesh.mesh_dim_names or ("",) * mesh.ndim
            for place, (name, placement) in enumerate(zip(names, parameter.placements, strict=True)):
                if mesh.size(place) > 1 and not isinstance(placement, Replicate):
                    group = mesh.get_group(place)
                    groups[name, tuple(dist.get_process_group_ranks(group))] = group
    return groups
