"""The training scripts as one runs them: by two processes, stopped and resumed, and from no data to a drafter."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import distill_drafter
import generate_data
import pytest
import report
import talking
import torch
import train_eagle
import train_medusa
from accelerate.commands.launch import launch_command_parser
from running import runs
from safetensors.torch import load_file
from talking import ASSISTANT, END, USER
from texts import data
from texts.chats import IGNORED
from torch import Tensor
from transformers import AutoModelForCausalLM, HfArgumentParser

import hf_specgen as sg

ROOT = Path(__file__).parent.parent
LAYERS = (0, 1, -1)
# Each script, and what it is told of a target of two layers and 66 ids.
SCRIPTS = {
    "train_medusa": "--num_heads 2 --vocabulary 40 --others 8",
    "train_eagle": "--feature_layers 0 1 -1 --drafted 3 --draft_vocabulary 40",
    "distill_drafter": "--layers 1 --vocabulary 40 --others 8",
}
SLOW = {"train_eagle", "distill_drafter"}


@pytest.fixture(autouse=True)
def _cached_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that chats, and data: eight conversations of unequal length to train on, and two that are held out."""
    folder = tmp_path_factory.mktemp("home")
    talking.saved(folder / "target")
    target, rows = talking.speaker(), []
    generator = torch.Generator().manual_seed(0)
    for place in range(10):
        asked, said = 2 + place % 3, 5 + 3 * place % 7
        words = torch.randint(len(talking.SPECIAL), 65, (asked + said,), generator=generator).tolist()
        prompt, answer = [USER, *words[:asked], END, ASSISTANT], [*words[asked:], END]
        with torch.no_grad():
            hidden = target(torch.tensor([prompt + answer]), output_hidden_states=True).hidden_states
        rows.append(
            {
                "input_ids": prompt + answer,
                "labels": [IGNORED] * len(prompt) + answer,
                "held_out": place >= 8,
                "prompt": str(place),
                "hidden_states": torch.cat([hidden[layer][0] for layer in LAYERS], -1).half().numpy(),
            }
        )
    data.write_info(folder / "data", {"hidden_layers": LAYERS})
    data.write_part(folder / "data", 0, rows)
    return folder


def line(home: Path, out: Path, name: str, more: str) -> list[str]:
    """What a script is called with."""
    words = f"--target {home}/target --data {home}/data --output_dir {out} --report False --report_to none --use_cpu"
    return f"{words} --disable_tqdm True --logging_steps 2 --save_steps 4 {SCRIPTS[name]} {more}".split()


def run(monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]) -> None:
    """Runs a script here, with the defaults it has on a command line."""
    script = str(ROOT / "training" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *words])
    runpy.run_path(script, run_name="__main__")


def process(command: list[str], **environment: str) -> None:
    """Runs a command, whose last words are shown where it fails."""
    paths = os.pathsep.join(filter(None, (environment.pop("PYTHONPATH", None), str(ROOT))))
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


# Python runs it before a script. It notes what each rank gives its final name, which is how files come that are written
# whole.
NOTING = """
import os, sys

def note(what):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(os.environ.get("RANK", "-") + " " + what + "\\n")

def hear(event, arguments):
    if event == "os.rename":
        note(os.path.relpath(arguments[1], os.environ["OUT"]))

sys.addaudithook(hear)
"""
# accelerate shards nothing where processes are a CPU's, and says nothing either: they pass for a GPU's.
SHARDING = """
import torch.distributed as distributed
from accelerate.state import DistributedType, PartialState

def prepare(*_):
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    return "gloo", DistributedType.MULTI_GPU

if "RANK" in os.environ:
    import torch.distributed.fsdp as fsdp
    PartialState._prepare_backend, shard = prepare, fsdp.fully_shard
    fsdp.fully_shard = lambda module, **kwargs: (note("sharded " + type(module).__name__), shard(module, **kwargs))[1]
"""


def launched(tmp_path: Path, name: str, words: list[str], *flags: str) -> Counter[str]:
    """Runs a script in two gloo processes by `accelerate launch`; which rank has written what, and how often."""
    (tmp_path / "noting").mkdir(exist_ok=True)
    sharded = "--use_fsdp" in flags
    (tmp_path / "noting" / "sitecustomize.py").write_text(NOTING + SHARDING * sharded)
    kind = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", *kind, *flags]
    process(
        [*command, str(ROOT / "training" / f"{name}.py"), *words],
        ACCELERATE_USE_CPU="true",
        ACCELERATE_TORCH_DEVICE="cpu",
        HF_DATASETS_CACHE=str(tmp_path / "cache"),
        PYTHONPATH=str(tmp_path / "noting"),
        NOTES=str(tmp_path / "notes"),
        OUT=words[words.index("--output_dir") + 1],
    )
    return Counter((tmp_path / "notes").read_text().splitlines())


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def curve(out: Path) -> list[dict[str, Any]]:
    """What was logged by step, from the last checkpoint."""
    last = runs.last_complete(out)
    assert last is not None
    state = json.loads((last / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


# -------------------------------------------------------------------------------------------------------- two processes


def compared(two: Path, one: Path) -> None:
    """What two processes have saved and logged is what one has, but for the order of sums."""
    for name in "loss", "grad_norm":
        logged = [[entry[name] for entry in curve(out)] for out in (two, one)]
        assert logged[0] == pytest.approx(logged[1], rel=1e-4), name
    theirs = weights(one)
    assert weights(two).keys() == theirs.keys()
    for name, tensor in weights(two).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
    early, late = (load_file(one / f"checkpoint-{step}" / runs.TRAINED) for step in (4, 6))
    assert max(float((late[name] - early[name]).abs().max()) for name in late) > 1e-3


# Sums in another order differ by a last bit, which Adam makes a whole step of where a gradient is 0.
SGD = "--optim sgd --learning_rate 0.1 --warmup_steps 0 --max_steps 6"


@pytest.mark.parametrize("name", ["generate_data", pytest.param("train_medusa", marks=pytest.mark.slow)])
def test_where_the_extra_is_not_installed_it_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text("raise ModuleNotFoundError(\"No module named 'datasets'\")", encoding="utf-8")
    asked = [sys.executable, str(ROOT / "training" / f"{name}.py"), "--help"]
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = subprocess.run(asked, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip install -e '.[train]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SCRIPTS])
def test_two_processes_train_what_one_does_and_one_of_them_writes(home, tmp_path, monkeypatch, name):
    """Report 131: rows have unequal numbers of labels."""
    one, two = tmp_path / "one", tmp_path / "two"
    run(monkeypatch, name, line(home, one, name, f"{SGD} --per_device_train_batch_size 2"))
    wrote = launched(tmp_path, name, line(home, two, name, f"{SGD} --per_device_train_batch_size 1"), "--multi_gpu")
    assert wrote["0 provenance.json"] == wrote["0 README.md"] == 1
    assert {entry.split()[0] for entry in wrote} == {"0"}
    compared(two, one)
    assert json.loads((two / "provenance.json").read_text())["settings"]["world_size"] == 2


BY_LAYERS = [
    *("--use_fsdp", "--fsdp_version", "2", "--fsdp_cpu_ram_efficient_loading", "false"),
    *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_sharded_is_gathered_and_saved_whole(home, tmp_path, monkeypatch, name):
    """Report 122."""
    one, two = tmp_path / "one", tmp_path / "two"
    run(monkeypatch, name, line(home, one, name, f"{SGD} --per_device_train_batch_size 2"))
    wrote = launched(tmp_path, name, line(home, two, name, f"{SGD} --per_device_train_batch_size 1"), *BY_LAYERS)
    assert wrote["1 sharded LlamaDecoderLayer"] >= 2
    assert wrote["0 provenance.json"] == wrote["0 README.md"] == 1
    compared(two, one)
    told = [json.loads((out / "provenance.json").read_text())["target"]["fingerprint"] for out in (two, one)]
    assert told[0] == told[1] is not None


@pytest.mark.slow
def test_a_sharded_training_goes_on_where_it_was_stopped(home, tmp_path, monkeypatch):
    name, one, two = "train_medusa", tmp_path / "one", tmp_path / "two"
    run(monkeypatch, name, line(home, one, name, f"{SGD} --per_device_train_batch_size 2"))
    words = line(home, two, name, f"{SGD} --per_device_train_batch_size 1")
    launched(tmp_path, name, [*words, "--minutes", "0"], *BY_LAYERS)
    assert runs.last_complete(two) == two / "checkpoint-2"
    wrote = launched(tmp_path, name, [*words, "--resume"], *BY_LAYERS)
    assert wrote["0 provenance.json"] == wrote["0 README.md"] == 1
    compared(two, one)


# ------------------------------------------------------------------------------------------------------- stop and go on


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("train_medusa", ""),
        ("train_eagle", ""),
        ("distill_drafter", ""),
        pytest.param("distill_drafter", "--on_policy 0.5 --max_new_tokens 4", marks=pytest.mark.slow),
    ],
)
def test_a_training_that_was_stopped_twice_is_an_unbroken_one(home, tmp_path, monkeypatch, name, more):
    """Report 134. Stopped in the first epoch and in the second one, in which rows come in another order."""
    more = f"{more} --per_device_train_batch_size 3 --max_steps 8 --learning_rate 0.01"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(monkeypatch, name, line(home, whole, name, more))
    for step, flags in ((2, "--minutes 0"), (4, "--resume --minutes 0"), (8, "--resume")):
        run(monkeypatch, name, line(home, parts, name, f"{more} {flags}"))
        assert runs.last_complete(parts) == parts / f"checkpoint-{step}"
        assert (parts / "provenance.json").is_file() == (step == 8)
    assert curve(parts) == curve(whole)
    assert len({entry["loss"] for entry in curve(whole)}) == 4
    ours, theirs = weights(parts), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ------------------------------------------------------------------------------------------------------------ the guide

# Who reads the flags of a command: a launcher, or a script.
READERS: dict[str, Callable[[], ArgumentParser]] = {
    "accelerate launch": launch_command_parser,
    "generate_data": lambda: HfArgumentParser(generate_data.Arguments),
    "report": report.parser,
    **{
        script.__name__: partial(HfArgumentParser, (script.Arguments, runs.DrafterTrainingArguments))
        for script in (train_medusa, train_eagle, distill_drafter)
    },
}


def test_the_flags_of_the_guide_are_those_of_launchers_and_scripts():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").replace("\\\n", " ")
    called = re.findall(r"^(python|accelerate launch) (.*)training/(\w+)\.py(.*)$", text, re.MULTILINE)
    assert {name for launcher, _, script, _ in called for name in (launcher, script)} > READERS.keys()
    for launcher, before, script, behind in called:
        for reader, words in (launcher, before), (script, behind):
            if flags := re.findall(r"--[\w-]+", words) if reader in READERS else []:
                assert set(flags) <= READERS[reader]()._option_string_actions.keys(), reader


# -------------------------------------------------------------------------------------------- from nothing to a drafter


@pytest.mark.slow
def test_three_commands_lead_from_no_data_to_a_drafter_that_is_better_than_a_fresh_one(tmp_path):
    target, made, out = talking.saved(tmp_path / "target"), tmp_path / "data", tmp_path / "heads"
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    limits = "--tokens 12000 --rows 128 --max_prompt_tokens 12 --max_new_tokens 24 --hidden_layers -1"
    script = [sys.executable, str(ROOT / "training" / "generate_data.py")]
    process([*script, "--target", target, "--out", str(made), *limits.split()], **cache)
    words = f"--target {target} --data {made} --output_dir {out} --num_train_epochs 20 --warmup_steps 5"
    words += " --learning_rate 0.01 --use_cpu --report_to none"
    process([sys.executable, str(ROOT / "training" / "train_medusa.py"), *words.split()], **cache)

    files = ("model.safetensors", "provenance.json", "report.json", "report.txt", "report.png", "README.md")
    assert {name: (out / name).stat().st_size > 0 for name in files} == dict.fromkeys(files, True)
    told = json.loads((out / "report.json").read_text())
    before, after = told["results"]
    assert (before["drafter"], after["drafter"]) == ("before", "after")
    assert after["prompts"] == after["identical"] > 0
    assert after["mean_accepted_tokens"] > before["mean_accepted_tokens"]
    # Trees that grow by measured accuracies bring a little without any training.
    assert after["acceptance"][0] > before["acceptance"][0] + 0.12
    assert curve(out)[-1]["loss"] < 0.7 * curve(out)[0]["loss"]

    model: Any = sg.enable(AutoModelForCausalLM.from_pretrained(target))
    asked = {"inputs": torch.tensor([[USER, 9, 17, 30, END, ASSISTANT]]), "max_new_tokens": 32, "do_sample": False}
    stats = sg.Stats()
    assert torch.equal(
        model.generate(**asked, assistant=str(out), stats=stats), model.generate(**asked, assistant=sg.Plain())
    )
    assert stats.rounds > 0
