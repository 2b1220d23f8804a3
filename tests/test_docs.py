"""What the documents say runs as it stands."""

import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from transformers import PreTrainedModel
from typer.testing import CliRunner

import hf_specgen as sg
from hf_specgen.bench import smollm2
from hf_specgen.cli import app

ROOT = Path(__file__).parents[1]
NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page, with the folder on this machine in place of the hub's names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [local(block) for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def local(text: str) -> str:
    for name in NAMES:
        text = text.replace(name, str(smollm2.folder()))
    return text


def two_layers() -> PreTrainedModel:
    """A drafter that costs little: the model's first two layers."""
    model, _ = smollm2.load()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    return model


def test_every_python_block_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace = {"small_model": two_layers()}
    for block in blocks("README.md", "python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert "tokens a pass" in capsys.readouterr().out


def test_the_drafter_of_the_guide_runs_and_changes_nothing() -> None:
    model, tokenizer = smollm2.load()
    inputs = tokenizer("one one one one", return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    namespace = {"model": sg.enable(model), "inputs": inputs}
    for block in blocks("docs/write-a-drafter.md", "python"):
        exec(compile(block, "write-a-drafter.md", "exec"), namespace)
    drafted = model.generate(**inputs, assistant=namespace["RepeatLast"](), max_new_tokens=16, do_sample=False)
    assert torch.equal(drafted, plain)


def test_the_command_of_the_readme_runs() -> None:
    command = next(block for block in blocks("README.md", "bash") if block.startswith("hf-specgen"))
    words = re.findall(r'"([^"]*)"|(\S+)', command)[1:]
    arguments = [quoted or word for quoted, word in words]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "12", "--set", "do_sample=false"])
    assert result.exit_code == 0, result.output
    assert "Paris" in result.stdout
    assert "tokens in" in result.stderr


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([a-z-]+)", "\n".join(blocks("README.md", "bash")), re.MULTILINE)
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_notebook_runs() -> None:
    notebook = nbformat.read(ROOT / "docs" / "colab_quickstart.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        # As it stands but for the model's place and for its length: a test need not be convinced by the numbers.
        cell.source = local(cell.source).replace('"max_new_tokens": 48', '"max_new_tokens": 12')
    done = NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", []))
    assert printed.count("identical: True") == 2
    assert printed.count("  yes") == 4, printed
