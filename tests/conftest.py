"""Every test runs with the annotations checked at run time, and with warnings as errors."""

import hypothesis
import jaxtyping

# Before anything imports eqx_norm.
jaxtyping.install_import_hook("eqx_norm", "beartype.beartype")

# The first example of a shape compiles, which takes as long as it takes.
hypothesis.settings.register_profile("eqx_norm", deadline=None, max_examples=40)
hypothesis.settings.load_profile("eqx_norm")
