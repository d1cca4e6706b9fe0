"""The wheel: what is in it, and that it works away from the repository."""

import shutil
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from hf_models.releases import minor_release, tested_releases

pytestmark = pytest.mark.slow

SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("cape_plugins", "fairseq_user_dir", "hf_models")


@pytest.fixture(scope="module")
def wheel(repo_root: Path, run_cli: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the repository, so that no build folder is left in the original."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        shutil.copy(repo_root / name, copy / name)
    for name in ("recipes", "benchmarks", "tests", *PACKAGES):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repo_root / name, copy / name, ignore=ignored)
    run_cli(
        *("python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--disable-pip-version-check", "--wheel-dir", copy / "out", copy),
    )
    (built,) = (copy / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return Parser().parsestr(_read(wheel, "METADATA"))


def _read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"cape_plugins-0.2.0.dist-info/{name}").decode()


def test_wheel_has_every_module_and_template_and_nothing_else(wheel: Path, repo_root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
    modules = {
        path.relative_to(repo_root).as_posix()
        for package in PACKAGES
        for pattern in ("*.py", "*.md")  # templates of READMEs
        for path in (repo_root / package).rglob(pattern)
    }
    assert "cape_plugins/serving/ctranslate2.md" in modules
    assert modules <= names
    assert "cape_plugins/py.typed" in names
    assert {name.split("/")[0] for name in names} == {*PACKAGES, "cape_plugins-0.2.0.dist-info"}


def test_only_what_fairseq_and_its_beams_need_ends_with_python_3_12(metadata: Message) -> None:
    lasting, ending = set(), set()
    for need in map(Requirement, metadata.get_all("Requires-Dist")):
        (ending if 'python_version < "3.13"' in str(need.marker) else lasting).add(need.name)
    assert {"hydra-core", "omegaconf", "bitarray", "flashlight-text"} <= ending
    assert {"numpy", "torch", "transformers", "datasets", "matplotlib", "jiwer"} <= lasting


def test_transformers_is_allowed_exactly_where_it_was_tested(metadata: Message) -> None:
    requirements = map(Requirement, metadata.get_all("Requires-Dist"))
    (allowed,) = (need.specifier for need in requirements if need.name == "transformers")
    rows = [row["transformers"] for row in tested_releases()]
    assert all(release in allowed for release in rows)
    oldest, newest = Version(rows[0]), Version(rows[-1])
    assert f"{oldest.major}.{oldest.minor - 1}.99" not in allowed
    assert f"{newest.major}.{newest.minor + 1}.0" not in allowed
    minors = {minor_release(release)[1] for release in rows}
    assert minors == set(range(oldest.minor, newest.minor + 1))


def test_wheel_needs_numpy_and_torch_only_and_has_extras_and_scripts(
    wheel: Path, metadata: Message
) -> None:
    extras = {"fairseq", "hf", "plot", "speech", "serve", "recipes", "dev"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    requirements = metadata.get_all("Requires-Dist")
    assert {name for name in requirements if "extra" not in name} == {"numpy", "torch>=2.6"}
    # unusable beside a CPU-only torch, see setup.py
    assert not any("torchaudio" in name or "torchvision" in name for name in requirements)
    assert metadata["Requires-Python"] == ">=3.10"
    assert "MIT License" in _read(wheel, "licenses/LICENSE")
    scripts = _read(wheel, "entry_points.txt").split("\n")
    assert "cape-plugins = cape_plugins.cli:main" in scripts
    assert "cape-average-checkpoints = fairseq_user_dir.average:main" in scripts


def test_installed_wheel_works_elsewhere(wheel: Path, tmp_path: Path, run_cli: Callable) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {"PYTHONPATH": str(tmp_path / "site")}
    done = run_cli("python", "-m", "cape_plugins", "user-dir", cwd=elsewhere, env=env)
    assert done.stdout.strip() == str(tmp_path / "site" / "cape_plugins")
