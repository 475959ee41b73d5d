"""Each mask and each path of attention against a loop over queries in float64."""

from tests.support.jax_process import Grug


def test_each_mask_on_each_path(grug: Grug) -> None:
    found = grug("pieces:each_mask")
    assert found.keys() == {"reference", "blocked", "library", "picked"}
    assert max(found.values()) <= 1e-5, found


def test_several_blocks_of_queries(grug: Grug) -> None:
    found = grug("pieces:many_blocks")
    assert max(found.values()) <= 1e-5, found


def test_the_tpu_kernel_interpreted(grug: Grug) -> None:
    found = grug("pieces:splash")
    assert found.keys() == {"window", "segments"}
    assert max(found.values()) <= 1e-5, found


def test_a_dense_mask_is_refused(grug: Grug) -> None:
    assert "dense masks are not supported" in grug("pieces:dense_mask")
