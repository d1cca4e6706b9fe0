"""No file that is read runs code: neither weights, nor settings, nor data. What fairseq does with
them is tested in tests/fairseq/test_checkpoint_code.py."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ("benchmarks", "cape_plugins", "fairseq_user_dir", "hf_models", "recipes")
RUNNING = {"eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load"}
RUNNING |= {"yaml.load", "yaml.full_load", "yaml.unsafe_load", "dill.load", "marshal.loads"}
# keywords with which a reader would run code, and those without which it could
FORBIDDEN = {("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False)}
REQUIRED = {"torch.load": ("weights_only", True)}


def violations(source: str) -> Iterator[str]:
    """Line and text of every call that may run what is in a file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {
            (keyword.arg, keyword.value.value)
            for keyword in node.keywords
            if isinstance(keyword.value, ast.Constant)
        }
        required = REQUIRED.get(name)
        if any(ast.unparse(argument).startswith("pickle.dumps(") for argument in node.args):
            continue  # a copy of an object of this process
        if name in RUNNING or keywords & FORBIDDEN or (required and required not in keywords):
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, **options)",
        "np.load(path, allow_pickle=True)",
        "pickle.load(file)",
        "yaml.load(file, Loader=yaml.FullLoader)",
        "eval(text)",
    ],
)
def test_violations_are_seen(source: str) -> None:
    assert list(violations(source))
    assert not list(violations("torch.load(path, weights_only=True); model.eval(); np.load(x)"))
    assert not list(violations("pickle.loads(pickle.dumps(model))"))


def test_no_reader_of_this_project_runs_code(repo_root: Path) -> None:
    paths = [path for folder in FOLDERS for path in sorted((repo_root / folder).rglob("*.py"))]
    assert len(paths) > 100
    bad = [f"{path}:{call}" for path in paths for call in violations(path.read_text("utf-8"))]
    assert not bad, "\n".join(bad)
