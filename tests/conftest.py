"""Fixtures of all tests, and what fails a test beside its assertions."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import tiny
import torch

from hf_specgen import generation
from hf_specgen.length import as_length

# The training scripts import one another as they do when a person runs one.
sys.path.append(str(Path(__file__).parent.parent / "training"))

# What makes a test fail where transformers says it in a log; warnings are errors by pyproject's filterwarnings.
DEPRECATED = re.compile(r"deprecat|will be removed", re.IGNORECASE)


class Deprecations(logging.Handler):
    """Collects what transformers says of things that will go."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if DEPRECATED.search(record.getMessage()):
            self.found.append(record.getMessage())


def _without_deprecations(item: pytest.Item) -> Iterator[None]:
    logger, handler = logging.getLogger("transformers"), Deprecations()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if handler.found:
        pytest.fail(f"{item.nodeid} made transformers log: {handler.found}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _without_deprecations(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _without_deprecations(item)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the hub for anything, whatever name it gives an assistant."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """How deep "auto" drafts depends on the clock, and so what a test shows: whoever says nothing drafts one depth."""
    monkeypatch.setattr(generation, "as_length", lambda asked: as_length(tiny.DEPTH if asked is None else asked))


def pytest_configure() -> None:
    # Before any test: two workers with two threads each stall one another, and sums in threads may round differently.
    torch.set_num_threads(1)


@pytest.fixture(params=["sdpa", "eager"])
def attention(request: pytest.FixtureRequest) -> str:
    """Both of the implementations that take a mask."""
    name: str = request.param
    return name


@pytest.fixture
def model() -> tiny.LlamaForCausalLM:
    """A stock tiny Llama, nobody else's; see `tiny.llama`."""
    return tiny.llama()


@pytest.fixture
def windowed() -> tiny.MistralForCausalLM:
    """A stock tiny Mistral that sees 8 tokens."""
    return tiny.mistral()
