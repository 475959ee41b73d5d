"""The public data sets that quern knows by name: the locations and hashes of their files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

HUB = "https://huggingface.co/datasets"


@dataclass(frozen=True)
class DataSet:
    """The files of a data set, relative to `base`. kind: the reader for them; sha256: file name → hex digest."""

    about: str
    base: str
    train: tuple[str, ...]
    val: tuple[str, ...]
    kind: Literal["documents", "conversations", "questions", "tokens"] = "documents"
    sha256: Mapping[str, str] = field(default_factory=dict)


def _numbered(template: str, count: int, first: int = 0) -> tuple[str, ...]:
    return tuple(template.format(index) for index in range(first, first + count))


DATASETS: Mapping[str, DataSet] = MappingProxyType(
    {
        "tinystories": DataSet(
            "Short stories in a small child's words (0.5M rows a shard, 250 MB)",
            f"{HUB}/roneneldan/TinyStories/resolve/main/data",
            (
                "train-00000-of-00004-2d5a1467fff1081b.parquet",
                "train-00001-of-00004-5852b56a2bd28fd9.parquet",
                "train-00002-of-00004-a26307300439e943.parquet",
                "train-00003-of-00004-d243063613e5a057.parquet",
            ),
            ("validation-00000-of-00001-869c898b519ad725.parquet",),
            sha256=MappingProxyType(
                {
                    "validation-00000-of-00001-869c898b519ad725.parquet": (
                        "33406a6206554cfc279c29c11f4df51528af487aa1a602b075566fc83c49dcab"
                    )
                }
            ),
        ),
        "fineweb-edu": DataSet(
            "Educational web pages, 100B tokens, shuffled (100 MB a shard)",
            f"{HUB}/karpathy/fineweb-edu-100b-shuffle/resolve/main",
            _numbered("shard_{:05d}.parquet", 1822),
            ("shard_01822.parquet",),
        ),
        "fineweb-edu-10b": DataSet(
            "Educational web pages, the 10B token sample (2 GB a shard)",
            f"{HUB}/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT",
            _numbered("{:03d}_00000.parquet", 13),
            ("013_00000.parquet",),
        ),
        "climbmix": DataSet(
            "Clustered web mixture, 400B tokens, shuffled, as nanochat trains on (90 MB a shard)",
            f"{HUB}/karpathy/climbmix-400b-shuffle/resolve/main",
            _numbered("shard_{:05d}.parquet", 6542),
            ("shard_06542.parquet",),
        ),
        "fineweb-gpt2": DataSet(
            "FineWeb 10B as GPT-2 tokens, as modded-nanogpt trains on (100M tokens, 200 MB a shard)",
            f"{HUB}/kjj0/fineweb10B-gpt2/resolve/main",
            _numbered("fineweb_train_{:06d}.bin", 103, first=1),
            ("fineweb_val_000000.bin",),
            kind="tokens",
        ),
        "smol-smoltalk": DataSet(
            "Conversations for small assistants (115,000 a shard, 230 MB)",
            f"{HUB}/HuggingFaceTB/smol-smoltalk/resolve/main/data",
            _numbered("train-{:05d}-of-00004.parquet", 4),
            ("test-00000-of-00001.parquet",),
            kind="conversations",
        ),
        "smoltalk": DataSet(
            "Conversations for assistants, the full mixture (115,000 a shard, 220 MB)",
            f"{HUB}/HuggingFaceTB/smoltalk/resolve/main/data/all",
            _numbered("train-{:05d}-of-00009.parquet", 9),
            ("test-00000-of-00001.parquet",),
            kind="conversations",
        ),
        "gsm8k": DataSet(
            "Grade-school word problems with worked answers (columns question, answer)",
            f"{HUB}/openai/gsm8k/resolve/main/main",
            ("train-00000-of-00001.parquet",),
            ("test-00000-of-00001.parquet",),
            kind="questions",
        ),
        "mmlu": DataSet(
            "Multiple-choice questions of school and university (columns question, choices, answer); 47 MB",
            f"{HUB}/cais/mmlu/resolve/main/all",
            ("auxiliary_train-00000-of-00001.parquet",),
            ("test-00000-of-00001.parquet",),
            kind="questions",
        ),
    }
)
