from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = "stone river light house green seven walk under over bread".split()
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(" ".join(rng.choice(words, 40)) for _ in range(150)), encoding="utf-8")
    return path
