#!/usr/bin/env python
"""Train a recipe; the same program as ``megatron-cp train``. See ``--help``."""

import sys

from megatron_cp.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
