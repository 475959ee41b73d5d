"""The public data sets that quern knows by name: the locations of their files.

Sizes of training files are estimates, those of text at 4 bytes a token: they decide how many files a run fetches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class DataSet:
    """The files of a data set of the Hugging Face Hub, relative to `folder`."""

    about: str  # a line for the user
    repository: str
    folder: str  # the folder that holds them there; "" for the root
    train: tuple[str, ...]  # the training files, in reading order
    val: tuple[str, ...]  # the files for validation; of conversations and questions, the test split
    kind: Literal["documents", "conversations", "questions", "tests", "tokens"] = "documents"
    """The reader for them; tests are questions to evaluate with, never to train on."""
    file_tokens: int = 0  # tokens in a training file, of documents and tokens
    file_rows: int = 0  # rows in a training file, of conversations
    tokenizer: tuple[str, str] | None = None
    """The address and the SHA-256 (hex) of the vocabulary that made the tokens; for kind "tokens"."""

    def path(self, file: str) -> str:
        """The path of a file in the repository."""
        return f"{self.folder}/{file}".lstrip("/")


def _numbered(template: str, count: int, first: int = 0) -> tuple[str, ...]:
    return tuple(template.format(index) for index in range(first, first + count))


def _parquet(split: str, count: int) -> tuple[str, ...]:
    return _numbered(f"{split}-{{:05d}}-of-{count:05d}.parquet", count)


def _tests(about: str, repository: str, folder: str) -> DataSet:
    return DataSet(about, repository, folder, (), _parquet("test", 1), "tests")


def _talks(about: str, repository: str, folder: str, files: int) -> DataSet:
    train, test = _parquet("train", files), _parquet("test", 1)
    return DataSet(about, repository, folder, train, test, "conversations", file_rows=115_000)


DATASETS: Mapping[str, DataSet] = MappingProxyType(
    {
        "tinystories": DataSet(
            "Short stories in a small child's words (0.5M rows a shard, 250 MB)",
            "roneneldan/TinyStories",
            "data",
            (
                "train-00000-of-00004-2d5a1467fff1081b.parquet",
                "train-00001-of-00004-5852b56a2bd28fd9.parquet",
                "train-00002-of-00004-a26307300439e943.parquet",
                "train-00003-of-00004-d243063613e5a057.parquet",
            ),
            ("validation-00000-of-00001-869c898b519ad725.parquet",),
            file_tokens=110_000_000,
        ),
        "wikitext": DataSet(
            "WikiText-103: Wikipedia's good articles, a paragraph or heading in each row (270 MB a shard)",
            "Salesforce/wikitext",
            "wikitext-103-raw-v1",
            _parquet("train", 2),
            _parquet("validation", 1),
            file_tokens=65_000_000,
        ),
        "fineweb-edu": DataSet(
            "Educational web pages, 100B tokens, shuffled (100 MB a shard)",
            "karpathy/fineweb-edu-100b-shuffle",
            "",
            _numbered("shard_{:05d}.parquet", 1822),
            ("shard_01822.parquet",),
            file_tokens=60_000_000,
        ),
        "fineweb-edu-10b": DataSet(
            "Educational web pages, the 10B token sample (2 GB a shard)",
            "HuggingFaceFW/fineweb-edu",
            "sample/10BT",
            _numbered("{:03d}_00000.parquet", 13),
            ("013_00000.parquet",),
            file_tokens=700_000_000,
        ),
        "climbmix": DataSet(
            "Clustered web mixture, 400B tokens, shuffled, as nanochat trains on (90 MB a shard)",
            "karpathy/climbmix-400b-shuffle",
            "",
            _numbered("shard_{:05d}.parquet", 6542),
            ("shard_06542.parquet",),
            file_tokens=60_000_000,
        ),
        "fineweb-gpt2": DataSet(
            "FineWeb 10B as GPT-2 tokens, as modded-nanogpt trains on (100M tokens, 200 MB a shard)",
            "kjj0/fineweb10B-gpt2",
            "",
            _numbered("fineweb_train_{:06d}.bin", 103, first=1),
            ("fineweb_val_000000.bin",),
            kind="tokens",
            file_tokens=100_000_000,
            tokenizer=(
                "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken",
                "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
            ),
        ),
        "smol-smoltalk": _talks(
            "Conversations for small assistants (115,000 a shard, 230 MB)", "HuggingFaceTB/smol-smoltalk", "data", 4
        ),
        "smoltalk": _talks(
            "Conversations for assistants, the full mixture (115,000 a shard, 220 MB)",
            "HuggingFaceTB/smoltalk",
            "data/all",
            9,
        ),
        "gsm8k": DataSet(
            "Grade-school word problems with worked answers (columns question, answer)",
            "openai/gsm8k",
            "main",
            _parquet("train", 1),
            _parquet("test", 1),
            "questions",
        ),
        "mmlu": DataSet(
            "Multiple-choice questions of school and university (columns question, choices, answer); 47 MB",
            "cais/mmlu",
            "all",
            _parquet("auxiliary_train", 1),
            _parquet("test", 1),
            "questions",
        ),
        "arc_easy": _tests("Science questions of grade school", "allenai/ai2_arc", "ARC-Easy"),
        "arc_challenge": _tests("Those that simple methods get wrong", "allenai/ai2_arc", "ARC-Challenge"),
        "humaneval": _tests(
            "Functions to write from their docstrings, with tests", "openai/openai_humaneval", "openai_humaneval"
        ),
    }
)
