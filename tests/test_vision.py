"""Vision-language targets: the prompt's pass carries the pictures and is stock's; what follows is text."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import transformers as hf
from tiny import MODES, ONE, RAGGED, VOCAB, Prompt, Scripted
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_specgen as sg
from hf_specgen.generation import rehearse

NEW, BEYOND = 24, 16
ROWS = {"one": ONE, "ragged": RAGGED}
BATCHES = pytest.mark.parametrize("rows", ROWS)
SHAPES = pytest.mark.parametrize("shape", ["chain", "tree"])

# The id of a place that a picture takes, and those around it; prompts have lower ids.
PICTURE, BEFORE, BEHIND, VIDEO = 90, 92, 93, 91
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
TEXT |= {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
SLIDING = {**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8}
SLIDING |= {"layer_types": ["sliding_attention", "full_attention"]}
EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
EYE |= {"image_size": 8, "patch_size": 4}
WHOLE = {"image_token_id": PICTURE, "tie_word_embeddings": False}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN = {**WHOLE, "video_token_id": VIDEO, "vision_start_token_id": BEFORE, "vision_end_token_id": BEHIND}
QWEN |= {"text_config": {**TEXT, "rope_parameters": MROPE}}
QWEN_EYE = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_heads": 2}
QWEN_EYE |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
TILES = {"max_num_tiles": 2, "vision_output_dim": 32, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}


def _qwen2_vl() -> hf.PreTrainedConfig:
    eye = {key: value for key, value in QWEN_EYE.items() if key not in ("out_hidden_size", "intermediate_size")}
    return hf.Qwen2VLConfig(**QWEN, vision_config={**eye, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2})


def _paligemma(text: hf.PreTrainedConfig) -> hf.PreTrainedConfig:
    eye = hf.SiglipVisionConfig(**EYE).to_dict()
    sizes = {"projection_dim": 32, "hidden_size": 32}
    return hf.PaliGemmaConfig(text_config=text.to_dict(), vision_config=eye, **sizes, **WHOLE)


def _mllama() -> hf.PreTrainedConfig:
    eye = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1}
    eye |= {"attention_heads": 2, "image_size": 8, "patch_size": 4, "intermediate_layers_indices": [1], **TILES}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {**TEXT, "bos_token_id": 1, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": rope}
    return hf.MllamaConfig(vision_config=eye, text_config=text, image_token_index=PICTURE, tie_word_embeddings=False)


def _idefics() -> hf.PreTrainedConfig:
    eye = {**EYE, "embed_dim": 16}
    text = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
    return hf.IdeficsConfig(
        **text, additional_vocab_size=0, cross_layer_interval=1, alpha_initializer="ones", vision_config=eye
    )


CONFIGS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "llava": lambda: hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**EYE), text_config=hf.LlamaConfig(**TEXT), vision_feature_layer=-1, **WHOLE
    ),
    "mistral3": lambda: hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**{**EYE, "image_size": 16}, head_dim=8),
        text_config=hf.MistralConfig(**TEXT, sliding_window=None),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        **WHOLE,
    ),
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        **QWEN, vision_config={**QWEN_EYE, "window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        **QWEN, vision_config={**QWEN_EYE, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    ),
    "gemma3": lambda: hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(**SLIDING),
        vision_config=hf.SiglipVisionConfig(**EYE),
        mm_tokens_per_image=4,
        boi_token_id=BEFORE,
        eoi_token_id=BEHIND,
        **WHOLE,
    ),
    "paligemma": lambda: _paligemma(hf.GemmaConfig(**TEXT)),
    "paligemma2": lambda: _paligemma(hf.Gemma2Config(**SLIDING)),
    "idefics": _idefics,
    "idefics3": lambda: hf.Idefics3Config(
        text_config=hf.LlamaConfig(**TEXT),
        vision_config={**EYE, "image_size": 16},
        scale_factor=2,
        pad_token_id=0,
        **WHOLE,
    ),
    "mllama": _mllama,
}
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# What cannot take masks by the kind of layer.
CROPPED = ("paligemma2",)


def build(name: str) -> PreTrainedModel:
    """A stock model, nobody else's; equal names make equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = hf.AutoModelForImageTextToText.from_config(CONFIGS[name]()).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 1.0 if any(part in path for part in ("embed", "lm_head", "position")) else 0.25
                weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
            elif "gate" in path:
                weight.fill_(2.0)  # how far pictures are let in
    model.generation_config = hf.GenerationConfig(pad_token_id=0)
    # Gemma 2's eager attention softmaxes in float32, where float64's mask is -inf and padding NaN.
    return model.float() if model.config.get_text_config()._attn_implementation == "eager" else model


@functools.cache
def target(name: str) -> PreTrainedModel:
    return sg.enable(build(name))


def look(name: str, prompt: Prompt, seed: int = 0) -> dict[str, Tensor]:
    """A picture in each row, behind its first token."""
    around = {**dict.fromkeys(QWENS, 1), "gemma3": 1}.get(name, 0)
    places = 0 if name in ("mllama", "idefics") else 4
    shown = [BEFORE] * around + [PICTURE] * places + [BEHIND] * around
    rows = [[token if token < PICTURE else token - 50 for token in row] for row in prompt.rows]
    prompt = Prompt(tuple((*row[:1], *shown, *row[1:]) for row in rows))
    given, batch = prompt.inputs(), prompt.batch
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(target(name).dtype)

    if name in QWENS:
        # Sixteen patches of two frames, four by four, of which four become one place.
        given["pixel_values"] = noise(16, 3 * 2 * 4 * 4).flatten(0, 1)
        given["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch)
        given["mm_token_type_ids"] = (given["input_ids"] == PICTURE).int()
    elif name == "mllama":
        # Two pictures, the first of two tiles; the last two tokens but one see the second only.
        given["pixel_values"] = noise(2, 2, 3, 8, 8)
        given["aspect_ratio_ids"] = torch.tensor([[2, 1]] * batch)
        given["aspect_ratio_mask"] = torch.tensor([[[1, 1], [1, 0]]] * batch)
        seen = torch.ones(batch, prompt.columns, 2, 2, dtype=torch.long)
        seen[:, :, 1, 1] = seen[:, -3:-1, 0] = 0
        given["cross_attention_mask"] = seen
    elif name == "idefics":
        given["pixel_values"] = noise(2, 3, 8, 8)
        given["image_attention_mask"] = torch.ones(batch, prompt.columns, 2, dtype=torch.long)
        given["image_attention_mask"][:, -3:-1, 0] = 0
    elif name == "idefics3":
        given["pixel_values"] = noise(1, 3, 16, 16)
    elif name == "mistral3":
        given |= {"pixel_values": noise(3, 16, 16), "image_sizes": torch.tensor([[16, 16]] * batch)}
    else:
        given["pixel_values"] = noise(3, 8, 8)
    if name == "gemma3":
        given["token_type_ids"] = (given["input_ids"] == PICTURE).int()
    elif name in ("paligemma", "paligemma2"):
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    return given


def inputs(name: str, rows: str, kind: str = "picture") -> dict[str, Tensor]:
    return ROWS[rows].inputs() if kind == "text" else look(name, ROWS[rows])


def say(model: PreTrainedModel, given: dict[str, Tensor], mode: str = "greedy", **kwargs: Any) -> Tensor:
    """What `generate` returns in one of `MODES`; with `assistant=` under seed 7 where the mode samples."""
    arguments = {**{key: value.clone() for key, value in given.items()}, **MODES[mode](), "max_new_tokens": NEW}
    arguments |= kwargs
    if "assistant" in arguments and arguments["do_sample"]:
        arguments["seed"] = 7
    out: Tensor = model.generate(**arguments)
    return out


def texts(given: dict[str, Tensor], sequences: Tensor) -> list[list[int]]:
    """Rows without their padding."""
    mask = given["attention_mask"]
    shown = torch.nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1).bool()
    return [row[keep].tolist() for row, keep in zip(sequences, shown, strict=True)]


@functools.cache
def truth(name: str, rows: str, kind: str = "picture", mode: str = "greedy") -> Tensor:
    """What plain decoding gives, and some tokens more."""
    kwargs = {"max_new_tokens": NEW + BEYOND, "assistant": sg.Plain()}
    return say(target(name), inputs(name, rows, kind), mode, **kwargs)


CELLS = [
    pytest.param(name, kind, rows, marks=[] if (kind, rows) == ("picture", "ragged") else pytest.mark.slow)
    for name in CONFIGS
    for kind in ("picture", "text")
    for rows in ROWS
    if (name, kind) != ("idefics", "text")  # it has no pass without a picture
]


@pytest.mark.parametrize(("name", "kind", "rows"), CELLS)
def test_every_family_says_what_stock_says(name, kind, rows):
    given, known = inputs(name, rows, kind), truth(name, rows, kind)
    assert torch.equal(say(build(name), given, max_new_tokens=NEW + BEYOND), known)
    for shape in ("chain", "tree"):
        script = Scripted(texts(given, known), shape)
        assert torch.equal(say(target(name), given, assistant=script), known[:, :-BEYOND])
        assert script.seen.share("mixed") > 0.5
        assert any(script.seen.chains) == (name in CROPPED)
        if shape == "tree" and name not in CROPPED:
            assert script.seen.share("younger") > 0.3


def test_the_pictures_are_seen():
    """Or else the tests above would show nothing."""
    for name in CONFIGS:
        for mask in (None, "cross_attention_mask", "image_attention_mask"):
            given = look(name, ONE, seed=0 if mask else 1)
            if mask is None or mask in given:
                if mask is not None:
                    given[mask] = given[mask].clone()
                    given[mask][:, -1, 0] = 0
                other = say(target(name), given, assistant=sg.Plain(), max_new_tokens=18)
                assert not torch.equal(other, truth(name, "one")[:, : other.shape[1]]), (name, mask)


@pytest.mark.parametrize("name", QWENS)
def test_positions_count_a_picture_as_the_model_does(name):
    """In three axes and behind a picture of four places that takes two: in each row, chain or tree."""
    model, given = build(name), inputs(name, "ragged")
    known, seen = truth(name, "ragged"), []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    sg.enable(model)
    script = Scripted(texts(given, known), "tree")
    assert torch.equal(say(model, given, assistant=script), known[:, :-BEYOND])
    assert bool((model.model.rope_deltas == -2).all())
    assert all(positions.shape[:2] == (4, 3) for positions in seen)
    counted, first = seen[1][0, :, 0], seen[1][1:, :, 0]
    assert counted.tolist() == given["attention_mask"].sum(1).tolist()
    assert first.tolist() == [(counted - 2).tolist()] * 3


DRAFTERS: dict[str, Callable[[PreTrainedModel, Any], Any]] = {
    "scripted": lambda model, known: Scripted(known, "tree"),
    "text model": lambda model, known: tiny.llama(),
    "sibling": lambda model, known: tiny.sibling(model, noise=0.05),
    "tree": lambda model, known: sg.DraftModel(tiny.sibling(model, noise=0.05), branches=3),
    "lookup": lambda model, known: sg.PromptLookup(1, branches=2),
    "store": lambda model, known: sg.PromptLookup(store=tiny.store_of(known)),
}


@pytest.mark.parametrize(
    ("drafter", "name", "mode", "rows"),
    [
        pytest.param(
            drafter,
            name,
            mode,
            rows,
            marks=[] if name == "qwen2_5_vl" and mode == "hash-sampled" and rows == "ragged" else pytest.mark.slow,
        )
        for drafter in DRAFTERS
        for name in ("qwen2_5_vl", "gemma3", "llava")
        for mode in MODES
        for rows in ROWS
    ],
)
def test_the_text_is_that_of_plain_decoding(drafter, name, mode, rows):
    model, given, known = target(name), inputs(name, rows), truth(name, rows, mode=mode)
    assistant, stats = DRAFTERS[drafter](model, texts(given, known)), sg.Stats()
    assert torch.equal(say(model, given, mode, assistant=assistant, stats=stats), known[:, :-BEYOND])
    if drafter in ("scripted", "store"):
        assert 0 < stats.accepted < stats.drafted


def test_eyes_open_once_a_call():
    model, given = build("qwen2_5_vl"), inputs("qwen2_5_vl", "one")
    passes = []
    model.model.visual.register_forward_hook(lambda *_: passes.append(1))
    script = Scripted(texts(given, truth("qwen2_5_vl", "one")))
    say(sg.enable(model), given, assistant=script)
    assert len(passes) == 1


@SHAPES
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "paligemma"])
def test_report_23_inputs_for_each_token_grow_with_or_without_a_mask(name, shape):
    """All ones, none, and left padding: beside the main mask each of these models has one of its own."""
    for rows, masked in (("one", True), ("one", False), ("ragged", True)):
        given, known = inputs(name, rows), truth(name, rows)
        assert {"token_type_ids", "mm_token_type_ids"} & given.keys()
        script = Scripted(texts(given, known), shape)
        if not masked:
            del given["attention_mask"]
        assert torch.equal(say(target(name), given, assistant=script), known[:, :-BEYOND])
        assert torch.equal(say(build(name), given), known[:, :-BEYOND])
        assert script.seen.share("mixed") > 0.5


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "paligemma"])
def test_static_caches(name):
    """PaliGemma's own masks are made for each pass there, from types of which new tokens have one of their own."""
    given, known = inputs(name, "ragged"), truth(name, "ragged")
    script = Scripted(texts(given, known))
    kwargs = {"cache_implementation": "static"}
    assert torch.equal(say(target(name), given, assistant=script, **kwargs), say(build(name), given, **kwargs))
    assert script.seen.share("mixed") > 0.4


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_conversation_goes_on(name):
    """In a cache that the caller keeps, with the picture in its first turn."""
    answers = []
    for assistant in (None, tiny.llama()):
        model, given = sg.enable(build(name)), inputs(name, "one")
        cache, drafting = DynamicCache(config=model.config.get_text_config()), {}
        if assistant is not None:
            drafting = {"assistant": assistant}
        first = say(model, given, cache=cache, **drafting)
        more = {"input_ids": torch.cat([first, torch.tensor([[7, 8, 9]])], 1)}
        more["attention_mask"] = torch.ones_like(more["input_ids"])
        answers.append(say(model, more, cache=cache, **drafting))
    assert torch.equal(*answers)


def test_several_answers_to_one_picture():
    given = inputs("qwen2_5_vl", "one")
    kwargs: dict[str, Any] = {"num_return_sequences": 3, "do_sample": True}
    known = say(target("qwen2_5_vl"), given, assistant=sg.Plain(), **kwargs)
    script = Scripted([row.tolist() for row in known])
    assert torch.equal(say(target("qwen2_5_vl"), given, assistant=script, **kwargs), known)
    assert len({tuple(row) for row in known.tolist()}) == 3


# ------------------------------------------------------------------------------------------------------ refusals


def test_mllama_in_a_cache_that_is_cropped_is_refused():
    with pytest.raises(ValueError, match="MllamaForConditionalGeneration keeps pictures in the cache of its text"):
        say(target("mllama"), inputs("mllama", "one"), assistant=sg.Plain(), cache_implementation="static")


def test_a_picture_without_ids_is_refused():
    """GIT keeps one in its cache; nobody is told how many columns it takes."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hf.GitForCausalLM(hf.GitConfig(vocab_size=VOCAB, vision_config=EYE, **sizes)).eval()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match=r"GitForCausalLM \(git\) cannot check several tokens in one pass"):
        sg.enable(model).generate(**ONE.inputs(), assistant=sg.Plain(), max_new_tokens=4)


class Uncounted(hf.LlamaForCausalLM):
    """Drops the positions that it is given."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "position_ids": None}


def test_dropped_positions_are_noticed():
    model = Uncounted(tiny.llama().config).eval()
    with pytest.raises(ValueError, match="Uncounted drops its position ids in prepare_inputs_for_generation"):
        sg.enable(model).generate(**RAGGED.inputs(), assistant=sg.Plain(), max_new_tokens=4)


class Carrying(hf.LlamaForCausalLM):
    """Carries something from token to token."""

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super()._update_model_kwargs_for_generation(*args, **kwargs)


def test_other_inputs_that_are_carried_are_refused():
    model = Carrying(tiny.llama().config).eval()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match="Carrying carries inputs from token to token in a way of its own"):
        sg.enable(model).generate(**ONE.inputs(), assistant=sg.Plain(), max_new_tokens=4)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_call_runs_on_is_known_beforehand(name):
    given = inputs(name, "ragged")
    reasons = rehearse(copy.copy(target(name)), **given, assistant=sg.Plain(), max_new_tokens=4).reasons
    assert (reasons.cropped is not None) == (name in CROPPED)
