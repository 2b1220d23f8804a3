"""Training of Medusa heads: what each learns from which place, with a frozen target and one that learns too."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import tiny
import tokenizers
import torch
import train_medusa
from heads import BATCH, VOCAB, babble, batch_of, speaker
from learning.losses import IGNORED
from learning.medusa import MedusaTraining, Recipe
from running import runs
from texts import data
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

import hf_specgen as sg
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.recorded import fingerprint

# PEFT asks transformers for it by its old name.
OLD_NAME = "ignore:`is_gradient_checkpointing`:FutureWarning"
pytestmark = pytest.mark.filterwarnings(OLD_NAME)


def small(seed: int = 0, **changed: Any) -> LlamaForCausalLM:
    """A frozen tiny target of 20 ids."""
    return tiny.llama(seed=seed, **{"vocab_size": VOCAB, **changed}).requires_grad_(False)


def fresh(target: Any, num_heads: int = 3, noise: float = 0.1, **changed: Any) -> MedusaHeads:
    """Heads that no longer hand on what they get."""
    heads = MedusaHeads.fresh(target, num_heads=num_heads, **changed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return heads


K = 6


def stored_of(target: Any, batch: dict[str, Tensor], k: int = K) -> dict[str, Tensor]:
    """What a data folder would hold of a batch: states behind those of another layer, and the best ids."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        output = target(**inputs, output_hidden_states=True)
    best = output.logits.log_softmax(-1).topk(k)
    states = torch.cat([output.hidden_states[1], output.hidden_states[-1]], dim=-1)
    return {"hidden_states": states, "top_ids": best.indices, "top_logprobs": best.values}


def slow_loss(
    target: Any, heads: MedusaHeads, batch: dict[str, Tensor], recipe: Recipe, k: int = VOCAB, known: Any = range(VOCAB)
) -> float:
    """The loss place by place: row by row without padding, label by label, head by head.

    The KL is that of the `k` likeliest ids as far as they are `known`, and of all others together.
    """
    total, labels = 0.0, 0
    columns = (batch[name].tolist() for name in ("input_ids", "attention_mask", "labels"))
    for ids, mask, said in zip(*columns, strict=True):
        with torch.no_grad():
            output = target(torch.tensor([ids[: sum(mask)]]), output_hidden_states=True)
            guesses = heads(output.hidden_states[-1][0], target.lm_head if heads.borrows else None).softmax(-1)
            truth = output.logits[0].softmax(-1)
        for place, head in itertools.product(range(len(said)), range(heads.config.num_heads)):
            state = place - (head + 2)
            labels += said[place] != IGNORED and head == 0
            if said[place] == IGNORED or state < 0:
                continue
            guess, wanted = guesses[state, head].tolist(), truth[place - 1].tolist()
            best = sorted(range(VOCAB), key=lambda token: -wanted[token])[:k]
            classes = [[token] for token in best if token in known]
            classes.append([token for token in range(VOCAB) if [token] not in classes])
            kl = 0.0
            for same in filter(None, classes):
                p, q = (sum(distribution[token] for token in same) for distribution in (wanted, guess))
                kl += p * math.log(p / q)
            share = recipe.distillation
            total += recipe.decay**head * (share * kl - (1 - share) * math.log(guess[said[place]]))
    return total / labels


# ------------------------------------------------------------------------------------------------------------ the loss


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("source", ["run", "stored"])
@pytest.mark.parametrize("lm_heads", ["target", "shared", "own"])
def test_each_head_is_scored_on_its_own_offset(lm_heads, source, share):
    """Report 119; also that stored states and distributions count as the target's own."""
    target, recipe, batch = small(), Recipe(distillation=share, decay=0.7), batch_of(*BATCH)
    heads = fresh(target, lm_heads=lm_heads)
    stored = stored_of(target, batch) if source == "stored" else {}
    report = MedusaTraining(target, heads, recipe, stored_from=target.config.hidden_size)(**batch, **stored)
    wanted = slow_loss(target, heads, batch, recipe, k=K if stored else VOCAB)
    assert report["loss"].item() == pytest.approx(wanted, rel=1e-5)
    report["loss"].backward()
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in heads.parameters())


def test_accuracy_is_the_share_of_labels_that_a_head_says():
    target, batch = small(), batch_of(*BATCH)
    heads = fresh(target)
    report = MedusaTraining(target, heads)(**batch)
    states = stored_of(target, batch)["hidden_states"][..., target.config.hidden_size :]
    for head in range(3):
        guesses = torch.stack([heads(row, target.lm_head)[:, head].argmax(-1) for row in states])
        labels = batch["labels"][:, head + 2 :]
        kept = labels != IGNORED
        wanted = float((guesses[:, : -(head + 2)] == labels)[kept].float().mean())
        assert report[f"accuracy_{head}"].item() == pytest.approx(wanted)


def test_stored_states_spare_the_target_s_passes(monkeypatch):
    target, batch = small(), batch_of(*BATCH)
    training, stored = MedusaTraining(target, fresh(target), Recipe(distillation=0.5)), stored_of(target, batch)
    monkeypatch.setattr(type(target), "forward", None)
    training(**batch, **stored)


def test_a_frozen_target_gets_no_gradient_and_stays_in_eval_mode():
    target = small()
    training = MedusaTraining(target, fresh(target)).train()
    training(**batch_of(*BATCH))["loss"].backward()
    assert not target.training
    assert training.heads.training
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_rows_without_labels_add_nothing(lora, dtype, caplog):
    """Report 118, five steps of each kind."""
    target = small().to(dtype)
    if lora:
        target = adapted(target)
    training = MedusaTraining(target, fresh(tiny_of(target)).float(), Recipe(distillation=0.5))
    optimizer = torch.optim.SGD([p for p in training.parameters() if p.requires_grad], lr=0.01)
    some, none = batch_of((12, 4, 10), (12, 0, 0)), batch_of((12, 0, 0))
    alone = {name: value[:1] for name, value in some.items()}
    for _ in range(5):
        losses = [training(**batch)["loss"] for batch in (some, alone, none)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=2e-2 if dtype == torch.bfloat16 else 1e-5)
        assert losses[2].item() == 0
        (losses[0] + losses[2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert caplog.text.count("no labels") == 5
    assert all(bool(parameter.isfinite().all()) for parameter in training.parameters())


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("lora", [False, True])
def test_accumulated_batches_count_as_one(lora, share):
    """Report 131: rows of 11 and 101 tokens."""
    both = batch_of((101, 6, 101), (11, 2, 9))
    gradients = []
    for parts in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        target = adapted(small()) if lora else small()
        training = MedusaTraining(target, fresh(tiny_of(target)), Recipe(distillation=share))
        count = (both["labels"] != IGNORED).sum()
        for part in parts:
            training(**{name: value[part] for name, value in both.items()}, num_items_in_batch=count)["loss"].backward()
        gradients.append([p.grad for p in training.parameters() if p.requires_grad])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def test_parts_of_many_logits_add_up_to_the_whole(monkeypatch):
    results = []
    for held in (2**26, 3 * VOCAB):
        monkeypatch.setattr("learning.chunks.HELD", held)
        target = small()
        training = MedusaTraining(target, fresh(target), Recipe(distillation=0.3))
        report = training(**batch_of(*BATCH))
        report["loss"].backward()
        results.append([*report.values(), *(p.grad for p in training.heads.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_sizes_come_from_the_config():
    """Report 121: the target's tensors may hold nothing yet."""
    with torch.device("meta"):
        target = LlamaForCausalLM(small().config)
    heads = MedusaHeads.fresh(target, num_heads=3)
    MedusaTraining(target.requires_grad_(False), heads)
    assert [tuple(p.shape) for p in heads.parameters()] == [
        tuple(p.shape) for p in fresh(small(), lm_heads="own").parameters()
    ]


# --------------------------------------------------------------------------------------------- some of the vocabulary


@pytest.mark.parametrize("stored", [False, True])
def test_where_all_other_ids_are_drawn_the_loss_is_exact(stored, monkeypatch):
    """But for the KL, to which they are one."""
    target, batch = small(), batch_of(*BATCH)
    ids = batch["labels"][batch["labels"] >= 0].unique()[:9]
    batch["labels"] = batch["labels"].where(torch.isin(batch["labels"], ids), IGNORED)
    kwargs = stored_of(target, batch) if stored else {}
    heads, recipe = fresh(target), Recipe(others=VOCAB - len(ids), distillation=0.4)
    monkeypatch.setattr(torch, "randint", lambda high, size, device: torch.arange(high))
    report = MedusaTraining(target, heads, recipe, ids, stored_from=32)(**batch, **kwargs)
    wanted = slow_loss(target, heads, batch, recipe, K if stored else VOCAB, ids.tolist())
    assert report["loss"].item() == pytest.approx(wanted, rel=1e-5)


def test_ids_that_are_drawn_stand_for_all_others():
    target, batch = small(), batch_of(*BATCH)
    ids = batch["labels"][batch["labels"] >= 0].unique()[:9]
    batch["labels"] = batch["labels"].where(torch.isin(batch["labels"], ids), IGNORED)
    heads = fresh(target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        some = MedusaTraining(target, heads, Recipe(others=1000), ids)(**batch)["loss"].item()
    assert some == pytest.approx(MedusaTraining(target, heads)(**batch)["loss"].item(), rel=0.02)
    assert some > 1.02 * MedusaTraining(target, heads, Recipe(others=0), ids)(**batch)["loss"].item()


def test_labels_that_are_not_there_are_left_out():
    target, batch = small(), batch_of(*BATCH)
    ids = torch.arange(0, VOCAB, 2)
    known = {**batch, "labels": batch["labels"].where(torch.isin(batch["labels"], ids), IGNORED)}
    training = MedusaTraining(target, fresh(target), Recipe(others=0), ids)
    count = (batch["labels"] != IGNORED).sum()
    torch.testing.assert_close(training(**batch)["loss"], training(**known, num_items_in_batch=count)["loss"])


# -------------------------------------------------------------------------------------------- a target that learns too


def adapted(target: Any, **changed: Any) -> Any:
    """A target with an adapter, which already changes what it says."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, **changed)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return peft.get_peft_model(target, config)


def tiny_of(target: Any) -> Any:
    return target.get_base_model() if isinstance(target, peft.PeftModel) else target


def test_the_target_s_own_loss_is_added():
    target, batch = adapted(small()), batch_of(*BATCH)
    heads = fresh(tiny_of(target))
    training = MedusaTraining(target, heads, Recipe(heads_weight=0.3)).eval()
    report = training(**batch)
    wanted = target(**batch).loss
    assert report["language_loss"].item() == pytest.approx(wanted.item(), rel=1e-5)
    both = wanted.item() + 0.3 * slow_loss(tiny_of(target), heads, batch, training.recipe)
    assert report["loss"].item() == pytest.approx(both, rel=1e-5)


def test_a_target_that_learns_is_held_to_what_it_said_before():
    target, batch = adapted(small()), batch_of(*BATCH)
    training = MedusaTraining(target, fresh(tiny_of(target)), Recipe(distillation=1.0)).train()
    report = training(**batch)
    assert target.training
    stored = training(**batch, **stored_of(small(), batch, k=VOCAB - 1))["language_loss"].item()
    assert report["language_loss"].item() == pytest.approx(stored, rel=1e-4)
    with target.disable_adapter():
        assert training(**batch)["language_loss"].item() == pytest.approx(0, abs=1e-6)


CHECKPOINTING = {"off": None, "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}


@pytest.mark.parametrize("lora", [False, True])
def test_activation_checkpointing_changes_no_gradient(lora):
    found = []
    for kwargs in CHECKPOINTING.values():
        target = adapted(small()) if lora else small()
        training = MedusaTraining(target, fresh(tiny_of(target))).train()
        if kwargs is not None:
            training.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        training(**batch_of(*BATCH))["loss"].backward()
        found.append({name: p.grad for name, p in training.named_parameters() if p.requires_grad})
        assert all(bool(grad.abs().sum() > 0) for grad in found[-1].values())
        assert any("lora" in name for name in found[-1]) == lora
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


# ---------------------------------------------------------------------------------------------------- what is learned


def fit(training: MedusaTraining, batches: Any, rate: float = 0.01) -> list[dict[str, float]]:
    """Trains on batches with Adam."""
    optimizer = torch.optim.Adam([p for p in training.parameters() if p.requires_grad], lr=rate)
    reports = []
    for batch in batches:
        report = training(**batch)
        optimizer.zero_grad()
        report["loss"].backward()
        optimizer.step()
        reports.append({name: value.item() for name, value in report.items()})
    return reports


def counting(rows: int = 8, length: int = 12) -> dict[str, Tensor]:
    ids = (torch.arange(rows).unsqueeze(1) * 3 + torch.arange(length)) % VOCAB
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("lm_heads", ["target", *(pytest.param(k, marks=pytest.mark.slow) for k in ("shared", "own"))])
def test_all_heads_learn_to_count(lm_heads):
    target = small().float()
    training = MedusaTraining(target, MedusaHeads.fresh(target, 4, lm_heads=lm_heads))
    last = fit(training, itertools.repeat(counting(), 80), rate=0.02)[-1]
    assert [last[f"accuracy_{head}"] for head in range(4)] == [1.0] * 4


def test_one_batch_is_overfitted():
    target = small().float()
    training = MedusaTraining(target, MedusaHeads.fresh(target, 3))
    reports = fit(training, itertools.repeat(batch_of(*BATCH), 80), rate=0.03)
    assert reports[-1]["loss"] < 0.1 * reports[0]["loss"]
    assert reports[-1]["accuracy_0"] == 1.0


def talk(steps: int) -> Any:
    for step in range(steps):
        ids = babble(8, 24, 1000 + step)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def drafted(target: Any, heads: MedusaHeads) -> tuple[list[int], float]:
    """A text, and the mean accepted tokens by which it was made."""
    stats = sg.Stats()
    text = target.generate(
        babble(1, 6, 5),
        assistant=sg.Medusa(heads),
        stats=stats,
        max_new_tokens=48,
        do_sample=False,
        num_assistant_tokens=3,
    )
    return text[0].tolist(), stats.mean_accepted_tokens


def test_training_raises_what_is_accepted(tmp_path):
    target = copy.deepcopy(speaker()).requires_grad_(False)
    heads = MedusaHeads.fresh(target, 3, lm_heads="target")
    before = drafted(target, heads)
    fit(MedusaTraining(target, heads), talk(40), rate=0.01)
    after = drafted(target, heads)
    assert after[0] == before[0]
    assert after[1] > before[1] + 0.5
    heads.save_pretrained(tmp_path)
    assert drafted(target, MedusaHeads.from_pretrained(tmp_path)) == after


# ----------------------------------------------------------------------------------------------------------- the script


def numbers() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the ids."""
    words = tokenizers.models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a data folder with its states, one side of it held out."""
    path, target, texts = tmp_path_factory.mktemp("medusa"), speaker(), babble(12, 16, 1)
    target.save_pretrained(path / "target")
    numbers().save_pretrained(path / "target")
    with torch.no_grad():
        hidden = target(texts, output_hidden_states=True).hidden_states
    states = torch.cat([hidden[0], hidden[-1]], dim=-1).half().numpy()
    rows = [
        {
            "input_ids": ids,
            "labels": [IGNORED] * 3 + ids[3:],
            "held_out": place > 8,
            "prompt": "",
            "hidden_states": kept,
        }
        for place, (ids, kept) in enumerate(zip(texts.tolist(), states, strict=True))
    ]
    (path / "data").mkdir()
    data.write_info(path / "data", {"hidden_layers": [0, -1]})
    data.write_part(path / "data", 0, rows)
    return path


def train(folder: Path, out: Path, more: str) -> None:
    """Runs the script."""
    line = f"--target {folder}/target --data {folder}/data --output_dir {out} --report False --report_to none --use_cpu"
    line += (
        f" --per_device_train_batch_size 3 --logging_steps 1 --save_steps 2 --disable_tqdm True --num_heads 3 {more}"
    )
    train_medusa.main(*runs.parse(train_medusa.Arguments, line.split(), learning_rate=1e-2))


def losses_of(out: Path) -> list[float]:
    """By step, from the last checkpoint."""
    last = runs.last_complete(out)
    assert last is not None
    state = json.loads((last / "trainer_state.json").read_text())
    return [log["loss"] for log in state["log_history"] if "loss" in log]


@pytest.mark.parametrize("lora", [pytest.param("", marks=pytest.mark.slow), "--lora_rank 2"])
def test_a_resumed_training_is_an_unbroken_one(folder, tmp_path, monkeypatch, lora):
    """Report 134: the same tensors learn, the same loss is logged, and the target is bit-equal."""
    modules, before = [], []

    class Watched(train_medusa.MedusaTrainer):
        def __init__(self, module: MedusaTraining, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, *args, **kwargs)
            modules.append(module)
            before.append({name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad})
            if len(modules) == 2:
                self.add_callback(StopAt())

    monkeypatch.setattr(train_medusa, "MedusaTrainer", Watched)
    more = f"--vocabulary 12 --others 4 {lora} --max_steps 8"
    for out, resume in (("whole", ""), ("parts", ""), ("parts", "--resume")):
        train(folder, tmp_path / out, f"{more} {resume}")
        assert runs.last_complete(tmp_path / out).name == f"checkpoint-{4 if len(modules) == 2 else 8}"
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    whole, _, parts = (runs.trained(module) for module in modules)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    for module, frozen in zip(modules, before, strict=True):
        now = dict(module.named_parameters())
        assert now.keys() == frozen.keys() | whole.keys()
        assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())


class StopAt(TrainerCallback):
    """Saves and stops after the fourth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == 4:
            control.should_save = control.should_training_stop = True
        return control


def test_script_makes_heads_that_choose_their_trees(folder, tmp_path, caplog):
    train(folder, tmp_path, "--max_steps 30 --vocabulary 12")
    heads = MedusaHeads.from_pretrained(tmp_path)
    assert "logits of 12 of 20 ids" in caplog.text
    assert heads.config.lm_heads == "target"
    assert [len(ranks) for ranks in heads.config.accuracies] == [10] * 3
    assert heads.config.accuracies[0][0] > 0.5
    assert (tmp_path / "provenance.json").is_file()
    target = sg.enable(LlamaForCausalLM.from_pretrained(folder / "target"))
    stats = sg.Stats()
    target.generate(babble(1, 6, 5), assistant=str(tmp_path), stats=stats, max_new_tokens=24, num_assistant_tokens=3)
    assert stats.mean_accepted_tokens > 1.5


@pytest.mark.parametrize(
    "quantize", ["", "--quantize 4bit --distillation 0.5", pytest.param("--quantize 8bit", marks=pytest.mark.slow)]
)
def test_medusa_2_saves_adapter_and_merged_model(folder, tmp_path, quantize):
    """Report 133: of a target with tied embeddings too, the merged model says what the adapter makes of it."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    model = small(tie_word_embeddings=True, hidden_size=64, intermediate_size=128).float()
    model.save_pretrained(tmp_path / "target")
    numbers().save_pretrained(tmp_path / "target")
    (tmp_path / "data").symlink_to(folder / "data")
    out = tmp_path / "out"
    train(tmp_path, out, f"--lora_rank 4 --max_steps 3 --heads_warmup 2 {quantize}")
    heads = MedusaHeads.from_pretrained(out)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    adapter = peft.PeftModel.from_pretrained(copy.deepcopy(base), out / "adapter").eval()
    merged = LlamaForCausalLM.from_pretrained(out / "merged")
    ids = babble(2, 8, 3)
    torch.testing.assert_close(merged(ids).logits, adapter(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged(ids).logits, base(ids).logits, atol=1e-4)
    assert torch.equal(merged.lm_head.weight, base.lm_head.weight)
    assert heads.config.target["fingerprint"] == fingerprint(merged)


def test_quantized_targets_stay_frozen(folder, tmp_path):
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    small(hidden_size=64, intermediate_size=128).float().save_pretrained(tmp_path / "target")
    (tmp_path / "data").symlink_to(folder / "data")
    line = f"--target {tmp_path}/target --data {folder}/data --output_dir {tmp_path} --quantize 4bit --use_cpu"
    arguments, _ = runs.parse(train_medusa.Arguments, line.split())
    target = train_medusa.load_target(arguments)
    assert type(target.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    training = MedusaTraining(target, train_medusa.load_heads(arguments, target), Recipe(distillation=0.5))
    training(**batch_of(*BATCH))["loss"].backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in training.heads.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_the_adapter_learns_slower_and_the_heads_come_in_slowly(folder, tmp_path):
    line = f"--target {folder}/target --data {folder}/data --output_dir {tmp_path} --use_cpu --lora_rank 2"
    arguments, training_arguments = runs.parse(train_medusa.Arguments, line.split(), learning_rate=0.01)
    target = train_medusa.load_target(arguments)
    module = MedusaTraining(train_medusa.with_adapter(arguments, target), fresh(target), Recipe(heads_weight=0.2))
    trainer = train_medusa.MedusaTrainer(module, arguments, training_arguments)
    optimizer = trainer.create_optimizer()
    assert trainer.create_optimizer() is optimizer
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in runs.trained(module).items():
        assert rates[id(parameter)] == (0.0025 if "lora" in name else 0.01)
    assert len(rates) == len(runs.trained(module))
    warmup = train_medusa.HeadsWarmup(module, 4)
    weights = []
    for step in range(6):
        warmup.on_step_begin(training_arguments, SimpleNamespace(global_step=step), None)
        weights.append(module.heads_weight)
    assert weights == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])


def test_heads_begin_as_copies_of_a_tied_lm_head():
    """Report 133."""
    target = small(tie_word_embeddings=True)
    before = target.lm_head.weight.clone()
    training = MedusaTraining(target, MedusaHeads.fresh(target, 2, lm_heads="own"))
    assert torch.equal(training.heads.lm_heads[0].weight, before)
    fit(training, itertools.repeat(batch_of(*BATCH), 3))
    assert torch.equal(target.lm_head.weight, before)
    assert torch.equal(target.get_input_embeddings().weight, before)
    assert not torch.equal(training.heads.lm_heads[0].weight, before)
    assert not torch.equal(training.heads.lm_heads[0].weight, training.heads.lm_heads[1].weight)


def test_data_without_labels_are_refused(folder, tmp_path):
    """Report 125."""
    (tmp_path / "data").mkdir()
    data.write_info(tmp_path / "data", {"hidden_layers": []})
    data.write_part(
        tmp_path / "data", 0, [{"input_ids": [1, 2], "labels": [IGNORED] * 2, "held_out": False, "prompt": ""}]
    )
    (tmp_path / "target").symlink_to(folder / "target")
    with pytest.raises(SystemExit, match="no label"):
        train(tmp_path, tmp_path / "out", "--max_steps 1")
