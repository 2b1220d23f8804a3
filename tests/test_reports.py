"""Faults that users of speculative decoding reported in public, by the number of our collection.

`REPORTS` says which test holds which; those that no other file holds are here, with what concerns a call as a whole:
that it leaves no trace.
"""

import ast
import copy
import gc
import json
import re
import resource
import threading
import tracemalloc
import weakref
from pathlib import Path

import pytest
import tiny
import torch
from generating import BATCHES, SHAPES, Recorded, drafter, said, same_as_stock, tokenizer, whole
from transformers import LlamaForCausalLM

import hf_specgen as sg

ONE, RAGGED = tiny.ONE, tiny.RAGGED
HOT = {"do_sample": True, "temperature": 3.0, "seed": 3}


def half(model):
    """The model in bfloat16."""
    return copy.deepcopy(model).to(torch.bfloat16)


def near_ties(model, prompt, assistant, count, margin):
    """Tokens before the first difference to stock, which must be where stock's two best logits are `margin` apart."""
    kwargs = {**prompt.inputs(), "max_new_tokens": count, "do_sample": False}
    expected = model.generate(**kwargs, return_dict_in_generate=True, output_logits=True)
    actual = sg.enable(model).generate(**kwargs, assistant=assistant)
    differing = (actual != expected.sequences).nonzero()
    if not len(differing):
        return count
    place = int(differing[0, 1]) - prompt.columns
    best = expected.logits[place][0].topk(2).values
    assert float(best[0] - best[1]) <= margin * float(expected.logits[place].abs().max())
    return place


@pytest.mark.parametrize("seed", range(4))
@SHAPES
def test_report_2_half_precision_differs_at_near_ties_only(model, seed, shape):
    prompt = tiny.Prompt.random((60, seed))
    model, small = model.float(), half(model)
    rows = said(model, prompt, 40)
    same_as_stock(model, drafter(shape, model, whole(prompt, rows)), **prompt.inputs(), max_new_tokens=40)
    near_ties(small, prompt, drafter(shape, model, whole(prompt, said(small, prompt, 40))), 40, margin=2**-6)


@BATCHES
@pytest.mark.parametrize("branches", [1, 2, 3, 5])
def test_report_4_the_shape_of_the_tree_changes_no_text(model, prompt, branches):
    same_as_stock(model, sg.DraftModel(tiny.sibling(model), branches=branches), **prompt.inputs(), max_new_tokens=20)


def test_report_5_the_prompt_s_pass_is_stock_s_to_the_bit(model):
    """In float32, where another split of the prompt would show."""
    model = sg.enable(model.float())
    prompt = tiny.Prompt.random(*[(30, seed) for seed in range(10)], *[(1 + seed, seed) for seed in range(40)])
    kwargs = {**prompt.inputs(), "max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    outputs = [model.generate(**kwargs, output_logits=True, assistant=which) for which in (None, sg.Plain())]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert torch.equal(outputs[0].logits[0], outputs[1].logits[0])


@SHAPES
@BATCHES
def test_report_7_drafts_that_are_always_wrong_beyond_a_window(windowed, prompt, shape):
    script = tiny.AlwaysWrong(whole(prompt, said(windowed, prompt, 60)), shape)
    same_as_stock(windowed, script, **prompt.inputs(), max_new_tokens=60)


@SHAPES
def test_report_22_a_rejected_token_stays_nowhere(model, shape):
    """Not in the ids, the stream, nor the cache: a pass over the text alone leaves the same keys and values."""
    kwargs = {**ONE.inputs(), "max_new_tokens": 80, **HOT, "return_dict_in_generate": True}
    sg.enable(model)
    expected = model.generate(**kwargs, assistant=sg.Plain()).sequences
    streamer, stats = Recorded(), sg.Stats()
    script = tiny.AlwaysWrong(expected.tolist(), shape)
    output = model.generate(**kwargs, streamer=streamer, stats=stats, assistant=script)
    assert torch.equal(output.sequences, expected)
    assert streamer.puts[1:] == [[token] for token in expected[0, ONE.columns :].tolist()]
    assert (stats.accepted, stats.rounds) == (0, 79)
    with torch.no_grad():
        fresh = model(expected[:, :-1]).cache
    for mine, theirs in zip(output.cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


@pytest.mark.parametrize("acceptance", ["matching", "rejection", "block"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["chain", "model", "lookup"])
def test_report_38_the_smallest_calls_and_an_accepted_end(model, acceptance, count, kind):
    rows = said(model, RAGGED)
    script = drafter(kind, model, whole(RAGGED, rows))
    kwargs = {**RAGGED.inputs(), **HOT, "acceptance": acceptance, "assistant": script}
    assert sg.enable(model).generate(**kwargs, max_new_tokens=count).shape[1] == RAGGED.columns + count
    # Every second token may be the end: nothing is drawn behind one.
    eos = list(range(1, tiny.VOCAB, 2))
    for row in model.generate(**kwargs, max_new_tokens=12, eos_token_id=eos)[:, RAGGED.columns :].tolist():
        first = next(i for i, token in enumerate([*row, 1]) if token % 2)
        assert set(row[first + 1 :]) <= {0}


def quantized(model):
    """The model with its linear layers in int8, rows and inputs scaled one by one, as dynamic quantisation does."""

    class Linear(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.scale = weight.abs().amax(1) / 127
            self.weight = torch.nn.Parameter((weight / self.scale.unsqueeze(1)).round().to(torch.int8), False)

        def forward(self, states):
            # One scale for the whole pass: so a block's tokens are rounded otherwise than a single one's.
            scale = (states.abs().amax() / 127).clamp(min=1e-9)
            return ((states / scale).round() * scale) @ (self.weight.to(states.dtype) * self.scale.unsqueeze(1)).T

    for layer in model.model.layers:
        for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(part, f"{name}_proj", Linear(getattr(part, f"{name}_proj").weight.detach()))
    return model


@pytest.mark.parametrize("seed", range(6))
def test_report_82_a_quantised_target_differs_at_near_ties_only(seed):
    """Its passes over several tokens are others than over one. Fresh weights, since sharp ones enlarge the error."""
    torch.manual_seed(seed)
    model = quantized(LlamaForCausalLM(tiny.llama().config).eval())
    prompt = tiny.Prompt.random((20, seed))
    script = drafter("chain", model, whole(prompt, said(model, prompt, 40)))
    near_ties(model, prompt, script, 40, margin=0.02)
    # Drafting nothing makes stock's passes, and so stock's text.
    same_as_stock(model, sg.Plain(), **prompt.inputs(), max_new_tokens=40)


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_report_94_the_first_token_of_a_draft_is_verified_too(model, depth, sampled):
    prompt = tiny.Prompt(((1, 1, 1),))
    kwargs = {**prompt.inputs(), "max_new_tokens": 20, **(HOT if sampled else {"do_sample": False})}
    expected = sg.enable(model).generate(**kwargs, assistant=sg.Plain())
    stats = sg.Stats()
    script = tiny.AlwaysWrong(expected.tolist(), num_assistant_tokens=depth)
    assert torch.equal(model.generate(**kwargs, assistant=script, stats=stats), expected)
    assert stats.accepted == 0 < stats.drafted


@pytest.mark.parametrize("branches", [1, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_report_98_copies_that_are_almost_right_change_no_text(model, branches, sampled):
    """A structured prompt: the same tags over and over, around entries that differ in one place."""
    tags = [[5, 6, entry, 7, 8, 9] for entry in (20, 21, 20, 22, 23, 20)]
    prompt = tiny.Prompt((tuple(token for tag in tags for token in tag),))
    kwargs = {**prompt.inputs(), "max_new_tokens": 30, **(HOT if sampled else {"do_sample": False})}
    # The tags are what the target likes to say, too.
    kwargs["sequence_bias"] = [[[token], 12.0] for token in (5, 6, 7, 8, 9, 20, 21, 22, 23)]
    stats = sg.Stats()
    expected = sg.enable(model).generate(**kwargs, assistant=sg.Plain())
    lookup = sg.PromptLookup(min_ngram=1, branches=branches)
    assert torch.equal(model.generate(**kwargs, assistant=lookup, stats=stats), expected)
    assert 0 < stats.accepted < stats.drafted


@BATCHES
@SHAPES
def test_report_113_rejected_slots_are_masked_and_not_merely_overwritten(model, prompt, shape):
    """A row's logits in company, after rounds that kept unequal numbers of tokens, are those it has alone."""
    rows = said(model, prompt, 24)
    kwargs = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    script = tiny.Scripted(whole(prompt, rows), shape, spoiled=0.4, num_assistant_tokens=5)
    together = sg.enable(model).generate(**prompt.inputs(), **kwargs, assistant=script)
    for row in range(prompt.batch):
        alone = model.generate(**prompt.alone(row).inputs(), **kwargs)
        for mine, theirs in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(mine[row], theirs[0], rtol=1e-5, atol=1e-4)


@SHAPES
@pytest.mark.parametrize("cache", ["slot", "dynamic"])
def test_report_116_positions_follow_the_mask_in_every_round(model, shape, cache):
    prompt = RAGGED
    passes = []

    def note(module, args, kwargs):
        passes.append((kwargs["input_ids"].clone(), kwargs["position_ids"].expand(prompt.batch, -1).clone()))

    model.register_forward_pre_hook(note, with_kwargs=True)
    rows = said(model, prompt)
    passes.clear()
    arguments = tiny.CACHES[cache](model, 64)
    kwargs = {**prompt.inputs(), "max_new_tokens": 24, "do_sample": False, **arguments}
    decided = [0] * prompt.batch
    mask = prompt.inputs()["attention_mask"]
    for step in sg.stream(sg.enable(model), **kwargs, assistant=drafter(shape, model, whole(prompt, rows))):
        ids, positions = passes[-1]
        if len(passes) == 1:
            assert torch.equal(positions * mask, (mask.cumsum(1) - 1) * mask)
        for row, tokens in enumerate(step.tokens):
            if len(passes) > 1 and tokens:
                start = len(prompt.rows[row]) + decided[row]
                assert positions[row, 0] == start - 1
                # Each kept token stood one place behind the one before it.
                shown = set(zip(positions[row].tolist(), ids[row].tolist(), strict=True))
                assert shown >= {(start + i, token) for i, token in enumerate(tokens[: step.accepted[row]])}
            decided[row] += len(tokens)
    assert len(passes) < 24


# A call leaves no trace


def kinds(model):
    """Arguments of calls of every kind, to be made over and over."""
    small, prompt = tiny.sibling(model), RAGGED
    training = tiny.sibling(model).train()
    rows = whole(prompt, said(model, prompt, 12))
    inputs = {**prompt.inputs(), "max_new_tokens": 6}
    greedy = {**inputs, "do_sample": False}
    everything = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    return [
        {**greedy, "assistant": sg.Plain()},
        {**greedy, "assistant": sg.PromptLookup(), **everything},
        {**greedy, "assistant": tiny.Scripted(rows, "tree", num_assistant_tokens=4)},
        {**greedy, "assistant": small, **everything},
        {**greedy, "assistant": sg.DraftModel(training, branches=2)},
        {**inputs, **HOT, "assistant": small, "acceptance": "block"},
        {**inputs, **HOT, "assistant": small, "acceptance": "rejection", "seed": None, "repetition_penalty": 1.1},
        {**greedy, "assistant": {"method": "ngram"}, "stop_strings": ["abcabc"], "tokenizer": tokenizer()},
        {**greedy, "assistant": small, "num_assistant_tokens": 0},
    ]


def tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_report_140_memory_stays_flat_over_two_hundred_calls(model):
    calls = kinds(sg.enable(model))

    def rounds(count):
        for _ in range(count):
            for kwargs in calls:
                model.generate(**kwargs)
            left = sg.stream(model, **calls[3])
            next(left)
            del left

    def grown():
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        rounds(2)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - held

    rounds(2)
    before, peak = tensors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    # What leaks does so each time. What else is counted, less and less of it, is new where something untraced was.
    windows = [grown() for _ in range(6)]
    tracemalloc.stop()
    rounds(6)
    assert tensors() == before
    assert min(windows) < 20_000, windows
    # In kilobytes, or in bytes on a Mac; a call's caches and logits are a tenth of this.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 0.1 * peak


@pytest.mark.parametrize("which", range(9))
def test_report_142_what_a_call_returned_dies_with_it(model, which, monkeypatch):
    """And what it worked with, without waiting for the garbage collector: caches are large."""
    kwargs = {**kinds(sg.enable(model))[which], "return_dict_in_generate": True, "output_scores": True}
    alive = []
    for name in ("SlotCache", "CropCache"):
        kind = getattr(__import__("hf_specgen.cache", fromlist=[name]), name)

        def watched(self, *args, make=kind.__init__, **kwargs):
            make(self, *args, **kwargs)
            alive.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", watched)
    model.generate(**kwargs)
    alive.clear()
    gc.collect()
    gc.disable()
    try:
        output = model.generate(**kwargs)
        alive += [weakref.ref(output.cache), weakref.ref(output.cache.layers[0].keys), weakref.ref(output.scores[0])]
        del output
        assert len(alive) > 3
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


def test_report_143_what_a_prompt_gains_does_not_depend_on_history(model):
    lookup, small = sg.PromptLookup(), tiny.sibling(model)
    loop = tiny.Prompt(((*ONE.rows[0], *ONE.rows[0]),))
    gains = []
    sg.enable(model)
    for turn in range(30):
        for assistant in (lookup, small):
            stats = sg.Stats()
            prompt = loop if turn % 2 else tiny.Prompt.random((12, turn))
            model.generate(**prompt.inputs(), max_new_tokens=8, do_sample=False, assistant=assistant, stats=stats)
            if turn % 2:
                gains.append((stats.rounds, stats.drafted, stats.accepted))
    assert len(set(gains[::2])) == len(set(gains[1::2])) == 1


def settings(*things):
    """Everything that is written down of models and tokenizers, deep, and all else that hangs on the objects."""
    found = []
    for thing in things:
        for config in (getattr(thing, name, None) for name in ("config", "generation_config", "init_kwargs")):
            if config is not None:
                as_dict = config if isinstance(config, dict) else {**config.to_dict(), **vars(config)}
                found.append(json.dumps(as_dict, default=repr, sort_keys=True))
        found.append(sorted(vars(thing)))
        if isinstance(thing, torch.nn.Module):
            found.append([(name, module.training, sorted(vars(module))) for name, module in thing.named_modules()])
            hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
            found.append([len(getattr(module, name)) for module in thing.modules() for name in hooks])
            found.append([(name, weight.data_ptr(), weight._version) for name, weight in thing.named_parameters()])
            found.append(sorted(name for name, _ in thing.named_buffers()))
    return found


def test_a_call_writes_nothing_on_models_configs_or_tokenizers(model):
    """Report 70, and the fourth law."""
    model.generation_config.max_length = 99
    model.generation_config.top_k = 7
    sg.enable(model)
    calls = kinds(model)
    words = tokenizer()
    small = calls[3]["assistant"]
    training = calls[4]["assistant"].model
    # Stock's own forward puts hooks on a model when hidden states are first asked for.
    for stock in (model, small, training):
        stock(RAGGED.inputs()["input_ids"], output_hidden_states=True)
    before = settings(model, small, training, words)
    drafter_before = copy.deepcopy(calls[7]["assistant"])
    config = type(model.generation_config)(max_new_tokens=5, num_assistant_tokens=3)
    config_before = config.to_dict()
    for kwargs in calls:
        model.generate(**{**kwargs, "tokenizer": words} if "tokenizer" in kwargs else kwargs)
        model.generate(**RAGGED.inputs(), generation_config=config, assistant=kwargs["assistant"])
        assert settings(model, small, training, words) == before
    assert config.to_dict() == config_before
    assert calls[7]["assistant"] == drafter_before


@pytest.mark.parametrize("kind", ["model", "training", "lookup", "chain"])
def test_two_threads_share_model_and_drafter(model, kind):
    prompts = [ONE, RAGGED]
    sg.enable(model)
    script = drafter("lookup" if kind == "lookup" else "model", model, [])
    if kind == "training":
        script = script.train()
    expected = {prompt: said(model, prompt, 20) for prompt in prompts}
    sampled = {
        prompt: model.generate(**prompt.inputs(), max_new_tokens=20, **HOT, assistant=sg.Plain()) for prompt in prompts
    }
    wrong, barrier = [], threading.Barrier(4)

    def work(prompt, hot):
        assistant = script if kind != "chain" else drafter("chain", model, whole(prompt, expected[prompt]))
        barrier.wait()
        for _ in range(4):
            kwargs = {**prompt.inputs(), "max_new_tokens": 20, "assistant": assistant}
            answer = model.generate(**kwargs, **(HOT if hot else {"do_sample": False}))
            good = (
                torch.equal(answer, sampled[prompt])
                if hot
                else answer[:, prompt.columns :].tolist() == expected[prompt]
            )
            if not good:
                wrong.append((prompt, hot))

    threads = [threading.Thread(target=work, args=(prompt, hot)) for prompt in prompts for hot in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Which test holds which report

OUTPUTS, STOPS, PROCESSORS = "test_generate_outputs.py", "test_generate_stops.py", "test_generate_processors.py"
DOORS, REFUSALS, MODEL, HERE = (
    "test_generate_doors.py",
    "test_generate_refusals.py",
    "test_draft_model.py",
    "test_reports.py",
)
SEQ2SEQ, VISION, CROSSED = "test_encoder_decoder.py", "test_vision.py", "test_cross_vocabulary.py"
EXACT, LOOKUP, REAL, RULES = "test_exact.py", "test_prompt_lookup.py", "test_real_model.py", "test_verify.py"
TRAINED, MEDUSA, LAYOUTS = "test_trained.py", "test_medusa.py", "test_medusa_layouts.py"

# What belongs to parts that do not exist yet.
TRAINING = "training"

REPORTS = {
    1: (OUTPUTS, "test_the_shortest_prompts"),
    2: (HERE, "test_report_2_half_precision_differs_at_near_ties_only"),
    4: (HERE, "test_report_4_the_shape_of_the_tree_changes_no_text"),
    5: (REFUSALS, "test_a_cache_whose_crop_does_nothing_is_found_out"),
    7: (HERE, "test_report_7_drafts_that_are_always_wrong_beyond_a_window"),
    8: (MODEL, "test_a_drafter_with_a_sliding_window_goes_on_beyond_it"),
    10: (REFUSALS, "test_targets_that_cannot_be_rolled_back"),
    11: ("test_recurrent.py", "test_after_every_round_the_state_is_that_of_the_decided_tokens"),
    13: (OUTPUTS, "test_a_cache_kind_that_the_model_itself_asks_for_is_no_obstacle"),
    14: (OUTPUTS, "test_continuing_from_a_filled_cache_equals_stock"),
    16: (REFUSALS, "test_a_model_that_drops_its_cache_is_named"),
    17: (SEQ2SEQ, "test_every_family_says_what_stock_says"),
    19: (MODEL, "test_the_drafter_s_cache_follows_what_was_decided"),
    20: (MODEL, "test_the_drafter_sees_every_token_at_its_true_position"),
    22: (HERE, "test_report_22_a_rejected_token_stays_nowhere"),
    23: (VISION, "test_report_23_inputs_for_each_token_grow_with_or_without_a_mask"),
    25: (LOOKUP, "test_report_25_nothing_is_drafted_after_a_copied_eos"),
    26: (STOPS, "test_eos_of_every_kind"),
    28: (STOPS, "test_stop_strings_with_every_drafter"),
    29: (STOPS, "test_the_earlier_of_stop_and_limit_wins"),
    31: (STOPS, "test_a_streamer_sees_exactly_what_stock_shows_it"),
    32: (STOPS, "test_an_eos_that_only_the_drafter_says_is_a_guess_like_any_other"),
    34: (STOPS, "test_stop_strings_inside_of_a_token_and_at_every_place_of_a_block"),
    35: (STOPS, "test_no_more_is_asked_for_than_can_be_used"),
    37: (OUTPUTS, "test_an_end_inside_a_block_is_where_counting_stops"),
    38: (HERE, "test_report_38_the_smallest_calls_and_an_accepted_end"),
    40: (MODEL, "test_q_is_what_the_draft_was_drawn_from"),
    41: (MODEL, "test_drafts_are_sampled_or_the_most_likely_tokens"),
    43: (TRAINED, "test_the_first_tokens_have_the_distribution_of_the_target"),
    44: (MODEL, "test_sampled_text_does_not_depend_on_how_drafts_are_chosen"),
    46: (MODEL, "test_other_seeds_say_other_things_and_the_same_seed_the_same"),
    47: (MODEL, "test_other_seeds_say_other_things_and_the_same_seed_the_same"),
    49: ("test_ranks.py", "test_report_49_ranks_that_sample_without_a_seed_accept_the_same"),
    50: (PROCESSORS, "test_a_tiny_temperature_is_greedy"),
    52: (PROCESSORS, "test_the_scores_of_every_token_are_what_stock_s_processors_make_of_its_logits"),
    53: (PROCESSORS, "test_a_processor_with_a_state_of_its_own_is_shown_what_stock_shows_it"),
    55: (PROCESSORS, "test_greedy_text_under_each_processor_equals_stock"),
    56: (PROCESSORS, "test_a_processor_with_a_state_of_its_own_is_shown_what_stock_shows_it"),
    58: (PROCESSORS, "test_greedy_text_under_each_processor_equals_stock"),
    59: (PROCESSORS, "test_what_a_call_clears_of_a_saved_generation_config_is_cleared_as_in_stock"),
    61: (PROCESSORS, "test_a_processor_with_a_state_of_its_own_is_shown_what_stock_shows_it"),
    62: (OUTPUTS, "test_scores_logits_and_hidden_states_are_one_entry_a_token_and_equal_stock"),
    64: (OUTPUTS, "test_scores_logits_and_hidden_states_are_one_entry_a_token_and_equal_stock"),
    65: (STOPS, "test_a_streamer_sees_exactly_what_stock_shows_it"),
    67: (STOPS, "test_a_streamer_sees_exactly_what_stock_shows_it"),
    68: (OUTPUTS, "test_token_types_go_on_as_in_stock"),
    70: (HERE, "test_a_call_writes_nothing_on_models_configs_or_tokenizers"),
    71: (MODEL, "test_the_drafter_sees_every_token_at_its_true_position"),
    73: (REFUSALS, "test_a_config_that_training_left_without_a_cache_is_no_refusal"),
    74: (MODEL, "test_a_drafter_s_own_generation_config_is_neither_read_nor_written"),
    76: (REFUSALS, "test_other_ways_to_decode"),
    77: ("test_auto.py", "test_report_77_what_cannot_gain_costs_no_more_than_plain_decoding"),
    79: (MODEL, "test_a_drafter_on_another_device"),
    80: (DOORS, "test_a_peft_target_works_through_its_wrapper"),
    82: (HERE, "test_report_82_a_quantised_target_differs_at_near_ties_only"),
    83: (MODEL, "test_a_drafter_in_train_mode_drafts_in_eval_mode_and_stays_as_it_is"),
    85: (MODEL, "test_the_size_is_that_of_the_text_model"),
    86: (MODEL, "test_rejection_aligns_unequal_widths"),
    88: (MODEL, "test_two_unused_special_tokens_are_tolerated_with_one_warning"),
    89: (DOORS, "test_a_pipeline_passes_the_assistant_on"),
    91: (CROSSED, "test_report_91_there_is_one_bos_at_most"),
    92: (CROSSED, "test_report_92_unshared_ids_get_no_mass"),
    94: (HERE, "test_report_94_the_first_token_of_a_draft_is_verified_too"),
    95: (REAL, "test_a_batch_of_four_and_its_rows_alone_equal_stock"),
    97: (LOOKUP, "test_report_97_a_proposal_does_not_grow_with_the_text"),
    98: (HERE, "test_report_98_copies_that_are_almost_right_change_no_text"),
    100: (LOOKUP, "test_report_100_nothing_leaks_between_calls"),
    101: (LOOKUP, "test_report_101_a_repetitive_prompt_is_drafted_from"),
    103: (LAYOUTS, "test_every_published_layout_loads_into_the_right_modules_and_drafts"),
    104: (LAYOUTS, "test_counts_that_a_config_lacks_come_from_the_weights"),
    106: (MEDUSA, "test_each_row_of_a_batch_is_what_it_is_alone"),
    107: ("test_states.py", "test_a_session_is_shown_every_state_once_and_in_order"),
    109: (MODEL, "test_beyond_the_drafter_s_positions_rows_are_decoded_plainly"),
    110: (MODEL, "test_beyond_the_drafter_s_positions_rows_are_decoded_plainly"),
    112: (STOPS, "test_rows_that_end_early_are_filled_up_with_padding"),
    113: (HERE, "test_report_113_rejected_slots_are_masked_and_not_merely_overwritten"),
    115: (EXACT, "test_the_text_is_that_of_plain_decoding"),
    116: (HERE, "test_report_116_positions_follow_the_mask_in_every_round"),
    118: TRAINING,
    119: TRAINING,
    121: (MEDUSA, "test_sizes_come_from_the_config_and_heads_without_weights_are_refused"),
    122: TRAINING,
    124: TRAINING,
    125: TRAINING,
    127: TRAINING,
    128: TRAINING,
    130: (CROSSED, "test_report_130_permuted_vocabularies_are_told_apart_and_translated"),
    131: TRAINING,
    133: TRAINING,
    134: TRAINING,
    136: TRAINING,
    137: TRAINING,
    139: TRAINING,
    140: (HERE, "test_report_140_memory_stays_flat_over_two_hundred_calls"),
    142: (HERE, "test_report_142_what_a_call_returned_dies_with_it"),
    143: (HERE, "test_report_143_what_a_prompt_gains_does_not_depend_on_history"),
}
# Tests of the law itself, which do not speak of single reports.
SILENT = {EXACT, REAL}


def test_every_report_is_held_by_a_test_that_names_it_or_waits_for_its_part():
    held = {number: place for number, place in REPORTS.items() if isinstance(place, tuple)}
    tests = {}
    for file in {file for file, _ in held.values()}:
        tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
        found = (node for node in tree.body if isinstance(node, ast.FunctionDef))
        tests[file] = {node.name: f"{node.name} {ast.get_docstring(node)}" for node in found}
    for number, (file, name) in held.items():
        assert name in tests[file], f"report {number}: {file} has no {name}"
        numbers = re.findall(r"\d+", tests[file][name])
        assert file in SILENT or str(number) in numbers, f"{name} does not name report {number}"
