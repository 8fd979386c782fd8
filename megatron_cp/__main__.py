"""Entry point of ``python -m megatron_cp`` and ``megatron-cp``."""

import sys
from collections.abc import Sequence

from megatron_cp.common.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, also for an interrupt during imports."""
    try:
        from megatron_cp.cli import main as run  # takes 0.5 s, without a handler for Ctrl-C
    except KeyboardInterrupt:
        from megatron_cp.common.errors import EXIT_INTERRUPTED
        from megatron_cp.launch.launcher import is_first_rank

        if is_first_rank():
            say("megatron-cp: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
