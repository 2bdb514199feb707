"""Names all that is compared, each by one name in every table, figure and file."""

OURS = "eqx-norm"
OURS_SEPARATE = "eqx-norm, separate ReLU"  # what a changed import gives
OURS_XLA = "eqx-norm, xla"
OURS_PALLAS = "eqx-norm, pallas"
OURS_UNBIASED = "eqx-norm, unbiased"
# Equinox's batch norm in its two modes, and its layer norm.
EQUINOX_EMA, EQUINOX_BATCH, EQUINOX = "Equinox ema", "Equinox batch", "Equinox"
LINEN, NNX = "Flax linen", "Flax nnx"
# Flax's default is the variance of one pass, E[x^2] - E[x]^2: `use_fast_variance`.
LINEN_TWO_PASS, NNX_TWO_PASS = "Flax linen, two-pass", "Flax nnx, two-pass"
TORCH, TORCH_COMPILED = "PyTorch", "PyTorch, compiled"
# The operator that PyTorch's layer calls, without the check that comes before.
TORCH_OPERATOR = "torch.batch_norm"


def package(name: str) -> str:
    """Returns the package that has to be installed for the peer of that name."""
    words = {"eqx-norm": "eqx_norm", "Equinox": "equinox", "Flax": "flax"}
    words |= {"PyTorch": "torch", "torch": "torch"}
    return next(package for word, package in words.items() if name.startswith(word))
