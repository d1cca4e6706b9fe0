"""Pictures of position embeddings: each in every domain for every type, what they show, and what
the command refuses. Their numbers are in test_views.py."""

import argparse
import re
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
from PIL import Image

from cape_plugins import DOMAINS, TYPES, PositionConfig
from cape_plugins.checkpoints.stack import Stack
from cape_plugins.cli import main
from cape_plugins.pictures import command
from cape_plugins.pictures.command import PICTURES, draw_picture
from cape_plugins.pictures.views import views
from tests.support.core import EVERYWHERE, make_encoder
from tests.support.expected import DOMAIN_SAMPLES, EXPECTED

# Types that have something to show; the others are refused.
SHOWN = {
    picture: {name for name in TYPES if picture in EXPECTED[name].pictures.split()}
    for picture in PICTURES
}
# each type with texts; in other domains, a type that adds and a type that acts in attention
CASES = [
    (picture, domain, name)
    for picture in PICTURES
    for name, domain in EVERYWHERE
    if name in SHOWN[picture] and (domain == "text" or name in ("cape", "relpos"))
]


def plot_words(picture, domain, name):
    """The command line of a picture of few small inputs."""
    words = ["plot", picture, "--domain", domain, "--position-embedding", name, "--dim", "16"]
    several = PICTURES[picture].most_sizes if name == "cape" else 1
    config = PositionConfig(name, domain)
    if picture == "coverage" and config.random:
        words += ["--draws", "5"]
    if not config.encoding.relative:  # which has distances
        words += ["--sizes", *DOMAIN_SAMPLES[domain].shown[:several]]
    return words + (["--channels", "0", "1"] if picture == "components" else [])


@pytest.mark.parametrize(("picture", "domain", "name"), CASES)
def test_pictures_show_their_types_in_every_domain(picture, domain, name, figures, tmp_path):
    main([*plot_words(picture, domain, name), "--output", str(tmp_path / "x.png")])
    (figure,) = figures
    assert f"{name}, {domain}" in figure.get_suptitle()
    assert len(figure.axes) > 1
    assert all(axis.has_data() for axis in figure.axes)
    labels = [axis.get_xlabel() + axis.get_ylabel() for axis in figure.axes]
    labels.append(figure.get_supxlabel() + figure.get_supylabel())
    row, unit = DOMAINS[domain], DOMAINS[domain].axis.partition("(")[2]
    counted = row.grid and picture not in ("augmentation", "coverage")
    counted = counted or PositionConfig(name, domain).encoding.relative
    assert (row.steps if counted else unit) in " ".join(labels)


@pytest.mark.parametrize(
    ("picture", "domain", "name"),
    [*((picture, "text", "shape") for picture in PICTURES), ("augmentation", "image", "cape")],
)
def test_picture_files_are_of_one_width_and_filled(picture, domain, name, tmp_path, capsys):
    output = tmp_path / "new" / "a picture.PNG"
    assert main([*plot_words(picture, domain, name), "--output", str(output)]) == 0
    assert f"wrote {output}, in the new folder {output.parent}" in capsys.readouterr().out
    assert list(tmp_path.rglob("*.*")) == [output]
    with Image.open(output) as image:
        assert image.format == "PNG"
        assert image.width == 1200
        grey = np.asarray(image.convert("L"), dtype=float)
    assert grey.std() > 5
    # something in each quarter of the width, not in a corner alone
    assert all(part.std() > 1 for part in np.array_split(grey, 4, axis=1))


@pytest.mark.parametrize(
    ("picture", "name"),
    [(picture, name) for picture in PICTURES for name in TYPES if name not in SHOWN[picture]],
)
def test_types_with_nothing_to_show_are_refused(picture, name, tmp_path, capsys):
    folder = tmp_path / "new"
    with pytest.raises(SystemExit, match="2"):
        main([*plot_words(picture, "text", name), "--output", str(folder / "x.png")])
    message = capsys.readouterr().err
    assert f"--position-embedding {name}" in message
    assert set(re.findall(r"\w+", message)) >= SHOWN[picture]
    assert not folder.exists()


@pytest.mark.parametrize("picture", PICTURES)
def test_defaults_are_enough(picture, monkeypatch):
    paths = []
    monkeypatch.setattr(command, "save", lambda figure, path: paths.append(str(path)))
    main(["plot", picture])
    assert paths == [f"{picture}-cape-text.png"]


@pytest.mark.slow
def test_a_server_without_display_is_enough(tmp_path, run_cli):
    """No backend is chosen, and pyplot is never needed."""
    code = (
        "import sys; from cape_plugins.cli import main\nmain(['plot', 'coverage'])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    words = [word for name in ("MPLBACKEND", "DISPLAY") for word in ("-u", name)]
    run_cli("env", *words, sys.executable, "-c", code, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["coverage-cape-text.png"]


def draw(words, tmp_path):
    """The table that a picture comes with."""
    parser = argparse.ArgumentParser()
    command.add_plot_args(parser)
    return draw_picture(parser.parse_args([*words.split(), "--output", str(tmp_path / "x.png")]))


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (
            "--position-embedding sinpos --lengths 30 50 --test-lengths 25 100 200",
            [r"25 tokens \| .* \| 100 %", r"100 tokens \| 0 to 99 \| 50 %", r".* \| 25 %"],
        ),
        # training reaches up to 49 + 30 + 0.5: positions up to 78 or 79 of 0 .. 99
        (
            "--position-max-global-shift 30 --lengths 50 --test-lengths 100",
            [r".* \| (79|80) %"],
        ),
        (
            "--domain image --position-embedding sinpos --sizes 9 --test-sizes 5 9 17x17",
            [r".* \| 0.500 \| 100 %.*", r".* \| 0.250 \| 0 %.*", r".* \| 0.125 \| 0 %.*"],
        ),
    ],
)
def test_coverage_is_the_share_counted_by_hand(words, rows, figures, tmp_path):
    lines = draw(f"coverage {words}", tmp_path).splitlines()[2:-1]
    for line, row in zip(lines, rows, strict=True):
        assert re.fullmatch(rf"\| {row} \|", line)


def test_sizes_are_shown_in_their_units(figures, tmp_path):
    """Seconds become frames; alpha stretches a source; patches have rows and columns."""
    words = "components --domain audio --lengths 0.6 --position-embedding sinpos --channels 1"
    draw(f"{words} --seconds-per-frame 0.02", tmp_path)
    x, _ = figures.pop().axes[0].lines[0].get_data()
    assert np.allclose(x, 0.02 * np.arange(30))
    words = "components --architecture seq2seq --position-source-scale 1.5 --lengths 5 --channels 0"
    for side, alpha in {"encoder": 1.5, "decoder": 1.0}.items():
        draw(f"{words} --side {side}", tmp_path)
        x, _ = figures.pop().axes[0].lines[0].get_data()
        assert np.allclose(x, alpha * np.arange(5))
    words = "similarity --domain image --sizes 3x5 --patch 0 4 --position-gamma 0.5"
    draw(words, tmp_path)
    full, patch, *_ = (axis.images[0].get_array() for axis in figures.pop().axes if axis.images)
    assert (full.shape, patch.shape) == ((15, 15), (3, 5))
    assert np.unravel_index(patch.argmax(), patch.shape) == (0, 4)


def test_relative_embeddings_are_shown_over_their_distances(figures, tmp_path):
    """Rows are distances from -C to C, of which 0 is in the middle of the zoom."""
    words = ["--position-embedding", "relpos", "--position-relative-context", "30", "--dim", "16"]
    words += ["--output", str(tmp_path / "x.png")]
    main(["plot", "components", "--channels", "1", *words])
    main(["plot", "similarity", *words])
    curves, maps = figures
    (line,) = curves.axes[0].lines
    assert line.get_xdata().tolist() == list(range(-30, 31))
    assert line.get_ydata().std() > 0.01
    full, zoom, by_distance = [axis for axis in maps.axes if axis.get_xlabel()][:3]
    assert full.images[0].get_extent() == [-30.5, 30.5, 30.5, -30.5]
    assert zoom.images[0].get_extent() == [-12.5, 12.5, 12.5, -12.5]
    matrix, part = (np.asarray(axis.images[0].get_array()) for axis in (full, zoom))
    assert np.array_equal(part, matrix[18:43, 18:43])
    assert by_distance.lines[0].get_ydata()[0] == pytest.approx(np.diag(matrix).mean())


def test_maps_show_the_channels_that_were_asked_for(figures, tmp_path):
    words = "components --domain image --sizes 3x4 5 --channels 7 2 --dim 16 --draws 0"
    draw(words, tmp_path)
    maps = [axis.images[0].get_array() for axis in figures.pop().axes if axis.images]
    encoder = make_encoder("cape", "image", dim=16)
    expected = views(Stack(encoder.config, encoder), [(3, 4), (5, 5)], 0, torch.Generator())
    for image, (view, channel) in zip(
        maps, [(view, channel) for view in expected for channel in (7, 2)], strict=True
    ):
        assert np.allclose(image, view.embedding[:, channel].reshape(view.size), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("similarity --lengths 0", ["--lengths 0", "tokens", "1 to 3000"]),
        ("similarity --domain audio --lengths nan", ["--lengths nan", "seconds"]),
        ("similarity --domain image --sizes 3x", ["--sizes 3x", "10x14"]),
        ("similarity --lengths 1 2 3 4", ["--lengths", "4 sizes", "at most 3"]),
        ("coverage --domain image --sizes 1 --draws 1", ["1 x 1", "at least 2"]),
        ("coverage --draws 0", ["--draws 0", "1 to 2000"]),
        ("components --position-embedding sinpos --draws 1", ["--draws 1", "sinpos", "nothing"]),
        (f"components --channels {' '.join(map(str, range(13)))}", ["at most 12"]),
        ("similarity --patch 1 1", ["--patch 1 1", "images"]),
        ("similarity --domain image --sizes 3x5 --patch 3 0", ["--patch 3 0", "0 to 2", "0 to 4"]),
        ("similarity --position-embedding relpos --lengths 5", ["--lengths 5", "all their"]),
        ("components --seed -1", ["--seed -1", "0 to"]),
        ("similarity --dim 0", ["--dim 0", "1 to 16384"]),
        ("similarity --seconds-per-frame 0.1", ["--seconds-per-frame 0.1", "--domain audio"]),
        ("similarity --domain audio --seconds-per-frame 0", ["--seconds-per-frame 0", "> 0"]),
        ("similarity --side decoder", ["--side decoder", "allowed: encoder"]),
        ("similarity --output x.jpg", ["x.jpg", ".png"]),
        ("similarity --lengths 5 --output /dev/null/x.png", ["--output /dev/null/x.png", "folder"]),
        ("similarity --output /nowhere/such/x.png", ["/nowhere does not exist", "make the folder"]),
        ("similarity --model nowhere", ["--model nowhere", "no such file"]),
        ("similarity --model marian --dim 4", ["error: --dim 4 contradicts --model"]),
        (
            "similarity --model marian --position-embedding cape",
            ["error: --position-embedding cape contradicts --model"],
        ),
        ("similarity --model cut", ["config.json cannot be read"]),
        ("similarity --model vit", ["'image_size'"]),
        ("similarity --model other.pt", ["cannot be read as a checkpoint of fairseq"]),
    ],
)
def test_bad_input_is_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, content in {
        "marian": '{"model_type": "marian", "d_model": 8}',
        "cut": "{",
        "vit": '{"model_type": "cape_vit", "position_embedding": {"type": "cape"}}',
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(content)
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(SystemExit, match="2"):
        main(["plot", *words.split()])
    message = capsys.readouterr().err
    assert all(part in message for part in said), message
    assert "weights_only" not in message  # advice for users of torch
    assert not list(tmp_path.glob("*.png"))


def test_without_matplotlib_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="2"):
        main(["plot", "similarity", "--lengths", "5"])
    assert 'pip install "cape-plugins[plot]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
