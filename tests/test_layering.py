"""The rules of the source tree: allowed imports, sizes, and no code that asks for a row by its
name.

Every rule is a function from one file to its violations, and is shown to find a violation before
it is applied to the repository.
"""

import ast
import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from cape_plugins import DOMAINS, ENCODINGS, TYPES
from cape_plugins.checkpoints.families import FAIRSEQ_FAMILIES, FAMILY_ROWS, OWN_PREFIX

CODE = ("benchmarks", "cape_plugins", "fairseq_user_dir", "hf_models", "recipes", "tests")
FOLDERS = (*CODE, ".ci", "docs", "requirements")
TEXT = {"", ".cff", ".cfg", ".csv", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

CORE, HOOK = "cape_plugins", "cape_plugins/models/fairseq_hook.py"
SKINS = ("fairseq_user_dir", "hf_models")
# A package may import itself, the standard library and these; other top-level folders are free.
ALLOWED = {
    CORE: {"numpy", "torch"},
    "fairseq_user_dir": {CORE, "numpy", "torch"}
    | {"fairseq", "fairseq_cli", "hydra", "omegaconf", "tqdm"}
    | {"ctranslate2", "jiwer", "safetensors", "sentencepiece", "yaml"},
    "hf_models": {CORE, "numpy", "torch"}
    | {"accelerate", "huggingface_hub", "peft", "safetensors", "sentencepiece"}
    | {"ctranslate2", "onnx", "onnxruntime", "tqdm", "transformers"},
}
# files that do what torch cannot, for those who call them
READERS = {
    "cape_plugins/speech/audio.py": {"scipy", "soundfile"},
    "cape_plugins/checkpoints/stack.py": {"safetensors"},
    "cape_plugins/speech/ctc_decoder.py": {"flashlight"},
    "cape_plugins/pictures/plot.py": {"PIL", "matplotlib"},
}
# Rooms of a package, from the ground up, and which of the rooms below each may import.
CORE_ROOMS = {
    "settings": set(),
    "mathematics": {"settings"},
    "speech": {"settings", "mathematics"},
    "corpus": {"settings", "mathematics"},
    "checkpoints": {"settings", "mathematics"},
    "pictures": {"settings", "mathematics", "checkpoints"},
    "demo": {"settings", "mathematics", "pictures"},
    "serving": {"settings", "checkpoints"},
    "doctor": {"settings"},
    "models": set(),
}
FAIRSEQ_ROOMS = {
    "host": set(),
    "flags": {"host"},
    "embedding": set(),
    "admin": {"host"},
    "radam": {"host"},
    "attention": {"embedding", "host"},
    "stacks": {"attention", "embedding"},
    "checkpoints": {"flags", "host"},
    "models": {"admin", "attention", "checkpoints", "embedding", "flags", "host", "stacks"},
    "asr": {"attention", "checkpoints", "embedding", "flags", "models", "stacks"},
    "serving": {"admin", "checkpoints", "flags", "host", "models"},
}
HF_ROOMS = {
    "host": {"releases"},
    "processors": set(),
    "switching": {"host", "processors"},
    "seams": {"host", "switching"},
    "families": {"processors", "seams", "switching"},
    "generated": {"host", "seams", "switching"},
    "calls": {"generated", "seams", "switching"},
    "storage": {"calls", "generated", "seams", "switching"},
    "convert": {"counting", "generated", "processors", "seams", "storage", "switching"},
    "checks": {"calls", "generated", "seams", "switching"},
    "serving": {"convert", "families", "host", "processors", "seams", "storage", "switching"},
}


HF_TOOLS = {"callback", "counting", "releases", "stand_ins"}


class Rooms(NamedTuple):
    """Rules of a package."""

    below: dict[str, set[str]]  # the rooms that each room may import
    tools: set[str]  # files outside of rooms that every room may import
    doors: set[str]  # files outside of rooms that may import every room


ROOMS = {
    CORE: Rooms(CORE_ROOMS, {"utils"}, {"__init__", "__main__", "cli"}),
    "fairseq_user_dir": Rooms(FAIRSEQ_ROOMS, set(), {"__init__", "average", "doctor"}),
    "hf_models": Rooms(HF_ROOMS, HF_TOOLS, {"__init__", "doctor", "run"}),
}
# Rows and counts are plain data: these files have no import of torch.
WITHOUT_TORCH = {f"{CORE}/settings", f"{CORE}/corpus/alpha.py", f"{CORE}/checkpoints/families.py"}
OWN = {CORE, *SKINS, "recipes"}
FREE = ("benchmarks", "recipes", "setup.py", "tests")
# What is a row is asked for its properties, never for its name.
STOCK_MODELS = {*FAMILY_ROWS, *(family.model_type for family in FAIRSEQ_FAMILIES)}
ROW_NAMES = {*TYPES, *ENCODINGS, *DOMAINS, *STOCK_MODELS}
ROW_NAMES |= {OWN_PREFIX + name for name in STOCK_MODELS}
# The same word for something else.
OTHER_MEANINGS = {
    ("fairseq_user_dir/asr/s2t_model.py", "s2t_transformer"),  # value of fairseq's --conv-version
    ("cape_plugins/mathematics/relative_tables.py", "clip"),  # value of relative_beyond
    ("recipes/vit/augment.py", "none"),  # timm's name for no policy
    ("recipes/vit/augment.py", "deit"),  # a recipe of augmentation
}
# split, so that this file does not break its own rule
MACHINE_PATH = re.compile(r"(?<![\w.$}>~*-])/(?:home|root|tmp|Users|work)" + r"/\w")


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def imports(path: str, tree: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and absolute module name of every import, also of importlib.import_module("...")."""
    package = PurePosixPath(path).parent.parts
    for node in tree:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from cape_plugins import config` imports cape_plugins.settings.config
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def check_imports(path: str, source: str) -> Iterator[str]:
    """Packages import their host, the core and themselves; nothing but tests imports tests."""
    top = PurePosixPath(path).parts[0]
    for line, module in imports(path, nodes(source)):
        target = module.split(".")[0]
        if target == "tests" and top != "tests":
            yield f"{path}:{line} imports {module}"
        if top not in ALLOWED or target == top or target in sys.stdlib_module_names:
            continue
        allowed = ALLOWED[top] | READERS.get(path, set())
        if target not in allowed and not (path == HOOK and module == "fairseq_user_dir"):
            yield f"{path}:{line} imports {module}; {top} may import {sorted(ALLOWED[top])}"


def check_rooms(path: str, source: str) -> Iterator[str]:
    """Rooms import those below them; files of WITHOUT_TORCH have no import of torch."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts[0] not in ROOMS:
        return
    package, room, rooms = parts[0], parts[1], ROOMS[parts[0]]
    everything = {*rooms.below, *rooms.tools, *rooms.doors}
    if room not in everything:
        yield f"{path} is in a room without a rule; add it to ROOMS"
        return
    below = everything if room in rooms.doors else {room, *rooms.tools, *rooms.below.get(room, ())}
    torch_free = any(path.startswith(start) for start in WITHOUT_TORCH)
    for line, module in imports(path, nodes(source)):
        names = module.split(".")
        if names[0] == "torch" and torch_free:
            yield f"{path}:{line} imports torch"
        if names[0] == package and not below.issuperset(names[1:2]):
            yield f"{path}:{line} imports {module}, which is not below it"


def check_own_imports_on_top(path: str, source: str) -> Iterator[str]:
    """An import inside a function hides a cycle."""
    if PurePosixPath(path).parts[0] == "tests":
        return
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for _, module in imports(path, ast.walk(node)):
                if module.split(".")[0] in OWN:
                    yield f"{path}:{node.lineno} {node.name} imports {module}"


def compared(tree: Iterable[ast.AST]) -> Iterator[tuple[int, object]]:
    """Line and value of every constant that something is compared with: by an operator, as a member
    of what is written out, in a match statement, or by startswith and endswith."""
    for node in tree:
        operands: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            operands = node.args if node.func.attr in ("startswith", "endswith") else []
        for operand in operands:
            members = getattr(operand, "elts", None) or getattr(operand, "keys", None) or [operand]
            for member in members:
                if isinstance(member, ast.Constant):
                    yield member.lineno, member.value


def check_row_names(path: str, source: str) -> Iterator[str]:
    """No type, encoding, domain or family is asked for by name: a new row must be enough."""
    if PurePosixPath(path).parts[0] not in OWN:
        return
    for line, value in compared(nodes(source)):
        named = isinstance(value, str) and value in ROW_NAMES
        if named and (path, value) not in OTHER_MEANINGS:
            yield f"{path}:{line} compares with {value!r}; ask the row for a property"


def check_sizes(path: str, source: str) -> Iterator[str]:
    """Files up to 400 lines, functions up to 60; the docstring of a function is not counted."""
    lines = source.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path} has {lines} lines, at most {MAX_FILE_LINES}"
    for node in nodes(source):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node):
            lines -= node.body[0].end_lineno - node.body[0].lineno + 1
        if lines > MAX_FUNCTION_LINES:
            where = f"{path}:{node.lineno} {node.name}"
            yield f"{where} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def check_machine_paths(path: str, source: str) -> Iterator[str]:
    """No file holds paths of a particular machine."""
    for number, line in enumerate(source.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield f"{path}:{number} {line.strip()[:80]}"


CHECKS = (
    *(check_imports, check_rooms, check_own_imports_on_top),
    *(check_row_names, check_sizes, check_machine_paths),
)
Check = Callable[[str, str], Iterator[str]]


LONG_FUNCTION = 'def f():\n    """Doc."""\n' + "    x = 1\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (check_imports, "cape_plugins/x.py", "def f():\n    from transformers import x"),
        (check_imports, "cape_plugins/models/other.py", "import fairseq_user_dir"),
        (check_imports, "cape_plugins/x.py", "importlib.import_module('hf_models')"),
        (check_imports, "recipes/mt/x.py", "from tests.reference import y"),
        (check_rooms, "cape_plugins/settings/config.py", "import torch"),
        (check_rooms, "cape_plugins/mathematics/x.py", "from ..pictures import views"),
        (check_rooms, "cape_plugins/speech/ctc.py", "from cape_plugins import PositionConfig"),
        (check_rooms, "cape_plugins/unheard_of/x.py", ""),
        (check_rooms, "fairseq_user_dir/host/x.py", "from fairseq_user_dir.flags import record"),
        (check_rooms, "hf_models/seams/x.py", "from hf_models.generated.model import PARTS"),
        (check_own_imports_on_top, "recipes/x.py", "def f():\n    from hf_models import run"),
        (check_row_names, "cape_plugins/x.py", "if config.type in ('nopos', 'relpos'): pass"),
        (check_row_names, "recipes/x.py", "x = y in {'text': 1}"),
        (check_row_names, "recipes/x.py", "match x:\n    case 'vit': pass"),
        (check_row_names, "fairseq_user_dir/x.py", "name.startswith('cape_s2t_transformer')"),
        (check_sizes, "recipes/x.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
        (check_sizes, "recipes/x.py", LONG_FUNCTION),
        (check_machine_paths, "docs/x.md", "see `" + "/tmp" + "/x`"),
    ],
)
def test_check_can_fail(check: Check, path: str, source: str) -> None:
    assert list(check(path, source))


@pytest.fixture(scope="module")
def files(repo_root: Path) -> Iterator[dict[str, str]]:
    """Repository path -> text of every text file, Python or not. Trees of all of them are kept
    until the end; the garbage collector would walk over them again and again."""
    gc.disable()
    paths = [*repo_root.iterdir(), *(p for top in FOLDERS for p in (repo_root / top).rglob("*"))]
    yield {
        path.relative_to(repo_root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.suffix in TEXT and path.is_file() and path.name not in (".coverage", ".git")
    }
    nodes.cache_clear()
    gc.enable()


def test_every_folder_is_read_and_has_a_rule(files: dict[str, str]) -> None:
    tops = {PurePosixPath(path).parts[0] for path in files}
    assert tops >= {*FOLDERS, "setup.py", "Makefile"}
    python = {PurePosixPath(path).parts[0] for path in files if path.endswith(".py")}
    assert python <= {*ALLOWED, *FREE, "docs"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_repository(check: Check, files: dict[str, str]) -> None:
    violations = [
        violation
        for path, source in files.items()
        if path.endswith(".py") or check is check_machine_paths
        for violation in check(path, source)
    ]
    assert not violations, "\n".join(violations)


def test_no_modules_import_each_other_in_a_circle(files: dict[str, str]) -> None:
    modules = {
        ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
        if path.endswith(".py") and PurePosixPath(path).parts[0] in OWN
    }
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        # of `from package import name` the name is a module or something in the package
        imported = [module for _, module in imports(path, nodes(files[path]))]
        used = {m if m in modules else m.rpartition(".")[0] for m in imported}
        graph[name] = used & modules.keys() - {name}
    assert len(graph) > 100
    TopologicalSorter(graph).prepare()  # raises CycleError
    graph["cape_plugins.utils.texts"].add("cape_plugins.corpus.alpha")
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()
