"""The shape of the package, enforced: import layers, torch-free folders, sizes. Ruff has the other habits.

Every file under quern/ is parsed, never run, so an import inside a function or under TYPE_CHECKING counts
too. The table of docs/architecture.md gives each room (a file or a folder of quern/, or a folder in it) its layer; a
file may import lower layers and its own room, and nothing imports a leaf.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "quern").rglob("*.py"))

TABLE = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/architecture.md").read_text("utf-8"), re.MULTILINE)
LAYER = {room: int(number) for number, rooms in TABLE for room in re.findall(r"`([\w.]+)`", rooms)}
assert len(LAYER) > 40 and LAYER["cli"] > 10, "docs/architecture.md has no table of layers"
LEAVES = {
    "report": {"stages.run_all", "lab.log", "lab.search"},
    "lab": {"lab.board", "lab.ladder", "lab.log", "lab.scaling", "lab.search"},
    "lab.axes": {"lab", "lab.ladder"},
    "lab.ladder": {"lab.log"},
    "lab.scaling": {"lab.log"},
    "lab.search": {"lab.log"},
    **{room: set() for room in ("bench", "lab.board", "lab.log")},
}
"""Rooms that the command line alone imports, and who else may."""
MOST_FILES, MOST_LINES = 14, 400
"""Python files in a folder, and lines in a file."""
# The JAX twin shares torch-free files with the rest and nothing else.
MAY_IMPORT = {
    "grug": set("recipe records temporaries process text data optim.schedule optim.constants".split()),
    "__init__": set(),
}
# Both trainers, torch's and JAX's, read text and data: NumPy and pyarrow do for these.
NO_TENSORS = {"text", "data"}
TENSOR_LIBRARIES = {"torch", "jax", "jaxlib"}
IMPORTERS = {"import_module", "importlib.import_module", "__import__"}


def room_of(module: str) -> str:
    """The longest room of the table that holds a module: `quern.text.chat` → `text`, `quern.text.tinyworld.world` →
    `text.tinyworld`, `quern.machine` → `machine`, `quern` → `__init__`; an unknown one is its first part."""
    parts = module.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in LAYER:
            return ".".join(parts[:end])
    return (parts or ["__init__"])[0]


def imported_modules(node: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Dotted names that a node imports. For `from a import b` it is a.b: b may be a module, and its part is
    the same when it is not. Relative imports are resolved against `module`; import_module("…") counts too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS and isinstance(node.args[0], ast.Constant):
        yield str(node.args[0].value)


def may_import(module: str, name: str) -> bool:
    importer, imported = room_of(module), room_of(name)
    if importer == imported:
        return True
    if importer in MAY_IMPORT:
        return any(f"{name}.".startswith(f"quern.{allowed}.") for allowed in MAY_IMPORT[importer])
    if imported in ("__init__", "__version__"):
        return True  # quern itself, which loads no modules
    if importer not in LAYER or imported not in LAYER:
        return False
    if imported in LEAVES and importer != "cli":
        return bool({importer, module.removeprefix("quern.")} & LEAVES[imported])
    return LAYER[imported] < LAYER[importer] or LAYER[imported] == LAYER[importer] == 0


def import_faults(name: str, module: str) -> Iterator[str]:
    top, importer = name.split(".")[0], room_of(module)
    if top == "quern" and not may_import(module, name):
        yield f"{importer} may not import {name}: it is not on a lower layer (docs/architecture.md), or a leaf"
    if top in ("experiments", "tests"):
        yield f"quern may not import {top}: those build on quern"
    if importer.split(".")[0] in NO_TENSORS and top in TENSOR_LIBRARIES:
        yield f"{importer}/ is shared with the JAX twin and may not import {top}: use NumPy"


def faults(path: str, source: str) -> list[str]:
    """Returns the faults of one file of quern/; `path` is relative to the root, as in quern/text/chat.py."""
    tree = ast.parse(source, path)
    names = path.removesuffix(".py").split("/")
    is_package = names[-1] == "__init__"
    module = ".".join(names[:-1] if is_package else names)
    importer = room_of(module)
    found = []

    def fault(node: ast.AST, message: str) -> None:
        found.append(f"{path}:{getattr(node, 'lineno', 1)}: {message}")

    if importer not in LAYER and importer not in MAY_IMPORT:
        fault(tree, f"{importer} has no layer: give it one in docs/architecture.md")
    if ast.get_docstring(tree) is None:
        fault(tree, "no opening docstring: say what this is, what it is not, units, source")
    if "allow_pickle=True" in source:
        fault(tree, "a pickle can run code from a file")
    if source.count("\n") > MOST_LINES:
        fault(tree, f"{source.count(chr(10))} lines: split it, a file has at most {MOST_LINES}")
    for node in ast.walk(tree):
        for name in imported_modules(node, module, is_package):
            for message in import_faults(name, module):
                fault(node, message)
    return found


def test_quern_keeps_its_layers_and_habits() -> None:
    assert FILES, "no files found under quern/"
    texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in FILES}
    found = [fault for path, text in texts.items() for fault in faults(path, text)]
    assert not found, "\n" + "\n".join(found)


BROKEN = {
    "upwards": ("quern/model/gpt.py", "from quern.train.loop import run", "model may not import"),
    "upwards, package": ("quern/model/__init__.py", "from ..train import loop", "model may not import"),
    "upwards, from quern": ("quern/optim/muon.py", "from quern import bench", "optim may not import"),
    "upwards, in a function": ("quern/data/shards.py", "def f():\n import quern.cli.main", "data may not import"),
    "upwards, by name": ("quern/recipe.py", "importlib.import_module('quern.model.gpt')", "recipe may not"),
    "sideways": ("quern/data/loader.py", "from quern.text.chat import render", "data may not import"),
    "twin": ("quern/grug/model.py", "from quern.model.gpt import GPT", "grug may not import"),
    "twin, beside what it may": ("quern/grug/optim.py", "from quern.optim.muon import Muon", "grug may not import"),
    "top imports nothing": ("quern/__init__.py", "from quern.model.gpt import GPT", "__init__ may not"),
    "upwards, subfolder": ("quern/text/chat.py", "from quern.text.tinyworld import facts", "text may not import"),
    "sideways, subfolders": ("quern/kernels/attention/flash.py", "import quern.kernels.rope", "attention may not"),
    "a leaf": ("quern/stages/sft.py", "from quern.report.build import build", "stages may not import"),
    "a leaf, from a leaf": ("quern/bench/train.py", "from quern.lab.report import main", "bench may not import"),
    "torch in a subfolder": ("quern/text/tinyworld/world.py", "import torch", "may not import torch"),
    "no layer": ("quern/utils.py", "", "utils has no layer"),
    "experiments": ("quern/report/build.py", "import experiments.baseline", "may not import experiments"),
    "torch in data": ("quern/data/loader.py", "def f():\n import torch.nn as nn", "may not import torch"),
    "np.load": ("quern/data/shards.py", "np.load(path, allow_pickle=True)", "can run code"),
    "too long": ("quern/data/shards.py", "x = 1\n" * MOST_LINES, "split it"),
}


FINE = {
    "downwards": ("quern/train/loop.py", "from quern.model.gpt import GPT\nfrom quern.machine import Machine"),
    "own folder": ("quern/text/chat.py", "from .tokenizer import Tokenizer\nfrom quern.text import hub"),
    "layer 0": ("quern/records.py", "from quern.recipe import Recipe"),
    "twin": ("quern/grug/state.py", "import jax\nfrom quern.data.loader import Loader"),
    "twin, one file": ("quern/grug/state.py", "from quern.optim import schedule"),
    "verbs over everything": ("quern/cli/main.py", "from quern.estimate import plan\nimport quern.recipes.gpt"),
    "version": ("quern/report/build.py", "from quern import __version__"),
    "long enough": ("quern/data/shards.py", "x = 1\n" * (MOST_LINES - 2)),
}


@pytest.mark.parametrize("name", [*BROKEN, *FINE])
def test_planted_faults_are_found_and_what_is_allowed_is_not(name: str) -> None:
    path, body, *messages = BROKEN.get(name) or FINE[name]
    found = faults(path, f'"""A file."""\n{body}\n')
    assert len(found) == len(messages) and all(message in found[0] for message in messages), found


def test_a_folder_holds_one_subject() -> None:
    counts = Counter(file.parent.relative_to(ROOT).as_posix() for file in FILES)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports() -> dict[str, set[str]]:
    """Which modules of quern each one imports, wherever in the file."""
    paths = {module_of(file): file for file in FILES}
    found = {}
    for module, file in paths.items():
        names = [
            name
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            for name in imported_modules(node, module, file.name == "__init__.py")
        ]
        found[module] = {part for name in names for part in (name, name.rpartition(".")[0]) if part in paths}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = imports()
    assert "quern.recipe" in found["quern.validate"]
    TopologicalSorter(found).prepare()  # CycleError names the modules
    with pytest.raises(CycleError):
        TopologicalSorter({**found, "quern.recipe": {"quern.resolve"}}).prepare()


@pytest.mark.parametrize(("rooms", "libraries"), [(NO_TENSORS, TENSOR_LIBRARIES), ({"grug"}, {"torch"})])
def test_no_lower_file_loads_a_tensor_library_behind_their_backs(rooms: set[str], libraries: set[str]) -> None:
    modules = [module_of(file) for file in FILES if file.relative_to(ROOT).parts[1] in rooms]
    code = "import sys, importlib\n"
    code += f"for name in {modules!r}: importlib.import_module(name)\n"
    code += f"print(sorted(set(sys.modules) & {libraries!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def undeclared(module: str, distributions: dict[str, list[str]]) -> bool:
    """Tells whether no distribution that pyproject.toml names has the module: a fresh .venv may lack it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.split(r"[^\w.-]", one)[0].lower() for one in named}
    return declared.isdisjoint(re.sub("[_.]", "-", name.lower()) for name in distributions.get(module, [module]))


def test_what_is_imported_is_declared() -> None:
    """A .venv that grew keeps what a former dependency brought; a fresh one does not."""
    distributions = dict(metadata.packages_distributions())
    clients = ROOT / "tests" / "serve" / "clients"  # run in an environment of their own
    files = [file for name in ("quern", "tests", "runs", "experiments") for file in (ROOT / name).rglob("*.py")]
    imported: dict[str, Path] = {}
    for file in files:
        for node in [] if clients in file.parents else ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            imported |= {name.partition(".")[0]: file for name in names}
    foreign = imported.keys() - sys.stdlib_module_names - {"quern", "tests", "experiments"}
    assert "numpy" in foreign
    assert undeclared("typeguard", {"typeguard": ["typeguard"]})
    assert {name: str(imported[name]) for name in foreign if undeclared(name, distributions)} == {}
