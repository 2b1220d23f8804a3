"""The target drafts for itself with fewer layers: what it drafts, in whose cache, and what it leaves behind."""

from __future__ import annotations

import copy
import functools
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import accelerate
import families
import peft
import pytest
import tiny
import torch
from tiny import CACHES, ONE, RAGGED, Prompt, run
from torch import Tensor
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen.cache import SlotCache, SlotLayer
from hf_specgen.draft import Context, Draft, Limit, Request
from hf_specgen.drafters import skip_search
from hf_specgen.drafters.layer_skip import LayerSkipSession
from hf_specgen.drafters.layer_view import view_of, why_not_skipped
from hf_specgen.drafters.skip_search import promised_speed, search_skip_set

LAYERS = 4
NEW = 20
ROWS = {"one": ONE, "ragged": RAGGED}
HALVES = sg.SkipSet(attention=(0, 2), mlp=(2, 3))
# Seven tokens in the window's sight and more, in rows of unequal length.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny.llama(num_hidden_layers=LAYERS),
    "tied": lambda: tiny.llama(num_hidden_layers=LAYERS, tie_word_embeddings=True),
    "window": lambda: tiny.mistral(),
    "both": lambda: families.build("gemma2"),
}
Check = Callable[[Context, Limit, Draft], Draft | None]


@functools.cache
def target(name: str = "llama") -> PreTrainedModel:
    return sg.enable(MODELS[name]())


def plain(model: PreTrainedModel, prompt: Prompt, mode: str = "greedy", **kwargs: Any) -> tuple[tuple[int, ...], ...]:
    return run(model, prompt, mode, assistant=sg.Plain(), max_new_tokens=NEW, **kwargs)


@dataclass(frozen=True)
class Watched:
    """A drafter whose sessions are looked at before and after each draft, which may be changed."""

    drafter: sg.LayerSkip
    after: Check
    before: Callable[[Context], None] = lambda context: None
    num_assistant_tokens: int = 5
    sessions: list[LayerSkipSession] = field(default_factory=list)

    def start(self, model: PreTrainedModel, request: Request) -> WatchedSession:
        self.sessions.append(self.drafter.start(model, request))
        return WatchedSession(self, self.sessions[-1])


class WatchedSession:
    def __init__(self, watched: Watched, session: LayerSkipSession) -> None:
        self.watched, self.session, self.needs = watched, session, session.needs

    def propose(self, context: Context, limit: Limit) -> Draft:
        self.watched.before(context)
        draft = self.session.propose(context, limit)
        changed = self.watched.after(context, limit, draft)
        return draft if changed is None else changed


def chains(draft: Draft) -> list[list[int]]:
    """Row by row the drafted tokens of a chain."""
    return [
        [token for token, parent in zip(*row, strict=True) if parent >= 0]
        for row in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)
    ]


# ------------------------------------------------------------------------------------------------------ what is drafted


@torch.no_grad()
def exit_by_hand(model: Any, ids: Sequence[int], layers: int, count: int) -> list[int]:
    """The slow way: the whole text through the whole model, and a hidden state through the final norm and the head."""
    known = list(ids)
    for _ in range(count):
        states = model(torch.tensor([known]), output_hidden_states=True, use_cache=False).hidden_states
        known.append(int(model.lm_head(model.get_decoder().norm(states[layers][:, -1])).argmax()))
    return known[len(ids) :]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("name", "layers"), [("llama", 1), ("llama", 2), ("llama", 3), ("tied", 2), ("window", 1), ("both", 2)]
)
def test_early_exit_drafts_what_a_hidden_state_says_through_norm_and_head(name, layers, rows):
    model, prompt, drafted = target(name), ROWS[rows], []

    def check(context: Context, limit: Limit, draft: Draft) -> None:
        for ids, depth, tokens in zip(context.ids, limit.depth, chains(draft), strict=True):
            assert tokens == exit_by_hand(model, ids, layers, depth)
            drafted.extend(tokens)

    watched = Watched(sg.LayerSkip(exit_layer=layers), check)
    assert run(model, prompt, assistant=watched, max_new_tokens=NEW) == plain(model, prompt)
    assert watched.sessions[0]._in_target
    assert len(drafted) > 20


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("rows", ROWS)
def test_so_it_does_with_a_cache_of_its_own_where_the_target_s_is_cropped(kind, rows):
    model, prompt, drafted = target(), ROWS[rows], []

    def check(context: Context, limit: Limit, draft: Draft) -> None:
        for ids, depth, tokens in zip(context.ids, limit.depth, chains(draft), strict=True):
            assert tokens == exit_by_hand(model, ids, 2, depth)
            drafted.extend(tokens)

    watched = Watched(sg.LayerSkip(exit_layer=2), check)
    kwargs = CACHES[kind](model, prompt.columns + NEW)
    assert run(model, prompt, assistant=watched, max_new_tokens=NEW, **kwargs) == plain(model, prompt)
    assert not watched.sessions[0]._in_target
    assert len(drafted) > 20


def without(model: PreTrainedModel, skip: sg.SkipSet) -> Any:
    """A whole copy, in which what is skipped adds zeros."""
    other: Any = sg.disable(copy.deepcopy(model))
    with torch.no_grad():
        for index in skip.attention:
            other.model.layers[index].self_attn.o_proj.weight.zero_()
        for index in skip.mlp:
            other.model.layers[index].mlp.down_proj.weight.zero_()
    return other


@pytest.mark.parametrize("skip", [HALVES, sg.SkipSet.whole([0, 2]), sg.SkipSet(attention=(1,)), sg.SkipSet(mlp=(0, 1))])
def test_a_view_is_the_model_with_zeros_in_the_place_of_what_it_skips(skip):
    model, ids = target(), torch.tensor([ONE.rows[0]])
    with torch.no_grad():
        view = view_of(model, skip)(ids, use_cache=False)
        torch.testing.assert_close(view.logits, without(model, skip)(ids).logits)


@pytest.mark.parametrize("skip", [HALVES, sg.SkipSet.whole([1])])
def test_a_skip_set_drafts_behind_the_keys_and_values_of_the_whole_model(skip):
    model, other, drafted = target(), without(target(), skip), []

    @torch.no_grad()
    def by_hand(ids: Sequence[int], count: int) -> list[int]:
        cache, tokens = model(torch.tensor([ids[:-1]]), use_cache=True).cache, [ids[-1]]
        for _ in range(count):
            tokens.append(int(other(torch.tensor([tokens[-1:]]), cache=cache, use_cache=True).logits[0, -1].argmax()))
        return tokens[1:]

    def check(context: Context, limit: Limit, draft: Draft) -> None:
        for ids, depth, tokens in zip(context.ids, limit.depth, chains(draft), strict=True):
            assert tokens == by_hand(ids, depth)
            drafted.extend(tokens)

    assert run(model, RAGGED, assistant=Watched(sg.LayerSkip(skip=skip), check), max_new_tokens=NEW)
    assert len(drafted) > 20


def idle_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """The model with layers that add nothing."""
    return sg.enable(without(model, sg.SkipSet.whole(layers)))


@pytest.mark.parametrize("mode", ["greedy", "sampled", "penalties-greedy", "penalties-sampled"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_view_without_layers_that_do_nothing_is_always_right(mode, rows):
    # Its noise, its processors, its positions and what it reads of the cache are the target's.
    model, stats = idle_layers(tiny.llama(num_hidden_layers=LAYERS), [1, 2]), sg.Stats()
    kwargs = {"assistant": sg.LayerSkip(skip=[1, 2]), "num_assistant_tokens": 4, "stats": stats}
    assert run(model, ROWS[rows], mode, max_new_tokens=NEW, **kwargs) == plain(model, ROWS[rows], mode)
    assert stats.acceptance_rate == 1.0
    assert stats.rounds == 4


@pytest.mark.parametrize("rows", ROWS)
def test_a_tree_holds_the_chain_of_the_most_likely_tokens_where_these_are_sure(rows):
    model, stats = idle_layers(tiny.llama(num_hidden_layers=LAYERS), [1, 2]), sg.Stats()
    kwargs = {"assistant": sg.LayerSkip(skip=[1, 2], branches=3), "num_assistant_tokens": 4, "stats": stats}
    assert run(model, ROWS[rows], max_new_tokens=NEW, **kwargs) == plain(model, ROWS[rows])
    assert stats.rounds <= 6


class Six:
    """A draft length that might read confidences, as a fixed one never does."""

    def start(self, situation: sg.Situation) -> sg.Controller:
        return sg.Fixed(6)


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_confidence_is_a_chance_and_that_of_siblings_sums_to_one_at_most(branches, mode):
    seen = []

    def check(context: Context, limit: Limit, draft: Draft) -> None:
        assert draft.confidence is not None
        assert draft.confidence.shape == draft.tokens.shape
        for parents, chances in zip(draft.parents.tolist(), draft.confidence.tolist(), strict=True):
            sums: dict[int, float] = {}
            for parent, chance in zip(parents, chances, strict=True):
                assert 0 <= chance <= 1 + 1e-6
                sums[parent] = sums.get(parent, 0.0) + chance
            assert max(sums[parent] for parent in sums if parent >= 0) <= 1 + 1e-5
            seen.append(max(chances))

    drafter = Watched(sg.LayerSkip(exit_layer=2, branches=branches), check)
    run(target(), ONE, mode, assistant=drafter, num_assistant_tokens=Six(), max_new_tokens=NEW)
    assert max(seen) > 0.5


def test_the_prompt_is_read_once():
    model, widths = sg.enable(tiny.llama(num_hidden_layers=LAYERS)), []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    stats = sg.Stats()
    kwargs = {"assistant": sg.LayerSkip(exit_layer=2), "num_assistant_tokens": 3, "stats": stats}
    run(model, ONE, max_new_tokens=NEW, **kwargs)
    assert widths[0] == ONE.columns
    assert max(widths[1:]) == 4
    assert widths[1:5] == [1, 1, 1, 4], "three drafted tokens, one a pass, and a pass over them"
    assert len(widths) == 1 + stats.rounds + stats.drafted


# ------------------------------------------------------------------------------------------------- what is left behind


def committed(cache: SlotCache) -> list[list[Tensor]]:
    """Copies of what every layer holds for good, row by row."""
    return [
        [
            buffer[row, :, max(0, length - (layer.window or length)) - layer.base : length - layer.base].clone()
            for layer in cache.layers
            if isinstance(layer, SlotLayer)
            for buffer in (layer.keys, layer.values)
        ]
        for row, length in enumerate(cache.lengths)
    ]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["llama", "window", "both"])
def test_a_draft_leaves_what_is_committed_as_it_is(name, rows, branches):
    held: list[Any] = []

    def before(context: Context) -> None:
        cache = context.cache
        assert isinstance(cache, SlotCache)
        held[:] = [list(cache.lengths), committed(cache)]

    def after(context: Context, limit: Limit, draft: Draft) -> None:
        cache = context.cache
        assert isinstance(cache, SlotCache)
        assert cache.lengths == held[0]
        for old, new in zip(held[1], committed(cache), strict=True):
            for one, other in zip(old, new, strict=True):
                # A window may have slid on over what no later token sees.
                assert torch.equal(one[:, one.shape[1] - other.shape[1] :], other)

    drafter = Watched(sg.LayerSkip(exit_layer=1, branches=branches), after, before)
    # Long enough for buffers that grow while a draft is made.
    assert run(target(name), ROWS[rows], assistant=drafter, max_new_tokens=60)
    assert drafter.sessions[0]._in_target


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["llama", "window"])
def test_the_cache_that_is_returned_is_that_of_plain_decoding(name, rows, branches):
    model, prompt = target(name), ROWS[rows]
    kwargs = {"do_sample": False, "max_new_tokens": 60, "return_dict_in_generate": True, "num_assistant_tokens": 5}
    known, found = (
        model.generate(**prompt.inputs(), **kwargs, assistant=assistant)
        for assistant in (sg.Plain(), sg.LayerSkip(skip=[0], branches=branches))
    )
    assert torch.equal(known.sequences, found.sequences)
    for one, other in zip(known.cache.layers, found.cache.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=0, atol=1e-9)
        torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("checked", [1, 5])
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["llama", "window"])
def test_no_pass_of_the_target_reads_what_was_drafted(name, rows, branches, checked, monkeypatch):
    # Not even behind a mask, where a NaN would still count: what a view says in half precision may be one.
    feed = LayerSkipSession._pass

    def spoiling(session: LayerSkipSession, roots: Tensor, draft: Draft, idle: Sequence[bool] = ()) -> Tensor:
        logits = feed(session, roots, draft, idle)
        assert session.runner is not None
        for layer in session.runner.cache.layers:
            for row, length in enumerate(session.runner.cache.lengths):
                for buffer in (layer.keys, layer.values):
                    buffer[row, :, length - layer.base : length - layer.base + draft.nodes + 1] = torch.nan
        return logits

    monkeypatch.setattr(LayerSkipSession, "_pass", spoiling)
    model, prompt, stats = target(name), ROWS[rows], sg.Stats()

    def after(context: Context, limit: Limit, draft: Draft) -> Draft:
        # A controller may have less of it checked.
        return Draft(draft.tokens[:, :checked], draft.parents[:, :checked], is_chain=draft.is_chain)

    drafter = Watched(sg.LayerSkip(exit_layer=1, branches=branches), after)
    assert run(model, prompt, assistant=drafter, max_new_tokens=NEW, stats=stats) == plain(model, prompt)
    assert stats.drafted > 0


@pytest.mark.parametrize("rows", ROWS)
def test_a_window_that_slides_on_while_a_draft_is_made_loses_nothing(rows):
    # Everything is accepted, so that drafts are what comes to the end of the buffers first.
    model, prompt, stats = idle_layers(tiny.mistral(), [1]), ROWS[rows], sg.Stats()
    kwargs = {"assistant": sg.LayerSkip(skip=[1]), "num_assistant_tokens": 9, "max_new_tokens": 80}
    known = run(model, prompt, assistant=sg.Plain(), max_new_tokens=80)
    assert run(model, prompt, **kwargs, stats=stats) == known
    assert stats.acceptance_rate == 1.0


def trace(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that modules hold, by identity, and what their configs say."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, dict):
                found[f"{name}.{key}."] = [(inner, id(held)) for inner, held in value.items()]
        if hasattr(module, "config"):
            found[f"{name}.config."] = module.config.to_json_string(use_diff=False)
    return found


@pytest.mark.parametrize("skipped", [{"exit_layer": 2}, {"skip": HALVES}])
def test_nothing_on_the_model_changes(skipped):
    model = sg.enable(tiny.llama(num_hidden_layers=LAYERS))
    plain(model, ONE)
    before, drafter = trace(model), sg.LayerSkip(**skipped)
    seen = []

    def after(context: Context, limit: Limit, draft: Draft) -> None:
        seen.append(trace(model) == before)

    run(model, ONE, assistant=Watched(drafter, after), max_new_tokens=NEW)
    assert seen
    assert all(seen), "nor does it while a call goes on"
    assert trace(model) == before
    assert drafter == sg.LayerSkip(**skipped)


def test_one_drafter_serves_two_threads():
    model, drafter = target(), sg.LayerSkip(exit_layer=3)
    wanted = {rows: plain(model, prompt) for rows, prompt in ROWS.items()}
    wrong: list[str] = []

    def speak(rows: str) -> None:
        texts = [run(model, ROWS[rows], assistant=drafter, max_new_tokens=NEW) for _ in range(2)]
        wrong.extend(rows for text in texts if text != wanted[rows])

    threads = [threading.Thread(target=speak, args=(rows,)) for rows in ROWS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_view_shares_every_weight():
    model = target()
    own = {parameter.data_ptr() for parameter in model.parameters()}
    for skip in HALVES, sg.SkipSet.whole([3]):
        assert {parameter.data_ptr() for parameter in view_of(model, skip).parameters()} < own


# ----------------------------------------------------------------------------------------------- what the target may be


def test_a_model_in_train_mode_drafts_in_eval_mode_and_stays_as_it_is():
    model = tiny.llama(num_hidden_layers=LAYERS, attention_dropout=0.5).train()
    session = sg.LayerSkip(skip=HALVES).start(model, Request(batch=1))
    assert not any(module.training for module in session.model.modules())
    assert all(module.training for module in model.modules())
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in session.model.parameters()} < own
    model.eval()
    with torch.no_grad():
        ids = torch.tensor(ONE.rows)
        view = session.model(ids, use_cache=False)
        torch.testing.assert_close(view.logits, without(model, HALVES)(ids).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("rows", ROWS)
def test_an_adapter_speaks_in_the_draft_too(rows):
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped: Any = peft.get_peft_model(tiny.llama(num_hidden_layers=LAYERS), config).double().eval()
    sg.enable(wrapped)
    drafted = []

    def check(context: Context, limit: Limit, draft: Draft) -> None:
        for ids, depth, tokens in zip(context.ids, limit.depth, chains(draft), strict=True):
            assert tokens == exit_by_hand(wrapped.base_model.model, ids, 2, depth)
            drafted.extend(tokens)

    watched = Watched(sg.LayerSkip(exit_layer=2), check)
    assert run(wrapped, ROWS[rows], assistant=watched, max_new_tokens=NEW) == plain(wrapped, ROWS[rows])
    assert len(drafted) > 20


def test_hooks_that_accelerate_puts_on_a_model_call_the_view():
    model = tiny.llama(num_hidden_layers=LAYERS)
    wanted = run(model, ONE, max_new_tokens=NEW)
    accelerate.hooks.attach_align_device_hook_on_blocks(
        model, {"": torch.device("cpu"), **{f"model.layers.{index}": torch.device("cpu") for index in range(LAYERS)}}
    )
    assert "forward" in vars(model)

    def check(context: Context, limit: Limit, draft: Draft) -> None:
        assert chains(draft) == [exit_by_hand(model, context.ids[0], 2, limit.depth[0])]

    assert (
        run(sg.enable(model), ONE, assistant=Watched(sg.LayerSkip(exit_layer=2), check), max_new_tokens=NEW) == wanted
    )


@pytest.mark.parametrize("rows", ROWS)
def test_where_the_frequencies_follow_the_length_the_view_keeps_a_cache_of_its_own(rows):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = sg.enable(tiny.llama(num_hidden_layers=LAYERS, max_position_embeddings=32, rope_parameters=rope))
    watched = Watched(sg.LayerSkip(exit_layer=2), lambda *_: None)
    assert run(model, ROWS[rows], assistant=watched, max_new_tokens=NEW) == plain(model, ROWS[rows])
    assert not watched.sessions[0]._in_target


FAMILIES = ["gpt2", "gpt_oss", "phi3", "opt", "qwen2_5_vl", "qwen3_next", "mamba2", "falcon_h1"]


@pytest.mark.parametrize(
    "name", [*FAMILIES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[2:])]
)
@pytest.mark.parametrize("rows", ROWS)
def test_other_families_draft_for_themselves(name, rows):
    model, inputs = sg.enable(families.build(name)), families.inputs(name, ROWS[rows])
    sets = [sg.SkipSet.whole([1]), sg.SkipSet(attention=(1,)), sg.SkipSet(mlp=(1,))]
    possible = [skip for skip in sets if why_not_skipped(model, skip) is None]
    drafters = [sg.LayerSkip(exit_layer=2), *(sg.LayerSkip(skip=skip, branches=2) for skip in possible)]
    kwargs = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "num_assistant_tokens": 4}
    wanted = model.generate(**inputs, **kwargs, assistant=sg.Plain())
    accepted = 0
    for drafter in drafters:
        stats = sg.Stats()
        assert torch.equal(model.generate(**inputs, **kwargs, assistant=drafter, stats=stats), wanted)
        assert stats.drafted > 0
        accepted += stats.accepted
    assert accepted > 0


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({}, "exactly one of them"),
        ({"exit_layer": 1, "skip": [1]}, "exactly one of them"),
        ({"skip": []}, "the skip set is empty"),
        ({"exit_layer": 1, "branches": 0}, "branches must be at least 1"),
    ],
)
def test_what_says_nothing_or_two_things_is_refused(drafter, message):
    with pytest.raises(ValueError, match=message):
        sg.LayerSkip(**drafter)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"exit_layer": 0}, "must lie in 1 to 2"),
    ("llama", {"exit_layer": 3}, "must lie in 1 to 2"),
    ("llama", {"skip": [3]}, "there is no layer 3: the model has 3, counted from 0"),
    ("llama", {"skip": [-1]}, "there is no layer -1"),
    ("llama", {"skip": [0, 1, 2]}, "nothing is left of its 3 layers"),
    ("llama", {"skip": sg.SkipSet((1,), layers=30, model="other")}, r"found for 30 layers \(other\), .* model has 3"),
    ("opt", {"skip": sg.SkipSet(mlp=(1,))}, r"layer 1 \(OPTDecoderLayer\) has no MLP that could be left out by itself"),
    ("gemma4_text", {"exit_layer": 1}, "each of its layers has an embedding of its own"),
    ("qwen3_next", {"skip": [1]}, "recurrent, so that only the last ones can be left out: take exit_layer="),
    ("qwen3_next", {"exit_layer": 1}, "has no attention among the layers that would run"),
    ("falcon-alibi", {"exit_layer": 1}, "counts positions by its cache"),
    ("t5", {"exit_layer": 1}, "is an encoder-decoder"),
]


@pytest.mark.parametrize(("name", "drafter", "message"), REFUSED)
def test_what_cannot_be_skipped_is_refused_by_name_before_the_first_pass(name, drafter, message):
    model = sg.enable(families.build(name) if name != "llama" else tiny.llama(num_hidden_layers=3))
    if name != "t5":  # its encoder runs before any callable is called
        model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match=message):
        model.generate(**families.inputs(name, ONE), assistant=sg.LayerSkip(**drafter), max_new_tokens=4)


def test_a_forward_that_would_run_all_layers_is_refused():
    model = sg.enable(tiny.llama(num_hidden_layers=3))
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    with pytest.raises(ValueError, match="the forward of LlamaForCausalLM was replaced by"):
        run(model, ONE, assistant=sg.LayerSkip(exit_layer=1), max_new_tokens=4)


# ----------------------------------------------------------------------------------------------------------- the search

IDLE = [1, 3]


@functools.cache
def found(budget: int = 40, seed: int = 0) -> sg.SkipSet:
    model = idle_layers(tiny.llama(num_hidden_layers=5), IDLE)
    return search_skip_set(model, RAGGED.rows[1:], max_new_tokens=8, budget=budget, seed=seed)


def test_the_search_finds_the_layers_that_do_nothing():
    assert (found().attention, found().mlp) == (tuple(IDLE), tuple(IDLE))
    assert found().acceptance == 1.0
    assert found().layers == 5
    assert 0 < found().cost < 3 / 5 + 0.1
    assert found().speed == promised_speed(1.0, found().cost)


def test_the_search_keeps_to_its_budget_and_repeats_itself():
    assert found(12).evaluations == 12
    assert found(16) == found.__wrapped__(16)


def test_the_search_measures_agreement_token_by_token():
    """The acceptance of the only set that a budget of one allows, the slow way."""
    model = target()
    result = search_skip_set(model, [ONE.rows[0]], max_new_tokens=12, budget=1)
    assert (result.attention, result.mlp) == ((0,), ())
    text, other = run(model, ONE, max_new_tokens=12)[0], without(model, result)
    with torch.no_grad():
        agreed = [
            int(other(torch.tensor([text[:end]])).logits[0, -1].argmax()) == text[end]
            for end in range(len(ONE.rows[0]), len(text))
        ]
    assert result.acceptance == sum(agreed) / len(agreed)
    layer = model.model.layers[0]
    head, part = model.lm_head.weight.numel(), sum(weight.numel() for weight in layer.self_attn.parameters())
    whole = sum(weight.numel() for weight in model.model.layers.parameters()) + head
    assert result.cost == pytest.approx(1 - part / whole)


def test_a_set_is_saved_and_read(tmp_path):
    found().save(tmp_path / "skip.json")
    assert sg.SkipSet.load(tmp_path / "skip.json") == found()
    assert json.loads((tmp_path / "skip.json").read_text())["acceptance"] == 1.0
    drafter = sg.LayerSkip.from_file(tmp_path / "skip.json", branches=2)
    assert drafter == sg.LayerSkip(skip=found(), branches=2)
    with pytest.raises(ValueError, match=r"found for 5 layers \(LlamaForCausalLM\), and the model has 4"):
        run(target(), ONE, assistant=drafter, max_new_tokens=4)


def test_the_search_writes_nothing_on_the_model():
    model = sg.enable(tiny.llama(num_hidden_layers=3))
    run(model, ONE, max_new_tokens=4)
    before = trace(model)
    search_skip_set(model, [ONE.rows[0]], max_new_tokens=4, budget=8)
    assert trace(model) == before


def test_the_search_needs_no_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    shown = []
    tqdm = skip_search.tqdm
    monkeypatch.setattr(skip_search, "tqdm", lambda **kwargs: shown.append(kwargs) or tqdm(**kwargs))
    search_skip_set(target(), [ONE.rows[0]], max_new_tokens=4, budget=2)
    assert shown == [{"total": 2, "desc": "searching a skip set"}]


def test_the_search_takes_texts_and_says_when_nothing_pays(caplog):
    from generating import tokenizer

    text = tokenizer().decode(ONE.rows[0])
    result = search_skip_set(target(), [text], tokenizer(), max_new_tokens=6, budget=1)
    assert result.speed is not None
    assert (result.speed <= 1) == ("no set was found" in caplog.text)
    with pytest.raises(ValueError, match="needs tokenizer="):
        search_skip_set(target(), [text])
    with pytest.raises(ValueError, match="at least one prompt"):
        search_skip_set(target(), [])


@pytest.mark.parametrize(("acceptance", "cost"), [(0.8, 0.25), (0.5, 0.5), (1.0, 0.6), (0.0, 0.3)])
def test_the_promised_speed_is_that_of_the_best_length(acceptance, cost):
    lengths = [
        (length + 1 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)) / (1 + length * cost)
        for length in range(1, 9)
    ]
    assert promised_speed(acceptance, cost) == pytest.approx(max(lengths))
