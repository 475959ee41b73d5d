"""One file for each verb that prepares, trains, evaluates or talks, and what training stages share.

A stage gets a recipe, a machine and a run's folder, and wires the lower rooms together. JAX's stages are in jax/.
"""
