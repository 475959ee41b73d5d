"""Which files of a repository are read: by the card's list, by folders, by words in paths."""

from pathlib import Path

import pytest

from quern.text.repositories import HubName, Repository, data_set, local_copy
from quern.text.sources import list_source


def chosen(files: str, name: str = "hf:a/b", split: str = "train", configs: list | None = None) -> tuple[str, str]:
    """The training and the validation files, each as one text."""
    listed = {file: (1000, "0" * 64) for file in files.split()}
    found = data_set(Repository("a/b", "c", listed, configs or []), HubName.parse(name), split, "documents")
    return " ".join(found.train), " ".join(found.val)


@pytest.mark.parametrize(
    ("text", "repository", "config", "revision"),
    [
        ("hf:a/b", "a/b", "", ""),
        ("hf:a/b@refs/convert/parquet", "a/b", "", "refs/convert/parquet"),
        ("hf:a/b.c:sample/10BT@v1.0", "a/b.c", "sample/10BT", "v1.0"),
    ],
)
def test_names(text: str, repository: str, config: str, revision: str) -> None:
    name = HubName.parse(text)
    assert (name.repository, name.config, name.revision, str(name)) == (repository, config, revision, text)
    assert "/" not in name.folder and HubName(repository, config, revision + "x").folder != name.folder


@pytest.mark.parametrize("text", ["hf:b", "hf:a/b/c", "hf:a/b:", "hf:a/b@"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is named hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or"):
        HubName.parse(text)


WIKI = [
    {"config_name": "en", "data_files": [{"split": "train", "path": "en/train-*"}]},
    {"config_name": "de", "default": True, "data_files": [{"split": "train", "path": ["de/train-*"]}]},
]
SPLITS = [
    {
        "config_name": "default",
        "data_files": [
            {"split": "train_sft", "path": "data/train_sft-*"},
            {"split": "validation", "path": "data/val-[0-9].parquet"},
            {"split": "gone", "path": "data/gone-*"},
        ],
    }
]


@pytest.mark.parametrize(
    ("files", "name", "split", "configs", "expected"),
    [
        # The card lists configs and their files.
        ("en/train-0.parquet de/train-0.parquet", "hf:a/b:en", "train", WIKI, ("en/train-0.parquet", "")),
        ("en/train-0.parquet de/train-0.parquet", "hf:a/b", "train", WIKI, ("de/train-0.parquet", "")),
        ("data/train_sft-0.parquet data/val-1.parquet data/val-x.parquet", "hf:a/b", "train_sft", SPLITS,
         ("data/train_sft-0.parquet", "data/val-1.parquet")),
        ("x/test.parquet x/train.parquet y/train.parquet", "hf:a/b", "train",
         [{"config_name": "one", "data_dir": "x"}], ("x/train.parquet", "")),
        # There is no list: a config is a folder, a split a word.
        ("data/train-0.parquet data/train-1.parquet data/validation-0.parquet data/test-0.parquet", "hf:a/b", "train",
         [], ("data/train-0.parquet data/train-1.parquet", "data/validation-0.parquet")),
        ("one/train/0.parquet one/dev/0.parquet two/train/0.parquet", "hf:a/b:one", "train", [],
         ("one/train/0.parquet", "one/dev/0.parquet")),
        ("books.jsonl.zst more/shard_000.jsonl.gz README.md", "hf:a/b", "train", [],
         ("books.jsonl.zst more/shard_000.jsonl.gz", "")),
        ("train.csv valid.csv notes/constraint.csv", "hf:a/b", "train", [], ("train.csv", "valid.csv")),
        ("data/train_sft-0.parquet data/test_sft-0.parquet", "hf:a/b", "train_sft", [],
         ("data/train_sft-0.parquet", "")),
        # Parquet before JSON lines before others; descriptions are no data; paths that leave the folder are not read.
        ("a.txt b.jsonl c.parquet dataset_infos.json", "hf:a/b", "train", [], ("c.parquet", "")),
        ("a.txt ../b.txt /c.txt dataset_infos.json", "hf:a/b", "train", [], ("a.txt", "")),
    ],
)  # fmt: skip
def test_the_files_of_a_split(files: str, name: str, split: str, configs: list, expected: tuple[str, str]) -> None:
    assert chosen(files, name, split, configs) == expected


@pytest.mark.parametrize(
    ("files", "name", "split", "configs", "message"),
    [
        ("x.tar", "hf:a/b:c", "train", [], "has no file that ends in .txt .jsonl .* at hf:a/b:c@refs/convert/parquet"),
        ("train.parquet", "hf:a/b", "exam", [], "hf:a/b has no split 'exam': its splits are train$"),
        ("en/0.parquet", "hf:a/b:fr", "train", [], "there is no config or folder 'fr'; the folders are en$"),
        ("en/train-0.parquet", "hf:a/b:fr", "train", WIKI, "name one of its configs, en, de, as hf:a/b:en"),
        ("data/val-1.parquet", "hf:a/b", "train", SPLITS, "no split 'train': its splits are validation"),
    ],
)
def test_what_there_is_not(files: str, name: str, split: str, configs: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(files, name, split, configs)


CARD = "---\nlicense: mit\ndataset_info:\n  features: []\n---\n# Card\n"
CONFIGS = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/a*}
  - {split: validation, path: en/b*}
- config_name: de
  data_files: de/*
---
"""

DEFAULT = CONFIGS.replace("name: en", "name: default")


@pytest.mark.parametrize(
    ("files", "card", "expected"),
    [
        ("data/train-0.jsonl data/test-0.jsonl data/validation-0.jsonl", CARD,
         ("data/train-0.jsonl", "data/validation-0.jsonl")),
        ("train/0.txt train/1.txt dev/0.txt LICENSE.txt", None, ("train/0.txt train/1.txt", "dev/0.txt")),
        ("shards/0.jsonl shards/1.jsonl.gz", CARD, ("shards/0.jsonl shards/1.jsonl.gz", "")),
        ("en/a.jsonl en/b.jsonl de/c.jsonl", DEFAULT, ("en/a.jsonl", "en/b.jsonl")),
        # Folders of one's own.
        ("paris.txt london.txt", "# My travels", None),
        ("train-journey.txt paris.txt", "# My travels", None),
        ("trains.txt tests.txt", "# My words", None),
        ("train.md test.md", "---\ntitle: notes\n---\n", None),
        ("notes.md", CARD, None),
    ],
)  # fmt: skip
def test_a_folder_that_is_a_copy(
    tmp_path: Path, files: str, card: str | None, expected: tuple[str, str] | None
) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    if card is not None:
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
    said: list[str] = []
    found = local_copy(tmp_path, list_source(tmp_path), "train", "documents", said.append)
    assert len(said) == (expected is not None)
    names = found and tuple(" ".join(path.relative_to(tmp_path).as_posix() for path in part) for part in found)
    assert names == expected


def test_a_card_of_a_copy_is_obeyed_or_refused(tmp_path: Path) -> None:
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "a.jsonl").write_text("x", encoding="utf-8")
    for card, message in [
        (CONFIGS, f"^{tmp_path}: name one of its configs, en, de, as {tmp_path}/en$"),
        (DEFAULT.replace("a*", "c*").replace("b*", "c*"),
         f"^{tmp_path} has no split 'train': its splits are none$"),
        ("---\nconfigs: [\n---\n", "README.md is damaged .*: correct it, or name the files$"),
        ("---\nconfigs: 3\n---\n", "its card lists configs in another form .Expected `array`, got `int`"),
    ]:  # fmt: skip
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            local_copy(tmp_path, list_source(tmp_path), "train", "documents", lambda line: None)
