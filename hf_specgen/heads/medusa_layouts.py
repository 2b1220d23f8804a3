"""Published layouts of Medusa heads: how each is told by its keys, and how it is read.

Two families. The original numbers the modules of a head, blocks first and its LM head last: `0.0.linear.weight`,
`0.1.weight`; a prefix tells where it lies beside the model it was trained with. vLLM's names them:
`blocks.0.layers.0.weight`, `lm_heads.0.weight`. How many heads and blocks there are is read from the keys.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.filling import filled
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads
from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.heads.said import fault_of

logger = logging.getLogger(__name__)

NUMBERED = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
NAMED_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
NAMED_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")

# How the two families name a block's weight (by head, block and kind) and an LM head's (by head and number of blocks).
NUMBERED_NAMES = ("{}.{}.linear.{}", "{}.{}.weight")
NAMED_NAMES = ("blocks.{}.layers.{}.{}", "lm_heads.{}.weight")

# Beside FP8 weights: what they are to be multiplied by, and what inputs would be divided by.
SCALES = ("weight_scale", "input_scale")


@dataclass
class Found:
    """What the keys of a checkpoint say.

    Attributes:
        block: how a weight of a block is named, by head, block and kind.
        lm_head: how the weight of an LM head is named, by head and the number of blocks.
        keys: their keys by ours.
        heads: how many.
        layers: blocks a head.
        lm_heads: as in `MedusaConfig`.
        leftover: keys that mean nothing here.
        token_map: the key of the ids that truncated LM heads tell apart.
    """

    block: str = "blocks.{}.{}.{}"
    lm_head: str = "lm_heads.{}.weight"
    keys: dict[str, str] = field(default_factory=dict)
    heads: int = 0
    layers: int = 0
    lm_heads: Any = "target"
    leftover: list[str] = field(default_factory=list)
    token_map: str | None = None

    @property
    def biased(self) -> bool:
        """Blocks have biases."""
        return any(key.startswith("blocks.") and key.endswith(".bias") for key in self.keys)

    def theirs(self, key: str) -> str:
        """Their name of what is `key` here, whether it is there or not."""
        if key in self.keys:
            return self.keys[key]
        module, head, *rest = key.split(".")
        return self.block.format(head, *rest) if module == "blocks" else self.lm_head.format(head, self.layers)


def is_medusa_1(checkpoint: Checkpoint) -> bool:
    """FasterDecoding's and TGI's `medusa_lm_head.pt|safetensors`: the numbered heads and nothing else."""
    named = "medusa_num_heads" in checkpoint.config or any(".linear." in key for key in checkpoint.shapes)
    return named and all(NUMBERED.fullmatch(key) for key in checkpoint.shapes)


def is_medusa_2(checkpoint: Checkpoint) -> bool:
    """A model with its heads in one checkpoint, as FasterDecoding's `medusa-1.0-*`."""
    return _numbered(checkpoint, "medusa_head.")


def is_modelopt(checkpoint: Checkpoint) -> bool:
    """ModelOpt's export of a model with its heads, plain or in FP8."""
    return _numbered(checkpoint, "medusa_heads.")


def is_vllm(checkpoint: Checkpoint) -> bool:
    """The layout of vLLM's own Medusa model."""
    return any(NAMED_BLOCK.fullmatch(_bare(key)) for key in checkpoint.shapes)


def is_own(checkpoint: Checkpoint) -> bool:
    """What `MedusaHeads.save_pretrained` writes."""
    return checkpoint.config.get("model_type") == MedusaConfig.model_type


def read_medusa_1(checkpoint: Checkpoint) -> MedusaHeads:
    """Reads a file of numbered heads. A version 2 has no LM heads: it uses the target's."""
    config = checkpoint.config
    found = _find_numbered(checkpoint, "")
    # The trainer wrote 2 whatever it trained, and its own loader asks for 5: only too few heads are believed.
    _compare(checkpoint, "medusa_num_heads", config.get("medusa_num_heads"), found.heads, known_wrong=True)
    _compare(checkpoint, "medusa_num_layers", config.get("medusa_num_layers"), found.layers)
    return _build(checkpoint, found, {})


def read_medusa_2(checkpoint: Checkpoint) -> MedusaHeads:
    """Reads the heads beside a model, and nothing of the model."""
    config = checkpoint.config
    found = _find_numbered(checkpoint, "medusa_head.")
    _compare(checkpoint, "medusa_num_heads", config.get("medusa_num_heads"), found.heads)
    _compare(checkpoint, "medusa_num_layers", config.get("medusa_num_layers"), found.layers)
    return _build(checkpoint, found, {})


def read_modelopt(checkpoint: Checkpoint) -> MedusaHeads:
    """Reads the heads beside a model. FP8 weights are multiplied out."""
    counts = checkpoint.config.get("medusa") or {}
    found = _find_numbered(checkpoint, "medusa_heads.")
    _compare(checkpoint, "medusa.num_medusa_heads", counts.get("num_medusa_heads"), found.heads)
    _compare(checkpoint, "medusa.num_medusa_layers", counts.get("num_medusa_layers"), found.layers)
    return _build(checkpoint, found, {})


def read_vllm(checkpoint: Checkpoint) -> MedusaHeads:
    """Reads vLLM's layout, with one LM head or one a head, of all ids or of those in its `token_map`."""
    config = checkpoint.config
    found = _find_named(checkpoint)
    _compare(checkpoint, "num_heads", config.get("num_heads"), found.heads)
    _compare(checkpoint, "num_hidden_layers", config.get("num_hidden_layers"), found.layers)
    if bool(config.get("medusa_fc_bias")) and not found.biased:
        raise ValueError(f"{checkpoint.where}: medusa_fc_bias is true, and there is no blocks.0.layers.0.bias")
    if not config.get("medusa_fc_bias") and found.biased:
        # vLLM would leave them out, and run other heads than were trained.
        logger.warning("%s has biases that medusa_fc_bias in its config denies; they are used", checkpoint.where)
    return _build(checkpoint, found, {"logit_scale": float(config.get("logit_scale", 1.0))})


def read_own(checkpoint: Checkpoint) -> MedusaHeads:
    """Reads what `MedusaHeads.save_pretrained` wrote."""
    config = MedusaConfig.from_dict(checkpoint.config)
    heads = filled(checkpoint, lambda: MedusaHeads(config), checkpoint.tensors())
    if heads.to_target is not None:
        _refuse_map(checkpoint, "token_map", heads.to_target, int(config.vocab_size or 0))
    return heads


def _numbered(checkpoint: Checkpoint, prefix: str) -> bool:
    return any(key.startswith(prefix) and NUMBERED.fullmatch(key, len(prefix)) for key in checkpoint.shapes)


def _find_numbered(checkpoint: Checkpoint, prefix: str) -> Found:
    """Heads as numbered modules: a module with `linear` is a block, the last one without is the LM head."""
    block, lm_head = NUMBERED_NAMES
    found, ends = Found(prefix + block, prefix + lm_head), {}
    for key in checkpoint.shapes:
        match = NUMBERED.fullmatch(key, len(prefix)) if key.startswith(prefix) else None
        if match is None:
            if key.startswith(prefix) and not key.endswith(SCALES):
                found.leftover.append(key)
            continue
        head, place, linear, kind = match.groups()
        found.heads = max(found.heads, int(head) + 1)
        if linear:
            found.keys[f"blocks.{head}.{place}.{kind}"] = key
            found.layers = max(found.layers, int(place) + 1)
        elif kind == "weight":
            found.keys[f"lm_heads.{head}.weight"], found.lm_heads = key, "own"
            ends[head] = int(place)
        else:
            found.leftover.append(key)
    if ends:
        _share_blocks(found, max(ends.values()))
        found.layers = max(ends.values())
    return found


def _share_blocks(found: Found, layers: int) -> None:
    """Gives every block of a head the weights of its first where only that one is there.

    The original builds its blocks as `[ResBlock()] * layers`, one module several times; a saver that leaves out what
    is there twice keeps the first name only.
    """
    if layers < 2 or found.layers != 1:
        return
    for head in range(found.heads):
        for kind in ("weight", "bias"):
            first = found.keys.get(f"blocks.{head}.0.{kind}")
            if first is not None:
                found.keys.update({f"blocks.{head}.{place}.{kind}": first for place in range(1, layers)})


def _bare(key: str) -> str:
    return key.removeprefix("medusa_heads.")


def _find_named(checkpoint: Checkpoint) -> Found:
    found = Found(*NAMED_NAMES)
    shared = bool(checkpoint.config.get("original_lm_head", False))
    for key in checkpoint.shapes:
        bare = _bare(key)
        if match := NAMED_BLOCK.fullmatch(bare):
            head, place, kind = match.groups()
            found.keys[f"blocks.{head}.{place}.{kind}"] = key
            found.heads, found.layers = max(found.heads, int(head) + 1), max(found.layers, int(place) + 1)
        elif match := NAMED_LM_HEAD.fullmatch(bare):
            # With one LM head for all, vLLM reads that of head 0 and drops the others.
            if not shared or (match[1] == "0" and "lm_heads.0.weight" not in found.keys):
                found.keys[f"lm_heads.{match[1]}.weight"] = key
        elif bare == "lm_head.weight":
            found.keys["lm_heads.0.weight"], shared = key, True
        elif bare == "token_map":
            found.token_map = key
        else:
            found.leftover.append(key)
    if any(key.startswith("lm_heads.") for key in found.keys):
        found.lm_heads = "shared" if shared else "own"
    return found


def _compare(checkpoint: Checkpoint, name: str, said: Any, found: int, known_wrong: bool = False) -> None:
    """Compares a count of the config with the keys.

    Args:
        checkpoint: for the message.
        name: of the field.
        said: what it says; None where it is missing, as in several published configs (Medusa#76).
        found: what the keys say.
        known_wrong: published configs are known to say less than there is; more is an error still.

    Raises:
        ValueError: they contradict each other.
    """
    if said is None or said == found:
        return
    if known_wrong and said < found:
        logger.info("%s: its config says %s=%s, its keys say %d; all are used", checkpoint.where, name, said, found)
        return
    raise ValueError(f"{checkpoint.where}: its config says {name}={said}, and its keys say {found}: one is wrong")


def _build(checkpoint: Checkpoint, found: Found, more: Mapping[str, Any]) -> MedusaHeads:
    """The heads; sizes come from the shapes and must be those of the config, where it has any."""
    shapes, published = checkpoint.shapes, checkpoint.config
    sample = found.keys.get("blocks.0.0.weight") or found.keys.get("lm_heads.0.weight")
    lm_head = found.keys.get("lm_heads.0.weight")
    if sample is None:
        raise ValueError(f"{checkpoint.where} has no head 0; it has {', '.join(found.keys.values())}")
    rows = None if lm_head is None else shapes[lm_head][1][0]
    mapped = None if found.token_map is None or lm_head is None else shapes[found.token_map][1][0]
    vocabulary = published.get("vocab_size", rows)
    _compare_size(checkpoint, "hidden_size", shapes[sample][1][1])
    if mapped is not None:
        _compare_size(checkpoint, "truncated_vocab_size", mapped)
    if rows is not None and rows not in (vocabulary, mapped):
        raise ValueError(
            f"{checkpoint.where}: its config says vocab_size={vocabulary}"
            + ("" if mapped is None else f" and its token_map has {mapped} ids")
            + f", and {lm_head} has {rows} rows"
        )
    name = published.get("base_model_name_or_path")
    config = MedusaConfig(
        hidden_size=shapes[sample][1][1],
        vocab_size=vocabulary,
        num_heads=found.heads,
        num_layers=found.layers,
        block_bias=found.biased,
        lm_heads=found.lm_heads,
        draft_vocab_size=mapped,
        target=None if name is None else TargetRecord(name=name).to_dict(),
        **more,
    )
    tensors = _tensors(checkpoint, found)
    if mapped is not None and found.token_map is not None:
        tensors["token_map"] = ids = checkpoint.tensors([found.token_map])[found.token_map].long()
        found.keys["token_map"] = found.token_map
        _refuse_map(checkpoint, found.token_map, ids, int(config.vocab_size or 0))
        for key in tensors:
            if key.startswith("lm_heads.") and mapped != len(tensors[key]) == config.vocab_size:
                tensors[key] = tensors[key][ids]
    return filled(checkpoint, lambda: MedusaHeads(config), tensors, found.theirs, found.leftover)


def _compare_size(checkpoint: Checkpoint, name: str, found: int) -> None:
    said = checkpoint.config.get(name)
    if said is not None and said != found:
        raise ValueError(f"{checkpoint.where}: its config says {name}={said}, and its weights are for {found}")


def _tensors(checkpoint: Checkpoint, found: Found) -> dict[str, Tensor]:
    """The heads' tensors by our keys; nothing else is read."""
    read = checkpoint.tensors(dict.fromkeys(found.keys.values()))
    taken: set[str] = set()
    tensors: dict[str, Tensor] = {}
    for ours, theirs in found.keys.items():
        # One that stands for several blocks becomes as many, or it could not be saved again.
        tensor = _floating(checkpoint, theirs, read[theirs])
        tensors[ours] = tensor.clone() if theirs in taken else tensor
        taken.add(theirs)
    return tensors


def _floating(checkpoint: Checkpoint, key: str, tensor: Tensor) -> Tensor:
    """A weight as it was before it was quantized to FP8 with one scale.

    Raises:
        ValueError: it is quantized in another way.
    """
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor
    scale = f"{key.removesuffix('weight')}weight_scale"
    if tensor.dtype != torch.float8_e4m3fn or scale not in checkpoint.shapes:
        raise ValueError(f"{checkpoint.where}: {key} is {tensor.dtype}, quantized in a way that is not read here")
    named = checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype") or "bfloat16"
    factor = checkpoint.tensors([scale])[scale].float()
    if factor.numel() != 1:
        raise ValueError(f"{checkpoint.where}: {scale} has {factor.numel()} entries; one for the whole weight is read")
    return (tensor.float() * factor.reshape(())).to(getattr(torch, str(named).removeprefix("torch.")))


def _refuse_map(checkpoint: Checkpoint, key: str, ids: Tensor, vocabulary: int) -> None:
    if fault := fault_of(ids, vocabulary):
        raise ValueError(f"{checkpoint.where}: {key} {fault}")
