"""Checks of the JAX twin's parts, run in JAX's process (jax_process.py): masks, shardings, steps, checkpoints, the
gauntlet with the experiments that pass it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quern.bench.material import reference
from quern.grug import attention as paths
from quern.grug import gauntlet
from quern.grug.attention import AttentionMask, choose, reference_attention
from quern.grug.evaluate import flops_per_token, is_faster
from quern.grug.mesh import BATCH, place, use_device
from quern.grug.model import Params, forward, layout, logits
from quern.grug.optim import adamw
from quern.grug.state import Grug, JaxTrainState, device_batch, init_state, step_config, train_step
from quern.lab.jax_trainer import JaxTrainer
from quern.model.count import FlopCounter, parameters
from quern.optim.constants import AdamWGroup
from quern.optim.schedule import Multipliers
from quern.recipe import Resolved, ResolvedModel
from quern.stages.jax import train
from quern.stages.jax.backend import arrays_of
from quern.stages.jax.train import core_of, from_torch, to_torch
from quern.train import checkpoint, manifest
from tests.grug.parity import batch_of, mesh_of, recipe_in, recipe_of, relative, state_on, weights_of
from tests.grug.two_processes import save
from tests.support.models import CPU
from tests.support.toy_training import ROWS, toy_schedule, toy_state

BAR = 1e-5
HEADS = P(BATCH, None, "model", None)

# Attention --------------------------------------------------------------------------------------------------


def draw(B: int, T: int, H: int, K: int, E: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(T)
    q, k, v = (rng.normal(size=(B, T, heads, E)).astype(np.float32) for heads in (H, K, K))
    return q, k, v


@partial(jax.jit, static_argnames="function")
def pulled(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, function: Any) -> Any:
    """The output, and its vjp at q."""
    y, pull = jax.vjp(lambda q, k, v: function(q, k, v, mask), q, k, v)
    return y, pull(q)


def check_segments_in_blocks_of_queries_and_in_the_tpu_kernel_interpreted() -> None:
    """Some blocks with an odd number of rows. The gauntlet checks masks without segments."""
    mesh, splash = mesh_of("one"), partial(paths.splash_attention, interpret=True)
    for attend, window, lengths, (B, T, E) in (
        (paths.blocked_attention, 150, [[70], [190]], (2, 300, 8)),
        (splash, None, [[100]], (1, 256, 128)),
    ):
        with jax.set_mesh(mesh):
            ids = (np.arange(T)[None] // np.array(lengths)).astype(np.int32)
            mask = AttentionMask(window, place(ids, P(BATCH, None), mesh))
            q, k, v = (place(x, HEADS, mesh) for x in draw(B, T, 2, 1, E))
            (y, grads), (expected, theirs) = (pulled(q, k, v, mask, one) for one in (attend, reference_attention))
            assert max(relative(y, expected), *map(relative, grads, theirs)) <= BAR


def check_the_path_of_each_platform_shape_and_dtype() -> None:
    for platform, dtype, T, E, segments, path in (
        ("cpu", "bfloat16", 512, 128, False, paths.blocked_attention),
        ("gpu", "bfloat16", 600, 8, False, paths.cudnn_attention),
        ("gpu", "float32", 512, 128, False, paths.blocked_attention),
        ("gpu", "bfloat16", 512, 128, True, paths.blocked_attention),
        ("gpu", "bfloat16", 512, 136, False, paths.blocked_attention),
        ("gpu", "bfloat16", 512, 12, False, paths.blocked_attention),
        ("tpu", "bfloat16", 640, 128, True, paths.splash_attention),
        ("tpu", "float32", 640, 256, False, paths.splash_attention),
        ("tpu", "bfloat16", 600, 128, False, paths.blocked_attention),
        ("tpu", "bfloat16", 640, 64, False, paths.blocked_attention),
    ):
        mask = AttentionMask(segment_ids=jnp.zeros((1, T), int) if segments else None)
        q = jax.ShapeDtypeStruct((1, T, 2, E), jnp.dtype(dtype))
        assert choose(platform, q, mask) is path, (platform, dtype, T, E, segments)


# Sharding and steps -----------------------------------------------------------------------------------------


def check_types_say_how_arrays_are_cut() -> None:
    """On a mesh of 8, as JAX prints them."""
    mesh, recipe, rows = mesh_of("replica"), recipe_of(1), "8@(replica_dcn,replica,data)"
    cfg, seen = step_config(recipe, "float32"), dict[str, str]()
    with jax.set_mesh(mesh):
        state = state_on(weights_of(toy_state(recipe)), cfg, mesh)
        tokens = place(batch_of("full").tokens, P(BATCH, None), mesh)

        def types(params: Params) -> Any:
            x = forward(params, tokens, cfg.model)
            seen["hidden"], seen["logits"] = str(jax.typeof(x)), str(jax.typeof(logits(params, x, cfg.model)))
            return jnp.sum(x)

        grads = jax.eval_shape(jax.grad(types), state.params)
        for p, g, shape in zip(*map(jax.tree.leaves, (state.params, grads, layout(cfg.model, mesh))), strict=True):
            assert str(jax.typeof(p).sharding.spec) == str(g.sharding.spec) == str(shape.sharding.spec)
        assert seen == {"hidden": f"float32[{rows},16,32]", "logits": f"float32[{rows},16,62@model]"}
        matrix, momentum = state.params.blocks[0].query, jax.tree.leaves(state.opt_state.inner_states["matrices"])
        like = next(m for m in momentum if m.shape == matrix.shape)
        assert str(jax.typeof(matrix)) == str(jax.typeof(like)) == "float32[32@model,32@data]"


def check_steps_share_one_program_and_a_bad_one_changes_nothing() -> None:
    """Rates change from step to step, the loss of the same batch falls."""
    mesh, recipe, step_of = mesh_of("one"), recipe_of(1), toy_schedule(12)
    cfg, step, host = step_config(recipe, "float32"), train_step, batch_of("full")
    counter: Any = step
    with jax.set_mesh(mesh):
        state, batch = init_state(0, cfg), device_batch(host, ROWS, mesh)
        losses, before = [], counter._cache_size()
        for number in range(3):
            state, metrics = step(state, batch, step_of(number), cfg)
            losses.append(float(metrics["loss"]))
        kept = bytes_of((state.params, state.opt_state))
        weight = np.ones(host.mask.shape, np.float32)
        weight[0, 0] = np.nan
        state, metrics = step(state, device_batch(replace(host, weight=weight), ROWS, mesh), Multipliers(), cfg)
        assert np.isnan(float(metrics["loss"])) and bytes_of((state.params, state.opt_state)) == kept
        assert counter._cache_size() - before == 1
        assert losses[0] > losses[1] > losses[2], losses
        with pytest.raises(ValueError, match=r"the schedule has factors for \['heads'\]: the model's groups are \["):
            step(state, batch, Multipliers(groups={"heads": 0.5}), cfg)


def bytes_of(tree: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def check_the_start_does_not_depend_on_the_mesh() -> None:
    cfg, found = step_config(recipe_of(1), "float32"), []
    for name in ("one", "replica"):
        with jax.set_mesh(mesh_of(name)):
            found.append(to_torch(init_state(3, cfg).params))
    expected = {name: p.shape for name, p in toy_state(recipe_of(1)).model.named_parameters()}
    assert {name: value.shape for name, value in found[0].items()} == expected
    assert all(np.array_equal(value, found[1][name]) for name, value in found[0].items())


def check_an_update_keeps_the_classes_of_its_parameters() -> None:
    """jaxlib takes dataclasses of equally many fields for one type, so what is jitted with a tree can return another's
    class: that of a file which this process has loaded before, under the same name or another."""
    rule = adamw(AdamWGroup(0.1, 0.9, 0.95, 0.1), 1e-8)
    for _ in range(60):

        @jax.tree_util.register_dataclass
        @dataclass
        class Block:
            one: Any
            other: Any

        params: Any = Block(jnp.zeros(2), jnp.zeros(3))
        state = rule.init(params)
        changes, state = jax.eval_shape(partial(rule.update, multipliers=Multipliers()), params, state, params)
        assert type(changes) is type(state[0].mu) is type(state[0].nu) is Block


# Evaluation -------------------------------------------------------------------------------------------------


def check_flops_are_the_other_sides() -> None:
    recipe = recipe_of(2)
    with jax.set_mesh(mesh_of("data")):
        ours, theirs = flops_per_token(step_config(recipe, "float32")), FlopCounter(recipe).per_token()
    assert ours == pytest.approx(theirs, rel=2e-3)  # which has the products of the gates too


def check_bf16_must_be_clearly_faster_round_by_round() -> None:
    for bf16, fp32, faster in (
        ([180.0] * 5, [100.0] * 5, True),
        ([110.0] * 5, [100.0] * 5, False),
        ([30.0] * 5, [100.0] * 5, False),
        # The machine is four times as slow in some rounds, for both dtypes.
        ([160.0, 40.0, 160.0, 40.0], [100.0, 25.0, 100.0, 25.0], True),
        # A single round in which one dtype was slow does not decide.
        ([160.0, 10.0, 160.0], [100.0, 100.0, 100.0], True),
    ):
        assert is_faster(bf16, fp32) is faster


# Checkpoints, and PyTorch -------------------------------------------------------------------------------------


def check_saved_is_restored_on_any_mesh() -> None:
    """A checkpoint is saved from arrays that the next step donates."""
    recipe, mesh = recipe_of(1), mesh_of("replica")
    cfg, batch = step_config(recipe, "float32"), batch_of("full")
    with TemporaryDirectory() as name, jax.set_mesh(mesh):
        folder, state = Path(name) / "checkpoints", state_on(weights_of(toy_state(recipe)), cfg, mesh)
        state, _ = train_step(state, device_batch(batch, ROWS, mesh), Multipliers(), cfg)
        kept = bytes_of(state)
        save(folder, 1, state, cfg, mesh, {"counters": {"step": 1}})
        newest = manifest.latest(folder, pytest.fail)
        assert newest is not None and newest[1]["meta"] == {"counters": {"step": 1}}
        for other in map(mesh_of, ("one", "replica", "all")):
            with jax.set_mesh(other):
                like = jax.eval_shape(lambda: init_state(0, cfg))
                restored: JaxTrainState = arrays_of(checkpoint.load(newest[0])[0], like, other)
                assert bytes_of(restored) == kept
                for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
                    spec = P() if want.sharding is None else want.sharding.spec
                    assert got.sharding.is_equivalent_to(NamedSharding(other, spec), got.ndim)


def check_moving_changes_no_bit_and_names_what_does_not_fit() -> None:
    """PyTorch → JAX on a mesh → PyTorch. The exported file: verbs.py."""
    recipe, mesh = recipe_of(2), mesh_of("replica")
    weights = weights_of(toy_state(recipe))
    with jax.set_mesh(mesh):
        back = to_torch(from_torch(weights, recipe.model, mesh))
        assert back.keys() == weights.keys() and all(np.array_equal(back[n], weights[n]) for n in weights)
        with pytest.raises(ValueError, match=r"smear_scale has shape \(2,\) instead of \(1,\)"):
            from_torch(weights | {"smear_scale": np.zeros(2, np.float32)}, recipe.model, mesh)


# The gauntlet -----------------------------------------------------------------------------------------------


def passes(name: str) -> None:
    """An experiment. Its own attention has one path, so fp32 does for it. One layer has every kind of parameter."""
    core = core_of(recipe_in(f"grug/{name}.py"))
    with patch.object(gauntlet, "TINY", replace(gauntlet.TINY, depth=1)):
        found = gauntlet.check_attention(core, gauntlet.CASES[0]) | gauntlet.check(core)
    assert len(found) == 7 and all(value["passed"] for value in found.values()), found


def check_the_attention_of_each_platform() -> None:
    """The core's model passes as core.py, whose functions are the same."""
    cases = [case for case in gauntlet.CASES if case[2] == "bfloat16"]
    found = [gauntlet.check_attention(Grug, case) for case in cases]
    assert len(found) == 3 and all(value["passed"] for one in found for value in one.values()), found


PRECISION: Callable[[Any], Any] = attrgetter("config.jax_default_matmul_precision")


def check_products_of_fp32_are_whole_while_it_checks() -> None:
    """GPUs and TPUs would round their factors to 10 bits and less, by default. Each finding is said before the next."""
    seen, said = list[tuple[str, int]](), list[str]()

    def looked(core: type[Grug], case: Any = None) -> dict[str, Any]:
        seen.append((PRECISION(jax), len(said)))
        return {f"check {len(seen)}": {"passed": True, "value": 0.0, "bar": ""}}

    with (
        TemporaryDirectory() as out,
        patch.multiple(gauntlet, check_attention=looked, check=looked, measure=lambda core, steps: {}),
    ):
        assert gauntlet.run(Grug, "gpt", Path(out), 1, said.append)
    assert seen == [("highest", 1 + before) for before in range(len(gauntlet.CASES) + 1)] and PRECISION(jax) is None


def check_jax_does_not_compute_elsewhere_in_silence() -> None:
    for kind, advice in ("cuda", r"install jax\[cuda13\] or .*, or give --device cpu"), ("mps", "give --device cpu"):
        with pytest.raises(ValueError, match=f"JAX cannot compute on {kind} here: {advice}"):
            use_device(kind, 1)


def check_the_timed_model_is_that_of_the_benchmarks() -> None:
    assert replace(gauntlet.REFERENCE, bos=None) == ResolvedModel(**vars(reference(False, 0).model))


def check_parameters_are_counted_as_in_pytorch() -> None:
    recipe = recipe_of(bigrams=True)
    with jax.set_mesh(mesh_of("one")):
        assert train.count(step_config(recipe, "float32")) == parameters(recipe)


def check_no_pairs_are_left_out() -> None:
    recipe = recipe_of(bigrams=True, bigram_dropout=0.5)
    with pytest.raises(ValueError, match="trains with all pairs: leave --model.bigram-dropout out"):
        train.fresh_run(recipe, step_config(recipe, "float32"), mesh_of("one"))
    trainer = JaxTrainer(Path("out"), CPU, print)
    with pytest.raises(ValueError, match="trains with all pairs"):
        trainer.check(recipe)


def check_a_broken_experiment_is_noticed() -> None:
    """In three ways, each of which one check sees."""
    good: Callable[..., jax.Array] = forward

    def wrong(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
        return 1.01 * reference_attention(q, k, v, mask)

    def silent(params: Params, tokens: jax.Array, *rest: Any, **more: Any) -> jax.Array:
        first = jax.lax.stop_gradient(params.blocks[0].query)
        blocks = (replace(params.blocks[0], query=first), *params.blocks[1:])
        forgetful = jax.typeof(tokens).sharding.mesh.shape["data"]
        return good(replace(params, blocks=blocks), tokens, *rest, **more) / forgetful

    core = type("Broken", (Grug,), {"reference_attention": wrong, "forward": silent})
    with patch.object(gauntlet, "TINY", replace(gauntlet.TINY, depth=1)):
        failed = [check for check, value in gauntlet.check(core).items() if not value["passed"]]
    for notices in ("fast attention = reference", "parameters without", "devices = 1, loss"):
        assert any(notices in check for check in failed) and len(failed) < 6, failed


def check_a_recipe_of_the_other_library_is_refused() -> None:
    def recipe(name: str) -> Resolved:
        return Resolved.of(recipe_in(name))

    with pytest.raises(ValueError, match="train it with `quern grug train"):
        recipe("grug/attention_sink.py").make_model(None)
    with pytest.raises(ValueError, match="make_model = document_mask:DocumentsGPT, which is PyTorch's"):
        core_of(recipe("document_mask.py"))
    with pytest.raises(ValueError, match="make_rules = adamw_everywhere:rules, which is PyTorch's"):
        core_of(recipe("adamw_everywhere.py"))
