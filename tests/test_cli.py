"""The command line, on a tiny model that the tests make."""

import ast
import json
from pathlib import Path

import families
import pytest
import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers import __version__ as VERSION
from typer.testing import CliRunner, Result

import hf_specgen as sg
from hf_specgen import cli


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, so that a character can be several tokens."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=letters, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.llama(vocab_size=len(tokenizer)).float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, ["generate", *arguments], input=stdin)


def test_the_command_line_needs_the_core_install_only() -> None:
    tree = ast.parse(Path(cli.__file__).read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    allowed = {"__future__", "collections", "contextlib", "dataclasses", "json", "sys", "typing"}
    assert {name.split(".")[0] for name in names} <= allowed | {"torch", "transformers", "typer", "hf_specgen"}


def test_it_tells_its_versions() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"hf_specgen {sg.__version__}, transformers {VERSION}, torch {torch.__version__}\n"


def test_the_text_is_that_of_generate_whatever_drafts(folder: Path) -> None:
    model, tokenizer = tiny.LlamaForCausalLM.from_pretrained(folder), cli.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("abcabcab", return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    plain = tokenizer.decode(ids)
    config = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3})
    for assistant in ("ngram", "plain", str(folder), config):
        result = run("--model", str(folder), "--assistant", assistant, "--max-new-tokens", "20", "abcabcab")
        assert result.exit_code == 0, result.output
        # An incomplete character at the end is never shown.
        assert result.stdout.rstrip("\n") == plain.rstrip("�"), assistant
        assert "20 tokens in" in result.stderr


def test_the_prompt_may_come_from_standard_input(folder: Path) -> None:
    arguments = ["--model", str(folder), "--max-new-tokens", "8"]
    assert run(*arguments, "-", stdin="abcab").stdout == run(*arguments, "abcab").stdout


def test_settings_reach_generate_and_mistakes_are_named(folder: Path) -> None:
    arguments = ["--model", str(folder), "--max-new-tokens", "8", "ab"]
    seeded = [*arguments, "--set", "do_sample=true", "--set", "seed=3"]
    assert run(*seeded).stdout == run(*seeded).stdout
    assert run(*seeded).stdout != run(*arguments).stdout
    for wrong, word in (("num_beams=2", "beam"), ("nonsense", "name=value"), ("acceptance=maybe", "matching")):
        result = run(*arguments, "--set", wrong)
        assert result.exit_code != 0
        assert word in result.output


def test_report_89_the_chat_template_gives_the_same_ids_with_and_without_a_drafter(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    chat.chat_template = (
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    turn = [{"role": "user", "content": "hi"}]
    expected = chat.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert torch.equal(cli.encode(chat, "hi")["input_ids"], expected["input_ids"])
    assert chat.decode(cli.encode(chat, "hi")["input_ids"][0]) == "<hi>:"
    assert chat.decode(cli.encode(chat, "hi", raw=True)["input_ids"][0]) == "hi"


def test_a_character_of_several_tokens_waits_until_it_is_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    text = cli.Text(tokenizer)
    said = "aé€😀b"
    parts = [text.add(token) for token in tokenizer(said)["input_ids"]]
    assert "".join(parts) == said
    assert [part for part in parts if part] == list(said)


def test_drafted_pieces_are_told_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("abcd")["input_ids"]
    steps = [sg.Step([ids[:1]], [0], [0]), sg.Step([ids[1:]], [2], [2])]
    assert list(cli.pieces(steps, tokenizer)) == [("a", False), ("b", True), ("c", True), ("d", False)]


def checked(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["check", *arguments])


def test_a_check_prints_the_report_and_fails_where_a_call_would(folder: Path) -> None:
    model, tokenizer = tiny.LlamaForCausalLM.from_pretrained(folder), cli.AutoTokenizer.from_pretrained(folder)
    alone = checked(str(folder))
    assert (alone.exit_code, alone.stdout) == (0, f"{sg.check(model)}\n")
    itself = checked(str(folder), "--assistant", str(folder), "--set", "max_new_tokens=5", "--batch", "2", "--probe")
    assert itself.exit_code == 0
    assert "equal, token by token" in itself.stdout
    assert "agrees to rounding of float32" in itself.stdout
    for wrong in (["--assistant", '{"method": "ngrams"}'], ["--set", "num_beams=2"]):
        refused = checked(str(folder), *wrong)
        assert refused.exit_code == 1
        assert "refused, because of the a" in refused.stdout
    assert sg.check(model, sg.PromptLookup(), tokenizer=tokenizer, stop_strings="ab").ok
    assert checked(str(folder), "--assistant", "ngram", "--set", "stop_strings=ab").exit_code == 0


def test_a_check_takes_every_kind_of_model_and_one_without_a_tokenizer(tmp_path: Path) -> None:
    families.build("t5").save_pretrained(tmp_path)
    result = checked(str(tmp_path), "--assistant", "plain")
    assert result.exit_code == 0, result.output
    assert "T5ForConditionalGeneration (t5)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["check", "no/such/folder"], "no/such/folder", 2),
        (["check", "FOLDER", "--assistant", "no/such/drafter"], "no/such/drafter", 1),
        (["check", "FOLDER", "--assistant", "{bad"], "is not JSON", 2),
        (["generate", "hello", "--model", "no/such/folder"], "no/such/folder", 2),
        (["generate", "hello", "--model", "FOLDER", "--assistant", "no/such/drafter"], "no/such/drafter", 2),
    ],
)
def test_what_cannot_be_loaded_is_told_without_a_traceback(
    folder: Path, arguments: list[str], message: str, code: int
) -> None:
    result = CliRunner().invoke(cli.app, [str(folder) if one == "FOLDER" else one for one in arguments])
    assert result.exit_code == code
    assert message in "".join(result.output.split()) or message in result.output
    assert "Traceback" not in result.output
