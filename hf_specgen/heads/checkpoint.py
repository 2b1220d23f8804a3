"""A published checkpoint, read without running anything of it: config, key names, and only the tensors asked for."""

from __future__ import annotations

import json
import logging
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode, model_info, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

logger = logging.getLogger(__name__)

SAFE, PICKLED = (".safetensors",), (".bin", ".pt", ".pth")

# What trainers leave beside weights, and the same weights again under other names.
NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|consolidated)")
SHARD = re.compile(r"-\d+-of-\d+$")

# Trainers wrap what they save in one of these.
WRAPPED = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder, a file or a hub repository of weights holds.

    Attributes:
        config: its `config.json`; empty where there is none.
        shapes: the dtype and shape of every tensor, by its key, from the files' headers.
        where: what was opened, in words.
        files: the file that holds each key.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    where: str
    files: Mapping[str, Path] = field(repr=False)

    @classmethod
    def open(cls, path_or_id: str | PathLike[str], revision: str | None = None) -> Checkpoint:
        """Reads the config and the headers.

        Safetensors go before pickles of the same weights; pickles are read as tensors only and run nothing.

        Args:
            path_or_id: a folder, a single file of weights (a `config.json` beside it counts), or a hub id, which is
                downloaded into the hub's cache, or taken from there when offline.
            revision: of a hub id: a branch, a tag or a commit.

        Raises:
            ValueError: there is nothing, or no weights, or a file is cut short, or asks for more than tensors.
        """
        path = locate(path_or_id, revision)
        folder, names = (path, _names(path)) if path.is_dir() else (path.parent, [path.name])
        where = str(path) if Path(path_or_id).exists() else f"{path_or_id} ({revision or 'main'}) of the hub"
        found: dict[str, Path] = {}
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for file in weights(folder, names):
            for key, shape in _headers(file).items():
                shapes.setdefault(key, shape)
                found.setdefault(key, file)
        if not shapes:
            listed = ", ".join(sorted(names)[:12]) or "nothing"
            raise ValueError(f"{where} has no weights (*{', *'.join(SAFE + PICKLED)}); there is {listed}")
        return cls(_config(folder), shapes, where, found)

    def tensors(self, names: str | Iterable[str] = "") -> dict[str, Tensor]:
        """Reads tensors onto the CPU, in the dtype they are kept in; no other is read.

        Args:
            names: the prefix that keys begin with, or the keys; each comes under its whole key.

        Raises:
            ValueError: a key is not there, or a file is cut short.
        """
        keys = [key for key in self.files if key.startswith(names)] if isinstance(names, str) else list(names)
        if missing := [key for key in keys if key not in self.files]:
            raise ValueError(f"{self.where} has no {', '.join(missing)}")
        read: dict[str, Tensor] = {}
        for file in dict.fromkeys(self.files[key] for key in keys):
            read |= _read(file, [key for key in keys if self.files[key] == file])
        return {key: read[key] for key in keys}


def locate(path_or_id: str | PathLike[str], revision: str | None = None) -> Path:
    """The folder or file on this machine, downloaded from the hub where it is a hub id.

    Raises:
        ValueError: nothing has that name.
    """
    path, name = Path(path_or_id).expanduser(), str(path_or_id)
    if not name.strip():
        raise ValueError(f"{name!r} is no path and no hub id")
    try:
        if path.exists():
            return path
        return Path(_snapshot(name, revision))
    except HFValidationError as error:
        raise ValueError(f"there is no file or folder {name!r}, and it cannot be the id of a hub repository") from error
    except OSError as error:
        at = f" with revision {revision!r}" if revision else ""
        cached = "the hub cannot be asked (offline), and its cache does not hold it"
        reason = cached if isinstance(error, LocalEntryNotFoundError) else " ".join(str(error).split())
        raise ValueError(
            f"there is no file or folder {name!r}, and no hub repository of that id{at} can be loaded: {reason}"
        ) from error


def _snapshot(name: str, revision: str | None) -> str:
    """A hub repository's weights and JSON files, in the hub's cache."""
    if not is_offline_mode():
        try:
            listed = model_info(name, revision=revision).siblings or []
        except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except Exception as error:  # whatever the HTTP client calls it; as in transformers, what is cached may do
            logger.warning("the hub cannot be reached, so %s is looked for in its cache: %s", name, error)
        else:
            top = [file.rfilename for file in listed if "/" not in file.rfilename]
            wanted = [*_chosen(top), *(file for file in top if file.endswith(".json"))]
            return snapshot_download(name, revision=revision, allow_patterns=wanted)
    return snapshot_download(name, revision=revision, local_files_only=True)


def _names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.is_file()]


def _stem(name: str) -> str:
    """What the same weights are called in each format, whole or in shards."""
    stem = SHARD.sub("", name.rsplit(".", 1)[0])
    return "model" if stem == "pytorch_model" else stem


def _chosen(names: Iterable[str]) -> list[str]:
    """The files of weights among `names`; safetensors where the same weights are there twice."""
    known = sorted(name for name in names if name.endswith(SAFE + PICKLED) and not NOT_WEIGHTS.match(name))
    safe = {_stem(name) for name in known if name.endswith(SAFE)}
    return [name for name in known if name.endswith(SAFE) or _stem(name) not in safe]


def weights(folder: Path, names: Iterable[str]) -> list[Path]:
    """The files of weights in a folder, those that an index names where there is one.

    Raises:
        ValueError: an index names a file that is not there.
    """
    names = set(names)
    chosen = _chosen(names)
    for index in sorted(name for name in names if name.endswith(".index.json")):
        shards = sorted(_shards(folder / index))
        kind = index.removesuffix(".index.json")
        if not shards or (kind.endswith(PICKLED) and any(_stem(n) == _stem(kind) for n in chosen if n.endswith(SAFE))):
            continue
        if missing := [shard for shard in shards if shard not in names]:
            raise ValueError(f"{folder / index} names {', '.join(missing)}, which is not there: copy every shard")
        chosen = [*shards, *(name for name in chosen if _stem(name) != _stem(kind))]
    return [folder / name for name in chosen]


def _shards(index: Path) -> set[str]:
    named = _json(index).get("weight_map", {})
    if not isinstance(named, dict) or not all(isinstance(shard, str) for shard in named.values()):
        raise ValueError(f"{index} has no weight_map of keys and the files that hold them")
    return set(named.values())


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{file} holds no JSON object")
    return read


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return _json(file) if file.exists() else {}


def _headers(file: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    if file.name.endswith(SAFE):
        with _safe(file) as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
            if strange := {s.get_dtype() for s in slices.values()} - str_to_torch_dtype.keys():
                raise ValueError(f"{file} holds tensors of {', '.join(sorted(strange))}, which torch has no dtype for")
            return {key: (str_to_torch_dtype[s.get_dtype()], tuple(s.get_shape())) for key, s in slices.items()}
    if file.name.endswith(PICKLED):
        return {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in _pickled(file, "meta").items()}
    raise ValueError(f"{file} is no checkpoint: its name should end in {', '.join(SAFE + PICKLED)}")


def _read(file: Path, keys: list[str]) -> dict[str, Tensor]:
    # Copies, so that a file may change or go once it is read.
    if file.name.endswith(SAFE):
        with _safe(file) as opened:
            return {key: opened.get_tensor(key).clone() for key in keys}
    held = _pickled(file, "cpu")
    return {key: held[key].clone() for key in keys}


def _safe(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file{_pointer(file)}: {error}") from error


def _pickled(file: Path, device: str) -> dict[str, Tensor]:
    """The tensors of a pickle, none of them read before it is touched."""
    try:
        # Files of before torch 1.6 are no zip archives and cannot be mapped.
        held = torch.load(file, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # of half a dozen kinds
        refused = isinstance(error, pickle.UnpicklingError) and "nsupported" in str(error)
        if refused and not _pointer(file):
            raise ValueError(
                f"{file} holds more than tensors, and loading that could run code, so it is refused; where you trust "
                "it, convert it: safetensors.torch.save_file(torch.load(file, weights_only=False).state_dict(), new)"
            ) from error
        told = f"{type(error).__name__}: {error}".split("\n")[0]
        raise ValueError(f"{file} is not a whole checkpoint of torch{_pointer(file)}: {told}") from error
    for _ in WRAPPED:  # each name once at most, since a pickle may hold itself
        inner = [held[name] for name in WRAPPED if isinstance(held, Mapping) and isinstance(held.get(name), Mapping)]
        held = inner[0] if inner else held
    tensors = held.items() if isinstance(held, Mapping) else ()
    return {str(key): value.detach() for key, value in tensors if isinstance(value, Tensor)}


def _pointer(file: Path) -> str:
    """Says so where a file only stands for one that Git LFS keeps."""
    with file.open("rb") as opened:
        return " but a Git LFS pointer (git lfs pull fetches it)" if opened.read(19) == b"version https://git" else ""
