#!/usr/bin/env python
"""Train a recipe; the same program as ``megatron-cp train``. See ``--help``."""

import sys

from megatron_cp.__main__ import main

# The guard matters: saving a checkpoint starts helper processes that import this file.
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
