"""Files are written in one step, and rewritten only if their content changes."""

import json
import os
import stat

import pytest

from cape_plugins.utils.files import editing_json, writing


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("before", ["old", None])
def test_a_failed_block_leaves_everything_as_it_was(tmp_path, error, before):
    path = tmp_path / "table.csv"
    if before:
        path.write_text(before)

    def write_half() -> None:
        with writing(path) as file:
            file.write("half of ")
            file.flush()
            raise error

    with pytest.raises(error):
        write_half()
    assert [entry.name for entry in tmp_path.iterdir()] == ([path.name] if before else [])
    assert not before or path.read_text() == before


def test_others_see_the_old_file_until_the_block_ends(tmp_path):
    path = tmp_path / "new folder" / "table.csv"
    with writing(path) as file:
        file.write("größe")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == "größe".encode()
    with writing(path, "wb") as file:
        file.write(b"\xff")
        file.flush()
        assert path.read_bytes() == "größe".encode()
    assert path.read_bytes() == b"\xff"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_permissions_are_those_that_the_user_gives_to_new_files(tmp_path, umask):
    before = os.umask(umask)
    try:
        with writing(tmp_path / "file"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


def test_json_is_written_only_if_it_was_changed(tmp_path):
    path = tmp_path / "config.json"
    with editing_json(path) as content:  # a missing file is empty, and stays missing
        assert content == {}
    assert not path.exists()
    with editing_json(path) as content:
        content["size"] = 1
    assert json.loads(path.read_text()) == {"size": 1}
    path.write_text('{"b": {"size": 1}, "a": "ß"}')
    with editing_json(path) as content:
        content["b"].get("size")
    assert path.read_text() == '{"b": {"size": 1}, "a": "ß"}'
    with editing_json(path) as content:
        content["b"]["size"] = 2
    assert json.loads(path.read_text()) == {"a": "ß", "b": {"size": 2}}
    with pytest.raises(KeyError), editing_json(path) as content:
        content["b"]["size"] = content["size"]
    assert json.loads(path.read_text())["b"] == {"size": 2}


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"], ids=["cut", "list", "bytes"])
def test_json_that_holds_no_object_is_told_by_its_file(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    told = pytest.raises(ValueError, match=r"config.json holds no JSON object .*; repair or")
    with told, editing_json(path):
        pass
    assert path.read_bytes() == content
