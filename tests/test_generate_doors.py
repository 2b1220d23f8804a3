"""The ways in: `enable`, the mixin, `custom_generate=`, `stream`, pipelines, wrappers; and the ways out again."""

import copy
import pickle
from functools import partial
from pathlib import Path

import peft
import pytest
import tiny
import torch
from generating import BATCHES, Recorded, drafter, said, tokenizer, truth, whole
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    TextStreamer,
    dynamic_module_utils,
    pipeline,
)

import hf_specgen as sg

ONE, RAGGED = tiny.ONE, tiny.RAGGED
REPOSITORY = Path(__file__).parents[1]
GREEDY = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def rows(model):
    return {prompt: said(model, prompt, 16) for prompt in (ONE, RAGGED)}


def speaks(model, prompt, rows, **kwargs):
    """Whether the model, assisted, says the rows; with a fair number of drafted tokens kept."""
    stats = sg.Stats()
    script = kwargs.pop("assistant", None) or drafter("chain", model, whole(prompt, rows))
    answer = model.generate(**prompt.inputs(), **GREEDY, **kwargs, assistant=script, stats=stats)
    return answer[:, prompt.columns :].tolist() == rows and stats.accepted > 0


def test_enable_and_disable_undo_one_another(model, rows):
    plain, before = type(model), dict(model.__dict__)
    attention, shown = model.config._attn_implementation, repr(model)
    for _ in range(2):
        assert sg.enable(model) is model
        enabled = type(model)
        assert sg.enable(model) is model
        assert type(model) is enabled
        assert isinstance(model, sg.SpecGenMixin)
        assert isinstance(model, LlamaForCausalLM)
        assert (enabled.__name__, enabled.__qualname__, enabled.__module__) == (
            *(plain.__name__, plain.__qualname__, plain.__module__),
        )
        assert repr(model) == shown
        assert speaks(model, ONE, rows[ONE])
        for _ in range(2):
            assert sg.disable(model) is model
            assert type(model) is plain
            assert model.config._attn_implementation == attention
        assert model.__dict__.keys() == before.keys()


def test_models_of_a_class_are_enabled_one_by_one(model):
    other = tiny.llama()
    sg.enable(model)
    assert type(other) is LlamaForCausalLM
    assert type(sg.enable(other)) is type(model)
    sg.disable(model)
    assert isinstance(other, sg.SpecGenMixin)


def test_what_the_user_set_after_enable_survives_disable(model):
    sg.enable(model).set_attn_implementation("eager")
    sg.disable(model)
    assert model.config._attn_implementation == "eager"


def test_what_cannot_generate_cannot_be_enabled():
    with pytest.raises(ValueError, match="Linear holds no transformers model that can generate"):
        sg.enable(torch.nn.Linear(1, 1))


@BATCHES
@pytest.mark.parametrize(
    "kwargs",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 9, "temperature": 3.0},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "use_cache": False},
    ],
    ids=["greedy", "sampled", "beams", "no cache"],
)
def test_without_an_assistant_an_enabled_model_is_stock_s(model, prompt, kwargs):
    inputs = {**prompt.inputs(), **kwargs, "max_new_tokens": 12}
    torch.manual_seed(3)
    expected = model.generate(**inputs)
    sg.enable(model)
    for nothing in ({}, {"assistant": None}):
        torch.manual_seed(3)
        assert torch.equal(model.generate(**inputs, **nothing), expected)


def test_stock_s_own_prompt_lookup_still_works_on_an_enabled_model(model, rows):
    answer = sg.enable(model).generate(**ONE.inputs(), **GREEDY, prompt_lookup_num_tokens=4)
    assert answer[:, ONE.columns :].tolist() == rows[ONE]


@pytest.mark.parametrize("option", [{"seed": 1}, {"acceptance": "block"}, {"stats": sg.Stats()}])
def test_options_without_an_assistant_raise_and_name_plain(model, option):
    with pytest.raises(ValueError, match=rf"{next(iter(option))} without assistant=.*hf_specgen\.Plain\(\)"):
        sg.enable(model).generate(**ONE.inputs(), **GREEDY, **option)


def test_pickle_keeps_an_enabled_model_enabled(model, rows):
    sg.enable(model)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model)
        assert speaks(again, ONE, rows[ONE])
        sg.disable(again)
        assert type(again) is LlamaForCausalLM
        assert again.config._attn_implementation == "sdpa"
        assert isinstance(model, sg.SpecGenMixin)
        assert model.config._attn_implementation != "sdpa"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_save_and_reload_give_a_stock_model(model, rows, tmp_path):
    stock = tiny.llama()
    stock.save_pretrained(tmp_path / "stock")
    sg.enable(model).save_pretrained(tmp_path / "enabled")
    names = [sorted(path.name for path in (tmp_path / which).iterdir()) for which in ("stock", "enabled")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "enabled" / name).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled")
    assert type(again) is LlamaForCausalLM
    assert speaks(sg.enable(again), ONE, rows[ONE])
    subclass = type(model).from_pretrained(tmp_path / "enabled")
    assert speaks(subclass, ONE, rows[ONE])


@pytest.mark.parametrize("order", ["enable first", "compile first"])
def test_a_compiled_model_is_enabled_through_its_wrapper(model, rows, order):
    if order == "enable first":
        wrapped = torch.compile(sg.enable(model), backend="eager")
    else:
        wrapped = sg.enable(torch.compile(model, backend="eager"))
    assert wrapped.config is model.config
    assert wrapped.generation_config is model.generation_config
    assert wrapped.device == model.device
    assert speaks(wrapped, ONE, rows[ONE])
    assert sg.disable(wrapped) is wrapped
    assert type(model) is LlamaForCausalLM


def adapted(model, seed=0):
    """A PEFT wrapper whose adapter says something of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config).eval()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("order", ["enable first", "wrap first"])
def test_a_peft_target_works_through_its_wrapper(model, rows, order):
    """Report 80: exactly as the wrapped model, with its adapter and without."""
    wrapped = adapted(sg.enable(model)) if order == "enable first" else sg.enable(adapted(model))
    expected = wrapped.generate(**RAGGED.inputs(), **GREEDY)[:, RAGGED.columns :].tolist()
    assert expected != rows[RAGGED]
    assert speaks(wrapped, RAGGED, expected)
    with wrapped.disable_adapter():
        assert speaks(wrapped, RAGGED, rows[RAGGED])
    assert speaks(wrapped, RAGGED, expected)
    assert [len(step.tokens) for step in sg.stream(wrapped, **RAGGED.inputs(), **GREEDY, assistant=sg.Plain())]
    sg.disable(wrapped)
    assert type(model) is LlamaForCausalLM


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("door", ["the wrapper", "DraftModel"])
def test_a_peft_drafter_drafts_with_its_adapter(model, rows, door):
    """Report 80: alone, beside a PEFT target, and with the adapter off."""
    adapter = adapted(tiny.llama())
    script = adapter if door == "the wrapper" else sg.DraftModel(adapter)

    def accepted(target):
        stats = sg.Stats()
        answer = target.generate(**ONE.inputs(), **GREEDY, assistant=script, stats=stats)
        assert torch.equal(answer, target.generate(**ONE.inputs(), **GREEDY))
        return stats.acceptance_rate

    sg.enable(model)
    assert accepted(model) < 1
    with adapter.disable_adapter():
        assert accepted(model) == 1
    twin = sg.enable(adapted(tiny.llama()))
    assert accepted(twin) == 1


class Mine(sg.SpecGenMixin, LlamaForCausalLM):
    """A user's class."""


def test_a_class_may_inherit_the_mixin(model, rows):
    mine = Mine(model.config).double().eval()
    mine.load_state_dict(model.state_dict())
    assert speaks(mine, RAGGED, rows[RAGGED])
    assert type(sg.disable(sg.enable(mine))) is Mine
    again = pickle.loads(pickle.dumps(mine))
    assert type(again) is Mine
    assert speaks(again, ONE, rows[ONE])


@BATCHES
def test_custom_generate_on_a_stock_model(model, prompt, rows):
    assert speaks(model, prompt, rows[prompt], custom_generate=sg.speculate)
    assert type(model) is LlamaForCausalLM
    sampled = {**prompt.inputs(), "max_new_tokens": 12, "do_sample": True, "temperature": 3.0, "seed": 8}
    expected = model.generate(**sampled, custom_generate=sg.speculate, assistant=sg.Plain())
    script = drafter("tree", model, truth(expected, sampled["attention_mask"]))
    assert torch.equal(model.generate(**sampled, custom_generate=sg.speculate, assistant=script), expected)
    assert torch.equal(sg.enable(model).generate(**sampled, assistant=script), expected)


def test_custom_generate_without_an_assistant_names_what_is_missing(model):
    with pytest.raises(ValueError, match=r"assistant= is missing; it is a drafter such as hf_specgen\.PromptLookup"):
        model.generate(**ONE.inputs(), **GREEDY, custom_generate=sg.speculate)


@pytest.mark.parametrize("enabled", [False, True])
def test_streamer_and_tokenizer_are_bound_to_the_callable(model, rows, enabled, capsys):
    if enabled:
        sg.enable(model)
    words, streamer = tokenizer(), Recorded()
    door = partial(sg.speculate, streamer=streamer, tokenizer=words)
    stop = words.decode(rows[ONE][0][4:6])[:-1]
    script = drafter("chain", model, whole(ONE, rows[ONE]))
    kwargs = {**ONE.inputs(), **GREEDY, "stop_strings": [stop]}
    answer = model.generate(**kwargs, custom_generate=door, assistant=script)
    assert answer[0, ONE.columns :].tolist() == rows[ONE][0][:6]
    assert streamer.puts == [ONE.inputs()["input_ids"].tolist(), *[[token] for token in rows[ONE][0][:6]]]
    assert streamer.ends == 1
    door = partial(sg.speculate, streamer=TextStreamer(words, skip_prompt=True))
    model.generate(**ONE.inputs(), **GREEDY, custom_generate=door, assistant=script)
    assert capsys.readouterr().out == words.decode(rows[ONE][0]) + "\n"


def test_stop_strings_without_a_tokenizer_name_the_way_to_bind_one(model):
    kwargs = {**ONE.inputs(), **GREEDY, "stop_strings": ["abc"], "assistant": sg.Plain()}
    with pytest.raises(ValueError, match=r"functools\.partial\(hf_specgen\.speculate, tokenizer=tokenizer\)"):
        model.generate(**kwargs, custom_generate=sg.speculate)


def joined(steps, prompt):
    """The rows that a stream's steps add up to."""
    rows = [[] for _ in range(prompt.batch)]
    for step in steps:
        for row, tokens in zip(rows, step.tokens, strict=True):
            row.extend(tokens)
    return rows


@pytest.mark.parametrize("enabled", [False, True])
@BATCHES
def test_a_stream_s_steps_add_up_to_what_generate_returns(model, prompt, rows, enabled):
    if enabled:
        sg.enable(model)
    eos = [row[5 + 3 * i] for i, row in enumerate(rows[prompt])]
    script, stats = drafter("tree", model, whole(prompt, rows[prompt])), sg.Stats()
    kwargs = {**prompt.inputs(), **GREEDY, "eos_token_id": eos}
    steps = list(sg.stream(model, **kwargs, assistant=script, stats=stats))
    expected = model.generate(**kwargs)[:, prompt.columns :].tolist()
    for row, answer in zip(joined(steps, prompt), expected, strict=True):
        assert row == answer[: len(row)]
        assert row[-1] in eos or len(row) == 16
        assert not set(row[:-1]) & set(eos)
    assert (steps[0].width, steps[0].drafted, stats.rounds) == (0, [0] * prompt.batch, len(steps) - 1)
    assert stats.accepted == sum(sum(step.accepted) for step in steps) > 0
    assert stats.tokens == sum(len(row) for row in joined(steps, prompt))
    assert all(step.seconds >= step.verify_s > 0 for step in steps)


def test_a_stream_takes_ids_by_position_samples_and_knows_stop_strings(model, rows):
    words = tokenizer()
    ids = ONE.inputs()["input_ids"]
    stop = words.decode(rows[ONE][0][4:6])[:-1]
    steps = sg.stream(model, ids, **GREEDY, assistant=sg.PromptLookup(), stop_strings=stop, tokenizer=words)
    assert joined(steps, ONE) == [rows[ONE][0][:6]]
    sampled = {"max_new_tokens": 10, "do_sample": True, "temperature": 3.0, "seed": 4, "assistant": sg.Plain()}
    expected = sg.enable(model).generate(ids, **sampled)[:, ONE.columns :].tolist()
    assert joined(sg.stream(model, ids, **sampled), ONE) == expected


def test_a_stream_leaves_grad_mode_to_its_consumer(model):
    model.register_forward_hook(lambda *_: grad.append(torch.is_grad_enabled()))
    grad, weight = [], torch.ones(1, requires_grad=True)
    for _ in sg.stream(model, **ONE.inputs(), **GREEDY, assistant=tiny.sibling(model)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        (weight * 2).backward()
    with torch.no_grad():
        for _ in sg.stream(model, **ONE.inputs(), **GREEDY, assistant=sg.Plain()):
            assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert set(grad) == {False}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"assistant": sg.Plain(), "num_beams": 2}, "beam_search"),
        ({"assistant": sg.Plain(), "streamer": Recorded()}, "takes no streamer="),
        ({"assistant": 3}, "assistant=3 is not a drafter"),
        ({}, "assistant= is missing"),
        ({"assistant": sg.Plain(), "nonsense": 1}, "nonsense"),
    ],
)
@pytest.mark.parametrize("enabled", [False, True])
def test_a_stream_s_errors_come_before_its_first_step(model, kwargs, message, enabled):
    if enabled:
        sg.enable(model)
    with pytest.raises(ValueError, match=message):
        sg.stream(model, **ONE.inputs(), **{**GREEDY, **kwargs})


def test_streams_may_be_left_early_and_taken_in_turns(model, rows):
    script = drafter("chain", model, whole(RAGGED, rows[RAGGED]))
    left = sg.stream(model, **RAGGED.inputs(), **GREEDY, assistant=script)
    next(left)
    left.close()
    first = sg.stream(model, **RAGGED.inputs(), **GREEDY, assistant=script)
    second = sg.stream(model, **ONE.inputs(), **GREEDY, assistant=tiny.sibling(model))
    steps = [[], []]
    streams = [first, second]
    while streams[0] or streams[1]:
        for which in (0, 1):
            if streams[which] and (step := next(streams[which], None)) is not None:
                steps[which].append(step)
            else:
                streams[which] = None
    assert joined(steps[0], RAGGED) == rows[RAGGED]
    assert joined(steps[1], ONE) == rows[ONE]


def test_a_stream_goes_on_with_a_cache_that_was_passed_in(model, rows):
    cache = DynamicCache(config=model.config)
    script = drafter("chain", model, whole(ONE, rows[ONE]))
    lengths, decided = [], ONE.columns
    for step in sg.stream(model, **ONE.inputs(), **GREEDY, cache=cache, assistant=script):
        decided += len(step.tokens[0])
        lengths.append(cache.get_seq_length() == decided - 1)
    assert all(lengths)
    assert decided == ONE.columns + 16


@pytest.mark.parametrize("texts", [1, 3])
def test_a_pipeline_passes_the_assistant_on(model, texts):
    """Report 89: the same ids with an assistant and without."""
    words = tokenizer()
    prompts = [words.decode(row) for row in tiny.Prompt.random((14, 9), (4, 1), (7, 2)).rows[:texts]]
    pipe = pipeline("text-generation", model=sg.enable(model), tokenizer=words)
    stats = sg.Stats()
    kwargs = {"max_new_tokens": 12, "do_sample": False, "batch_size": texts}
    expected = pipe(prompts, **kwargs)
    assert pipe(prompts, **kwargs, assistant=sg.DraftModel(tiny.sibling(model)), stats=stats) == expected
    assert stats.accepted > 0
    assert stats.calls == 1


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))


@BATCHES
def test_the_recipe_folder_decodes_like_the_package(model, prompt, rows, modules_cache):
    recipe = {"custom_generate": str(REPOSITORY), "trust_remote_code": True}
    assert speaks(model, prompt, rows[prompt], **recipe)
    assert type(model) is LlamaForCausalLM
    script = drafter("chain", model, whole(prompt, rows[prompt]))
    output = model.generate(
        prompt.inputs()["input_ids"],
        attention_mask=prompt.inputs()["attention_mask"],
        generation_config=None,
        logits_processor=[tiny.PrefixHash()],
        return_dict_in_generate=True,
        assistant=script,
        **GREEDY,
        **recipe,
    )
    assert isinstance(output, sg.SpeculativeOutput)
    expected = model.generate(**prompt.inputs(), **GREEDY, logits_processor=[tiny.PrefixHash()])
    assert torch.equal(output.sequences, expected)


def test_the_recipe_folder_hands_on_streamer_and_tokenizer(model, rows, modules_cache):
    words, streamer = tokenizer(), Recorded()
    kwargs = {"custom_generate": str(REPOSITORY), "trust_remote_code": True, "streamer": streamer, "tokenizer": words}
    stop = words.decode(rows[ONE][0][4:6])[:-1]
    script = drafter("chain", model, whole(ONE, rows[ONE]))
    answer = model.generate(**ONE.inputs(), **GREEDY, **kwargs, stop_strings=[stop], assistant=script)
    assert answer[0, ONE.columns :].tolist() == rows[ONE][0][:6]
    assert streamer.puts == [ONE.inputs()["input_ids"].tolist(), *[[token] for token in rows[ONE][0][:6]]]
    assert streamer.ends == 1


def test_the_recipe_s_requirements_are_this_package(modules_cache):
    dynamic_module_utils.check_python_requirements(str(REPOSITORY), "custom_generate/requirements.txt")
    (line,) = (REPOSITORY / "custom_generate" / "requirements.txt").read_text().split()
    assert line == f"hf_specgen>={sg.__version__}"
