"""What the package shows to the world and what its files may know of one another."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import transformers.cache_utils

PACKAGE = Path(__file__).parents[1] / "hf_specgen"

ANYTHING = None
# The arrows of the design: what each module (or folder) may import of the package. A file within a folder may import
# the folder's other files. A module that is missing here fails: decide first where it stands.
ARROWS: dict[str, set[str] | None] = {
    "draft": {"trees"},
    "trees": set(),
    "stats": set(),
    "vocabulary": set(),
    "spelling": set(),
    "theory": set(),
    "attention": set(),
    "linear": set(),
    "sampling": set(),
    "rows": set(),
    "recurrent": set(),
    "cache": {"recurrent"},
    "indexer": set(),
    "prompt": {"cache", "encoder"},
    "target": {"prompt", "draft", "cache", "recurrent", "indexer", "rope", "ranks"},
    "heads": {"trees", "attention"},
    "verify": {"draft", "sampling"},
    "ranks": {"draft"},
    "rope": set(),
    "encoder": set(),
    "walk": {"draft", "verify", "sampling", "rows", "ranks"},
    "clock": set(),
    "files": set(),
    "costs": {"files", "record"},
    "acceptance": {"draft"},
    "parts": {"acceptance", "costs", "draft", "record"},
    "record": {"acceptance"},
    "length": {"acceptance", "costs", "draft", "parts", "record", "stats"},
    "outputs": {"stats"},
    "states": {"target"},
    "loop": {"clock", "draft", "walk", "rows", "sampling", "target", "length", "states", "stats", "ranks"},
    "drafters": {
        "prompt",
        "draft",
        "trees",
        "cache",
        "target",
        "heads",
        "vocabulary",
        "spelling",
        "files",
        "ranks",
        "encoder",
    },
    "loading": {"prompt", "draft", "drafters", "heads"},
    "vllm_config": {"draft", "drafters", "loading"},
    "assistants": {"draft", "drafters", "loading", "vllm_config"},
    "refusals": {"prompt", "cache", "target", "rope", "ranks"},
    "generation": {
        "prompt",
        "refusals",
        *("loop", "assistants", "target", "sampling", "verify", "walk", "rows", "outputs"),
        *("draft", "length", "costs", "stats", "attention", "linear", "ranks", "encoder"),
    },
    "probe": {"prompt", "draft", "drafters", "target"},
    "check": {"prompt", "assistants", "generation", "attention", "drafters", "length", "probe", "rope", "target"},
    "explain": {"prompt", "generation", "drafters", "probe", "sampling"},
    "trace": {"draft", "stats"},
    "metrics": {"stats"},
    "engines": {"drafters", "heads"},
    "export": {"draft", "drafters", "heads", "engines", "files", "loading", "vllm_config"},
    "__init__": ANYTHING,  # public names only
    "__main__": ANYTHING,
    "bench": ANYTHING,
    "cli": ANYTHING,
}

CACHE_NAMES = {
    name
    for name, value in vars(transformers.cache_utils).items()
    if isinstance(value, type) and value.__module__ == "transformers.cache_utils"
}


class AtRunTime(ast.NodeVisitor):
    """Collects dotted names that a module imports or reads off `transformers`, but for `if TYPE_CHECKING:` blocks."""

    def __init__(self, folder: str):
        self.folder = folder
        self.names: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)
            return
        for statement in node.orelse:
            self.visit(statement)

    def visit_Import(self, node: ast.Import) -> None:
        self.names.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            above = self.folder.split(".")[: len(self.folder.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        self.names.update(f"{base}.{alias.name}" for alias in node.names)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if ast.unparse(node).startswith("transformers."):
            self.names.add(ast.unparse(node))
        self.generic_visit(node)


def imports(source: str, folder: str = "hf_specgen") -> set[str]:
    visitor = AtRunTime(folder)
    visitor.visit(ast.parse(source))
    return visitor.names


def module_of(name: str, modules: set[str]) -> str | None:
    """The module of the package that a dotted name lies in; `__init__` for what is taken from the package itself."""
    head, *rest = name.split(".")
    if head != "hf_specgen":
        return None
    return rest[0] if rest and rest[0] in modules else "__init__"


def sources() -> Iterator[tuple[str, str, set[str]]]:
    """File, module and imported names of every file of the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE)
        folder = ".".join(["hf_specgen", *place.parts[:-1]])
        module = place.parts[0].removesuffix(".py")
        yield str(place), module, imports(file.read_text(encoding="utf-8"), folder)


def against_the_arrows(place: str, module: str, names: set[str]) -> list[str]:
    """What is wrong with a file of the package that imports `names`."""
    if module not in ARROWS:
        return [f"{place}: the arrows do not say what {module} may import"]
    wrong = [f"{place} imports {name}" for name in sorted(names) if name.split(".")[0] == "training"]
    if place not in ("cache.py", "recurrent.py"):
        wrong += [
            f"{place} knows {name}"
            for name in sorted(names)
            if name.split(".")[0] == "transformers" and CACHE_NAMES.union({"cache_utils"}) & set(name.split("."))
        ]
    allowed = ARROWS[module]
    if allowed is not ANYTHING:
        used = {name: module_of(name, set(ARROWS)) for name in sorted(names)}
        wrong += [
            f"{place} imports {name}" for name, found in used.items() if found and found not in allowed | {module}
        ]
    return wrong


def test_all_is_exactly_what_is_exported():
    import hf_specgen as sg

    values = {name: getattr(sg, name) for name in dir(sg) if not name.startswith("_")}
    exported = [
        name
        for name, value in values.items()
        if not isinstance(value, ModuleType) and str(getattr(value, "__module__", "")).startswith("hf_specgen")
    ]
    assert sorted(sg.__all__) == sorted(exported)


def test_imports_follow_the_arrows():
    found = list(sources())
    assert found
    wrong = [line for source in found for line in against_the_arrows(*source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("loop.py", "from hf_specgen.drafters import Plain"),
        ("loop.py", "from hf_specgen import drafters"),
        ("loop.py", "from .drafters.plain import Plain"),
        ("loop.py", "from . import drafters"),
        ("loop.py", "def f():\n    import hf_specgen.drafters.plain"),
        ("loop.py", "from hf_specgen import PromptLookup"),
        ("loop.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import hf_specgen.drafters"),
        ("draft.py", "from hf_specgen.sampling import Noise"),
        ("drafters/plain.py", "from ..loop import run"),
        ("verify.py", "from hf_specgen.cache import SlotCache"),
        ("stats.py", "import hf_specgen"),
        ("bench/demo.py", "from training.medusa import train"),
        ("newcomer.py", "import torch"),
        ("loop.py", "from transformers import DynamicCache"),
        ("bench/demo.py", "from transformers.cache_utils import Cache"),
        ("loop.py", "import transformers\nx = transformers.DynamicCache()"),
        ("loop.py", "import transformers\nx = transformers.cache_utils.DynamicLayer()"),
        ("loop.py", "from transformers import cache_utils"),
    ],
)
def test_the_arrow_test_sees(place, source):
    folder = ".".join(["hf_specgen", *Path(place).parts[:-1]])
    assert against_the_arrows(place, Path(place).parts[0].removesuffix(".py"), imports(source, folder))


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("loop.py", "from hf_specgen.draft import Draft\nfrom . import rows\nimport torch, hf_specgen.stats"),
        ("loop.py", "if TYPE_CHECKING:\n    from hf_specgen.drafters import Plain\n    from transformers import Cache"),
        ("drafters/__init__.py", "from hf_specgen.drafters.plain import Plain\nfrom .lookup import PromptLookup"),
        ("drafters/plain.py", "from ..draft import Draft"),
        ("cache.py", "from transformers import DynamicCache\nfrom transformers.cache_utils import Cache"),
        ("bench/demo.py", "import hf_specgen as sg\nfrom hf_specgen.bench import smollm2"),
        ("loop.py", "from transformers import PreTrainedModel, GenerationConfig"),
    ],
)
def test_the_arrow_test_allows(place, source):
    folder = ".".join(["hf_specgen", *Path(place).parts[:-1]])
    assert against_the_arrows(place, Path(place).parts[0].removesuffix(".py"), imports(source, folder)) == []


@pytest.mark.timing
def test_importing_costs_a_fifth_of_what_it_stands_on_at_most():
    # CPU time, and both in one process: a busy neighbour lengthens the wall clock's, and by a fifth from one process to
    # the next.
    timed = """
from time import process_time
start = process_time()
import torch; from transformers import GenerationMixin, PreTrainedModel
between = process_time()
import hf_specgen
print(between - start, process_time() - between)
"""
    runs = [subprocess.check_output([sys.executable, "-c", timed], text=True, cwd=PACKAGE.parent) for _ in range(3)]
    ground, ours = (min(map(float, times)) for times in zip(*map(str.split, runs), strict=True))
    assert ours <= 0.2 * ground, f"{ours:.2f} s on top of {ground:.2f} s"
