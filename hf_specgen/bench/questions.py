"""What is asked: questions of Spec-Bench (Xia et al. 2024, arXiv 2401.07851) in its six categories, and code edits."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_specgen.bench.prompts import EDITS
from hf_specgen.bench.smollm2 import cache

HOME = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
FILE = "question.jsonl"
TIMEOUT_S = 20.0

# The file names the six by their tasks, and MT-bench's part by MT-bench's categories.
CATEGORIES = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), "conversation"
    ),
    "translation": "translation",
    "summarization": "summarisation",
    "qa": "question answering",
    "math_reasoning": "mathematics",
    "rag": "RAG",
}
CODE_EDITS = "code edits"
# The answers of these copy from their prompts.
COPYING = ("summarisation", "RAG", CODE_EDITS)


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        name: Spec-Bench's `question_id`, or the name of a code edit.
        category: of this benchmark.
        prompt: the first turn.
    """

    name: str
    category: str
    prompt: str


def load(path: Path | None = None) -> dict[str, list[Question]]:
    """All questions by category, Spec-Bench's in the order of its file.

    Args:
        path: its file, or the folder that holds it. None: as it was fetched, which is done the first time.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: it has to be fetched and cannot be.
        ValueError: a line is not a question of Spec-Bench.
    """
    file = fetched() if path is None else path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; without --questions it is fetched from {HOME}")
    pools: dict[str, list[Question]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            question = Question(str(entry["question_id"]), CATEGORIES[entry["category"]], entry["turns"][0])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{file}, line {number}, is not a question of Spec-Bench: {error!r}") from error
        pools.setdefault(question.category, []).append(question)
    pools[CODE_EDITS] = [Question(name, CODE_EDITS, prompt) for name, prompt in EDITS.items()]
    return pools


def fetched() -> Path:
    """The file in this package's cache."""
    file = cache() / "spec_bench" / FILE
    if not file.exists():
        try:
            with urllib.request.urlopen(HOME, timeout=TIMEOUT_S) as answer:
                content = answer.read()
        except (urllib.error.URLError, TimeoutError) as error:
            raise RuntimeError(
                f"{HOME} cannot be reached ({error}); get the file by other means and name it: --questions {FILE}"
            ) from error
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(file)
    return file


def pick(pool: Sequence[Question], count: int, rows: int = 1) -> list[list[Question]]:
    """`count` batches of `rows` questions, spread evenly; a pool that is too small is gone through again.

    Half of a file, every second question of it, gives the same first questions as the whole.
    """
    starts = [len(pool) * place // count for place in range(count)]
    return [[pool[(start + row) % len(pool)] for row in range(rows)] for start in starts]
