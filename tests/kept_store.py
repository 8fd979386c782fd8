"""A process that keeps a store, as a launcher does."""

import os
import signal
import time
from contextlib import suppress

import torch.distributed as dist


class KeptStore:
    """The store of a process of its own, at ``port`` of 127.0.0.1.

    In the process of a test its thread would be a danger to the ranks that :func:`tests.ranks.run_ranks` forks: it
    looks up the name of each connection, and a fork at this moment copies glibc's resolver with its lock taken
    (``get_locked_global`` in ``resolv_conf.c``, seen in a debugger). Such a rank waits forever at its first connection.
    """

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                os.write(writing, str(store.port).encode())
                while os.getppid() != 1:
                    time.sleep(0.5)
            finally:
                os._exit(0)
        os.close(writing)  # so that reading ends if the process does
        self.port = int(os.read(reading, 16))
        os.close(reading)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
