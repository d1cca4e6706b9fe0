"""Reads the user's data: data sets of the hub, folders and tables, with options that all recipes
share."""

import argparse
import contextlib
import csv
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from cape_plugins.utils import texts
from cape_plugins.utils.texts import first_line
from recipes.lab.steps import CommandError

TABLES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# the first one that exists is the default test
TEST_SPLITS = ("test", "validation", "valid", "dev")


def open_dataset(
    name: str, config: str | None = None, text_columns: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Splits of a hub data set, a folder of ``save_to_disk``, or a folder or file of examples. In
    csv and tsv files, all cells of `text_columns` are read as texts."""
    from datasets import Dataset, load_dataset, load_dataset_builder, load_from_disk
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.folder_based_builder.folder_based_builder import (
        FolderBasedBuilder,
    )
    from datasets.packaged_modules.json.json import JsonConfig

    path = Path(name)
    if path.is_file():
        return open_tables({"train": name}, "--dataset", text_columns)
    remedy = "give the name of a data set of the hub, a folder of save_to_disk, or a folder or file"
    with reading(f"--dataset {name}", f"{remedy} of tables, images or recordings"):
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            data = load_from_disk(name)
            return {"train": data} if isinstance(data, Dataset) else data
        builder = load_dataset_builder(name, config)
        settings = builder.config
        of_files = path.is_dir() and isinstance(builder, FolderBasedBuilder)
        if of_files and (described := _described(path, builder, text_columns)):
            return described
        more: dict[str, Any] = {}
        if isinstance(settings, CsvConfig):
            more = {**(TSV if settings.sep == "\t" else CSV), **_texts(text_columns)}
        if path.is_dir() and isinstance(settings, CsvConfig | JsonConfig):
            for file in chain.from_iterable(settings.data_files.values()):
                more = {**more, **_format_of(Path(file), text_columns)}
        return load_dataset(name, config, **more)


def _described(path: Path, builder: Any, text_columns: Sequence[str]) -> dict[str, Any]:
    """Splits of a folder of images or recordings, as csv files in the folder describe them; empty
    if there are no such files. ``datasets`` would read cells such as "null" as empty, as pandas
    does."""
    from datasets import concatenate_datasets

    names, splits, tables = builder.METADATA_FILENAMES, {}, []
    for split, files in builder.config.data_files.items():
        tables = [Path(file) for file in files if Path(file).name in names]
        for table in tables:
            _format_of(table)
        tables = [table for table in tables if table.suffix == ".csv"]
        if tables:
            parts = [_with_files(table, builder, text_columns) for table in tables]
            splits[split] = concatenate_datasets(parts)
    if not splits and (unread := next(path.rglob("metadata.tsv"), None)):
        raise CommandError(f"{unread} is not read; write it as metadata.csv or metadata.jsonl")
    return splits


def _with_files(table: Path, builder: Any, text_columns: Sequence[str]) -> Any:
    """The rows of a csv file with the images or recordings that it names."""
    columns = ("file_name", *text_columns)
    rows = open_tables({"train": str(table)}, "--dataset", columns)["train"]
    if "file_name" not in rows.column_names:
        raise CommandError(
            f"{table}: needs the column file_name; it has {', '.join(rows.column_names)}"
        )
    folder, paths = os.path.abspath(table.parent), []
    for number, name in enumerate(rows["file_name"], 1):
        paths.append(os.path.normpath(os.path.join(folder, name or "")))
        if not (os.path.isfile(paths[-1]) and Path(paths[-1]).is_relative_to(folder)):
            why = f"row {number} names the file {name!r}, which is not below its folder"
            raise CommandError(f"{table}: {why}; repair the row or delete it")
    rows = rows.remove_columns("file_name").add_column(builder.BASE_COLUMN_NAME, paths)
    return rows.cast_column(builder.BASE_COLUMN_NAME, builder.BASE_FEATURE())


@contextlib.contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Turns every error of its block into a :class:`CommandError`: readers differ in their
    exceptions."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        general = isinstance(error, DatasetGenerationError)  # its cause says what is wrong
        why = first_line((error.__cause__ if general else None) or error)
        raise CommandError(f"{what} cannot be read ({why}); {remedy}") from None


def open_tables(
    files: Mapping[str, str], option: str = "--train-file", text_columns: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Splits of csv, tsv, json, jsonl or parquet files, all of one format; see
    :func:`open_dataset`."""
    from datasets import load_dataset

    for name in files.values():
        if not Path(name).is_file():
            raise CommandError(f"{name}: no such file; give {', '.join(TABLES)}")
        if not Path(name).stat().st_size:
            raise CommandError(f"{name}: is empty; give a file with a row for each example")
    suffix = Path(files["train"]).suffix
    if suffix not in TABLES:
        why = f"{option} {files['train']}: unknown format; allowed: {', '.join(TABLES)}"
        raise CommandError(why)
    if any(Path(name).suffix != suffix for name in files.values()):
        raise CommandError(f"{', '.join(files.values())}: give files of one format")
    data = {}
    for split, name in files.items():  # one by one, because errors of `datasets` name no file
        with reading(name, f"give a {suffix} file with a row for each example"):
            more = _format_of(Path(name), text_columns)
            data |= load_dataset(TABLES[suffix], data_files={split: name}, **more)
    return data


# An empty cell holds no text; words such as null, NA, None and nan are texts. By default pandas
# reads eighteen words, such as null, NA and nan, as empty cells.
CSV = {"keep_default_na": False, "na_values": [""]}
TSV = {**CSV, "sep": "\t", "quoting": csv.QUOTE_NONE}


def _texts(columns: Sequence[str]) -> dict[str, Any]:
    """Options that keep columns of texts as text. By default pandas reads 001 and 1e5 as numbers
    and True as a boolean."""
    return {"converters": dict.fromkeys(columns, _cell_text)} if columns else {}


def _cell_text(cell: str) -> str | None:
    return cell or None


def _format_of(path: Path, text_columns: Sequence[str] = ()) -> dict[str, Any]:
    """Options for reading a table. Lines end at line feeds only; by default pandas also ends a row
    at a carriage return. If rows end with a carriage return and a line feed, pandas has no option
    that keeps a carriage return inside a row.

    Raises:
        CommandError: if a line is no text, or has a carriage return inside while lines also end
            with carriage returns. The message names the line.
    """
    suffix = path.suffix
    if suffix not in TABLES or suffix == ".parquet":
        return {}
    encoding = texts.text_encoding(path)
    try:
        returns = [n for n, line in enumerate(texts.text_lines(path), 1) if "\r" in line]
    except ValueError as error:
        raise CommandError(str(error)) from None
    if suffix not in (".csv", ".tsv"):
        if encoding in ("utf-16", "utf-32"):
            raise CommandError(f"{path}: is in {encoding.upper()}; convert it to UTF-8")
        return {}
    more = {**(CSV if suffix == ".csv" else TSV), **_texts(text_columns), "encoding": encoding}
    if returns:
        with open(path, encoding=encoding, newline="\n") as file:
            if any(line.endswith("\r\n") for line in file):
                why = (
                    "has a carriage return inside, and lines also end with carriage returns; "
                    "remove it"
                )
                raise CommandError(f"{path}: line {returns[0]} {why}")
        more["lineterminator"] = "\n"  # otherwise a carriage return also ends a row
    return more


def given_tables(args: argparse.Namespace, text_columns: Sequence[str]) -> Mapping[str, Any]:
    """The splits of ``--dataset``, or of ``--train-file`` and ``--test-file``, or
    ``--validation-file``; see :func:`open_dataset`."""
    if args.dataset:
        return open_dataset(args.dataset, args.dataset_config, text_columns)
    files = {"train": args.train_file, "test": args.test_file or args.validation_file}
    files = {split: name for split, name in files.items() if name}
    return open_tables(files, text_columns=text_columns)


def add_data_args(parser: argparse.ArgumentParser, files: bool = True) -> None:
    """Adds options for the user's data."""
    parser.add_argument("--dataset", metavar="NAME", help="data set of the hub, folder or file")
    parser.add_argument(
        "--dataset-config", metavar="NAME", help="configuration of a data set of the hub"
    )
    parser.add_argument(
        "--train-split", default="train", metavar="NAME", help="split for training (default: train)"
    )
    parser.add_argument(
        "--test-split",
        metavar="NAME",
        help="split for the test (default: test, validation, valid or dev; if the data have none "
        "of these, a tenth of the training data, at most 1000 rows)",
    )
    if files:
        for split in ("train", "validation", "test"):
            parser.add_argument(
                f"--{split}-file", metavar="FILE", help="csv, tsv, json, jsonl or parquet"
            )


def has_data(args: argparse.Namespace) -> bool:
    """Whether the user gave data; False means the built-in data."""
    files = [getattr(args, f"{split}_file", None) for split in ("train", "validation", "test")]
    if args.dataset and any(files):
        raise CommandError("--dataset and --train-file exclude each other; give one of them")
    if any(files[1:]) and not files[0]:
        raise CommandError("--test-file needs --train-file")
    if all(files[1:]):
        raise CommandError("--validation-file and --test-file both name the test; give one of them")
    if args.dataset_config and not args.dataset:
        raise CommandError("--dataset-config needs --dataset")
    return bool(args.dataset or files[0])


def train_and_test(
    data: Mapping[str, Any], train_split: str = "train", test_split: str | None = None
) -> dict[str, Any]:
    """The splits for training and test. Without a test split, a tenth of training, at most 1000
    rows, becomes the test."""
    for option, name in (("--train-split", train_split), ("--test-split", test_split)):
        if name is not None and name not in data:
            raise CommandError(f"{option} {name}: the data have the splits {', '.join(data)}")
    test = test_split or next((name for name in TEST_SPLITS if name in data), None)
    if test is not None:
        return {"train": data[train_split], "test": data[test]}
    rows = len(data[train_split])
    if rows < 2:
        count = "1 row" if rows == 1 else f"{rows} rows"
        raise CommandError(
            f"{train_split}: has {count}, too few to split off a test; give more data, or a "
            "separate test"
        )
    size = min(1000, max(1, rows // 10))
    return dict(data[train_split].train_test_split(size, seed=0))


def read_text(path: Path) -> str:
    """The whole of a text file, see :func:`cape_plugins.utils.texts.read_text`."""
    try:
        return texts.read_text(path)
    except ValueError as error:
        raise CommandError(str(error)) from None


def fingerprint(texts: Sequence[str]) -> str:
    """Fingerprint of the texts that a tokenizer is made from."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def check_columns(args: argparse.Namespace, data: Any, *options: str) -> None:
    """Refuses options that name columns which the data do not have."""
    for option in options:
        if getattr(args, option) not in data.column_names:
            raise CommandError(
                f"--{option.replace('_', '-')} {getattr(args, option)}: the data have the columns "
                f"{', '.join(data.column_names)}; name one of them"
            )
