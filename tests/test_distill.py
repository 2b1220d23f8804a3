"""Distillation of a sibling: made of the target's layers, taught by it on its own texts or on those of the sibling."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import distill_drafter
import families
import generating
import heads
import pytest
import tiny
import torch
from learning import losses
from learning.distill import DistillTraining, Recipe, refuse_unknown_head
from learning.on_policy import DistillTrainer, OnPolicy, answered
from learning.siblings import keep_layers, spread
from running.runs import DrafterTrainingArguments
from texts import data
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import hf_specgen as sg
from hf_specgen.prompt import generative

IGNORED = losses.IGNORED
KINDS = tuple(losses.DIVERGENCES)


def tied(layers: int = 4, **changed: Any) -> LlamaForCausalLM:
    """A tiny Llama in float32, with one table for both ends where nothing else is said."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": layers, "tie_word_embeddings": True, "initializer_range": 0.2, **changed}
        return LlamaForCausalLM(LlamaConfig(**tiny._sizes(**sizes))).eval()


def rows(count: int = 4, length: int = 12, prompt: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Random texts of which all but the first tokens are labelled; the last one is shorter by three."""
    ids = torch.randint(3, tiny.VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :prompt] = IGNORED
    return {"input_ids": ids.where(mask != 0, 0), "attention_mask": mask, "labels": labels}


def trained(module: DistillTraining, batch: dict[str, Tensor], steps: int, lr: float = 1e-2) -> list[float]:
    """The losses of some steps on one batch."""
    optimizer = torch.optim.Adam([weight for weight in module.parameters() if weight.requires_grad], lr=lr)
    module.train()
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(**batch)["loss"]
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def bits(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def gradients(module: DistillTraining, *batches: dict[str, Tensor], count: int | None = None) -> dict[str, Tensor]:
    module.zero_grad()
    for batch in batches:
        module(**batch, num_items_in_batch=count)["loss"].backward()
    return {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}


# ------------------------------------------------------------------------------------------------------ making siblings


def test_layers_are_spread_over_the_ends_and_evenly_between() -> None:
    assert spread(30, 6) == [0, 1, 10, 19, 28, 29]
    assert spread(30, 10) == [0, 1, 2, 7, 12, 17, 22, 27, 28, 29]
    for layers in range(1, 40):
        for count in range(1, layers + 1):
            kept = spread(layers, count)
            assert len(set(kept)) == count
            assert kept == sorted(kept)
            assert kept[-1] == layers - 1
            assert kept[0] == 0 or count == 1
    for count in (0, 31):
        with pytest.raises(ValueError, match=f"{count} of 30 layers cannot be kept"):
            spread(30, count)


def test_kept_layers_and_all_around_them_are_the_targets() -> None:
    target = tied()
    before = bits(target)
    sibling = keep_layers(target, [0, 3])
    assert sibling.config.num_hidden_layers == 2
    for place, old in enumerate([0, 3]):
        for name, weight in sibling.model.layers[place].state_dict().items():
            assert torch.equal(weight, before[f"model.layers.{old}.{name}"])
    assert torch.equal(sibling.model.norm.weight, before["model.norm.weight"])
    assert torch.equal(sibling.model.embed_tokens.weight, before["model.embed_tokens.weight"])
    assert sibling.lm_head.weight is sibling.model.embed_tokens.weight
    # A copy: what it learns leaves the target alone.
    assert target.config.num_hidden_layers == 4
    with torch.no_grad():
        for weight in sibling.parameters():
            weight.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_a_sibling_of_all_layers_says_what_the_target_says() -> None:
    for target in (tied(), mixed()):
        ids = rows()["input_ids"]
        sibling = keep_layers(target, range(target.config.num_hidden_layers))
        torch.testing.assert_close(sibling(ids).logits, target(ids).logits, rtol=0, atol=0)


def mixed() -> Gemma3ForCausalLM:
    """Five layers that see a window and one that sees all."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Gemma3ForCausalLM(
            Gemma3TextConfig(**tiny._sizes(num_hidden_layers=6, sliding_window=8, head_dim=8))
        ).eval()


def test_what_a_config_lists_by_layer_is_cut_along() -> None:
    sibling = keep_layers(mixed(), [0, 5])
    assert sibling.config.layer_types == ["sliding_attention", "full_attention"]
    assert [layer.self_attn.is_sliding for layer in sibling.model.layers] == [True, False]
    # Two end tokens are no list of two layers.
    target = tied(layers=2, eos_token_id=[1, 2])
    assert keep_layers(target, [1]).config.eos_token_id == [1, 2]


def test_layers_that_cannot_be_kept_are_refused() -> None:
    for kept in ([], [0, 0], [2, 1], [0, 4], [-1]):
        with pytest.raises(ValueError, match="layers to keep must ascend from 0 to 3"):
            keep_layers(tied(), kept)


def test_layers_that_keep_no_keys_are_no_sibling_by_themselves() -> None:
    target = families.build("lfm2")
    assert target.config.layer_types == ["conv", "full_attention", "conv"]
    with pytest.raises(ValueError, match=r"none of layers \[0, 2\] attends.*keep some of \[1\]"):
        keep_layers(target, [0, 2])
    sibling = keep_layers(target, [0, 1])
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = target.generate(ids, max_new_tokens=4, do_sample=False)
    said = sg.enable(target).generate(ids, max_new_tokens=4, do_sample=False, assistant=sg.DraftModel(sibling))
    assert said.tolist() == wanted.tolist()


# ---------------------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_labelled_places_logits(kind: str) -> None:
    target, batch = tied(), rows()
    sibling = keep_layers(target, [0, 3])
    module = DistillTraining(target, sibling, Recipe(kind, temperature=1.5))
    report = module(**batch)
    kept = batch["labels"][:, 1:] != IGNORED
    shown = {name: batch[name] for name in ("input_ids", "attention_mask")}
    ours, theirs = (model(**shown).logits[:, :-1][kept].detach() for model in (sibling, target))
    each = [losses.divergence(kind, *both, temperature=1.5) for both in zip(ours, theirs, strict=True)]
    total = sum(map(float, each))
    assert float(report["loss"].detach()) == pytest.approx(total / len(ours), rel=1e-4)
    assert float(report["agreement"]) == pytest.approx(float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()))
    # Before the first labelled token and behind the last one nothing is learned.
    assert int(kept.sum()) == 3 * 8 + 5


def test_tables_may_be_padded_to_other_sizes() -> None:
    target, batch = tied(), rows()
    sibling = keep_layers(target, [0, 3])
    exact = float(DistillTraining(target, sibling)(**batch)["loss"].detach())
    padded = copy.deepcopy(sibling)
    padded.resize_token_embeddings(tiny.VOCAB + 8, mean_resizing=False)
    assert padded.lm_head.weight.shape[0] == tiny.VOCAB + 8
    assert float(DistillTraining(target, padded)(**batch)["loss"].detach()) == pytest.approx(exact, rel=1e-5)
    assert torch.isfinite(DistillTraining(target, padded, Recipe(), torch.arange(40))(**batch)["loss"])
    target.resize_token_embeddings(tiny.VOCAB + 16, mean_resizing=False)
    assert float(DistillTraining(target, sibling)(**batch)["loss"].detach()) == pytest.approx(exact, rel=1e-5)


def test_stored_states_are_as_good_as_running_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch = tied(), rows()
    module = DistillTraining(target, keep_layers(target, [0, 3]), Recipe(hidden_loss=0.5), stored_from=64)
    run = module(**batch)
    states = target(batch["input_ids"], output_hidden_states=True).hidden_states
    stored = torch.cat([states[1], states[2], states[-1]], dim=-1)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the teacher was run")

    monkeypatch.setattr(target.model, "forward", never)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-2)):
        found = module(**batch, hidden_states=stored.detach().to(dtype))
        assert float(found["loss"].detach()) == pytest.approx(float(run["loss"].detach()), rel=tolerance)


def test_stored_top_tokens_are_used_without_the_teacher() -> None:
    target, batch = tied(), rows()
    module = DistillTraining(target, keep_layers(target, [0, 3]))
    whole = module(**batch)
    log_probs = target(batch["input_ids"]).logits.log_softmax(-1)
    for k, tolerance in ((tiny.VOCAB - 1, 1e-4), (24, 1.0)):
        top = log_probs.topk(k)
        target.model.forward = None
        found = module(**batch, top_ids=top.indices.int(), top_logprobs=top.values.detach())
        del target.model.forward
        assert float(found["loss"].detach()) == pytest.approx(float(whole["loss"].detach()), rel=tolerance)
        assert float(found["loss"].detach()) <= float(whole["loss"].detach()) + 1e-5
        assert float(found["agreement"]) == float(whole["agreement"])


def test_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch = tied(), rows()
    top = target(batch["input_ids"]).logits.log_softmax(-1).topk(9)
    stored = {"top_ids": top.indices, "top_logprobs": top.values.detach()}
    module = DistillTraining(target, keep_layers(target, [0, 3]), Recipe(hidden_loss=0.1))
    for more in ({}, stored):
        whole = gradients(module, {**batch, **more})
        with monkeypatch.context() as patch:
            patch.setattr("learning.chunks.HELD", 5 * tiny.VOCAB)
            parts = gradients(module, {**batch, **more})
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_others_stand_for_all_ids_outside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each of them is drawn equally often, the loss is exact; without them it is another."""
    target, batch = tied(tie_word_embeddings=False), rows()
    sibling = keep_layers(target, [0, 3])
    with torch.no_grad():
        sibling.lm_head.weight[1::2] *= 3  # likes the ids outside more than the target does
    ids, outside = (torch.arange(first, tiny.VOCAB, 2) for first in (0, 1))
    exact = float(DistillTraining(target, sibling, Recipe(kind))(**batch)["loss"].detach())
    for often in (1, 2, 3):
        some = DistillTraining(target, sibling, Recipe(kind, others=often * len(outside)), ids)
        monkeypatch.setattr(some.some, "draw", lambda often=often: torch.cat([ids, outside.repeat(often)]))
        assert float(some(**batch)["loss"].detach()) == pytest.approx(exact, rel=1e-4)
    none = DistillTraining(target, sibling, Recipe(kind, others=0), ids)
    assert float(none(**batch)["loss"].detach()) != pytest.approx(exact, rel=0.1)
    # Drawn anew each time; and nothing is drawn where all ids are always there.
    few = DistillTraining(target, sibling, Recipe(kind, others=8), ids)
    assert float(few(**batch)["loss"].detach()) != float(few(**batch)["loss"].detach())
    everything = DistillTraining(target, sibling, Recipe(kind), torch.arange(tiny.VOCAB))
    assert float(everything(**batch)["loss"].detach()) == pytest.approx(exact, rel=1e-5)


def test_the_hidden_loss_is_the_variance_of_the_logits_difference() -> None:
    target, batch = tied(), rows()
    sibling = keep_layers(target, [0, 3])
    with_it, without = (DistillTraining(target, sibling, Recipe(hidden_loss=weight)) for weight in (0.5, 0.0))
    found = float(with_it(**batch)["loss"].detach()) - float(without(**batch)["loss"].detach())
    kept = batch["labels"][:, 1:] != IGNORED
    ours, theirs = (model(batch["input_ids"]).logits[:, :-1][kept].detach() for model in (sibling, target))
    assert found == pytest.approx(0.5 * float((ours - theirs).var(-1, correction=0).mean()), rel=1e-4)


def test_rows_of_any_length_weigh_the_same_however_they_are_batched() -> None:
    """Report 131: rows of 11 and 101 tokens."""
    target = tied(max_position_embeddings=128)
    module = DistillTraining(target, keep_layers(target, [0, 3]), Recipe(hidden_loss=0.1))
    generator = torch.Generator().manual_seed(0)
    short, long = (torch.randint(3, tiny.VOCAB, (1, length), generator=generator) for length in (11, 101))
    padded = torch.nn.functional.pad(short, (0, 90))
    both = torch.cat([padded, long])
    labels = torch.cat([torch.nn.functional.pad(short, (0, 90), value=IGNORED), long])
    whole = gradients(module, {"input_ids": both, "labels": labels})
    parts = gradients(
        module, {"input_ids": short, "labels": short}, {"input_ids": long, "labels": long}, count=10 + 100
    )
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-5, atol=1e-5)


def test_a_batch_without_labels_adds_nothing() -> None:
    target, batch = tied(), rows()
    module = DistillTraining(target, keep_layers(target, [0, 3]), Recipe(hidden_loss=0.1))
    empty = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
    report = module(**empty, num_items_in_batch=torch.tensor(0))
    assert float(report["loss"].detach()) == 0
    assert report["agreement"].isnan()
    assert all(bool((gradient == 0).all()) for gradient in gradients(module, empty).values())
    one = {name: torch.cat([batch[name], empty[name]]) for name in batch}
    for name, gradient in gradients(module, batch).items():
        torch.testing.assert_close(gradients(module, one)[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_checkpointed_activations_change_no_gradient(lora_rank: int, reentrant: bool) -> None:
    target, batch = tied(), rows()
    wanted = distill_drafter.Arguments(target="t", data="d", lora_rank=lora_rank)
    module = DistillTraining(target, distill_drafter.learning(wanted, keep_layers(target, [0, 3]))).train()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1)
    plain = gradients(module, batch)
    passes: list[int] = []
    layer = generative(module.drafter).model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *args: passes.append(1))
    module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    again = gradients(module, batch)
    assert len(passes) == 2  # once for the loss and once for the gradient
    assert plain.keys() == again.keys()
    assert any(bool(gradient.any()) for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no divergence 'kl'"):
        Recipe("kl")
    with pytest.raises(ValueError, match="beta must be between 0 and 1"):
        Recipe(beta=1.0)
    left = {**rows(), "attention_mask": torch.ones(4, 12).tril()}
    with pytest.raises(ValueError, match="padded on the left"):
        DistillTraining(tied(), tied())(**{**left, "attention_mask": left["attention_mask"].flip(1)})
    with pytest.raises(ValueError, match="of size 16 in the drafter and 32 in the target"):
        DistillTraining(tied(), tied(hidden_size=16), Recipe(hidden_loss=1.0))
    odd = tied()
    refuse_unknown_head(odd)
    _scaled(odd)
    with pytest.raises(ValueError, match="in a way that is not known here"):
        refuse_unknown_head(odd)


def _scaled(model: Any) -> None:
    """A model that does something to its logits which no config field tells."""
    forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled


# --------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("kind", KINDS)
def test_one_batch_is_learned_and_the_teacher_stays_as_it_is(kind: str) -> None:
    target, batch = tied(), rows()
    before = bits(target)
    sibling = keep_layers(target, [0, 3])
    module = DistillTraining(target, sibling, Recipe(kind))
    first = module(**batch)
    assert float(first["agreement"]) < 0.5
    found = trained(module, batch, 30, lr=2e-2)
    assert found[-1] < 0.2 * found[0]
    assert float(module(**batch)["agreement"]) > 0.8
    assert not any(part.training for part in target.modules())
    assert any(part.training for part in sibling.modules())
    assert all(weight.grad is None and not weight.requires_grad for weight in target.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_the_teacher_has_no_dropout_while_the_sibling_learns() -> None:
    target, batch = tied(attention_dropout=0.5), rows()
    module = DistillTraining(target, keep_layers(target, [0, 1, 2, 3]))
    module.eval()
    assert float(module(**batch)["loss"].detach()) == pytest.approx(0, abs=1e-6)
    module.train()
    once, again = (module._teacher_states(batch["input_ids"], {}) for _ in range(2))
    assert torch.equal(once, again)


def accepted(model: Any, drafter: Any, prompts: Tensor) -> sg.Stats:
    """What `generate` accepts of a drafter, four tokens at a time."""
    stats = sg.Stats()
    settings = {"assistant": drafter, "num_assistant_tokens": 4, "max_new_tokens": 24, "do_sample": False}
    model.generate(prompts, **settings, stats=stats)
    return stats


def test_training_raises_what_generate_accepts_and_saving_keeps_it(tmp_path: Path) -> None:
    """Report 139: before and after, on texts that training has not seen; from a sibling that knows nothing yet."""
    target = heads.speaker()
    plain = sg.disable(copy.deepcopy(target))
    sibling = keep_layers(plain, [1])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for weight in sibling.parameters():
            torch.nn.init.normal_(weight, std=0.2)
    prompts = heads.babble(12, 6, seed=1000)
    before = accepted(target, sibling, prompts)
    module = DistillTraining(plain, sibling)
    optimizer = torch.optim.Adam([weight for weight in sibling.parameters() if weight.requires_grad], lr=5e-3)
    for step in range(30):
        texts = heads.babble(16, 32, step)
        report = module(input_ids=texts, labels=texts)
        optimizer.zero_grad()
        report["loss"].backward()
        optimizer.step()
    after = accepted(target, sibling, prompts)
    assert after.acceptance_rate > before.acceptance_rate + 0.2
    assert after.mean_accepted_tokens > before.mean_accepted_tokens + 0.5
    assert float(report["agreement"]) > 0.6
    sibling.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(prompts).logits, sibling.eval()(prompts).logits)
    saved = accepted(target, str(tmp_path), prompts)
    assert saved.accepted == after.accepted


# -------------------------------------------------------------------------------------------------------- its own texts


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Notes every call of a model's `generate`."""
    calls: list[dict[str, Any]] = []
    generate = model.generate

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return generate(*args, **kwargs)

    monkeypatch.setattr(model, "generate", noted)
    return calls


def test_on_policy_texts_are_the_siblings_own() -> None:
    sibling, batch = keep_layers(tied(), [0, 3]), rows()
    sibling.generation_config.eos_token_id = [7, 8]
    sibling.train()
    made = answered(sibling, batch, OnPolicy(1.0, max_new_tokens=20), seed=3)
    assert sibling.training
    assert made["input_ids"].shape == made["labels"].shape == made["attention_mask"].shape
    ended = 0
    for row in range(4):
        ids, labels = (made[name][row].tolist() for name in ("input_ids", "labels"))
        length = int(made["attention_mask"][row].sum())
        assert ids[:4] == batch["input_ids"][row, :4].tolist()
        assert labels == [IGNORED] * 4 + ids[4:length] + [IGNORED] * (len(ids) - length)
        answer = ids[4:length]
        assert not {7, 8} & set(answer[:-1])
        assert len(answer) == 20 or answer[-1] in {7, 8}
        ended += len(answer) < 20
    assert ended > 0
    again = answered(sibling, batch, OnPolicy(1.0, max_new_tokens=20), seed=3)
    other = answered(sibling, batch, OnPolicy(1.0, max_new_tokens=20), seed=4)
    assert torch.equal(made["input_ids"], again["input_ids"])
    assert not torch.equal(made["input_ids"], other["input_ids"])
    # It is drawn from what the sibling would say: a cold draw is its likeliest text.
    cold = answered(sibling, batch, OnPolicy(1.0, max_new_tokens=6, temperature=1e-4), seed=3)
    greedy = sibling.eval().generate(batch["input_ids"][:1, :4], do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert cold["input_ids"][0, : greedy.shape[1]].tolist() == greedy[0].tolist()


def test_only_the_last_turn_is_answered_anew() -> None:
    ids = torch.arange(3, 15).unsqueeze(0).repeat(2, 1)
    labels = torch.full_like(ids, IGNORED)
    labels[0, 2:5] = ids[0, 2:5]
    labels[0, 8:10] = ids[0, 8:10]  # two more tokens of the user follow
    mask = torch.ones_like(ids)
    made = answered(tied(), {"input_ids": ids, "attention_mask": mask, "labels": labels}, OnPolicy(1.0, 3), 0)
    # The row without a label has no place to answer at.
    assert made["input_ids"].shape == (1, 11)
    assert made["input_ids"][0, :8].tolist() == ids[0, :8].tolist()
    assert (made["labels"] != IGNORED).sum() == 3
    nothing = {"input_ids": ids, "labels": torch.full_like(ids, IGNORED), "attention_mask": mask}
    assert answered(tied(), nothing, OnPolicy(1.0), 0) is nothing


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_so_many_batches_are_on_policy(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tied()
    module = DistillTraining(target, keep_layers(target, [0, 3]))
    counts = []
    forward = module.forward

    def noted(**batch: Any) -> Any:
        counts.append(((batch["labels"] != IGNORED).sum().item(), int(batch["num_items_in_batch"])))
        return forward(**batch)

    monkeypatch.setattr(module, "forward", noted)
    batch = rows(24)
    texts = [{name: values[row] for name, values in batch.items()} for row in range(24)]
    training = settings(tmp_path, max_steps=6, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    arguments = distill_drafter.Arguments(target="t", data="d")
    trainer = DistillTrainer(
        module,
        arguments,
        training,
        OnPolicy(share, max_new_tokens=5),
        train_dataset=texts,
        data_collator=data.Collator(),
    )
    own, others = counted(module.drafter, monkeypatch), counted(target, monkeypatch)
    trainer.train_or_resume()
    assert not others
    assert len(own) == {0.0: 0, 0.5: len(own), 1.0: 12}[share]
    assert share != 0.5 or 2 <= len(own) <= 10
    assert all(call["custom_generate"] is sg.speculate for call in own)
    windows = list(zip(counts[::2], counts[1::2], strict=True))
    # Answers were there before labels were counted.
    assert all(one + other == window == same for (one, window), (other, same) in windows)
    mine = [[labels == 2 * 5 for labels in (one, other)] for (one, _), (other, _) in windows]
    assert sum(map(sum, mine)) == len(own)
    assert share != 0.5 or [True, False] in mine or [False, True] in mine  # asked anew for each batch of a window


def settings(folder: Path, **changed: Any) -> DrafterTrainingArguments:
    """Of Trainer, for a moment on the CPU."""
    known = {"logging_steps": 2, "save_steps": 100, "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True}
    return DrafterTrainingArguments(
        output_dir=str(folder), **{**known, **changed}, dataloader_pin_memory=False, report_to="none"
    )


# ----------------------------------------------------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its tokenizer, and data it wrote with its last states, in a folder."""
    folder = tmp_path_factory.mktemp("world")
    # Wide enough for the blocks of 64 weights that are quantized together.
    target, tokenizer = tied(hidden_size=64, intermediate_size=128), generating.tokenizer()
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    batch = rows(16)
    written = []
    for row in range(16):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        states = target(ids.unsqueeze(0), output_hidden_states=True).hidden_states
        written.append(
            {
                "input_ids": ids.tolist(),
                "labels": batch["labels"][row, :length].tolist(),
                "held_out": row % 4 == 0,
                "prompt": str(row),
                "hidden_states": torch.cat([states[1], states[-1]], -1)[0].detach().half().numpy(),
            }
        )
    data.write_info(folder / "data", {"hidden_layers": [1, -1]})
    data.write_part(folder / "data", 0, written)
    return folder


def arguments(world: Path, **changed: Any) -> distill_drafter.Arguments:
    known = {"target": str(world / "target"), "data": str(world / "data"), "layers": 2, "report": False}
    return distill_drafter.Arguments(**{**known, **changed})


def test_the_script_makes_trains_and_saves_a_sibling(world: Path, tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(world / "target")
    distill_drafter.main(arguments(world), settings(tmp_path, max_steps=30))
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "before", tmp_path))
    assert after.config.num_hidden_layers == 2
    assert torch.equal(before.model.layers[1].mlp.up_proj.weight, target.model.layers[3].mlp.up_proj.weight)
    # The tables are tied and frozen.
    assert torch.equal(after.lm_head.weight, target.lm_head.weight)
    assert after.lm_head.weight is after.model.embed_tokens.weight
    batch = rows(16)
    first, last = (float(DistillTraining(target, model)(**batch)["agreement"]) for model in (before, after))
    assert last > first + 0.2
    assert (tmp_path / "provenance.json").is_file()
    assert (tmp_path / "README.md").is_file()
    assert (tmp_path / "tokenizer.json").is_file()


# peft asks a model's old name of a property.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_merged_and_kept(world: Path, tmp_path: Path) -> None:
    """Report 133: merged and loaded again it says what it said with the adapter; the base is untouched."""
    import peft

    distill_drafter.main(arguments(world, lora_rank=4), settings(tmp_path, max_steps=6))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    base = bits(before)
    ids = rows()["input_ids"]
    plain = before(ids).logits
    adapted = peft.PeftModel.from_pretrained(before, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    assert (merged(ids).logits - plain).abs().max() > 1e-2
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(ids).logits, plain)
    assert torch.equal(merged.lm_head.weight, base["lm_head.weight"])


def test_a_drafter_with_other_words_is_refused(world: Path, tmp_path: Path) -> None:
    """Report 130: vocabularies of one size, in another order."""
    keep_layers(tied(), [0]).save_pretrained(tmp_path / "other")
    tokenizer = generating.tokenizer()
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    words = raw["model"]["vocab"]
    one, other = (next(word for word, i in words.items() if i == wanted) for wanted in (10, 20))
    words[one], words[other] = 20, 10
    swapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(raw)), pad_token="<pad>")
    swapped.save_pretrained(tmp_path / "other")
    wanted = f"the two vocabularies differ: id 10 is {one!r} for the target and {other!r} for the drafter"
    with pytest.raises(SystemExit, match=wanted):
        distill_drafter.main(arguments(world, drafter=str(tmp_path / "other")), settings(tmp_path / "out", max_steps=1))
    # With the same words it is taught.
    tokenizer.save_pretrained(tmp_path / "other")
    distill_drafter.main(arguments(world, drafter=str(tmp_path / "other")), settings(tmp_path / "out", max_steps=1))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 1


def test_arguments_that_exclude_each_other_are_refused() -> None:
    for changed, told in (
        ({"drafter": "d", "keep_layers": [0]}, "pass one of them"),
        ({"lora_rank": 4, "train_embeddings": True}, "pass one"),
    ):
        with pytest.raises(ValueError, match=told):
            distill_drafter.Arguments(target="t", data="d", **changed)
    with pytest.raises(ValueError, match="on_policy is a share from 0 to 1"):
        OnPolicy(1.5)


def test_a_quantized_teacher_teaches_as_it_is(world: Path, tmp_path: Path) -> None:
    """The sibling is made of the unquantized checkpoint; the quantized one cannot lend its layers."""
    distill_drafter.main(arguments(world, quantize="4bit"), settings(tmp_path, max_steps=2))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    whole = AutoModelForCausalLM.from_pretrained(world / "target")
    assert torch.equal(before.model.layers[1].mlp.up_proj.weight, whole.model.layers[3].mlp.up_proj.weight)
    quantized = distill_drafter.load_target(arguments(world, quantize="4bit"))
    with pytest.raises(ValueError, match="LlamaForCausalLM is quantized"):
        keep_layers(quantized, [0])
    ids = rows()["input_ids"]
    said, held = quantized(ids).logits, {name: weight.clone() for name, weight in quantized.named_parameters()}
    module = DistillTraining(quantized, before)
    found = trained(module, rows(), 20)
    assert found[-1] < 0.7 * found[0]
    assert all(torch.equal(weight, held[name]) for name, weight in quantized.named_parameters())
    assert torch.equal(quantized(ids).logits, said)


def test_rotary_frequencies_of_a_sibling_in_half_precision_are_those_of_a_loaded_model() -> None:
    target = tiny.llama().bfloat16()
    exact = tiny.llama().float().model.rotary_emb.inv_freq
    assert torch.equal(keep_layers(target, [0]).model.rotary_emb.inv_freq, exact)
