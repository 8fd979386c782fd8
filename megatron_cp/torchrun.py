"""torchrun, but patient: ``python -m megatron_cp.torchrun [torchrun's own arguments]``.

A run that is asked to stop finishes its step and saves. torchrun gives it 30 seconds for that, then kills it; and with
--max-restarts it starts ranks again that stopped because one of them was asked to. Here a launcher that is asked to
stop waits for ``MEGATRON_CP_STOP_SECONDS`` (600), and ranks that all end with 143, 130 or 129 (SIGTERM, SIGINT, SIGHUP;
see training/signals.py) are not started again. A rank that fails is torchrun's business: the others have 30 seconds,
and --max-restarts counts, unless the rank ended with 2: what is wrong with a recipe is wrong again. Ranks of other
nodes hear of one that was killed, and a launcher on another machine can take the place of one that is lost.

Stores listen on the loopback or the endpoint's address (launch/torch_rendezvous.py). Ranks end when this process is
killed (launch/process.py).

Exit codes: 0 done; the first failing rank's own (1, or 2 for what a user can mend); 1 where a rank had to be killed or
a port is taken; 2 usage; 143, 130 and 129 stopped (128 + the signal, for any other). torchrun ends with 1 and a
traceback for all of these.

In torch 2.11 the 30 seconds are the default of ``PContext.close`` (distributed/elastic/multiprocessing/api.py:649), as
``LocalElasticAgent._shutdown`` and ``SubprocessContext._poll`` call it; ``_remaining_restarts`` is its agent's, which
torchrun makes in distributed/launcher/api.py:297, from a name that we put ours under; ``_bootstrap_store_info`` is what
``DynamicRendezvousHandler.next_rendezvous`` (elastic/rendezvous/dynamic_rendezvous.py:1206) keeps. None of it is a
public interface: should a later torch than 2.15 differ, this behaves like torchrun or fails at once, and
tests/unit_tests/launch/test_torchrun.py or tests/functional_tests/test_restarts.py fails.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

from megatron_cp.launch.process import announce_launcher, drop_lost_output, end_when_interrupted, signals_to_stop_at

if __name__ == "__main__":
    end_when_interrupted()  # importing torch takes seconds

import torch.distributed.elastic.multiprocessing.api as multiprocessing_api
import torch.distributed.launcher.api as launcher_api
import torch.distributed.run as torchrun
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous.api import RendezvousError

from megatron_cp.common.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OF_SIGNAL, EXIT_OK, ConfigError
from megatron_cp.common.terminal import say
from megatron_cp.launch import launcher
from megatron_cp.launch.health_monitor import report_for_killed_ranks, stopped_before_rendezvous
from megatron_cp.launch.sockets import LOOPBACK, PortError
from megatron_cp.launch.torch_rendezvous import confine_arguments, confine_stores

_STOPPED = set(EXIT_OF_SIGNAL.values())
_DEFAULT_PORT = 29500  # torchrun's
_SECONDS_TO_MEET = 30.0  # for the launchers of all nodes, whose ranks stopped together; torch has 300


class PatientAgent(LocalElasticAgent):
    """Starts and watches the ranks of this node."""

    seconds: ClassVar[int] = 600  # for ranks that were asked to stop
    exit_code: ClassVar[int] = EXIT_OK  # of the launcher, once its ranks have stopped

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stopping_since: float | None = None
        self._asked_again: set[int] = set()  # with these signals
        self._said_for: set[int] = set()  # processes that were killed

    def _ranks(self) -> list[subprocess.Popen]:
        """The processes of this node; none where ranks are functions (--run-path), which are torch's business alone."""
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return []
        return [handler.proc for handler in context.subprocess_handlers.values()]

    def _shutdown(self, death_sig: signal.Signals | None = None, *args: Any, **kwargs: Any) -> None:
        drop_lost_output()
        if death_sig is not None and self._pcontext is not None and (ranks := self._ranks()):
            # This launcher was asked to stop. What it is asked from now on goes to the ranks: nothing ends the waiting.
            for number in signals_to_stop_at():
                signal.signal(number, self._pass_on)
            self._pcontext.close(death_sig, timeout=self.seconds)
            codes = {rank.returncode for rank in ranks}
            as_asked = {EXIT_OK, *_STOPPED, *(-number for number in self._asked_again)}
            type(self).exit_code = 128 + death_sig if codes <= as_asked else EXIT_FAILED
            said = ", ".join(map(str, sorted(codes)))
            say(f"megatron-cp: {death_sig.name}: the ranks were told and ended with {said}", file=sys.stderr)
            if codes <= _STOPPED:  # and those of other nodes with them: this launcher may keep the store they still use
                self._exit_barrier_timeout = _SECONDS_TO_MEET
                self._exit_barrier()
        # Ranks that are left, in 30 seconds, which torch 2.14 passes by itself, and what else there is.
        super()._shutdown(death_sig or signal.SIGTERM, *args, **kwargs)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Asked once more: a second SIGINT ends ranks at once, a second SIGTERM tells them nothing new."""
        self._asked_again.add(number)
        for rank in self._ranks():
            if rank.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """With a store of its own each time: a launcher that takes a lost one's place looks for its address where torch
        writes it in the first round only, and a restarted rank finds what the dead have written."""
        if hasattr(handler := worker_group.spec.rdzv_handler, "_bootstrap_store_info"):
            handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)

    def _report_for_killed_ranks(self, worker_group: WorkerGroup) -> None:
        """To ranks of all nodes, before those of this one are stopped, which takes up to 30 seconds."""
        group: Any = worker_group  # whose attributes are all None to torch's stub
        for rank, worker in zip(self._ranks(), group.workers, strict=False):
            code = rank.poll()
            if code is not None and code < 0 and rank.pid not in self._said_for:
                self._said_for.add(rank.pid)
                report_for_killed_ranks(group.master_addr, group.master_port, worker.global_rank, -code)

    def _one_is_waited_for(self, worker_group: WorkerGroup) -> bool:
        """Whether a rank stopped before all had met: no signal will end the others, which wait for it."""
        group: Any = worker_group
        for rank, worker in zip(self._ranks(), group.workers, strict=False):
            if rank.poll() in _STOPPED and stopped_before_rendezvous(
                group.master_addr, group.master_port, worker.global_rank
            ):
                text = f"rank {worker.global_rank} stopped before all ranks had met; the others are ended"
                say(f"megatron-cp: {text}", file=sys.stderr, flush=True)
                return True
        return False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._report_for_killed_ranks(worker_group)
        codes = {rank.poll() for rank in self._ranks()}
        nobody_failed = None in codes and codes <= {None, EXIT_OK, *_STOPPED}
        is_early = nobody_failed and self._one_is_waited_for(worker_group)
        if nobody_failed and not is_early:
            # Nobody has failed. torch would take the first rank that stopped for a failure and send SIGTERM to those
            # that are still ending, some of which no longer expect one.
            if self._stopping_since is None and _STOPPED & codes:
                self._stopping_since = time.monotonic()
            if self._stopping_since is None or time.monotonic() - self._stopping_since < self.seconds:
                return RunResult(state=WorkerState.HEALTHY)
        self._stopping_since = None
        result = super()._monitor_workers(worker_group)
        failed_with = {failure.exitcode for failure in result.failures.values()}
        if EXIT_CONFIG in failed_with:
            self._remaining_restarts = 0
        # A rank that waits at the rendezvous is ended by SIGTERM, and has nothing to save.
        if failed_with and failed_with <= (_STOPPED | {-signal.SIGTERM} if is_early else _STOPPED):
            type(self).exit_code = max(failed_with)
            self._exit_barrier_timeout = _SECONDS_TO_MEET
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={rank.global_rank: None for rank in worker_group.workers}
            )
        return result


def _stop_once(number: int, frame: FrameType | None) -> None:
    """What torch's handler does, but not twice: a terminal that hangs up has its shell send SIGHUP once more."""
    for each in signals_to_stop_at():
        signal.signal(each, signal.SIG_IGN)  # until PatientAgent._shutdown passes them on
    raise SignalException(f"Process {os.getpid()} got signal: {signal.Signals(number)}", signal.Signals(number))


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a rank failed, which it said itself, nor a line for each rank that is ended because of it."""
    return not str(record.msg).startswith(("Sending process", "failed (exitcode"))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """torchrun's arguments, changed so that the launcher listens where it must."""
    parser = torchrun.get_args_parser()
    if parser.get_default("master_port") == _DEFAULT_PORT:
        parser.set_defaults(master_port=None)
    args = parser.parse_args(argv)
    if args.master_port is not None and not 0 <= args.master_port < 2**16:
        parser.error(f"--master_port={args.master_port}: ports go from 0 to 65535. Fix: --master_port=29501")
    try:
        confine_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    if args.master_port is None:
        args.master_port = _DEFAULT_PORT
    handled = args.signals_to_handle.split(",")
    if signal.SIGHUP not in signals_to_stop_at() and "SIGHUP" in handled:  # nohup
        args.signals_to_handle = ",".join(name for name in handled if name != "SIGHUP")
    return args


def _fix(error: PortError, args: argparse.Namespace) -> str:
    if not error.free:
        return error.fix
    if args.rdzv_backend == "static":
        return f"--master_port={error.free} on every node"
    if error.host == LOOPBACK:
        return f"--rdzv_endpoint=localhost:{error.free}, or --standalone, which finds a free port"
    return f"--rdzv_endpoint={error.host}:{error.free} on every node"


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun and return the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        seconds = launcher.number("MEGATRON_CP_STOP_SECONDS", "a number of whole seconds, or unset it")
    except ConfigError as error:
        say(f"megatron-cp: {error}", file=sys.stderr)
        return EXIT_CONFIG
    PatientAgent.seconds = PatientAgent.seconds if seconds is None else seconds
    args = _arguments(argv)
    launcher_api.LocalElasticAgent = PatientAgent  # type: ignore[misc]
    multiprocessing_api._terminate_process_handler = _stop_once  # type: ignore[assignment]
    confine_stores()
    announce_launcher()
    logging.getLogger(multiprocessing_api.__name__).addFilter(_is_news)
    try:
        record(torchrun.run)(args)
    except ChildFailedError as failed:
        # Not those that stopped as asked, while another did not.
        failures = {rank: each for rank, each in failed.failures.items() if each.exitcode not in _STOPPED}
        rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
        killed = f"was killed by signal {-first.exitcode}"
        how = f"ended with {first.exitcode}; what it said is above" if first.exitcode > 0 else killed
        if first.exitcode != EXIT_CONFIG:  # whose message is complete
            say(f"megatron-cp: rank {rank} failed first: it {how}", file=sys.stderr)
        return max(first.exitcode, EXIT_FAILED)
    except (RendezvousError, DistError, PortError) as error:
        for cause in (error, error.__cause__):
            if isinstance(cause, PortError):
                say(f"megatron-cp: {cause}. Fix: {_fix(cause, args)}", file=sys.stderr)
                return EXIT_FAILED
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
        say(f"megatron-cp: this launcher does not find those of other nodes, or no more ({reason})", file=sys.stderr)
        return EXIT_FAILED
    except SignalException as stop:
        return PatientAgent.exit_code or 128 + stop.sigval
    except KeyboardInterrupt:  # before there were ranks
        return EXIT_INTERRUPTED
    return PatientAgent.exit_code


if __name__ == "__main__":
    sys.exit(main())
