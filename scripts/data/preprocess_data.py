#!/usr/bin/env python
"""Tokenize text into Megatron .bin/.idx files; the same program as ``megatron-cp preprocess``. See ``--help``."""

import sys

from megatron_cp.__main__ import main

# The guard matters: the processes that tokenize import this file.
if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
