"""What a run was made from: batches of another order are refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quern.data.batch import DOCUMENT_SIZE, GROUP_SIZE
from quern.data.shards import Corpus
from quern.runs.origin import Origin, group_size_of, require_same
from quern.runs.run_dir import RunDir


def test_a_run_with_batches_in_another_order_is_refused(tmp_path: Path) -> None:
    documents = GROUP_SIZE // (DOCUMENT_SIZE + 2)
    one = Corpus.from_arrays([[0, 1]])
    small, large = (one.part(np.zeros(number, dtype=np.int64)) for number in (documents, documents + 1))
    assert group_size_of(small) is None and group_size_of(large) == GROUP_SIZE
    run_dir, ungrouped = RunDir(tmp_path, "old"), Origin("t", tokens="k")  # also of a version that knew no groups
    grouped = replace(ungrouped, group_size=GROUP_SIZE)
    for origin in (ungrouped, grouped):
        require_same(origin, origin, run_dir, "pretrain")
    for began, now in ((ungrouped, grouped), (replace(grouped, group_size=GROUP_SIZE // 2), grouped)):
        with pytest.raises(ValueError, match=r"version, has changed since .*`quern pretrain --from old "):
            require_same(began, now, run_dir, "pretrain")
