"""Loading drafters: what a path turns out to be, what it is checked against, how often it is read, vLLM's fields."""

import gc
import json
import logging
import os
import threading
import weakref
from pathlib import Path

import huggingface_hub
import published
import pytest
import tiny
import torch
from generating import said
from published import eagle as published_eagle
from published import medusa as published_medusa
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_specgen as sg
from hf_specgen import cli, loading
from hf_specgen.assistants import named, resolve
from hf_specgen.heads import checkpoint, recorded
from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.eagle import EagleHead
from hf_specgen.heads.layouts import LAYOUTS, layout_of
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.vllm_config import ENGINE, METHODS, NEUTRAL

ONE = tiny.ONE
HEADS = 3

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


@pytest.fixture(autouse=True)
def _fresh():
    recorded._warn.cache_clear()


def numbered(prefix: str = "") -> dict[str, torch.Tensor]:
    """Medusa's own keys at the size of the tiny target."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator) / 8

    tensors = {}
    for head in range(HEADS):
        tensors[f"{prefix}{head}.0.linear.weight"] = drawn(32, 32)
        tensors[f"{prefix}{head}.0.linear.bias"] = drawn(32)
        tensors[f"{prefix}{head}.1.weight"] = drawn(tiny.VOCAB, 32)
    return tensors


def medusa_file(folder: Path) -> Path:
    folder.mkdir()
    torch.save(numbered(), folder / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/tiny"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "medusa_lm_head.pt"


def model_folder(folder: Path) -> Path:
    tiny.sibling(tiny.llama()).float().save_pretrained(folder)
    return folder


def both(folder: Path) -> Path:
    """A model with its heads, as Medusa-2 has them."""
    model_folder(folder)
    save_file({**load_file(folder / "model.safetensors"), **numbered("medusa_head.")}, folder / "model.safetensors")
    return folder


def saved(head, folder: Path) -> Path:
    head.save_pretrained(folder)
    return folder


MAKE = {
    "medusa": lambda path, target: medusa_file(path).parent,
    "medusa file": lambda path, target: medusa_file(path),
    "medusa and model": lambda path, target: both(path),
    "own medusa": lambda path, target: saved(MedusaHeads.fresh(target, num_heads=HEADS), path),
    "eagle": lambda path, target: saved(EagleHead.fresh(target, method="eagle"), path),
    "eagle3": lambda path, target: saved(EagleHead.fresh(target, method="eagle3", feature_layers=[0, 1, -1]), path),
    "model": lambda path, target: model_folder(path),
}
KIND = {
    **dict.fromkeys(("medusa", "medusa file", "medusa and model", "own medusa"), (sg.Medusa, "medusa", "heads")),
    "eagle": (sg.Eagle, "eagle", "head"),
    "eagle3": (sg.Eagle, "eagle3", "head"),
    "model": (sg.DraftModel, "draft_model", "model"),
}
SEEN = {
    "medusa": "Medusa-1: 3 Medusa heads, 12,384 parameters; trained for org/tiny",
    "medusa and model": "Medusa-2: 3 Medusa heads, 12,384 parameters",
    "own medusa": "hf_specgen's Medusa: 3 Medusa heads, 12,384 parameters; trained for a model (2 layers, hidden si",
    "eagle": "hf_specgen's EAGLE: an eagle head of 1 layer,",
    "eagle3": "hf_specgen's EAGLE: an eagle3 head of 1 layer,",
    "model": "the causal LM LlamaForCausalLM, ",
}


@pytest.mark.parametrize("what", MAKE)
def test_a_path_is_recognised_by_what_is_in_it(model, tmp_path, what):
    path = MAKE[what](tmp_path / "it", model)
    drafter = sg.load_assistant(path, model)
    kind, _, field = KIND[what]
    network = getattr(drafter, field)
    assert type(drafter) is kind
    assert drafter.num_assistant_tokens is None
    assert (network.dtype, network.device, network.training) == (torch.float64, torch.device("cpu"), False)
    assert not any(weight.isnan().any() for weight in network.parameters())
    assert "parameters" in named(drafter)
    found = resolve(path, model)
    assert found.origin.startswith(SEEN.get(what, SEEN["medusa"]))
    assert (type(found.drafter), found.tokens) == (kind, None)


@pytest.mark.parametrize("what", MAKE)
def test_a_path_drafts_and_changes_no_text(model, tmp_path, what):
    path, stats = MAKE[what](tmp_path / "it", model), sg.Stats()
    expected = said(model, ONE, 12)
    kwargs = {**ONE.inputs(), "max_new_tokens": 12, "do_sample": False, "num_assistant_tokens": 3}
    for assistant in (str(path), path, {"model": path}, {"method": KIND[what][1], "model": str(path)}):
        answer = sg.enable(model).generate(**kwargs, assistant=assistant, stats=stats)
        assert answer[:, ONE.columns :].tolist() == expected
    assert stats.drafted > 0


@pytest.mark.parametrize("what", ["medusa", "medusa and model", "eagle", "eagle3", "model"])
@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "draft_model"])
def test_a_method_that_contradicts_what_is_there_is_refused_and_both_named(model, tmp_path, what, method):
    path, kind = MAKE[what](tmp_path / "it", model), KIND[what][1]
    if method == kind or (method, what) == ("draft_model", "medusa and model"):
        assert resolve({"method": method, "model": path}, model).drafter is not None
        return
    with pytest.raises(ValueError, match=f"method='{method}', but .*it ") as told:
        resolve({"method": method, "model": path}, model)
    assert kind in str(told.value) or "Medusa-1" in str(told.value) or "hf_specgen's EAGLE" in str(told.value)


def test_of_a_model_with_heads_either_may_be_wanted(model, tmp_path):
    path = both(tmp_path / "it")
    assert isinstance(resolve(path, model).drafter, sg.Medusa)
    assert isinstance(resolve({"method": "draft_model", "model": path}, model).drafter, sg.DraftModel)


PUBLISHED = [*published_medusa.ALL, *published_eagle.READ, *published_eagle.REFUSED]
# By what the fixtures are called; the first that fits.
PUBLISHERS = {
    "FasterDecoding/medusa-v1.0": "Medusa-2",
    "ModelOpt, ": "ModelOpt's Medusa",
    "nvidia/": "ModelOpt's Medusa",
    "abhigoyal/vllm": "vLLM's Medusa",
    "vLLM, ": "vLLM's Medusa",
    "speculators-eagle": "speculators' EAGLE-1",
    "speculators-hass": "speculators' EAGLE-1",
    "speculators-": "speculators' EAGLE-3",
    "vllm-eagle": "vLLM's EAGLE-1",
    **dict.fromkeys(("eagle3-", "specforge-", "angelslim-", "sglang-", "modelopt-"), "EAGLE-3"),
    **dict.fromkeys(("eagle-", "hass-"), "EAGLE-1/2"),
    "": "Medusa-1",
}


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.name)
def test_a_published_layout_is_told_from_all_others(tmp_path, one):
    published.fill(one, tmp_path / "it", seed=0)
    opened = Checkpoint.open(tmp_path / "it")
    expected = next(name for start, name in PUBLISHERS.items() if one.name.startswith(start))
    assert layout_of(opened).name == expected
    # The lines of one method may overlap, the stricter first; those of two do not.
    methods = {"Medusa" in layout.name for layout in LAYOUTS if layout.recognises(opened)}
    assert methods == {"Medusa" in expected}


def test_of_a_model_with_heads_the_heads_alone_are_read(model, tmp_path, monkeypatch):
    seen, read = [], checkpoint._read
    monkeypatch.setattr(checkpoint, "_read", lambda file, keys: seen.extend(keys) or read(file, keys))
    sg.load_assistant(both(tmp_path / "it"), model)
    assert sorted(seen) == sorted(numbered("medusa_head."))


def test_a_model_is_no_head(tmp_path):
    opened = Checkpoint.open(model_folder(tmp_path / "it"))
    assert [layout.name for layout in LAYOUTS if layout.recognises(opened)] == []


def test_loaded_heads_and_models_are_taken_as_they_are(model):
    heads, head = MedusaHeads.fresh(model), EagleHead.fresh(model, method="eagle")
    assert resolve(heads, model).drafter.heads is heads
    assert resolve({"method": "medusa", "model": heads}, model).drafter.heads is heads
    assert resolve({"model": head, "num_speculative_tokens": 2}, model).tokens == 2
    assert resolve(head, model).origin is None
    with pytest.raises(ValueError, match="method='eagle3', but EagleHead is 'eagle'"):
        resolve({"method": "eagle3", "model": head}, model)


# -------------------------------------------------------------------------------------------------------- refusals


def test_what_is_neither_head_nor_model_says_what_was_tried(model, tmp_path):
    save_file({"layers.0.thing": torch.ones(1), "layers.1.thing": torch.ones(1)}, tmp_path / "model.safetensors")
    for door in (sg.load_assistant, resolve):
        with pytest.raises(ValueError, match="no head of a known layout") as told:
            door(tmp_path, model)
        for words in ("layers.{0..1}.thing", "Medusa-1", "EAGLE-3", "And it is no causal LM: "):
            assert words in str(told.value)


@pytest.mark.parametrize("as_model", [False, True])
def test_a_model_that_lacks_weights_does_not_draft_noise(model, tmp_path, as_model):
    file = model_folder(tmp_path / "it") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assistant = {"method": "draft_model", "model": file.parent} if as_model else file.parent
    with pytest.raises(ValueError, match=r"lacks the weights model.layers.1.mlp.up_proj.weight of a LlamaForCausalLM"):
        resolve(assistant, model)


def test_a_model_with_tied_embeddings_lacks_nothing(model, tmp_path):
    tiny.llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert isinstance(sg.load_assistant(tmp_path, model), sg.DraftModel)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ngram", 'pass assistant={"method": "ngram"}'),
        ("suffix", 'pass assistant={"method": "suffix"}'),
        ("eagle3", 'pass assistant={"method": "eagle3", "model": path_or_id}'),
        ("draft_model", 'pass assistant={"method": "draft_model", "model": path_or_id}'),
        ("plain", r"pass assistant=hf_specgen.Plain\(\)"),
        ("", "assistant='' is not a drafter"),
        ("no/such", "there is no file or folder 'no/such', and no hub repository of that id can be loaded"),
        ("/no/such/path", "there is no file or folder '/no/such/path'"),
    ],
)
def test_a_string_that_is_no_path_is_refused_before_any_pass(model, word, message):
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match=message):
        sg.enable(model).generate(**ONE.inputs(), max_new_tokens=4, assistant=word)


@pytest.mark.parametrize("what", ["own medusa", "eagle", "eagle3"])
@pytest.mark.parametrize(("field", "name"), [("num_hidden_layers", "num_layers"), ("vocab_size", "vocab_size")])
def test_a_head_for_a_target_of_other_sizes_is_refused_and_both_named(model, tmp_path, what, field, name):
    path = MAKE[what](tmp_path / "it", model)
    other = tiny.llama(**{field: 112}) if field == "vocab_size" else tiny.llama(**{field: 3})
    ours, theirs = getattr(model.config, field), getattr(other.config, field)
    with pytest.raises(ValueError, match=f"{name}={ours}; LlamaForCausalLM has {name}={theirs}"):
        sg.load_assistant(path, other)


@pytest.mark.parametrize("what", ["own medusa", "eagle", "eagle3"])
def test_a_head_for_a_target_with_other_weights_is_warned_of(model, tmp_path, what, caplog):
    path = MAKE[what](tmp_path / "it", model)
    with caplog.at_level(logging.WARNING):
        sg.load_assistant(path, model)
        sg.load_assistant(path, tiny.llama().bfloat16())
        assert "was trained for" not in caplog.text
        sg.load_assistant(path, tiny.llama(seed=1))
    assert "whose embeddings differ" in caplog.text


def test_a_target_without_weights_gets_its_heads(tmp_path, model):
    path = MAKE["own medusa"](tmp_path / "it", model)
    with torch.device("meta"):
        empty = type(model)(model.config)
    heads = sg.load_assistant(path, empty).heads
    assert heads.device == torch.device("cpu")
    assert not any(weight.isnan().any() for weight in heads.parameters())


# ------------------------------------------------------------------------------------------------------- loaded once


@pytest.fixture
def loads(monkeypatch):
    """The sources that were read."""
    read, load = [], loading.load
    monkeypatch.setattr(loading, "load", lambda source, target: read.append(source) or load(source, target))
    return read


def test_a_path_is_read_once_for_each_live_target(model, tmp_path, loads, monkeypatch):
    path = medusa_file(tmp_path / "it")
    first = resolve(path, model).drafter
    monkeypatch.chdir(tmp_path)
    assert resolve(str(path), model).drafter is first
    assert resolve(Path("it") / path.name, model).drafter is first
    assert resolve({"method": "medusa", "model": path}, model).drafter is first
    assert len(loads) == 1
    other = tiny.llama()
    kept = weakref.ref(resolve(path, other).drafter.heads)
    assert kept() is not first.heads
    assert len(loads) == 2
    del other
    gc.collect()
    assert kept() is None
    # Whoever loads one himself may train it: it is his.
    assert sg.load_assistant(path, model).heads is not first.heads


def test_a_folder_that_is_saved_anew_is_read_anew(model, tmp_path, loads):
    path = saved(MedusaHeads.fresh(model), tmp_path / "it")
    first = resolve(path, model).drafter.heads
    changed = MedusaHeads.fresh(model)
    with torch.no_grad():
        changed.blocks[0][0].weight.fill_(0.25)
    saved(changed, path)
    file = path / "model.safetensors"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))  # file systems with a coarse clock
    second = resolve(path, model).drafter.heads
    assert (first.blocks[0][0].weight == 0).all()
    assert (second.blocks[0][0].weight == 0.25).all()
    assert resolve(path, model).drafter.heads is second
    assert len(loads) == 2
    kept = weakref.ref(first)
    del first
    gc.collect()
    assert kept() is None


def test_a_target_that_changes_its_dtype_gets_drafters_of_that(model, tmp_path, loads):
    path = medusa_file(tmp_path / "it")
    assert resolve(path, model).drafter.heads.dtype == torch.float64
    model.float()
    assert resolve(path, model).drafter.heads.dtype == torch.float32
    assert len(loads) == 2


def test_what_failed_is_tried_again(model, tmp_path):
    path = tmp_path / "it"
    with pytest.raises(ValueError, match="there is no file or folder"):
        resolve(path, model)
    medusa_file(path)
    assert isinstance(resolve(path, model).drafter, sg.Medusa)


def test_two_threads_read_a_path_once(model, tmp_path, loads):
    path, together, found = medusa_file(tmp_path / "it"), threading.Barrier(2), {}

    def work(number):
        together.wait()
        found[number] = resolve(path, model).drafter

    tiny.in_two_threads(work)
    assert found[0] is found[1]
    assert len(loads) == 1


# --------------------------------------------------------------------------------------------- the hub, and its code


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An offline cache of the hub; returns a function that puts a folder into it under an id and a branch."""
    root = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))

    def put(name, make, branch="main", commit="a" * 40):
        repository = root / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        (repository / "snapshots").mkdir(exist_ok=True)
        make(repository / "snapshots" / commit)

    return put


@pytest.mark.parametrize("what", ["medusa", "own medusa", "eagle3", "model"])
def test_a_hub_id_is_loaded_out_of_the_cache(model, hub, what, loads):
    hub("org/it", lambda folder: MAKE[what](folder, model))
    kind = KIND[what][0]
    assert isinstance(sg.load_assistant("org/it", model), kind)
    loads.clear()
    for _ in range(2):
        assert isinstance(resolve("org/it", model).drafter, kind)
    assert len(loads) == 1
    with pytest.raises(ValueError, match="with revision 'newer'"):
        sg.load_assistant("org/it", model, revision="newer")


def test_revisions_are_different_drafters(model, hub):
    hub("org/it", lambda folder: saved(MedusaHeads.fresh(model, num_heads=2), folder))
    hub("org/it", lambda folder: saved(MedusaHeads.fresh(model, num_heads=4), folder), "old", "b" * 40)
    for revision, heads in ((None, 2), ("old", 4), ("b" * 40, 4), ("main", 2)):
        config = {"method": "medusa", "model": "org/it"} | ({} if revision is None else {"revision": revision})
        assert resolve(config, model).drafter.heads.config.num_heads == heads
    hub("org/lm", model_folder)
    hub("org/lm", tiny.llama(num_hidden_layers=1).save_pretrained, "old", "b" * 40)
    for config, layers in (({}, 2), ({"revision": "old"}, 1), ({"revision": "old", "method": "draft_model"}, 1)):
        assert resolve({"model": "org/lm", **config}, model).drafter.model.config.num_hidden_layers == layers


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class OddConfig(LlamaConfig):
    model_type = "odd"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


@pytest.mark.parametrize("door", ["load_assistant", "draft_model", "no method", "head"])
def test_code_of_a_repository_runs_only_where_it_is_trusted(model, tmp_path, monkeypatch, door):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    mark = tmp_path / "mark"
    folder = medusa_file(tmp_path / "it").parent if door == "head" else model_folder(tmp_path / "it")
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    odd = {**config, "model_type": "odd", "architectures": ["OddForCausalLM"], "auto_map": code}
    (folder / "config.json").write_text(json.dumps(odd))
    (folder / "odd.py").write_text(CODE.format(mark=str(mark)))

    def load(trusted):
        if door in ("load_assistant", "head"):
            return sg.load_assistant(folder, model, trust_remote_code=trusted)
        method = {"method": "draft_model"} if door == "draft_model" else {}
        return resolve({**method, "model": folder, "trust_remote_code": trusted}, model).drafter

    if door == "head":  # needs none of it, even where it is trusted
        assert isinstance(load(True), sg.Medusa)
        assert not mark.exists()
        return
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load(False)
    assert not mark.exists()
    assert type(load(True).model).__name__ == "OddForCausalLM"
    assert mark.exists()


# ---------------------------------------------------------------------------------------------------- vLLM's fields


def test_the_methods_are_vllm_s():
    assert METHODS == ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3")


@pytest.mark.parametrize("method", ["ngram", "suffix", "medusa", "draft_model"])
def test_fields_that_change_nothing_are_passed_over_and_others_refused_by_name(model, tmp_path, method):
    config = {"method": method, "num_speculative_tokens": 2}
    if method in ("medusa", "draft_model"):
        config["model"] = MAKE["medusa" if method == "medusa" else "model"](tmp_path / "it", model)
    everything = {name: (values or (None,))[-1] for name, (values, _) in NEUTRAL.items()}
    assert resolve({**config, **everything}, model).tokens == 2
    assert resolve({**config, **dict.fromkeys(NEUTRAL)}, model).tokens == 2
    for name, (values, instead) in NEUTRAL.items():
        for value in values:
            assert resolve({**config, name: value}, model).tokens == 2
        with pytest.raises(ValueError, match=f"{name}='else' has no meaning here: ") as told:
            resolve({**config, name: "else"}, model)
        assert str(told.value).endswith(instead)


def test_unknown_fields_are_refused_before_anything_is_loaded(model, loads):
    for method in ({}, {"method": "medusa"}, {"method": "draft_model"}):
        with pytest.raises(ValueError, match="takes no 'color'"):
            resolve({**method, "model": "no/such", "color": 1}, model)
    assert loads == []


@pytest.mark.parametrize("what", ["medusa", "eagle3", "model"])
@pytest.mark.parametrize(("value", "sample"), [("greedy", False), ("probabilistic", True), (None, True)])
def test_how_drafts_are_drawn_is_vllm_s_draft_sample_method(model, tmp_path, what, value, sample):
    path = MAKE[what](tmp_path / "it", model)
    assert resolve({"model": path, "draft_sample_method": value}, model).drafter.sample is sample
    with pytest.raises(ValueError, match="draft_sample_method='warm' is not one of 'greedy', 'probabilistic'"):
        resolve({"model": path, "draft_sample_method": "warm"}, model)
    with pytest.raises(ValueError, match="takes no 'draft_sample_method'"):
        resolve({"method": "ngram", "draft_sample_method": "probabilistic"}, model)
    assert resolve({"method": "ngram", "draft_sample_method": "greedy"}, model).tokens is None


PATHS = [(0,), (1,), (0, 0), (0, 0, 1)]


@pytest.mark.parametrize("tree", [PATHS, str(PATHS), [list(path) for path in PATHS]], ids=["list", "text", "lists"])
def test_a_token_tree_is_medusa_s_choices(model, tmp_path, tree):
    path = medusa_file(tmp_path / "it")
    for tokens in (4, None):
        config = {"method": "medusa", "model": path, "speculative_token_tree": tree, "num_speculative_tokens": tokens}
        found = resolve(config, model)
        assert sorted(found.drafter.choices) == sorted(PATHS)
        assert found.tokens == 3
    with pytest.raises(ValueError, match="num_speculative_tokens=3, but speculative_token_tree has 4 nodes"):
        resolve({**config, "num_speculative_tokens": 3}, model)


@pytest.mark.parametrize("tree", ["[", "", [], [()], [(0, -1)], [(0.5,)], 3, "import os", [("a",)]])
def test_what_is_no_token_tree_is_refused(model, tree):
    with pytest.raises(ValueError, match="is no list of paths such as"):
        resolve({"method": "medusa", "model": "no/such", "speculative_token_tree": tree}, model)


@pytest.mark.parametrize("what", ["eagle", "eagle3", "model"])
def test_a_token_tree_has_no_meaning_elsewhere(model, tmp_path, what):
    path = MAKE[what](tmp_path / "it", model)
    with pytest.raises(
        ValueError, match=r"speculative_token_tree has no meaning for .*hf_specgen\.(Eagle|DraftModel)\("
    ):
        resolve({"model": path, "speculative_token_tree": PATHS}, model)
    assert resolve({"model": path, "speculative_token_tree": None}, model).tokens is None


def test_a_config_without_a_method_is_read_as_vllm_reads_it(model, tmp_path):
    assert resolve({"model": "ngram", "prompt_lookup_max": 4}, model).drafter == sg.PromptLookup(4, 4)
    assert resolve({"model": "[ngram]"}, model).drafter == sg.PromptLookup()
    assert isinstance(resolve({"model": MAKE["eagle3"](tmp_path / "it", model)}, model).drafter, sg.Eagle)
    for config in ({}, {"num_speculative_tokens": 3}, {"method": None}, {"method": "mtp"}, {"method": "dflash"}):
        with pytest.raises(
            ValueError, match="is not one of 'ngram', 'suffix', 'draft_model', 'medusa', 'eagle', 'eagl"
        ):
            resolve(config, model)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("medusa", "method='medusa' needs 'model': a path, a hub id or a loaded MedusaHeads"),
        ("eagle", "method='eagle' needs 'model': a path, a hub id or a loaded EagleHead"),
        ("eagle3", "method='eagle3' needs 'model'"),
        ("draft_model", "method='draft_model' needs 'model': a path, a hub id or a loaded causal LM"),
    ],
)
def test_a_method_that_needs_a_model_says_so(model, method, message):
    for config in ({}, {"model": None}):
        with pytest.raises(ValueError, match=message):
            resolve({"method": method, **config}, model)
    with pytest.raises(ValueError, match="'model' is 3; it must be"):
        resolve({"method": method, "model": 3}, model)


def test_the_configs_of_the_page_are_read(model, tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    block = next(part for part in page.split("```python\n") if part.startswith("{")).split("```")[0]
    read = []
    for line in block.splitlines():
        what = next((kind for kind in ("eagle3", "medusa", "draft_model") if kind in line), "ngram")
        make = MAKE.get({"draft_model": "model"}.get(what, what))
        path = str(make(tmp_path / what, model)) if make else ""
        config = eval(line.replace("path/or/hub-id", path), {"path": path})
        read.append(type(resolve(config, model).drafter).__name__)
    assert read == ["Eagle", "Medusa", "DraftModel", "PromptLookup"]


def test_the_page_names_every_field_that_is_passed_over_or_its_kind():
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    told = {name for name in NEUTRAL if f"`{name}`" in page}
    assert {name for name, (_, instead) in NEUTRAL.items() if instead != ENGINE} - told <= {
        *("posterior_threshold", "posterior_alpha", "tensor_parallel_size"),
        *("synthetic_acceptance_rates", "synthetic_acceptance_length"),
    }


# ------------------------------------------------------------------------------------------- check, and the command


@pytest.mark.parametrize("what", ["medusa", "own medusa", "eagle3", "model"])
def test_a_report_says_what_was_recognised(model, tmp_path, what):
    path = MAKE[what](tmp_path / "it", model)
    for assistant in (str(path), {"model": path}):
        report = sg.check(model, assistant, max_new_tokens=4)
        assert report.ok, report.refusal
        assert report.recognised.startswith(SEEN[what])
        assert f"recognised as  {SEEN[what][:20]}" in str(report)
    assert sg.check(model, sg.load_assistant(path, model)).recognised is None
    assert "MedusaHeads" not in sg.check(model, sg.PromptLookup()).assistant


def test_a_report_of_what_cannot_be_loaded_says_why(model):
    report = sg.check(model, "no/such/path")
    assert (report.ok, report.at_fault, report.recognised) == (False, "assistant", None)
    assert "there is no file or folder 'no/such/path'" in report.refusal


def test_the_command_takes_a_path(model, tmp_path, monkeypatch):
    target = tmp_path / "target"
    model.float().save_pretrained(target)
    heads = saved(MedusaHeads.fresh(model), tmp_path / "heads")
    asked, load = [], AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: asked.append(name) or load(name))
    result = CliRunner().invoke(cli.app, ["check", str(target), "--assistant", str(heads)])
    assert (result.exit_code, asked) == (0, [str(target), str(heads)]), result.output
    asked.clear()
    assert CliRunner().invoke(cli.app, ["check", str(target), "--assistant", "auto"]).exit_code == 0
    assert asked == [str(target)]
    assert "hf_specgen's Medusa: 5 Medusa heads" in result.stdout
    assert cli.parse_assistant(str(heads)) == str(heads)
    file = CliRunner().invoke(cli.app, ["check", str(target), "--assistant", str(medusa_file(tmp_path / "file"))])
    assert "Medusa-1: 3 Medusa heads" in file.stdout, file.output
    refused = CliRunner().invoke(cli.app, ["check", str(target), "--assistant", "eagle3"])
    assert (refused.exit_code, "is a method, not a path" in refused.stdout) == (1, True), refused.output


def test_a_draft_model_is_loaded_by_transformers_own_loader(model, tmp_path, monkeypatch):
    asked, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: asked.append(kwargs) or load(*args, **kwargs)
    )
    resolve({"method": "draft_model", "model": model_folder(tmp_path / "it")}, model)
    assert asked[0]["trust_remote_code"] is False
