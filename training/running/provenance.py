"""Where a drafter comes from: `provenance.json` beside its weights.

It names no place on the machine that trained it: paths become relative to the folder that the script ran in, or names
without their folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, hf_hub_download
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen.files import write_whole
from hf_specgen.heads.recorded import TargetRecord

if TYPE_CHECKING:
    from transformers import TrainingArguments  # brings all of Trainer

FILE = "provenance.json"
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "peft", "bitsandbytes")
HUB_TIMEOUT_S = 5.0
# Of a matrix, for `mark_of`.
ENTRIES = 64
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
# Of Trainer's hundred arguments those that a result depends on.
TRAINING = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("adam_beta1", "adam_beta2", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_train_epochs", "max_steps", "seed", "bf16", "fp16", "world_size"),
)
# An absolute path within a text, in quotes or without: not the rest of an address or of a hub id.
PATH = re.compile(r"(?<=[\"'])/(?!/)[^\"'\n]+(?=[\"'])|(?<![\w./~-])/(?!/)[^\s\"'=:,;()]+")


def write(
    folder: str | Path,
    target: PreTrainedModel,
    arguments: Any,
    training: TrainingArguments | None = None,
    result: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes `provenance.json` for the weights in a folder.

    Args:
        folder: of the drafter, saved already.
        target: the model it was trained for.
        arguments: the script's, a dataclass; `arguments.data` is what was trained on.
        training: Trainer's.
        result: what else is to be kept, such as steps, tokens, seconds and the last loss.

    Returns:
        What was written.
    """
    folder, record = Path(folder), TargetRecord.of(target).to_dict()
    told = {
        "command": command(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "commit": commit(Path(__file__).parent),
        "hardware": hardware(),
        "target": {
            **record,
            "name": record["name"] or arguments.target,
            "license": license_of(arguments.target),
            "repository": repository_of(arguments.target),
        },
        "data": data_of(arguments.data),
        "settings": {**dataclasses.asdict(arguments), **_kept(training)},
        "result": dict(result or {}),
        "weights": {path.name: digest([path]) for path in weights_of(folder)},
    }
    return keep(folder, json.loads(json.dumps(told, default=str)))


def keep(folder: str | Path, told: Mapping[str, Any]) -> dict[str, Any]:
    """Writes what is told of a folder's weights, without places on this machine; returns what was written."""
    clean: dict[str, Any] = without_places(dict(told))
    write_whole(Path(folder) / FILE, json.dumps(clean, indent=2) + "\n")
    return clean


def read(folder: str | Path) -> dict[str, Any] | None:
    """What a folder says of itself; None where it says nothing."""
    path = Path(folder) / FILE
    told: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return told


def _kept(training: TrainingArguments | None) -> dict[str, Any]:
    if training is None:
        return {}
    held: dict[str, Any] = training.to_dict()  # type: ignore[no-untyped-call]
    held["world_size"] = training.world_size
    return {name: held[name] for name in TRAINING if name in held}


# ---------------------------------------------------------------------------------------------- no place on the machine


def without_places(told: Any) -> Any:
    """The same, with every path in every string made relative or cut to its last name."""
    if isinstance(told, dict):
        return {key: without_places(value) for key, value in told.items()}
    if isinstance(told, list):
        return [without_places(value) for value in told]
    return without_paths(told) if isinstance(told, str) else told


def without_paths(text: str) -> str:
    """A text in which absolute paths are made relative or cut to their last names."""
    if os.path.isabs(text) and "\n" not in text and os.path.exists(text):
        return _named(text)  # however many blanks it has
    return PATH.sub(lambda found: _named(found[0]), text)


def _named(path: str) -> str:
    inside = os.path.relpath(path)
    return Path(path).name if inside.startswith(os.pardir) else inside


def command(words: Iterable[str]) -> str:
    """A command line as one would type it again."""
    first, *rest = words
    split = [word.partition("=") for word in rest]
    named = [without_paths(name) + equals + without_paths(value) for name, equals, value in split]
    return shlex.join(["python", without_paths(first), *named])


# --------------------------------------------------------------------------------------------------- what it ran with


def versions() -> dict[str, str]:
    """Of Python, this package and those it trains with, as far as they are installed."""
    found = {"python": platform.python_version(), "hf_specgen": sg.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit(folder: Path) -> str | None:
    """The git commit that a folder is at, and whether files differ from it; None outside of a repository."""
    try:
        said = [
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[0] + (" with changes" if said[1] else "")


def hardware() -> str:
    """The processors, in words."""
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB each"
    cores = os.cpu_count()
    threads = torch.get_num_threads()
    return f"{cores} CPU cores ({_processor()}), {threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", told, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


# ------------------------------------------------------------------------------------------------ what it was made from


def data_of(data: str) -> dict[str, Any]:
    """What was trained on: its name, what `data.json` says, and a fingerprint over its parts."""
    path = Path(data)
    if not path.exists():
        return {"name": data, "info": None, "fingerprint": None}
    parts = files_of(path)
    info = path / "data.json"
    told = json.loads(info.read_text(encoding="utf-8")) if info.is_file() else None
    return {"name": path.resolve().name, "info": told, "fingerprint": digest(parts) if parts else None}


def files_of(data: Path) -> list[Path]:
    """What a file or folder of data holds."""
    if data.is_file():
        return [data]
    return sorted(data.glob("*.parquet")) or sorted(filter(Path.is_file, data.rglob("*")))


def glance(data: Path, beside: Path) -> dict[str, str]:
    """A mark, in hex, of each file of data by its name; none where they are not on this machine.

    It is the SHA-256 of its size and its first and last MiB: recorded states fill disks.

    Args:
        data: a file or folder.
        beside: a folder that does not count, though it may lie in `data`.
    """
    marks = {}
    for path in files_of(data) if data.exists() else ():
        if beside.resolve() in path.resolve().parents:
            continue
        size = path.stat().st_size
        whole = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            whole.update(file.read(2**20))
            file.seek(max(0, size - 2**20))
            whole.update(file.read())
        marks[str(path.relative_to(data))] = whole.hexdigest()
    return marks


def digest(paths: Iterable[Path]) -> str:
    """SHA-256, in hex, over what files hold, in this order."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                whole.update(block)
    return whole.hexdigest()


@torch.no_grad()
def mark_of(model: PreTrainedModel) -> str | None:
    """What tells a model from one that was trained further, in hex; None for one that is quantized.

    It is the SHA-256 of some entries of every matrix, in bfloat16, so that it is the same in every precision.
    """
    whole = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if not weight.is_floating_point() or weight.element_size() < 2:
            return None
        if weight.ndim > 1 and weight.numel():
            flat = weight.detach().flatten()
            entries = flat[:: max(1, len(flat) // ENTRIES)][:ENTRIES].to("cpu", torch.bfloat16)
            whole.update(name.encode() + entries.view(torch.int16).numpy().tobytes())
    return whole.hexdigest()[:16]


def weights_of(folder: Path) -> list[Path]:
    """The files of weights in a folder, or the file itself."""
    if folder.is_file():
        return [folder]
    return sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))


def license_of(target: str) -> str | None:
    """What the target's own card says of its license; None where there is no card at hand that says it."""
    held = Path(target, "README.md")
    try:
        if not Path(target).exists():
            held = Path(hf_hub_download(target, held.name, etag_timeout=HUB_TIMEOUT_S))
        said: str | None = ModelCard.load(held).data.license if held.is_file() else None
    except (OSError, ValueError):  # no hub, no card, or none that can be read
        return None
    return said


def repository_of(target: str) -> str | None:
    """The hub id of a target; None for a folder that does not say what it is a copy of."""
    if not Path(target).exists():
        return target
    told = read(target) or {}
    said: str | None = told.get("repository")
    return said
