#!/usr/bin/env python
"""Tokenize text into Megatron .bin/.idx files.

It is the same program as ``megatron-cp preprocess``. See ``--help``.
"""

import sys

from megatron_cp.__main__ import main

# Without the guard, processes that tokenize would start this command again when they import the file.
if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
