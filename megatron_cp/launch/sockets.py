"""Addresses that a run's sockets listen on.

torch's store listens on all interfaces without authentication. Here the socket is bound first and passed to torch's
store (``master_listen_fd``). gloo and NCCL read their interface from environment variables. SECURITY.md lists the
remaining risks.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import time
from datetime import timedelta
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_cp.common.errors import RuntimeFault, first_line
from megatron_cp.launch import launcher
from megatron_cp.launch.store_watch import RESTART, StoreSilentError, within

LOOPBACK = "127.0.0.1"
_LISTEN = "MEGATRON_CP_LISTEN"  # address for stores to listen on, if it is not the one that others connect to
_SECONDS_REFUSED = 3.0  # by a launcher's host with a full queue of connections, or without a launcher
_SECONDS_TO_ANSWER = 5.0  # beyond a time limit; less than the rendezvous allows as a whole

logger = logging.getLogger(__name__)


class PortError(RuntimeFault):
    """Port that cannot be used; ``free`` is another port, or 0."""

    def __init__(self, host: str, port: int, what: str, fix: str = "", free: int = 0) -> None:
        super().__init__(f"port {port} of {host}: {what}")
        self.host, self.fix, self.free = host, fix, free


def address_of(host: str) -> str:
    """Resolve a host, preferring non-loopback addresses and IPv4.

    Raises:
        OSError: the name is unknown.
    """
    found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return min(sorted(found), key=lambda text: (ipaddress.ip_address(text).is_loopback, ":" in text))


def address_towards(host: str) -> str:
    """Return this machine's address on the interface that leads to ``host``.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    address = address_of(host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has ``address``."""
    wanted = LOOPBACK if ipaddress.ip_address(address).is_loopback else address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, its in interfaces if wanted in [each.address.partition("%")[0] for each in its]), None)


def use_one_interface() -> None:
    """Have gloo and NCCL listen on one interface, unless the user has chosen one.

    One node: the loopback. Several nodes: the interface that leads to MASTER_ADDR.
    """
    one_node = launcher.on_one_node()
    try:
        name = interface_of(LOOPBACK if one_node else address_towards(os.environ.get("MASTER_ADDR", "")))
    except OSError:  # the rendezvous will report it
        return
    if name is None:
        return
    # "=": NCCL would otherwise match prefixes of interface names.
    chosen = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    if not one_node and launcher.is_first_rank() and not chosen.keys() & os.environ.keys():
        logger.info("network: %s, which leads to %s", name, os.environ["MASTER_ADDR"])
    for variable, value in chosen.items():
        os.environ.setdefault(variable, value)


def tcp_store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(minutes=5),
    **options: Any,
) -> dist.TCPStore:
    """Create a TCPStore that, as master, listens on one address only.

    Raises:
        PortError: the port is taken, or no store answers there.
        RuntimeError: torch's, for other connection errors.
    """
    if is_master:
        listener = _listen(host_name, port)
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()
    # torch would wait without limit for a program that accepts the connection and sends nothing.
    seconds = timeout.total_seconds() + _SECONDS_TO_ANSWER
    try:
        return within(
            seconds, lambda: dist.TCPStore(host_name, port, world_size, is_master, timeout=timeout, **options)
        )
    except StoreSilentError:
        what = f"no store answered within {seconds:.0f} seconds"
    except dist.DistNetworkError as error:
        what = f"no store listens there ({first_line(error)})"
    raise PortError(
        host_name, port, what, f"start rank 0 on {host_name}; if another program uses the port, give all ranks another"
    )


def environment_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Connect to the store of ``env://``; return it, the rank and the size.

    Raises:
        RuntimeFault: the launcher exited, or rank 0 must keep the store and MASTER_PORT is taken.
        ValueError, RuntimeError: torch's.
    """
    environment = os.environ
    port, size = launcher.number("MASTER_PORT", "MASTER_PORT=29500"), launcher.world_size()
    if "MASTER_ADDR" not in environment or port is None or port >= 2**16 or size is None:
        return next(rendezvous("env://", timeout=timeout))  # which raises an error that names the variable
    rank, by_launcher = launcher.rank(), environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launcher.on_one_node() and not by_launcher:
        environment["MASTER_ADDR"] = LOOPBACK
    if by_launcher:
        _check_launcher(environment["MASTER_ADDR"], port)
    return _store_at(environment["MASTER_ADDR"], port, size, rank == 0 and not by_launcher, timeout), rank, size


def _check_launcher(host: str, port: int) -> None:
    """Check that the launcher still listens: it did before it started this rank.

    Raises:
        RuntimeFault: nothing listens there any more.
    """
    deadline = time.monotonic() + _SECONDS_REFUSED
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                message = "the launcher exited, and with it the store of torch.distributed"
                raise RuntimeFault(f"MASTER_ADDR={host}, MASTER_PORT={port}: {message}. {RESTART}") from None
            time.sleep(0.2)
        except OSError:  # unreachable: torch waits for it, and reports it
            return None


def _store_at(host: str, port: int, size: int, is_master: bool, timeout: timedelta) -> dist.Store:
    try:
        return tcp_store(host, port, size, is_master, timeout, multi_tenant=is_master)
    except PortError as error:
        fix = f"MASTER_PORT={error.free} on every rank" if error.free else error.fix
        raise RuntimeFault(f"MASTER_ADDR={host}, MASTER_PORT={port}: {error}. Fix: {fix}") from None


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address.

    Raises:
        PortError: the address or port cannot be used.
    """
    address = os.environ.get(_LISTEN, "")
    try:
        address = address or address_of(host)
        listener = _bound(address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            fix = f"name an address of this machine, or set {_LISTEN}=0.0.0.0 to listen on all interfaces"
            raise PortError(host, port, error.strerror or str(error), fix) from None
        with _bound(address, 0) as other:
            raise PortError(host, port, "another process listens there", free=other.getsockname()[1]) from None
    if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        logger.warning(
            "%s is %s on this machine: other machines cannot connect. To silence this warning use its address "
            "instead of its name, or set %s=0.0.0.0 to listen on all interfaces",
            *(host, address, _LISTEN),
        )
    listener.listen(socket.SOMAXCONN)
    return listener


def _bound(address: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made
