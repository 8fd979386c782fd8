#!/usr/bin/env python
"""Train a recipe; the same program as ``megatron-cp train``. See ``--help``."""

import sys

from megatron_cp.__main__ import main

# Without the guard, helper processes that save checkpoints would start this command again on import.
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
