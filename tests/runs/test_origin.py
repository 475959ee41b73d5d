"""What a run was made from: batches of another order are refused."""

from pathlib import Path

import numpy as np
import pytest

from quern.data.batch import DOCUMENT_SIZE, GROUP_SIZE
from quern.data.shards import Corpus
from quern.runs.origin import Origin, group_size_of, refuse_other_order
from quern.runs.run_dir import RunDir


def test_a_run_with_batches_in_another_order_is_refused(tmp_path: Path) -> None:
    documents = GROUP_SIZE // (DOCUMENT_SIZE + 2)
    one = Corpus.from_arrays([[0, 1]])
    small, large = (one.part(np.zeros(number, dtype=np.int64)) for number in (documents, documents + 1))
    assert group_size_of(small) is None and group_size_of(large) == GROUP_SIZE
    run_dir = RunDir(tmp_path, "old")
    refuse_other_order(run_dir, Origin("t"), small)  # also a run of a version that knew no groups
    refuse_other_order(run_dir, Origin("t", group_size=GROUP_SIZE), large)
    for origin, corpus in ((Origin("t"), large), (Origin("t", group_size=GROUP_SIZE // 2), large)):
        with pytest.raises(ValueError, match=r"run 'old' was begun by another version.*`quern pretrain --from old "):
            refuse_other_order(run_dir, origin, corpus)
