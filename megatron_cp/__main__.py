"""``python -m megatron_cp``, and the program ``megatron-cp``."""

import sys
from collections.abc import Sequence

from megatron_cp.common.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code, also where it is interrupted before it is there."""
    try:
        from megatron_cp.cli import main as run  # takes half a second, in which nothing of it can answer Ctrl-C
    except KeyboardInterrupt:
        from megatron_cp.common.errors import EXIT_INTERRUPTED
        from megatron_cp.launch.launcher import is_first_rank

        if is_first_rank():
            say("megatron-cp: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
