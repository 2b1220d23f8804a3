"""Reading published checkpoints: what is found in them, what of it is read, and that nothing of it is run."""

import ast
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import save_file

from hf_specgen.heads import checkpoint as module
from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.layouts import LAYOUTS, abbreviated, read_head

TENSORS = {
    "a.0.weight": torch.arange(12.0).view(3, 4),
    "a.1.weight": torch.ones(2, dtype=torch.bfloat16),
    "d2t": torch.arange(5),
    "t2d": torch.tensor([True, False]),
}
SHAPES = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in TENSORS.items()}


def write(path: Path, tensors=TENSORS) -> Path:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


def shard(folder: Path, ending: str, name: str) -> None:
    """Writes `TENSORS` in two files and their index."""
    keys = list(TENSORS)
    halves = {f"{name}-00001-of-00002{ending}": keys[:2], f"{name}-00002-of-00002{ending}": keys[2:]}
    for file, part in halves.items():
        write(folder / file, {key: TENSORS[key] for key in part})
    index = {"metadata": {}, "weight_map": {key: file for file, part in halves.items() for key in part}}
    (folder / f"{name}{ending}.index.json").write_text(json.dumps(index))


def equal(read, expected) -> bool:
    return read.keys() == expected.keys() and all(
        read[key].dtype == expected[key].dtype and torch.equal(read[key], expected[key]) for key in expected
    )


NAMES = ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", "medusa_lm_head.safetensors", "x.pth"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_and_a_file_give_the_same(tmp_path, name):
    file = write(tmp_path / name)
    (tmp_path / "config.json").write_text('{"model_type": "medusa"}')
    for path in (tmp_path, file, str(file)):
        opened = Checkpoint.open(path)
        assert opened.config == {"model_type": "medusa"}
        assert opened.shapes == SHAPES
        assert equal(opened.tensors(), TENSORS)
        assert equal(opened.tensors("a."), {key: TENSORS[key] for key in ("a.0.weight", "a.1.weight")})
        assert equal(opened.tensors(["d2t"]), {"d2t": TENSORS["d2t"]})
        assert str(path) in opened.where


def test_a_missing_config_is_an_empty_one(tmp_path):
    write(tmp_path / "medusa_lm_head.pt")
    assert Checkpoint.open(tmp_path).config == {}


@pytest.mark.parametrize(("ending", "name"), [(".safetensors", "model"), (".bin", "pytorch_model")])
def test_shards_are_read_by_their_index(tmp_path, ending, name):
    shard(tmp_path, ending, name)
    # Left over from a save in more parts.
    write(tmp_path / f"{name}-00003-of-00003{ending}", {"stale": torch.ones(1)})
    opened = Checkpoint.open(tmp_path)
    assert opened.shapes == SHAPES
    assert equal(opened.tensors(), TENSORS)
    (tmp_path / f"{name}-00002-of-00002{ending}").unlink()
    with pytest.raises(ValueError, match=f"{name}-00002-of-00002{ending}, which is not there"):
        Checkpoint.open(tmp_path)


def test_files_of_before_zip_archives_and_what_trainers_wrap_are_read(tmp_path):
    old = tmp_path / "old.pt"
    torch.save({"epoch": 3, "state_dict": TENSORS}, old, _use_new_zipfile_serialization=False)
    assert equal(Checkpoint.open(old).tensors(), TENSORS)


def test_safetensors_go_before_pickles_of_the_same_weights_only(tmp_path):
    write(tmp_path / "model.safetensors", {"same": torch.zeros(1)})
    write(tmp_path / "pytorch_model.bin", {"same": torch.ones(1), "old": torch.ones(1)})
    write(tmp_path / "medusa_lm_head.pt", {"head": torch.ones(1)})
    opened = Checkpoint.open(tmp_path)
    assert equal(opened.tensors(), {"same": torch.zeros(1), "head": torch.ones(1)})
    shard(tmp_path, ".bin", "pytorch_model")
    assert Checkpoint.open(tmp_path).shapes == opened.shapes


def test_what_trainers_leave_beside_weights_is_not_opened(tmp_path):
    write(tmp_path / "medusa_lm_head.pt")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"no checkpoint")
    assert Checkpoint.open(tmp_path).shapes == SHAPES


class Reads:
    """A safetensors file that notes what is read of it."""

    def __init__(self, opened):
        self.opened, self.keys_read = opened, []

    def __enter__(self):
        self.file = self.opened.__enter__()
        return self

    def __exit__(self, *error):
        return self.opened.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_slice(self, key):
        return SimpleNamespace(
            get_shape=self.file.get_slice(key).get_shape, get_dtype=self.file.get_slice(key).get_dtype
        )

    def get_tensor(self, key):
        self.keys_read.append(key)
        return self.file.get_tensor(key)


def test_only_the_tensors_asked_for_are_read(tmp_path, monkeypatch):
    shard(tmp_path, ".safetensors", "model")
    files = []
    safe = module._safe
    monkeypatch.setattr(module, "_safe", lambda file: files.append((file.name, Reads(safe(file)))) or files[-1][1])
    opened = Checkpoint.open(tmp_path)
    assert [reads.keys_read for _, reads in files] == [[], []]
    files.clear()
    opened.tensors("a.1")
    assert [(name, reads.keys_read) for name, reads in files] == [("model-00001-of-00002.safetensors", ["a.1.weight"])]


def test_a_pickle_is_mapped_and_read_on_no_device_for_its_shapes(tmp_path, monkeypatch):
    file, calls = write(tmp_path / "x.pt"), []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: calls.append(kwargs) or load(*args, **kwargs))
    Checkpoint.open(file)
    assert calls == [{"map_location": "meta", "weights_only": True, "mmap": True}]


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_what_was_read_does_not_change_with_its_file(tmp_path, name):
    file = write(tmp_path / name)
    opened = Checkpoint.open(file)
    read = opened.tensors()
    with file.open("r+b") as raw:
        raw.write(b"\xff" * file.stat().st_size)
    assert equal(read, TENSORS)


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", ["zip", "old", "module"])
def test_a_pickle_that_would_run_something_is_refused_and_does_not(tmp_path, kind):
    file, mark = tmp_path / "evil.pt", tmp_path / "mark"
    held = torch.nn.Linear(2, 2) if kind == "module" else {"a": torch.ones(2), "b": Evil(mark)}
    torch.save(held, file, _use_new_zipfile_serialization=kind != "old")
    with pytest.raises(ValueError, match=r"evil.pt holds more than tensors.*convert it.*safetensors.torch.save_file"):
        Checkpoint.open(file)
    assert not mark.exists()
    if kind == "zip":  # so that it would have
        pickle.loads(pickle.dumps(Evil(mark)))
        assert mark.exists()


def test_nothing_in_the_package_loads_pickles_otherwise():
    seen = 0
    for file in Path(module.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                seen += 1
                assert "weights_only=True" in ast.unparse(node), f"{file}: {ast.unparse(node)}"
    assert seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_named(tmp_path, name, part):
    file = write(tmp_path / name)
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    with pytest.raises(ValueError, match=rf"{name} is not a whole"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_pointer_of_git_lfs_is_called_that(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no weights .*; there is nothing"),
        ({"config.json": "{}"}, r"has no weights .*; there is config.json"),
        ({"x.pt": TENSORS, "config.json": "{"}, "config.json is not JSON"),
        ({"x.pt": TENSORS, "config.json": "[]"}, "config.json holds no JSON object"),
        ({"x.pt": [1, 2]}, "has no weights"),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_what_is_there(tmp_path, files, message):
    for name, held in files.items():
        if isinstance(held, str):
            (tmp_path / name).write_text(held)
        else:
            torch.save(held, tmp_path / name)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(tmp_path)


def test_a_file_that_is_no_checkpoint_and_keys_that_are_not_there_are_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt has no weights \(\*.safetensors, \*.bin, \*.pt, \*.pth\)"):
        Checkpoint.open(tmp_path / "notes.txt")
    opened = Checkpoint.open(write(tmp_path / "x.pt"))
    with pytest.raises(ValueError, match=r"x.pt has no b, c"):
        opened.tensors(["d2t", "b", "c"])


@pytest.mark.parametrize("name", ["no/such/folder", "/no/such/folder", "no-such-model", "org/name"])
def test_nothing_of_a_name_is_told(name):
    with pytest.raises(ValueError, match=f"there is no file or folder '{name}', and"):
        Checkpoint.open(name)


COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, with `org/name` in it: its main branch at one commit and `old` at another."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for branch, commit, value in (("main", COMMIT, 1.0), ("old", OLDER, 2.0)):
        (repository / "refs" / branch).write_text(commit)
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        write(folder / "model.safetensors", {"a": torch.full((1,), value)})
        (folder / "config.json").write_text('{"model_type": "medusa"}')
    return repository


@pytest.mark.parametrize(("revision", "value"), [(None, 1), ("main", 1), ("old", 2), (COMMIT, 1), (OLDER, 2)])
def test_a_hub_id_is_read_from_the_cache_when_offline(cache, revision, value, monkeypatch):
    monkeypatch.setattr(module, "model_info", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    opened = Checkpoint.open("org/name", revision)
    assert opened.tensors()["a"].item() == value
    assert opened.config == {"model_type": "medusa"}
    assert opened.where == f"org/name ({revision or 'main'}) of the hub"


@pytest.mark.parametrize(("name", "revision"), [("org/other", None), ("org/name", "newer")])
def test_what_the_cache_does_not_hold_is_told_when_offline(cache, name, revision):
    with pytest.raises(ValueError, match=rf"'{name}'.*the hub cannot be asked \(offline\)"):
        Checkpoint.open(name, revision)


def test_from_the_hub_come_the_files_that_are_read_and_no_others(cache, monkeypatch):
    asked = []

    def download(name, **kwargs):
        asked.append((name, kwargs))
        return str(cache / "snapshots" / COMMIT)

    there = ["config.json", "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", "README.md", "old/a.bin"]
    listed = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in there])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "model_info", lambda name, revision: listed)
    monkeypatch.setattr(module, "snapshot_download", download)
    assert Checkpoint.open("org/name", "old").tensors()["a"].item() == 1
    files = ["medusa_lm_head.pt", "model.safetensors", "config.json"]
    assert asked == [("org/name", {"revision": "old", "allow_patterns": files})]


def test_a_hub_out_of_reach_leaves_what_is_cached(cache, monkeypatch, caplog):
    def unreachable(name, revision):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "model_info", unreachable)
    assert Checkpoint.open("org/name").tensors()["a"].item() == 1
    assert "no route" in caplog.text


def test_a_repository_that_the_hub_does_not_show_is_not_looked_for_in_the_cache(cache, monkeypatch):
    def gated(name, revision):
        response = SimpleNamespace(headers={}, status_code=401, request=None)
        raise RepositoryNotFoundError("401 Client Error.\n\nAccess to org/name is restricted.", response=response)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "model_info", gated)
    with pytest.raises(ValueError, match=r"'org/name'.*401 Client Error. Access to org/name is restricted"):
        Checkpoint.open("org/name")


def test_keys_are_listed_by_kind():
    keys = [f"layers.{layer}.w1.weight" for layer in range(32)] + ["fc.weight", "0.0.linear.bias", "4.0.linear.bias"]
    assert abbreviated(keys) == ["layers.{0..31}.w1.weight", "fc.weight", "{0..4}.0.linear.bias"]


def test_a_layout_that_nobody_knows_lists_its_keys_and_what_is_known(tmp_path):
    save_file({f"layers.{i}.thing": torch.ones(1) for i in range(40)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "novel", "architectures": ["Novel"]}')
    with pytest.raises(ValueError, match="no head of a known layout") as told:
        read_head(Checkpoint.open(tmp_path))
    for word in ("model_type='novel'", "['Novel']", "layers.{0..39}.thing", *(layout.name for layout in LAYOUTS)):
        assert word in str(told.value)
    assert len(str(told.value)) < 2500


def test_layouts_have_names_of_their_own():
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS) > 0


# --------------------------------------------------------------------------------------------------------- malformed


def medusa(path, config, **tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name.replace("_", "."): tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


OWN = {"model_type": "hf_specgen_medusa", "hidden_size": 4, "vocab_size": 8}
BLOCK = {"blocks_0_0_weight": torch.zeros(4, 4), "blocks_0_0_bias": torch.zeros(4)}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({**OWN, "num_heads": 10**9}, BLOCK, "num_heads=1000000000, more than any head has"),
        (
            OWN,
            {**BLOCK, "blocks_99999999_0_weight": torch.zeros(4, 4)},
            r"the key blocks\.99999999\.0\.weight, a place",
        ),
        (
            {**OWN, "num_heads": 1, "hidden_act": "nope"},
            BLOCK,
            'malformed for the layout "hf_specgen\'s Medusa": KeyError',
        ),
        ({**OWN, "hidden_size": "four"}, BLOCK, "malformed for the layout"),
        ({"model_type": "medusa"}, {"blocks_0_layers_0_weight": torch.zeros(())}, "malformed for the layout"),
    ],
    ids=["endless config", "endless key", "activation", "size", "scalar"],
)
def test_what_nobody_would_write_is_an_error_that_says_where(config, tensors, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_head(Checkpoint.open(medusa(tmp_path, config, **tensors)))


def test_a_pickle_that_holds_itself_ends(tmp_path):
    held = {}
    held["model"] = held
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has no weights"):
        Checkpoint.open(tmp_path)


def test_weights_beside_a_counter_are_unwrapped(tmp_path):
    torch.save({"model": {"fc.weight": torch.ones(2)}, "step": torch.tensor(1)}, tmp_path / "pytorch_model.bin")
    assert list(Checkpoint.open(tmp_path).shapes) == ["fc.weight"]


@pytest.mark.parametrize(
    "index", ['{"weight_map": [1]}', '{"weight_map": null}', '{"weight_map": {"a": 5}}', "[" * 99_999]
)
def test_an_index_that_is_none_is_an_error(index, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"weight_map|is not JSON"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["", " ", "x" * 5000])
def test_a_name_that_no_file_can_have_is_an_error(name):
    with pytest.raises(ValueError, match=r"no path|cannot be the id|too long"):
        Checkpoint.open(name)
