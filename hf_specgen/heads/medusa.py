"""Medusa's heads as a network (arXiv 2401.10774): each guesses one of the next tokens from the target's last state."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN

from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.heads.said import copy_lm_head, lm_head_of

LMHeads = Literal["own", "shared", "target"]


@strict
class MedusaConfig(PreTrainedConfig):
    """What Medusa heads are made of.

    Attributes:
        hidden_size: of the target's states.
        vocab_size: the target's; None where the heads hold nothing of that size and any will do.
        num_heads: tokens that are guessed at once: head h guesses the one h + 2 places after the token whose state it
            reads, so the one at depth h + 1 below the root.
        num_layers: residual blocks a head.
        hidden_act: of the blocks.
        block_bias: whether the blocks' linear layers have a bias.
        lm_heads: "own": one a head; "shared": one for all; "target": the target's own, of which nothing is kept here.
        lm_head_bias: whether own or shared ones have a bias.
        draft_vocab_size: ids that own or shared LM heads tell apart, where these are fewer than the target's; which
            they are is in `token_map`.
        logit_scale: what the logits are multiplied by.
        accuracies: for each head, how often its best, second best, ... guess was right; see `measure_accuracies`. Where
            it is given, trees are built by it.
        target: the target that the heads were trained for, see `TargetRecord`; None if it is not known.
    """

    model_type = "hf_specgen_medusa"

    hidden_size: int = 4096
    vocab_size: int | None = None
    num_heads: int = 5
    num_layers: int = 1
    hidden_act: str = "silu"
    block_bias: bool = True
    lm_heads: LMHeads = "own"
    lm_head_bias: bool = False
    draft_vocab_size: int | None = None
    logit_scale: int | float = 1.0
    accuracies: list[list[int | float]] | None = None
    target: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuses what contradicts itself."""
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        if self.lm_heads not in ("own", "shared", "target"):
            raise ValueError(f"lm_heads must be 'own', 'shared' or 'target', not {self.lm_heads!r}")
        if self.num_heads < 1 or self.num_layers < 0:
            raise ValueError(f"Medusa needs a head at least, not {self.num_heads} of {self.num_layers} blocks")
        if self.lm_heads == "target" and self.draft_vocab_size is not None:
            raise ValueError("draft_vocab_size needs LM heads of that size: lm_heads='own' or 'shared'")
        if self.lm_heads != "target" and self.vocab_size is None:
            raise ValueError(f"lm_heads={self.lm_heads!r} needs vocab_size")
        shares = [share for ranks in self.accuracies or () for share in ranks]
        if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
            raise ValueError("accuracies must hold for each head a list of shares from 0 to 1, one for each rank")


class MedusaHeads(PreTrainedModel):
    """Medusa's heads: residual blocks `x + act(W x + b)`, then an LM head.

    What `from_pretrained` does not find stays NaN, and `Medusa` refuses it.
    """

    config_class = MedusaConfig
    config: MedusaConfig
    base_model_prefix = ""
    main_input_name = "states"

    token_map: Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        """Makes the modules; every weight is NaN until it is loaded or set."""
        super().__init__(config)
        size = config.hidden_size
        self.act = ACT2FN[config.hidden_act]
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size, bias=config.block_bias) for _ in range(config.num_layers))
            for _ in range(config.num_heads)
        )
        count = {"own": config.num_heads, "shared": 1, "target": 0}[config.lm_heads]
        out = config.draft_vocab_size or config.vocab_size or 0
        self.lm_heads = nn.ModuleList(nn.Linear(size, out, bias=config.lm_head_bias) for _ in range(count))
        mapped = None if config.draft_vocab_size is None else torch.full((config.draft_vocab_size,), -1)
        self.register_buffer("token_map", mapped)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.constant_(module.weight, torch.nan)
            if module.bias is not None:
                init.constant_(module.bias, torch.nan)
        elif isinstance(module, MedusaHeads) and module.token_map is not None:
            init.constant_(module.token_map, -1)

    @classmethod
    def fresh(
        cls,
        target: PreTrainedModel,
        num_heads: int = 5,
        num_layers: int = 1,
        lm_heads: LMHeads = "own",
        hidden_act: str = "silu",
    ) -> MedusaHeads:
        """Heads to be trained: blocks that hand on what they get, and copies of the target's LM head.

        Sizes come from the target's config. For a target on the meta device, without weights, the heads are there too.

        Args:
            target: the model they are for.
            num_heads: see `MedusaConfig`.
            num_layers: see `MedusaConfig`.
            lm_heads: see `MedusaConfig`.
            hidden_act: see `MedusaConfig`.

        Raises:
            ValueError: the target's LM head cannot be copied, because it is not whole or is quantized.
        """
        text = target.config.get_text_config(decoder=True)
        source = lm_head_of(target)
        config = MedusaConfig(
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_act=hidden_act,
            lm_heads=lm_heads,
            lm_head_bias=lm_heads != "target" and getattr(source, "bias", None) is not None,
            target=TargetRecord.of(target).to_dict(),
        )
        weight = getattr(source, "weight", None)
        with torch.device(weight.device if isinstance(weight, Tensor) else target.device):
            heads = cls(config)
        heads.to(dtype=target.dtype)  # type: ignore[call-arg]
        with torch.no_grad():
            for parameter in heads.blocks.parameters():
                parameter.zero_()
        for head in heads.lm_heads:
            copy_lm_head(source, head)
        return heads

    @property
    def known_ids(self) -> int | None:
        """How many ids a head tells apart; None: as many as the target has."""
        return self.config.draft_vocab_size or self.config.vocab_size

    @property
    def to_target(self) -> Tensor | None:
        """`(draft vocabulary,)` the target's id for each of the heads' own; None where they are the same."""
        return self.token_map

    @property
    def borrows(self) -> tuple[str, ...]:
        """What they use of the target's: "LM head"."""
        return ("LM head",) if self.config.lm_heads == "target" else ()

    def forward(self, states: Tensor, lm_head: nn.Module | None = None, count: int | None = None) -> Tensor:
        """The heads' logits.

        Args:
            states: `(batch, hidden)`, the target's last states (after its final norm), on any device and in any dtype.
            lm_head: the target's, where `config.lm_heads` is "target".
            count: run only the first `count` heads.

        Returns:
            `(batch, heads, known ids)`; `to_target` says which of the target's ids these are.
        """
        kept = self.config.lm_heads
        ours = next(self.parameters(), states)
        # Offloaded weights are nowhere (meta), and their hooks move what they are given.
        moved = states.to(states.device if ours.is_meta else ours.device, ours.dtype)
        features = torch.stack([self.features(head, moved) for head in range(len(self.blocks[:count]))], dim=1)
        if kept == "own":
            pairs = zip(self.lm_heads[:count], features.unbind(1), strict=True)
            logits = torch.stack([head(one) for head, one in pairs], dim=1)
        elif kept == "shared":
            logits = self.lm_heads[0](features)
        elif lm_head is not None:
            logits = lm_head(features.to(states.device, states.dtype))
        else:
            raise ValueError("these heads use the target's LM head: pass lm_head=target.get_output_embeddings()")
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def features(self, head: int, states: Tensor) -> Tensor:
        """What a head's blocks make of states, `(..., hidden)`: its LM head reads that."""
        for block in cast(nn.ModuleList, self.blocks[head]):
            states = states + self.act(block(states))
        return states
