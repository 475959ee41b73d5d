"""Loss curves of both trainers from the same weights, on the built-in world. Runs in JAX's process (jax_process.py).

The rates are a third of the recipe's. At the full rates batches of this size amplify rounding: PyTorch in micro-batches
of half the rows deviates from its own curve by 0.02 nats within 300 steps, here by less than 0.0001.
"""

import itertools
from dataclasses import replace

import jax
import numpy as np

from quern import compiler
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.grug.mesh import make_mesh
from quern.grug.state import device_batch, step_config, train_step
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import ModelRecipe, OptimRecipe, TrainRecipe
from quern.resolve import resolve
from quern.text.tinyworld import corpus as tinyworld_corpus
from quern.text.tokenizer import Tokenizer
from quern.train.state import build_model, build_state
from quern.train.step import train_step as torch_step
from tests.grug.parity import state_on, weights_of
from tests.support.toy_training import CPU, toy_recipe

compiler.set_eager(True)


def gaps(steps: int, shown: int, depth: int = 2, width: int = 64, context: int = 64, rows: int = 8) -> list[float]:
    """Returns |loss of JAX - loss of PyTorch| in nats for the first `shown` of `steps` steps, and the loss's decrease.

    Both train in fp32 from the same weights on the same batches.
    """
    texts = list(itertools.islice(tinyworld_corpus.documents(0, 1.0), 400))
    tokenizer = Tokenizer.train(texts, 512)
    corpus = Corpus.from_arrays([[tokenizer.bos, *tokenizer.encode(text)] for text in texts])
    shape = ModelRecipe(width=width, head_dim=32, context=context, vocab_size=tokenizer.vocab_size)
    train = TrainRecipe(steps=steps, batch_tokens=rows * context)
    slower = OptimRecipe(lr_scale=0.01, smear_lr=0.002)
    recipe = resolve(replace(toy_recipe(), depth=depth, model=shape, train=train, optim=slower))
    loader, schedule = Loader(corpus, context, rows, 0), warmup_stable_decay(recipe.train)
    torch_state = build_state(recipe, CPU, build_model(recipe, CPU, 0))
    mesh, cfg = make_mesh(devices=jax.devices()[:1]), step_config(recipe, "float32")
    found, losses = [], []
    with jax.set_mesh(mesh):
        state = state_on(weights_of(torch_state), cfg, mesh)
        for step in range(shown):
            batch = loader.batch(step)
            expected = torch_step(torch_state, batch, schedule(step), CPU, micro_batch_rows=rows)
            state, metrics = train_step(state, device_batch(batch, rows, mesh), schedule(step), cfg)
            found.append(abs(float(metrics["loss"]) - expected.loss))
            losses.append(expected.loss)
    return [*found, losses[0] - float(np.mean(losses[-10:]))]
