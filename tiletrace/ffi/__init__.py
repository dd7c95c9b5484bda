"""From a compiled kernel to a running one: the image, the launchers, and the JAX primitive."""
