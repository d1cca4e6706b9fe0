"""The user's data: complete and damaged data in several forms; tables beside images."""

import argparse
import csv
import io
import json
import re
import shutil

import pytest

pytest.importorskip("transformers")
import datasets
import numpy as np
import torch
from PIL import ExifTags, Image

from recipes.lab import data
from recipes.lab.steps import CommandError, run_main
from recipes.mt import finetune_hf as mt
from recipes.vit import data as vit_data
from recipes.vit import evaluate
from recipes.vit import finetune_hf as vit
from recipes.vit.data import digits
from tests.support.image_models import save
from tests.support.tables import read_csv


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("splits", [("train",), ("train", "validation")])
def test_folders_of_datasets_are_read(splits, tmp_path):
    """Folders as save_to_disk leaves them, and of files of tables."""
    rows = datasets.Dataset.from_dict({"en": [f"a {n}" for n in range(30)], "de": ["b"] * 30})
    datasets.DatasetDict(dict.fromkeys(splits, rows)).save_to_disk(tmp_path / "saved")
    for split in splits:
        (tmp_path / "tables").mkdir(exist_ok=True)
        rows.to_parquet(tmp_path / "tables" / f"{split}.parquet")
    expected = {"train": 30, "test": 30} if len(splits) == 2 else {"train": 27, "test": 3}
    for folder in ("saved", "tables"):
        parts = data.train_and_test(data.open_dataset(str(tmp_path / folder)))
        assert {name: len(part) for name, part in parts.items()} == expected
    rows.save_to_disk(tmp_path / "single")
    assert len(data.open_dataset(str(tmp_path / "single"))["train"]) == 30
    with pytest.raises(CommandError, match=r"--dataset .*nowhere cannot be read"):
        data.open_dataset(str(tmp_path / "nowhere"))


def test_single_file_is_tested_whole(tmp_path):
    """Tests all of it, not the part that training would split off."""
    path = save(tmp_path / "digits", names=digits()[1].names, channels=1)
    rows = {"image": [Image.new("L", (8, 8), n) for n in range(40)], "label": [*range(10)] * 4}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "pages.parquet")
    words = ["--model", path, "--dataset", str(tmp_path / "pages.parquet"), "--sizes", "16"]
    evaluate.main([*words, "--device", "cpu", "--output", str(tmp_path / "out")])
    (row,) = read_csv(tmp_path / "out/accuracy.csv")
    assert row["images"] == "40"


TABLES = {
    "empty.json": b"",
    "cut_off.json": b'{"en": "a"',
    "quote.csv": b'en,de\n"a,b\n',
    "no.parquet": b"en,de\na,b\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_broken_tables_are_named(name, tmp_path):
    (tmp_path / name).write_bytes(TABLES[name])
    for option in ("--train-file", "--dataset"):
        words = [option, str(tmp_path / name), "--output", str(tmp_path / "out")]
        with pytest.raises(CommandError, match=rf"^{tmp_path / name}.*; give a .*file") as error:
            mt.main(words)
        assert "\n" not in str(error.value)


def read_rows(path, folder=False):
    """The rows of a file, by itself or of the folder that it is in."""
    data_set = (
        data.open_dataset(str(path.parent)) if folder else data.open_tables({"train": str(path)})
    )
    return [list(row.values()) for row in data_set["train"]]


WORDS = ["null", "NA", "None", "nan", "NaN", "n/a", "NULL", "#N/A", "<NA>", "-inf", "good"]


FILES = [(".csv", False), (".tsv", False), (".csv", True), (".tsv", True), (".jsonl", True)]


@pytest.mark.parametrize(("suffix", "folder"), FILES)
def test_words_for_nothing_are_texts(suffix, folder, tmp_path):
    """As in json; only an empty cell has no text."""
    path = tmp_path / "tables" / f"train{suffix}"
    path.parent.mkdir()
    cells = [[word, word.upper()] for word in WORDS]
    if suffix == ".jsonl":
        rows = [json.dumps({"en": en, "de": de}) for en, de in cells]
    else:
        rows = [{".csv": ",", ".tsv": "\t"}[suffix].join(row) for row in [["en", "de"], *cells]]
    path.write_text("\n".join(rows) + "\n")
    assert read_rows(path, folder) == cells


ODD = "a\u2028b\x85c\x0bd\x0ce\x1cf"


@pytest.mark.parametrize(("suffix", "end"), [(".csv", "\n"), (".tsv", "\r\n")])
def test_rows_of_tables_end_at_line_feeds_alone(suffix, end, tmp_path):
    separator = {".csv": ",", ".tsv": "\t"}[suffix]
    text = "".join(f"{separator.join(row)}{end}" for row in (["en", "de"], [ODD, "x"], ["y", ODD]))
    (tmp_path / f"a{suffix}").write_bytes(text.encode())
    assert read_rows(tmp_path / f"a{suffix}") == [[ODD, "x"], ["y", ODD]]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_carriage_return_ends_no_row(suffix, tmp_path):
    separator = {".csv": ",", ".tsv": "\t"}[suffix]
    rows = [["en", "de"], ["a\rb", "x"], ["y", "z"]]
    (tmp_path / f"a{suffix}").write_bytes("\n".join(map(separator.join, rows)).encode())
    assert read_rows(tmp_path / f"a{suffix}") == rows[1:]
    (tmp_path / f"b{suffix}").write_bytes("\r\n".join(map(separator.join, rows)).encode())
    with pytest.raises(CommandError, match="line 2 has a carriage return inside"):
        read_rows(tmp_path / f"b{suffix}")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_keep_their_line_ends(end, tmp_path):
    cells = [["one\ntwo", "x"], ["y", "three\r\nfour"], ["z", "five\n\nsix"]]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator=end).writerows([["en", "de"], *cells])
    assert read_rows(tmp_path / "a.csv") == cells


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_tables_are_read_by_their_byte_order_mark(encoding, tmp_path):
    (tmp_path / "a.csv").write_bytes("en,de\ngrün,größer\n".encode(encoding))
    assert read_rows(tmp_path / "a.csv") == [["grün", "größer"]]


def test_json_of_another_encoding_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"en": "grün"}\n'.encode("utf-16"))
    with pytest.raises(CommandError, match=r"a\.jsonl: is in UTF-16; convert it to UTF-8"):
        read_rows(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("suffix", "folder"), FILES)
def test_a_byte_of_a_table_that_is_no_text_is_named_by_its_line(suffix, folder, tmp_path):
    path = tmp_path / "tables" / f"train{suffix}"
    path.parent.mkdir()
    row = {".csv": b"a,b", ".tsv": b"a\tb", ".jsonl": b'{"en": "a", "de": "b"}'}[suffix]
    path.write_bytes(b"\n".join([row, row, row.replace(b"a", b"\xe4")]))
    with pytest.raises(CommandError, match=rf"train{suffix}: line 3 is not UTF-8"):
        read_rows(path, folder)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"en": 1, "de": 2}\n' * 2, "the data have 1, which is no text"),
        ('{"en": "a", "de": "b"}\n', "train: has 1 row, too few"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(rows, message, tmp_path):
    (tmp_path / "train.jsonl").write_text(rows)
    with pytest.raises(CommandError, match=message):
        mt.main(["--train-file", str(tmp_path / "train.jsonl"), "--output", str(tmp_path / "out")])


@pytest.fixture
def photos(tmp_path):
    for number, label in enumerate(("dark", "light")):
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        for n in range(6):
            Image.new("RGB", (20, 16), (200 * number + n,) * 3).save(folder / f"{n}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "cut off"])
def test_broken_images_are_named(content, photos, tmp_path):
    broken = photos / "light/3.png"
    broken.write_bytes(broken.read_bytes()[:60] if content is None else content)
    with pytest.raises(CommandError, match=r"light/3.png cannot be read .*; repair the image"):
        vit.main(["--dataset", str(photos), "--output", str(tmp_path / "out")])


@pytest.mark.usefixtures("ended_loaders")
def test_broken_image_in_a_worker_process_is_named(photos, capsys):
    (photos / "light/3.png").write_bytes(b"")
    rows = data.open_dataset(str(photos))["train"]
    capsys.readouterr()
    names = argparse.Namespace(image_column=None, label_column=None)
    images = vit_data.read_images(names, rows, rows, 3)
    loader = torch.utils.data.DataLoader(images, 4, num_workers=1)
    with pytest.raises(SystemExit):
        run_main(lambda: list(loader))
    (error,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: .*light/3.png cannot be read", error)


RAMP = np.arange(256).reshape(16, 16)
WIDE = {
    "16 bits": ((RAMP * 257).astype(np.uint16), "PNG"),
    "16 bits, big-endian": ((RAMP * 257).astype(">u2"), "TIFF"),
    "32 bits": ((RAMP * 257).astype(np.int32), "TIFF"),
    "floats up to 1": ((RAMP / 255).astype(np.float32), "TIFF"),
    "floats up to 255": (RAMP.astype(np.float32), "TIFF"),
}


def opened(file, declared, channels=1, mode=None):
    """The image of a parquet file, declared as one or bytes alone, as a model gets it."""
    image = {"bytes": file, "path": None}
    features = datasets.Features({"image": datasets.Image(mode), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict(
        {"image": [image], "label": [0]}, features=features if declared else None
    )
    names = argparse.Namespace(image_column=None, label_column=None)
    return vit_data.read_images(names, rows, rows, channels).read(0)[0]


def encoded(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "bytes"])
@pytest.mark.parametrize("name", WIDE)
def test_images_of_more_than_8_bits_are_scaled(name, declared):
    values, format = WIDE[name]
    file = encoded(Image.fromarray(values), format)
    for channels in (1, 3):
        assert (opened(file, declared, channels) == torch.from_numpy(RAMP)).all()


def test_a_declared_mode_does_not_cut_wide_images_off():
    file = encoded(Image.fromarray((RAMP * 257).astype(np.uint16)), "PNG")
    assert (opened(file, True, 3, mode="RGB") == torch.from_numpy(RAMP)).all()


@pytest.mark.parametrize("values", [[0, 70000], [-1, 5], [0.0, 256.0], [0.0, np.nan]])
def test_images_without_a_known_white_are_refused(values):
    image = np.array([values]).astype(np.int32 if type(values[0]) is int else np.float32)
    with pytest.raises(CommandError, match="its values are .*; allowed: whole numbers from 0 to"):
        opened(encoded(Image.fromarray(image), "TIFF"), False)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "bytes"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_says(orientation, declared):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    expected = {
        1: values,
        2: values[:, ::-1],
        3: values[::-1, ::-1],
        4: values[::-1],
        5: values.T,
        6: np.rot90(values, -1),
        7: values[::-1, ::-1].T,
        8: np.rot90(values),
    }[orientation]
    file = encoded(Image.fromarray(values), "PNG", exif=exif)
    assert opened(file, declared)[0].tolist() == expected.tolist()


def test_images_are_told_from_others(photos):
    """By classes, number and pixels, also where they are not held."""
    names = argparse.Namespace(image_column=None, label_column=None)

    def fingerprint(hold=False):
        rows = data.open_dataset(str(photos))["train"]
        images = vit_data.read_images(names, rows, rows, 3)
        return (images.hold() if hold else images).fingerprint()

    first = fingerprint()
    assert fingerprint(hold=True) == first
    Image.new("RGB", (20, 16), (1, 1, 1)).save(photos / "dark/2.png")
    changed = fingerprint()
    (photos / "light/3.png").unlink()
    shutil.copy(photos / "light/2.png", photos / "dark/6.png")
    (photos / "dark").rename(photos / "dusky")
    assert len({first, changed, fingerprint()}) == 3


def test_pairs_that_a_test_is_split_off_are_other_training_data(tmp_path, monkeypatch):
    last_arguments = []

    def train_all(*args):
        last_arguments.append(args[-1])
        raise CommandError("enough")

    monkeypatch.setattr(mt, "train_all", train_all)
    for name in ("train", "test"):
        rows = (f"a b {name} {n},x y {n}\n" for n in range(40))
        (tmp_path / f"{name}.csv").write_text("".join(["en,de\n", *rows]))
    words = ["--vocab-size", "30", "--output", str(tmp_path / "out")]
    words += ["--train-file", str(tmp_path / "train.csv")]
    for more in (["--test-file", str(tmp_path / "test.csv")], []):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with pytest.raises(CommandError, match="enough"):
            mt.main([*words, *more])
    assert len(set(last_arguments)) == 2


@pytest.mark.parametrize("classes", [0, 1])
def test_images_of_fewer_than_two_classes_are_refused(classes, photos, tmp_path):
    for folder in ("dark", "light")[classes:]:
        shutil.rmtree(photos / folder)
    message = "--label-column is missing: .*two classes" if classes else "--dataset .* cannot be"
    with pytest.raises(CommandError, match=message):
        vit.main(["--dataset", str(photos), "--output", str(tmp_path / "out")])


# ---- tables beside images ------------------------------------------------------------------------


LABELS = ["null", "NA", "None", "nan", "a\u2028b", "good"]


@pytest.fixture
def numbered(tmp_path):
    """A folder of images, the brightness of each is its number."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(len(LABELS)):
        Image.new("RGB", (8, 8), (number,) * 3).save(folder / f"{number}.png")
    return folder


def describe(folder, words=LABELS, name="metadata.csv", encoding="utf-8", between=","):
    rows = [("file_name", "label"), *((f"{n}.png", word) for n, word in enumerate(words))]
    text = "".join(f"{between.join(row)}\n" for row in rows)
    (folder / name).write_bytes(text.encode(encoding))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_words_for_nothing_in_metadata_are_texts(numbered, encoding):
    describe(numbered, encoding=encoding)
    (rows,) = data.open_dataset(str(numbered)).values()
    assert rows["label"] == LABELS
    assert [image.getpixel((0, 0))[0] for image in rows["image"]] == list(range(len(LABELS)))


def test_metadata_that_cannot_be_read_are_refused(numbered):
    describe(numbered, name="metadata.tsv", between="\t")
    with pytest.raises(CommandError, match=r"metadata\.tsv is not read; write it as metadata\.csv"):
        data.open_dataset(str(numbered))
    (numbered / "metadata.csv").write_text("name,label\n0.png,a\n")
    with pytest.raises(CommandError, match=r"metadata\.csv: needs the column file_name"):
        data.open_dataset(str(numbered))


@pytest.mark.parametrize("file", ["gone.png", "../x.png", "/x.png", ""])
def test_a_file_that_metadata_name_and_is_not_there_is_named(numbered, file):
    (numbered / "metadata.csv").write_text(f"file_name,label\n0.png,a\n{file},b\n")
    with pytest.raises(CommandError, match=r"metadata\.csv: row 2 .* file .* below its folder"):
        data.open_dataset(str(numbered))


def test_an_image_without_a_label_is_refused(numbered):
    describe(numbered, ["", "a", "b"])
    names = argparse.Namespace(image_column=None, label_column=None)
    (rows,) = data.open_dataset(str(numbered)).values()
    with pytest.raises(CommandError, match="--label-column label: row 1 .* has no label"):
        vit_data.read_images(names, rows, rows, 3)


@pytest.mark.parametrize("text", ["001", "1e5", "True", "0x1", "2020-01-01"])
@pytest.mark.parametrize(("suffix", "folder"), [(".csv", False), (".tsv", True)])
def test_columns_of_texts_hold_texts(suffix, folder, text, tmp_path):
    """Also where all would be numbers; the pair of an empty cell is left out."""
    path = tmp_path / "tables" / f"train{suffix}"
    path.parent.mkdir()
    between = {".csv": ",", ".tsv": "\t"}[suffix]
    path.write_text(f"en{between}de\n{text}{between}{text}\n{between}{text}\n")
    words = ["--dataset", str(path.parent)] if folder else ["--train-file", str(path)]
    options = [*words, "--test-split", "train", "--output", str(tmp_path / "out")]
    assert mt.given_data(mt.read_options(options)[0])["train"] == [(text, text)]


@pytest.mark.parametrize("type", [np.int32, np.uint16])
@pytest.mark.parametrize("largest", [255, 4095])
def test_images_of_fewer_bits_than_their_file_has_are_reported(type, largest):
    dark = Image.fromarray(np.full((8, 8), largest, type))
    with pytest.warns(UserWarning, match="at most 4095, nearly black .* its values by 257 or 16"):
        assert np.asarray(vit_data.eight_bits(dark)).max() == round(largest / 257)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [0, 4096])
def test_black_and_grey_images_are_not_reported(values):
    vit_data.eight_bits(Image.fromarray(np.full((8, 8), values, np.uint16)))
