"""Patches of torch's launcher: one address, and no foreign pickles.

In torch 2.11 the launchers' store and the ranks' store listen on all interfaces. Launchers keep their state in the
store as a pickle, so anyone who can connect could run code in the launcher. :func:`confine_stores` replaces private
names; tests/unit_tests/launch/test_sockets.py fails if they change.
"""

from __future__ import annotations

import argparse
import io
import pickle
import types
import uuid
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous, static_tcp_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import _parse_rendezvous_config, parse_min_max_nnodes

from megatron_cp.launch.sockets import LOOPBACK, address_towards, tcp_store

_ALLOWED = {
    dynamic_rendezvous.__name__: ("_RendezvousState", "_NodeDesc"),
    "datetime": ("datetime", "timedelta", "timezone"),
}


class _StateUnpickler(pickle.Unpickler):
    """Unpickler of the classes of torch's ``_RendezvousState``."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _loads(data: bytes) -> Any:
    try:
        return _StateUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # any type: the data may be anything
        raise pickle.UnpicklingError(f"the launchers' store holds something other than their state: {error}") from error


def _store_of_ranks(handler: DynamicRendezvousHandler, address: str, port: int) -> dist.TCPStore:
    return tcp_store(address, port, is_master=True, multi_tenant=True)


def confine_stores() -> None:
    """Patch, in this process, how torch's launcher makes stores and reads its state."""
    static_tcp_rendezvous.TCPStore = tcp_store  # type: ignore[assignment,misc]
    c10d_rendezvous_backend.TCPStore = tcp_store  # type: ignore[assignment,misc]
    DynamicRendezvousHandler._create_tcp_store_server = _store_of_ranks  # type: ignore[method-assign,assignment]
    dynamic_rendezvous.pickle = types.SimpleNamespace(  # type: ignore[assignment]
        dumps=pickle.dumps, loads=_loads, PickleError=pickle.PickleError
    )


def confine_arguments(args: argparse.Namespace) -> None:
    """Confine torchrun's arguments to one interface.

    One node uses the loopback, and a free port unless one is given. Several nodes use the interface that leads to the
    endpoint. ``args.master_port`` is None if not given.
    """
    one_node = args.standalone or parse_min_max_nnodes(args.nnodes)[1] == 1
    if args.standalone:
        args.standalone, args.rdzv_backend, args.rdzv_endpoint = False, "c10d", ""
        args.rdzv_id = str(uuid.uuid4())
    conf = _parse_rendezvous_config(args.rdzv_conf)
    elsewhere = conf.get("store_type", "tcp") != "tcp" or conf.get("is_host") == "false"
    if not one_node:
        _confine_several(args)
    elif args.rdzv_backend in ("static", "c10d") and not elsewhere:
        _, port = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=args.master_port or 0)
        args.rdzv_backend = "c10d"  # a static rendezvous cannot choose a free port
        args.rdzv_endpoint = f"{LOOPBACK}:{port}"
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, "" if "is_host" in conf else "is_host=true"]))
        args.local_addr = LOOPBACK


def _confine_several(args: argparse.Namespace) -> None:
    if args.rdzv_backend == "c10d" and args.local_addr is None:
        host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)
        with suppress(OSError):  # an unknown name; torch reports it
            args.local_addr = address_towards(host)
