"""What trainings share: what is saved, what a resumed run does, and what two processes make of one training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import runs
from running.runs import (
    COMPLETE,
    TRAINED,
    CommonArguments,
    DrafterTrainer,
    DrafterTraining,
    DrafterTrainingArguments,
    begin,
    parse,
)
from safetensors.torch import load_file
from torch import nn

HERE = Path(__file__).parent
ROWS = 24


class Line(DrafterTraining):
    """Learns a linear map of a frozen one's output; rows have labels of unequal number."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 4).requires_grad_(False))
        self.drafter = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 4))

    def forward(self, x, labels, num_items_in_batch=None):
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        wrong = (self.drafter(self.target(x)) - x).square().mean(-1)
        seen = labels != -100
        return {"loss": (wrong * seen).sum() / count, "wrong": wrong[seen].mean()}


class Rows(torch.utils.data.Dataset):
    """Row i has i % 3 + 1 labels."""

    def __len__(self):
        return ROWS

    def __getitem__(self, place):
        generator = torch.Generator().manual_seed(place)
        return {
            "x": torch.randn(3, 4, generator=generator),
            "labels": torch.tensor([1, *[-100] * 2])[[0, 2, 2]]
            if place % 3 == 0
            else torch.tensor([1, 1, -100 if place % 3 == 1 else 1]),
        }


def trainer(folder, module=None, resume=False, minutes=None, **settings):
    common = CommonArguments(target="t", data="d", resume=resume, minutes=minutes)
    defaults = {"per_device_train_batch_size": 4, "max_steps": 12, "logging_steps": 2, "save_steps": 4}
    training = DrafterTrainingArguments(
        output_dir=str(folder), **{**defaults, **settings}, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False
    )
    return DrafterTrainer(module or Line(), common, training, train_dataset=Rows())


def losses(run):
    return [(entry["step"], entry["loss"], entry["wrong"]) for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("settings", "stop"),
    [({}, 8), ({"save_strategy": "epoch", "logging_steps": 4, "per_device_train_batch_size": 2}, ROWS // 2)],
    ids=["steps", "epochs"],
)
def test_a_resumed_run_has_the_loss_curve_and_the_weights_of_an_unbroken_one(tmp_path, settings, stop):
    settings = {"max_steps": stop + 4, **settings}
    whole = trainer(tmp_path / "whole", **settings)
    assert whole.train_or_resume()
    first = trainer(tmp_path / "parts", **settings)
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{stop}", tmp_path / "parts" / f"checkpoint-{stop}")
    second = trainer(tmp_path / "parts", resume=True, **settings)
    assert second.train_or_resume()
    assert losses(second) == losses(whole)
    assert losses(whole)[0][1] > min(loss for _, loss, _ in losses(whole)[1:])
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    del first


def test_resume_keeps_the_frozen_part_frozen_and_untouched(tmp_path):
    """Report 134."""
    before = {name: tensor.clone() for name, tensor in Line().target.state_dict().items()}
    trainer(tmp_path, max_steps=4).train_or_resume()
    run = trainer(tmp_path, resume=True, max_steps=8)
    names = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    run.train_or_resume()
    assert {name for name, parameter in run.model.named_parameters() if parameter.requires_grad} == names
    assert load_file(tmp_path / "checkpoint-8" / TRAINED).keys() == names == {"drafter.1.weight", "drafter.1.bias"}
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.target.state_dict().items())
    assert not run.model.target.training


def test_the_last_complete_checkpoint_is_taken_and_named(tmp_path, caplog):
    """Report 136."""
    trainer(tmp_path, max_steps=8).train_or_resume()
    shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-12")
    (tmp_path / "checkpoint-best").mkdir()  # of somebody else
    (tmp_path / "checkpoint-12" / COMPLETE).unlink()
    run = trainer(tmp_path, resume=True)
    caplog.clear()
    run.train_or_resume()
    assert "checkpoint-12 was cut off and is ignored" in caplog.text
    assert "going on from" in caplog.text
    assert "checkpoint-8" in caplog.text
    assert losses(run)[-1][0] == 12


def test_without_a_complete_checkpoint_it_starts_anew_and_says_so(tmp_path, caplog):
    (tmp_path / "checkpoint-4").mkdir()
    run = trainer(tmp_path, resume=True, max_steps=2)
    assert run.train_or_resume()
    assert "starting from the beginning" in caplog.text


def test_a_folder_in_use_is_not_written_over(tmp_path):
    trainer(tmp_path, max_steps=4).train_or_resume()
    with pytest.raises(SystemExit, match="pass --resume"):
        trainer(tmp_path).train_or_resume()


def test_what_began_with_other_arguments_is_not_resumed(tmp_path):
    run = trainer(tmp_path, max_steps=4)
    assert begin(run.arguments, run.args) == tmp_path
    run.train_or_resume()
    with pytest.raises(SystemExit, match="pass --resume"):
        begin(run.arguments, run.args)
    again = replace(run.arguments, resume=True, minutes=3.0)
    assert begin(again, run.args) == tmp_path
    with pytest.raises(SystemExit, match="begun with --target t, not u"):
        begin(replace(again, target="u"), run.args)
    for name, value in ("learning_rate", 0.5), ("per_device_train_batch_size", 8), ("seed", 1):
        with pytest.raises(SystemExit, match="was begun with --"):
            begin(again, replace(run.args, **{name: value}))
    halved = replace(run.args, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert begin(again, halved) == tmp_path


@pytest.mark.parametrize("data", ["chats.jsonl", "folder"])
def test_what_began_with_other_data_is_not_resumed(tmp_path, data):
    """What the training itself writes may lie among its data."""
    held, out = tmp_path / data, tmp_path / "folder" / "out"
    held.parent.mkdir(exist_ok=True)
    out.parent.mkdir()
    chats = held if data.endswith("jsonl") else held / "chats.jsonl"
    chats.write_text("one\n")
    run = trainer(out, max_steps=4)
    arguments = replace(run.arguments, data=str(held))
    begin(arguments, run.args)
    run.train_or_resume()
    again = replace(arguments, resume=True)
    assert begin(again, run.args) == out
    if held.is_dir():
        (held / "more.jsonl").write_text("three\n")
        assert begin(again, run.args) == out, "data may grow"
    chats.write_text("two\n")
    with pytest.raises(SystemExit, match="held something else"):
        begin(again, run.args)


def test_what_is_read_is_not_written_over(tmp_path):
    run = trainer(tmp_path / "out")
    with pytest.raises(ValueError, match="is what --target is"):
        begin(replace(run.arguments, target=f"{tmp_path}/x/../out"), run.args)


def test_weights_in_pieces_are_refused_where_rows_of_them_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "is_deepspeed_zero3_enabled", lambda: True)
    training = DrafterTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    with pytest.raises(ValueError, match="take stage 2, or FSDP"):
        runs.begin(CommonArguments(target="t", data="d"), training)
    assert not (tmp_path / "out").exists()


def test_what_trained_other_tensors_is_not_resumed(tmp_path):
    trainer(tmp_path, max_steps=4).train_or_resume()
    module = Line()
    module.drafter[1].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"drafter\.1\.bias"):
        trainer(tmp_path, module, resume=True).train_or_resume()


def test_time_that_is_up_stops_at_a_window_and_resume_ends_as_if_nothing_had_been(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train_or_resume()
    stopped = trainer(tmp_path / "parts", minutes=0.0)
    assert not stopped.train_or_resume()
    assert stopped.state.global_step == 2
    second = trainer(tmp_path / "parts", resume=True)
    assert second.train_or_resume()
    assert losses(second) == losses(whole)


@pytest.mark.parametrize(("batch", "windows"), [(2, 6), (4, 3), (6, 2)])
def test_gradients_do_not_depend_on_how_a_window_is_cut(tmp_path, batch, windows):
    """Report 131: rows have unequal numbers of labels."""
    module = Line()
    module.drafter[0].p = 0.0
    at_once, other = (
        trainer(
            tmp_path / str(size),
            module=one,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            max_grad_norm=0.0,
            optim="sgd",
        )
        for size, steps, one in ((12, 1, module), (batch, windows, Line()))
    )
    other.model.drafter[0].p = 0.0
    for run in (at_once, other):
        run.train()
    assert losses(at_once)[0][1] == pytest.approx(losses(other)[0][1], rel=1e-5)
    for ours, theirs in zip(at_once.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_a_loss_that_is_no_number_ends_the_training(tmp_path):
    module = Line()
    module.drafter[1].weight.data[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="learning_rate"):
        trainer(tmp_path, module).train_or_resume()


def test_tensors_that_are_empty_or_not_finite_are_not_saved(tmp_path):
    """Report 122."""
    run = trainer(tmp_path)
    assert run.whole("drafter").keys() == {"1.weight", "1.bias"}
    run.model.drafter[1].weight.data[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match=r"1\.weight holds NaN or infinity"):
        run.whole("drafter")
    run.model.drafter[1].weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"1\.weight is empty"):
        run.whole("drafter")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--output_dir is needed"),
        (["--output_dir", "o", "--save_steps", "15"], "no multiple of logging_steps 10"),
        (["--output_dir", "o", "--save_total_limit", "1"], "use 2"),
        (["--output_dir", "o", "--save_only_model", "True"], "no --save_only_model"),
        (["--output_dir", "o", "--logging_strategy", "epoch"], "--logging_strategy steps"),
        (["--output_dir", "o", "--eval_strategy", "steps"], "no --eval_strategy"),
        (["--output_dir", "o", "--max_length", "-5"], "--max_length must be 2 or more"),
        (["--output_dir", "o", "--quantize", "2bit"], "choose from '4bit', '8bit'"),
        (["--output_dir", "o", "--save_dtype", "int8"], "choose from 'float32', 'bfloat16', 'float16'"),
    ],
)
def test_arguments_that_would_lose_something_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        parse(CommonArguments, ["--target", "t", "--data", "d", *words])
    assert message in capsys.readouterr().err


def test_arguments_of_the_script_and_of_trainer_are_one_command_line():
    words = ["--target", "t", "--data", "d", "--output_dir", "o", "--learning_rate", "0.1", "--resume"]
    own, training = parse(CommonArguments, words, num_train_epochs=7)
    assert (own.resume, training.learning_rate, training.num_train_epochs) == (True, 0.1, 7)


TWO = """
import sys
sys.path[:0] = sys.argv[2:]
from test_runs import Line, trainer
from safetensors.torch import save_file
module = Line()
module.drafter[0].p = 0.0
run = trainer(sys.argv[1], module, per_device_train_batch_size=2, max_steps=4, save_steps=2, optim="sgd")
assert run.args.world_size == 2, run.args.world_size
assert run.train_or_resume()
state = run.whole("drafter")
assert (state is not None) == run.args.should_save
if state is not None:
    save_file(state, sys.argv[1] + "/drafter.safetensors")
    found = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    open(sys.argv[1] + "/losses", "w").write(repr(found))
"""


def launched(script, folder, *flags):
    """Two gloo processes by `accelerate launch`: its launcher for CPUs wants MPI, the one for GPUs does without."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    kind = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", *kind, *flags]
    paths = [str(HERE), str(HERE.parent / "training"), str(HERE.parent)]
    done = subprocess.run(
        [*command, str(folder / "script.py"), str(folder), *paths],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path):
    launched(TWO, tmp_path / "two", "--multi_gpu")
    module = Line()
    module.drafter[0].p = 0.0
    one = trainer(tmp_path / "one", module, per_device_train_batch_size=4, max_steps=4, save_steps=2, optim="sgd")
    one.train_or_resume()
    two = load_file(tmp_path / "two" / "drafter.safetensors")
    for name, tensor in one.whole("drafter").items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-7)
    written = json.loads((tmp_path / "two" / "losses").read_text())
    assert written == pytest.approx([loss for _, loss, _ in losses(one)], rel=1e-4)
    assert (tmp_path / "two" / "checkpoint-4" / COMPLETE).is_file()
