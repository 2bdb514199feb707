"""Compares the layers with other libraries, one script each; README.md has the results."""

import importlib.util
import sys

# A missing package gives one line in place of a traceback.
for _package in ("matplotlib", "optax", "tqdm"):
    if importlib.util.find_spec(_package) is None:
        print(
            f"experiments: {_package} is not installed; pip install -e '.[experiments]' has it",
            file=sys.stderr,
        )
        sys.exit(2)
