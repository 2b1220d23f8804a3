"""Training of EAGLE heads: the unrolled steps are those of drafting, and each learns from its own place."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import train_eagle
from heads import BATCH, VOCAB, babble, batch_of, speaker
from learning import beginning as eagle_beginning
from learning.beginning import begin_as_layer
from learning.eagle import EagleTraining, Recipe
from learning.losses import IGNORED
from learning.unroll import unroll
from running import runs
from texts import data
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

import hf_specgen as sg
from hf_specgen.heads.eagle import EagleConfig, EagleHead

# The ids that a head with a draft vocabulary can say.
SAID = [token for token in range(VOCAB) if token % 5]
LAYERS = (0, 1, -1)


def small(seed: int = 0, **changed: Any) -> LlamaForCausalLM:
    """A tiny target of 20 ids."""
    return tiny.llama(seed=seed, **{"vocab_size": VOCAB, **changed})


def fresh(target: Any, noise: float = 0.1, method: str = "eagle3", **changed: Any) -> EagleHead:
    """A head whose layers already add something."""
    kwargs = {"feature_layers": LAYERS, "token_map": SAID} if method == "eagle3" else {}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        head = EagleHead.fresh(target, method=method, **{**kwargs, **changed})
        for parameter in head.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return head


def said_of(target: Any, batch: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return target(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)


def stored_of(target: Any, batch: dict[str, Tensor], layers: tuple[int, ...] = (1, -1, 0)) -> dict[str, Tensor]:
    """What a data folder would hold of a batch."""
    output = said_of(target, batch)
    return {"hidden_states": torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)}


def states_of(target: Any, texts: Tensor) -> list[Any]:
    with torch.no_grad():
        hidden = target(texts, output_hidden_states=True).hidden_states
    return list(torch.cat([hidden[layer] for layer in LAYERS], dim=-1).half().numpy())


def slow_chain(head: EagleHead, embeds: Tensor, features: Tensor, root: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """`(hidden, features)` of each node below a root, as drafting makes them: one pass each, over a cache.

    Args:
        head: drafts.
        embeds: `(entries, hidden)` of the true tokens.
        features: `(entries, hidden)` from the target.
        root: the last decided entry.
        steps: nodes, the root's entry counted.
    """
    cache = DynamicCache()
    made = head(embeds[None, : root + 1], features[None, : root + 1], cache=cache)
    chain = [(made.hidden[0, -1], made.features[0, -1])]
    for entry in range(root + 1, min(root + steps, len(embeds))):
        made = head(embeds[None, entry : entry + 1], made.features[:, -1:], cache=cache)
        chain.append((made.hidden[0, -1], made.features[0, -1]))
    return chain


def spans_of(labels: list[int]) -> list[tuple[int, int]]:
    """(first, behind the last) of each run of labelled places."""
    marked = [label != IGNORED for label in labels]
    starts = [i for i, mark in enumerate(marked) if mark and (i == 0 or not marked[i - 1])]
    return [(start, next((i for i in range(start, len(marked)) if not marked[i]), len(marked))) for start in starts]


def slow_loss(target: Any, head: EagleHead, batch: dict[str, Tensor], recipe: Recipe) -> float:
    """The loss draft by draft: row by row without padding, from every root, node by node."""
    total, labels = 0.0, 0
    ids_of = head.to_target.tolist() if head.to_target is not None else list(range(VOCAB))
    lm_head = head.lm_head if head.config.own_lm_head else target.lm_head
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids, said = batch["input_ids"][row, :length], batch["labels"][row, :length].tolist()
        labels += sum(label != IGNORED for label in said)
        with torch.no_grad():
            output = target(ids[None], output_hidden_states=True)
            states = [output.hidden_states[layer][0] for layer in head.config.layers_of(2)]
            truth = output.logits[0][:, ids_of].softmax(-1)
            embeds, features = target.get_input_embeddings()(ids)[1:], head.fuse(torch.cat(states, dim=-1))
            for start, end in spans_of(said):
                for first in range(start, end - 1):  # the root: the last token that is decided
                    chain = slow_chain(head, embeds, features, first - 1, min(recipe.steps, end - 1 - first))
                    for step, (hidden, feature) in enumerate(chain):
                        fed = first + step
                        weight = recipe.decay**step
                        if recipe.regression:
                            last = output.hidden_states[-1][0, fed]
                            total += weight * recipe.regression * float(smooth_l1_loss(feature, last))
                        if said[fed + 1] not in ids_of:
                            continue
                        guess = lm_head(hidden).log_softmax(-1)
                        if recipe.distillation < 1:
                            total -= weight * (1 - recipe.distillation) * float(guess[ids_of.index(said[fed + 1])])
                        apart = float((truth[fed] * (truth[fed].log() - guess)).sum())
                        total += weight * recipe.distillation * apart
    return total / labels


KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "two layers": {"num_hidden_layers": 2},
    "eagle": {"method": "eagle"},
}


@pytest.mark.parametrize("kind", [*KINDS, "window", "latent"])
def test_unrolled_steps_are_those_of_drafting(kind: str) -> None:
    target = small()
    if kind in KINDS:
        head = fresh(target, **KINDS[kind])
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": VOCAB}
        latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
        changed = {"sliding_window": 6} if kind == "window" else latent
        head = EagleHead(EagleConfig(**sizes, feature_layers=list(LAYERS), **changed)).to(torch.float64)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.3)
    drafted = torch.zeros(2, 12, dtype=torch.bool)
    drafted[0, 3:12] = True
    drafted[1, 1:4] = drafted[1, 5:9] = True  # two turns
    generator = torch.Generator().manual_seed(0)
    embeds, features = (torch.randn(2, 12, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        steps = unroll(head.eval(), embeds, features, drafted, 4)
        seen = []
        for row in range(2):
            for root in drafted[row].nonzero().flatten().tolist():
                depth = next(i for i in range(1, 14) if root + i == 12 or not drafted[row, root + i])
                for step, wanted in enumerate(slow_chain(head, embeds[row], features[row], root, min(4, depth))):
                    column = steps[step].entries[row].tolist().index(root + step)
                    assert steps[step].drafted[row, column]
                    torch.testing.assert_close(steps[step].hidden[row, column], wanted[0])
                    torch.testing.assert_close(steps[step].features[row, column], wanted[1])
                    seen.append(step)
    assert [seen.count(step) for step in range(4)] == [int(step.drafted.sum()) for step in steps]


def test_accepted_lengths_in_generation_are_those_the_unrolling_foretells() -> None:
    target = sg.enable(copy.deepcopy(speaker()).to(torch.float64))
    head = trained_on(target, babble(8, 24, 1), steps=12)
    prompt = babble(1, 6, 5)
    drafter = sg.Eagle(head, top_k=1)
    rounds = list(sg.stream(target, prompt, assistant=drafter, num_assistant_tokens=3, max_new_tokens=40))
    text = torch.cat([prompt[0], torch.tensor([token for round in rounds for token in round.tokens[0]])])
    batch = {"input_ids": text[None], "attention_mask": torch.ones_like(text[None]), "labels": text[None]}
    states = said_of(target, batch).hidden_states
    with torch.no_grad():
        features = head.fuse(torch.cat([states[layer] for layer in LAYERS], dim=-1)[:, :-2])
        embeds = target.get_input_embeddings()(text[None, 1:-1])
        steps = unroll(head, embeds, features, torch.ones(1, len(text) - 2) > 0, 3)
        guesses = [head.to_target[head.lm_head(step.hidden[0]).argmax(-1)] for step in steps]
    # Every place is labelled, so that column i is entry i.
    right = [(guess == text[2:]).tolist() for guess in guesses]
    place, compared = len(prompt[0]) + len(rounds[0].tokens[0]), []
    for round in rounds[1:-1]:
        root, accepted = place - 2, 0
        while accepted < 3 and right[accepted][root + accepted]:
            accepted += 1
        assert round.accepted[0] == accepted
        compared.append(accepted)
        place += len(round.tokens[0])
    assert len(set(compared)) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_that_of_drafts_made_one_by_one(kind: str) -> None:
    target = small()
    head = fresh(target, **KINDS[kind])
    recipe = Recipe(steps=3, decay=0.7, distillation=0.6, regression=0.5)
    batch = batch_of(*BATCH)
    batch["labels"][0, 9] = IGNORED  # two turns
    found = EagleTraining(target, head, recipe)(**batch)["loss"]
    assert found.item() == pytest.approx(slow_loss(target, head, batch, recipe))


def test_first_step_is_plain_teacher_forcing() -> None:
    target, batch = small(), batch_of(*BATCH)
    head = fresh(target, token_map=range(VOCAB))
    found = EagleTraining(target, head, Recipe(steps=1, distillation=0))(**batch)["loss"]
    states = said_of(target, batch).hidden_states
    features = head.fuse(torch.cat([states[layer] for layer in LAYERS], dim=-1)[:, :-2])
    logits = head.lm_head(head(target.get_input_embeddings()(batch["input_ids"][:, 1:-1]), features).hidden)
    labels = batch["labels"][:, 2:].masked_fill(batch["labels"][:, 1:-1] == IGNORED, IGNORED)
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert found.item() == pytest.approx(wanted.item() / int((batch["labels"] != IGNORED).sum()))


@pytest.mark.parametrize("what", ["states", "labels", "tokens"])
def test_a_shift_by_one_is_another_loss(what: str) -> None:
    """What the loss is made of stands where it should: moved by one place it is another."""
    target, batch = small(), batch_of((14, 0, 14))
    head = fresh(target)
    module = EagleTraining(target, head, Recipe(steps=2, distillation=0.5), stored_layers=LAYERS)
    batch |= stored_of(target, batch, LAYERS)
    right = module(**batch)["loss"].item()
    name = {"states": "hidden_states", "labels": "labels", "tokens": "input_ids"}[what]
    for shift in (-1, 1):
        moved = {**batch, name: batch[name].roll(shift, dims=1)}
        assert abs(module(**moved)["loss"].item() - right) > 1e-2


def test_stored_states_spare_the_target_and_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch = small(), batch_of(*BATCH)
    head = fresh(target)
    wanted = EagleTraining(target, head)(**batch)["loss"]
    stored = stored_of(target, batch)
    last_only = {"hidden_states": stored["hidden_states"][..., :32]}

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the target was run")

    ran = EagleTraining(target, head, stored_layers=(1,))(**batch, **last_only)["loss"]
    monkeypatch.setattr(target, "forward", refuse)
    module = EagleTraining(target, head, stored_layers=(1, -1, 0))
    torch.testing.assert_close(module(**batch, **stored)["loss"], wanted)
    torch.testing.assert_close(ran, wanted)
    with pytest.raises(AssertionError, match="was run"):
        EagleTraining(target, head, stored_layers=(1,))(**batch, **last_only)


def test_stored_likeliest_ids_stand_for_the_last_state() -> None:
    target, batch = small(), batch_of(*BATCH)
    head = fresh(target, feature_layers=(0, 1))
    wanted = EagleTraining(target, head)(**batch)["loss"]
    best = said_of(target, batch).logits.log_softmax(-1).topk(VOCAB)
    stored = {**stored_of(target, batch, (0, 1)), "top_ids": best.indices.int(), "top_logprobs": best.values}
    target.forward = None
    module = EagleTraining(target, head, stored_layers=(0, 1))
    torch.testing.assert_close(module(**batch, **stored)["loss"].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient(kind: str) -> None:
    target, batch = small(), batch_of(*BATCH)
    recipe = Recipe(steps=3, distillation=0.5, regression=0.5)
    gradients, passes = [], []
    for checkpointing in (False, True):
        module = EagleTraining(target, fresh(target, **KINDS[kind]), recipe).train()
        module.head.register_forward_pre_hook(lambda *_, done=checkpointing: passes.append(done))
        if checkpointing:
            module.activation_checkpointing_enable()
        module(**batch)["loss"].backward()
        gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
    for name, gradient in gradients[0].items():
        if not name.startswith(("target", "rows")):
            assert gradient is not None
            assert float(gradient.abs().sum()) > 0, name
        torch.testing.assert_close(gradient, gradients[1][name])
    assert (passes.count(False), passes.count(True)) == (3, 6)


@pytest.mark.parametrize("autocast", [False, True])
def test_rows_without_labels_add_zero(autocast: bool, caplog: pytest.LogCaptureFixture) -> None:
    target = small().float()
    module = EagleTraining(target, fresh(target), Recipe(regression=1.0))
    both = batch_of(BATCH[0], (9, 0, 0))
    alone = {name: value[:1] for name, value in both.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        one, two = module(**alone), module(**both)
        torch.testing.assert_close(one["loss"], two["loss"], rtol=1e-2 if autocast else 1e-5, atol=1e-5)
        assert "adds nothing" not in caplog.text
        for length in (9, 3, 2, 1):
            module.zero_grad()
            with caplog.at_level(logging.WARNING):
                none = module(**batch_of((length, 0, 0), (length, 0, 0)))
            assert none["loss"].item() == 0
            none["loss"].backward()
            assert all(p.grad is None or not p.grad.any() for p in module.head.parameters())
    assert "adds nothing" in caplog.text


@pytest.mark.parametrize("distillation", [0.0, 1.0])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(distillation: float) -> None:
    target, rows = small(), ((11, 2, 11), (61, 3, 61))
    batch = batch_of(*rows)
    module = EagleTraining(target, fresh(target), Recipe(distillation=distillation))
    module(**batch)["loss"].backward()
    whole = [parameter.grad.clone() for parameter in module.head.parameters()]
    module.zero_grad()
    count = (batch["labels"] != IGNORED).sum()
    for row in range(2):
        length = rows[row][0]
        part = {name: value[row : row + 1, :length] for name, value in batch.items()}
        module(**part, num_items_in_batch=count)["loss"].backward()
    for parameter, wanted in zip(module.head.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


def test_draft_vocabulary_is_what_is_said_most() -> None:
    rows = [torch.tensor([IGNORED, 7, 7, 7, 3]), torch.tensor([3, 12, IGNORED, 5])]
    ids, covered = train_eagle.most_frequent(rows, VOCAB, 3, [19])
    assert ids.tolist() == [3, 7, 19]
    assert covered == pytest.approx(5 / 7)
    ids, covered = train_eagle.most_frequent(rows, VOCAB, 7, [19])
    assert ids.tolist() == [0, 1, 3, 5, 7, 12, 19]  # the lowest ids fill up
    assert covered == 1


def test_saved_head_says_the_ids_of_its_vocabulary(tmp_path: Path) -> None:
    target = small()
    fresh(target).save_pretrained(tmp_path)
    head = EagleHead.from_pretrained(tmp_path)
    assert head.to_target.tolist() == SAID
    kept = EagleHead.fresh(target, feature_layers=LAYERS, token_map=SAID)
    assert torch.equal(kept.lm_head.weight, target.lm_head.weight[SAID])


def test_a_head_may_begin_as_the_layer_that_reads_its_last_feature() -> None:
    target, batch = small(), batch_of((12, 0, 12))
    close = {"rtol": 1e-3, "atol": 1e-3}  # norms compute in float32
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "norm" in name:
                weight.mul_(1 + torch.arange(len(weight)) / 20)
        output = target(**{name: batch[name] for name in ("input_ids", "attention_mask")}, output_hidden_states=True)
        for layers, number in (((0, 1), 1), ((1, 0), 0), ((0, -1), 1)):
            head = EagleHead.fresh(target, feature_layers=layers, token_map=SAID)
            assert begin_as_layer(head, target) == number
            features = output.hidden_states[number]
            made = head(torch.zeros_like(features), features)
            if number == 1:
                torch.testing.assert_close(head.lm_head(made.hidden), output.logits[..., SAID], **close)
            else:
                torch.testing.assert_close(made.features, output.hidden_states[1], **close)
    assert begin_as_layer(EagleHead.fresh(target, "eagle"), target) is None


def test_a_head_stays_fresh_where_the_layers_are_built_otherwise() -> None:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
    target = GPT2LMHeadModel(GPT2Config(**sizes))
    head = EagleHead.fresh(target, feature_layers=LAYERS)
    before = copy.deepcopy(head.state_dict())
    assert begin_as_layer(head, target) is None
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_norms_are_copied_as_what_they_multiply_by() -> None:
    like = torch.ones(8)
    rms, layer, gemma = nn.RMSNorm(8), nn.LayerNorm(8), Gemma2RMSNorm(8)
    with torch.no_grad():
        rms.weight.mul_(3)
        gemma.weight.add_(0.5)
        layer.bias.add_(1)
        torch.testing.assert_close(eagle_beginning._scale(rms, like), 3 * like)
        torch.testing.assert_close(eagle_beginning._scale(gemma, like), 1.5 * like)
        assert eagle_beginning._scale(layer, like) is None


def test_attention_without_masks_is_refused() -> None:
    target = small()
    head = fresh(target)
    head.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'eager'"):
        EagleTraining(target, head)


def test_left_padding_is_refused() -> None:
    target, batch = small(), batch_of(*BATCH)
    with pytest.raises(ValueError, match="padded on the left"):
        EagleTraining(target, fresh(target))(**{name: value.flip(1) for name, value in batch.items()})


def test_the_target_stays_as_it_is() -> None:
    target, batch = small(), batch_of(*BATCH)
    before = copy.deepcopy(target.state_dict())
    module = EagleTraining(target, fresh(target, noise=0.3)).train()
    assert not target.training
    assert module.head.training
    learn(module, batch, steps=3)
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name])


def learn(module: EagleTraining, batch: dict[str, Tensor], steps: int, lr: float = 5e-3) -> list[dict[str, Tensor]]:
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=lr)
    reports = []
    for _ in range(steps):
        report = module(**batch)
        optimizer.zero_grad()
        report["loss"].backward()
        optimizer.step()
        reports.append(report)
    return reports


def trained_on(target: Any, texts: Tensor, steps: int, method: str = "eagle3") -> EagleHead:
    head = EagleHead.fresh(
        target, method, **({"feature_layers": LAYERS, "token_map": range(1, 18)} if method == "eagle3" else {})
    )
    batch = {"input_ids": texts, "attention_mask": torch.ones_like(texts), "labels": texts}
    recipe = Recipe(steps=3, regression=0.5 if method == "eagle" else 0.0)
    module = EagleTraining(target, head, recipe, stored_layers=LAYERS)
    learn(module, {**batch, **stored_of(target, batch, LAYERS)}, steps)
    return head.requires_grad_(False).eval()


def test_one_batch_can_be_learned() -> None:
    target, batch = small(), batch_of(*BATCH)
    module = EagleTraining(target, fresh(target, token_map=range(VOCAB)), Recipe(steps=3, distillation=0))
    report = learn(module, batch, steps=60, lr=2e-2)[-1]
    assert [float(report[f"accuracy_{step}"]) for step in range(3)] == [1, 1, 1]
    assert report["loss"].item() < 0.1


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_training_raises_acceptance_and_saving_keeps_it(method: str, tmp_path: Path) -> None:
    target, prompt = copy.deepcopy(speaker()), babble(4, 6, 5)

    def accepted(assistant: Any) -> tuple[list[list[int]], float]:
        stats = sg.Stats()
        settings = {"stats": stats, "num_assistant_tokens": 3, "max_new_tokens": 24}
        return target.generate(prompt, assistant=assistant, **settings).tolist(), stats.mean_accepted_tokens

    before, after = (trained_on(target, babble(8, 24, 1), steps, method) for steps in (0, 40))
    after.save_pretrained(tmp_path)
    plain, learned = accepted(sg.Eagle(before)), accepted(sg.Eagle(after))
    assert learned == accepted(str(tmp_path))
    assert learned[0] == plain[0]
    assert learned[1] > plain[1] + 0.7


def test_script_goes_from_a_data_folder_to_a_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In two parts: stopped after some steps and resumed, when its data have grown by then."""
    target, texts = speaker(), babble(12, 16, 1)
    target.save_pretrained(tmp_path / "target")
    rows = [
        {"input_ids": ids, "labels": [IGNORED] * 3 + ids[3:], "held_out": False, "prompt": "", "hidden_states": states}
        for ids, states in zip(texts.tolist(), states_of(target, texts), strict=True)
    ]
    data.write_info(tmp_path / "data", {"hidden_layers": [0, 1, -1]})
    data.write_part(tmp_path / "data", 0, rows[:8])
    line = f"--target {tmp_path}/target --data {tmp_path}/data --output_dir {tmp_path}/out --feature_layers 0 1 -1"
    line += " --draft_vocabulary 12 --report False --per_device_train_batch_size 4 --report_to none --use_cpu"
    line += " --logging_steps 1 --save_steps 2 --disable_tqdm True --max_steps"
    defaults = {"train_sampling_strategy": "group_by_length"}
    train_eagle.main(*runs.parse(train_eagle.Arguments, [*line.split(), "2"], **defaults))
    assert "12 of 20 ids covers" in caplog.text
    first = EagleHead.from_pretrained(tmp_path / "out")
    data.write_part(tmp_path / "data", 1, [{**row, "input_ids": [19] * 16, "labels": [19] * 16} for row in rows])
    train_eagle.main(*runs.parse(train_eagle.Arguments, [*line.split(), "4", "--resume"], **defaults))
    second = EagleHead.from_pretrained(tmp_path / "out")
    assert second.to_target.tolist() == first.to_target.tolist()
    assert len(second.to_target) == 12
    assert not torch.equal(second.fc.weight, first.fc.weight)
    assert (tmp_path / "out" / "provenance.json").is_file()
    assert (
        sg.enable(copy.deepcopy(target)).generate(texts[:1], assistant=str(tmp_path / "out"), max_new_tokens=4).numel()
    )
