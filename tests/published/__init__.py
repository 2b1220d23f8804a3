"""Published layouts of trained drafters, copied by hand from their sources, and how to fill one at tiny width.

A layout here is never what this package saved itself: key names, shapes and dtypes are literals beside their source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Fields of a published config that hold a size, wherever they are nested.
SIZE_FIELDS = {
    *("hidden_size", "intermediate_size", "target_hidden_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "draft_vocab_size", "truncated_vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"),
}
TOKEN_FIELDS = {"pad_token_id", "bos_token_id", "eos_token_id"}


@dataclass(frozen=True)
class Published:
    """One layout as somebody published it.

    `sizes` shrinks it: an int is a published size and its value the tiny one, in all shapes and all size fields of the
    config; a str is a config field whose whole value is replaced (layer ids, which depend on the depth).
    A `file` with `-of-` is written as that many shards and an index.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    sizes: Mapping[int | str, Any]
    file: str = "model.safetensors"

    def tiny_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            key: (getattr(torch, dtype), tuple(self.tiny(size) for size in shape))
            for key, (dtype, shape) in self.tensors.items()
        }

    def tiny(self, size: int) -> int:
        if size not in self.sizes:
            raise KeyError(f"{self.name}: sizes does not say what {size} becomes at tiny width")
        return int(self.sizes[size])

    def tiny_config(self) -> dict[str, Any]:
        shrunk = self._shrink(dict(self.config))
        assert isinstance(shrunk, dict)
        return shrunk

    def _shrink(self, value: Any, field: str = "") -> Any:
        if field in self.sizes:
            return self.sizes[field]
        if isinstance(value, Mapping):
            return {key: self._shrink(inner, key) for key, inner in value.items()}
        if field in TOKEN_FIELDS and isinstance(value, int):
            return min(value, 2)
        if field in SIZE_FIELDS and isinstance(value, int):
            return self.tiny(value)
        return value


def fill(published: Published, folder: Path, seed: int) -> None:
    """Writes the layout at tiny width with random values: its config.json and its file of weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published.tiny_config()), encoding="utf-8")
    save(values(published, seed), folder, published.file)


def values(published: Published, seed: int) -> dict[str, Tensor]:
    """Random weights; maps between vocabularies are true ones (`d2t` offsets, `t2d` its mask, `token_map` ids)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = published.tiny_shapes()
    filled = {key: _random(key, dtype, shape, generator) for key, (dtype, shape) in shapes.items()}
    for key in {"d2t", "token_map"} & set(shapes):
        dtype, (count,) = shapes[key]
        whole = shapes["t2d"][1][0] if "t2d" in shapes else _field(published.tiny_config(), "vocab_size")
        kept = torch.randperm(whole, generator=generator)[:count].sort().values
        filled[key] = (kept - torch.arange(count) if key == "d2t" else kept).to(dtype)
        if "t2d" in shapes:
            filled["t2d"] = torch.zeros(whole, dtype=torch.bool).index_fill(0, kept, True).to(shapes["t2d"][0])
    return filled


def _field(config: Mapping[str, Any], name: str) -> Any:
    """The value of a field, wherever it is nested."""
    if name in config:
        return config[name]
    inner = (_field(value, name) for value in config.values() if isinstance(value, Mapping))
    return next((value for value in inner if value is not None), None)


def _random(key: str, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if not dtype.is_floating_point:
        # Ids in ascending order, so that a map of them is one to one.
        return torch.randperm(max(1, shape[0]), generator=generator).sort().values.to(dtype)
    drawn = torch.randn(shape, generator=generator) * (0.1 if len(shape) < 2 else shape[-1] ** -0.5)
    return (drawn + 1 if "norm" in key and key.endswith("weight") and len(shape) == 1 else drawn).to(dtype)


def save(tensors: Mapping[str, Tensor], folder: Path, file: str) -> None:
    if "-of-" not in file:
        _save_one(dict(tensors), folder / file)
        return
    stem, suffix = file.split("-")[0], Path(file).suffix
    count = int(file.split("-of-")[1].split(".")[0])
    keys = sorted(tensors)
    index = {}
    for number in range(count):
        shard = f"{stem}-{number + 1:05d}-of-{count:05d}{suffix}"
        held = {key: tensors[key] for key in keys[number::count]}
        index.update(dict.fromkeys(held, shard))
        _save_one(held, folder / shard)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / f"{stem}{suffix}.index.json").write_text(text, encoding="utf-8")


def _save_one(tensors: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        torch.save(tensors, path)
