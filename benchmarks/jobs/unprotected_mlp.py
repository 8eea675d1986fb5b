"""The benchmarks' job without what keeps strangers out."""

from __future__ import annotations

import unprotected  # noqa: F401  # every process of the job is forked from one that has imported it
from mlp import main

if __name__ == "__main__":
    main()
