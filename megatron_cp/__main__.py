"""``python -m megatron_cp``."""

import sys

from megatron_cp.cli import main

sys.exit(main())
