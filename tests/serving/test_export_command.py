"""The command ``cape-plugins export``: inputs that it refuses, and a folder that is either complete
or missing."""

import errno
import os
import shutil
import signal
import threading
from importlib.metadata import EntryPoint

import pytest
from safetensors import SafetensorError

from cape_plugins.cli import main
from cape_plugins.serving.output import complete_folder

LONG = 256 * "n"  # one more than file systems take
BOTH_SIZES = ["--max-tokens", "8", "--image-size", "8", "8"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ctranslate2", "missing.pt", "out"], "SOURCE missing.pt does not exist"),
        (["onnx", "folder", "out"], "SOURCE folder has no config.json"),
        (["onnx", "model.pt", "out"], "takes no checkpoint of fairseq model.pt; allowed for it: "),
        (["ctranslate2", "model.pt:model.pt", "out"], "is an ensemble"),
        (["stock", "model.pt", "folder"], "OUT folder exists already"),
        (["stock", "model.pt", "dangling"], "OUT dangling exists already"),
        (["ctranslate2", "model.pt", "out", "--max-source-tokens", "1"], "--max-source-tokens"),
        (["ctranslate2", "model.pt", "model.pt/out"], "OUT model.pt/out cannot be made"),
        (["stock", "model.pt", LONG], f"OUT {LONG} cannot be made (File name too long"),
        (["stock", LONG, "out"], f"SOURCE {LONG} cannot be read (File name too long)"),
        (["ctranslate2", "model.pt", "out", "--quantization", "int3"], "invalid choice: 'int3'"),
        (["stock", "model.pt", "out", *BOTH_SIZES], "not allowed with argument"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.pt").write_bytes(b"no checkpoint")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(SystemExit, match="2"):
        main(["export", *arguments])
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert told in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "folder", "model.pt"]


def test_missing_engine_is_named_with_the_way_to_install_it(tmp_path, monkeypatch, capsys):
    def load(point):
        raise ImportError("No module named 'ctranslate2'")

    monkeypatch.setattr(EntryPoint, "load", load)
    (tmp_path / "model.pt").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["export", "ctranslate2", str(tmp_path / "model.pt"), str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert "(No module named 'ctranslate2'); install it: pip install 'cape-plugins[serve]'" in error
    assert error.count("\n") == 1


def test_folder_is_complete_or_not_there(tmp_path):
    target = tmp_path / "new" / "out"
    other = tmp_path / "new" / "of another process"

    def interrupted(*others):
        with complete_folder(target) as folder:
            (folder / "half").touch()
            for path in others:
                path.touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []  # nor the folder above, which was not there
    with pytest.raises(KeyboardInterrupt):
        interrupted(other)
    assert list(target.parent.iterdir()) == [other]
    other.unlink()
    with complete_folder(target) as folder:
        (folder / "file").touch(mode=0o600)
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["file"]
    assert target.stat().st_mode & 0o055 == 0o055  # a server may be another user
    assert (target / "file").stat().st_mode & 0o044 == 0o044
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_longest_name_that_a_file_system_takes(tmp_path):
    target = tmp_path / LONG[1:]
    with complete_folder(target) as folder:
        (folder / "file").touch()
    assert [path.name for path in target.iterdir()] == ["file"]


FULL = {
    "write": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "copytree": shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")]),
    "safetensors": SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    ),
    "torch": RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_full_disk_is_told_in_one_line(error, tmp_path):
    """Each library that writes reports a full disk in other words."""
    with pytest.raises(OSError, match="cannot be written") as told, complete_folder(tmp_path / "o"):
        raise error
    told = str(told.value)
    assert told.startswith(f"OUT {tmp_path}/o cannot be written (")
    assert told.endswith("); make room, or give a folder elsewhere.")
    assert not any(word in told for word in ("rrno", "os error", "enforce", "\n"))
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_not_called_a_full_disk(tmp_path):
    """Of a folder that was filled meanwhile by a job that was started twice, and of any code."""
    error = RuntimeError("of a model")
    with pytest.raises(RuntimeError, match="of a model"), complete_folder(tmp_path / "out"):
        raise error
    with (
        pytest.raises(ValueError, match="OUT .*/out now exists, because another"),
        complete_folder(tmp_path / "out"),
        complete_folder(tmp_path / "out") as folder,
    ):
        (folder / "of the other").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["of the other"]


@pytest.fixture
def unhandled():
    """SIGTERM without a handler, as in a new process: tests before may have left one, because
    programs of the recipes set theirs for good."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("unhandled")
def test_a_process_that_is_told_to_end_leaves_nothing(tmp_path):
    with pytest.raises(SystemExit) as ended, complete_folder(tmp_path / "new" / "out"):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """As nohup wants it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with complete_folder(tmp_path / "out") as folder:
            signal.raise_signal(signal.SIGHUP)
            (folder / "file").touch()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "out" / "file").exists()


@pytest.mark.usefixtures("unhandled")
def test_folders_are_written_in_threads_too(tmp_path):
    """Python lets only the main thread set signal handlers."""

    def write():
        with complete_folder(tmp_path / "out") as folder:
            (folder / "file").touch()

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (tmp_path / "out" / "file").exists()
    with complete_folder(tmp_path / "again"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
