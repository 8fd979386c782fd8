"""``python -m megatron_cp``."""

import sys

from megatron_cp.cli import main

if __name__ == "__main__":
    sys.exit(main())
