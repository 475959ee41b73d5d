"""Each mask and each path of attention against a loop over queries in float64."""

from tests.support.jax_process import Grug


def test_each_mask_on_each_path(grug: Grug) -> None:
    found = grug("pieces:each_mask")
    assert found.keys() == {"reference", "blocked", "library", "picked"}
    assert max(found.values()) <= 1e-5, found


def test_several_blocks_of_queries(grug: Grug) -> None:
    found = grug("pieces:many_blocks")
    assert max(found.values()) <= 1e-5, found


CHOICES = [
    (("cpu", "bfloat16", 512, 128, False), "blocked_attention"),
    (("gpu", "bfloat16", 600, 8, False), "cudnn_attention"),
    (("gpu", "float32", 512, 128, False), "blocked_attention"),
    (("gpu", "bfloat16", 512, 128, True), "blocked_attention"),
    (("gpu", "bfloat16", 512, 136, False), "blocked_attention"),
    (("gpu", "bfloat16", 512, 12, False), "blocked_attention"),
    (("tpu", "bfloat16", 640, 128, True), "splash_attention"),
    (("tpu", "float32", 640, 256, False), "splash_attention"),
    (("tpu", "bfloat16", 600, 128, False), "blocked_attention"),
    (("tpu", "bfloat16", 640, 64, False), "blocked_attention"),
]


def test_the_path_of_each_platform_shape_and_dtype(grug: Grug) -> None:
    assert grug("pieces:chosen", rows=[row for row, _ in CHOICES]) == [name for _, name in CHOICES]


def test_segments_in_the_tpu_kernel_interpreted(grug: Grug) -> None:
    assert grug("pieces:splash") <= 1e-5


def test_a_dense_mask_is_refused(grug: Grug) -> None:
    assert "dense masks are not supported" in grug("pieces:dense_mask")
