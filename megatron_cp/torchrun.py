"""torchrun with time to save: ``python -m megatron_cp.torchrun [arguments]``.

On a stop signal, a run finishes its step and saves. torchrun kills it after 30 seconds, and with --max-restarts it
restarts ranks that stopped on request. This launcher waits for ``MEGATRON_CP_STOP_SECONDS`` (600), and does not restart
ranks that all exit with 143, 130 or 129 (SIGTERM, SIGINT, SIGHUP; see training/signals.py). Failures are handled as in
torchrun: the other ranks have 30 seconds, and --max-restarts applies. Exit code 2 is not restarted: a wrong recipe
would fail again. Ranks of other nodes get a report of a killed rank. Another machine's launcher can replace a lost one.

Stores listen on the loopback or the endpoint's address (launch/torch_rendezvous.py). If this process is killed, its
ranks exit (launch/process.py).

Exit codes: 0 done; the first failed rank's code (1, or 2 for configuration and data); 1 if a rank was killed or a port
is taken; 2 usage; 143, 130 and 129 stopped (128 + the signal, for any other). torchrun exits with 1 and a traceback for
all of these.

Private names of torch 2.11: the 30 seconds are the default of ``PContext.close``
(distributed/elastic/multiprocessing/api.py:649) for ``LocalElasticAgent._shutdown`` and ``SubprocessContext._poll``.
``_remaining_restarts`` belongs to the agent, which distributed/launcher/api.py:297 creates from a name that is replaced
here. ``_bootstrap_store_info`` is kept by ``DynamicRendezvousHandler.next_rendezvous``
(elastic/rendezvous/dynamic_rendezvous.py:1206). If a torch later than 2.15 changes them, this file behaves like
torchrun or fails at once, and tests/unit_tests/launch/test_torchrun.py or tests/functional_tests/test_restarts.py
fails.
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
_EXIT_BARRIER_SECONDS = 30.0  # for the launchers of all nodes after ranks stopped; torch has 300


class PatientAgent(LocalElasticAgent):
    """Agent that starts and monitors the ranks of this node."""

    seconds: ClassVar[int] = 600  # for ranks to stop
    exit_code: ClassVar[int] = EXIT_OK  # of the launcher, after its ranks have stopped

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stopping_since: float | None = None
        self._repeated_signals: set[int] = set()
        self._reported: set[int] = set()  # process ids of killed ranks

    def _ranks(self) -> list[subprocess.Popen]:
        """Return the processes of this node; none if ranks are functions (--run-path)."""
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return []
        return [handler.proc for handler in context.subprocess_handlers.values()]

    def _shutdown(self, death_sig: signal.Signals | None = None, *args: Any, **kwargs: Any) -> None:
        drop_lost_output()
        if death_sig is not None and self._pcontext is not None and (ranks := self._ranks()):
            # The launcher got a stop signal. Later signals go to the ranks and do not end the wait.
            for number in signals_to_stop_at():
                signal.signal(number, self._pass_on)
            self._pcontext.close(death_sig, timeout=self.seconds)
            codes = {rank.returncode for rank in ranks}
            expected = {EXIT_OK, *_STOPPED, *(-number for number in self._repeated_signals)}
            type(self).exit_code = 128 + death_sig if codes <= expected else EXIT_FAILED
            text = ", ".join(map(str, sorted(codes)))
            say(f"megatron-cp: {death_sig.name}: sent to the ranks, which exited with {text}", file=sys.stderr)
            if codes <= _STOPPED:  # other nodes' ranks stop too, and may still use a store in this process
                self._exit_barrier_timeout = _EXIT_BARRIER_SECONDS
                self._exit_barrier()
        # Ends remaining ranks within 30 seconds; torch 2.14 passes the time itself.
        super()._shutdown(death_sig or signal.SIGTERM, *args, **kwargs)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a repeated signal to the ranks: a second SIGINT ends them at once."""
        self._repeated_signals.add(number)
        for rank in self._ranks():
            if rank.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Create a new store in each round: restarted ranks must not read old keys."""
        # torch writes the store's address in the first round only, where a replacing launcher would not find it.
        if hasattr(handler := worker_group.spec.rdzv_handler, "_bootstrap_store_info"):
            handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)

    def _report_for_killed_ranks(self, worker_group: WorkerGroup) -> None:
        """Report killed ranks to all nodes before this node's ranks stop (30 seconds)."""
        group: Any = worker_group  # torch's stub types all attributes as None
        for rank, worker in zip(self._ranks(), group.workers, strict=False):
            code = rank.poll()
            if code is not None and code < 0 and rank.pid not in self._reported:
                self._reported.add(rank.pid)
                report_for_killed_ranks(group.master_addr, group.master_port, worker.global_rank, -code)

    def _stopped_early(self, worker_group: WorkerGroup) -> bool:
        """Return whether a rank stopped before the rendezvous, where others wait for it."""
        group: Any = worker_group
        for rank, worker in zip(self._ranks(), group.workers, strict=False):
            if rank.poll() in _STOPPED and stopped_before_rendezvous(
                group.master_addr, group.master_port, worker.global_rank
            ):
                text = f"rank {worker.global_rank} stopped before the rendezvous; stopping the other ranks"
                say(f"megatron-cp: {text}", file=sys.stderr, flush=True)
                return True
        return False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._report_for_killed_ranks(worker_group)
        codes = {rank.poll() for rank in self._ranks()}
        none_failed = None in codes and codes <= {None, EXIT_OK, *_STOPPED}
        is_early = none_failed and self._stopped_early(worker_group)
        if none_failed and not is_early:
            # torch would treat the first stopped rank as a failure and send SIGTERM to ranks that are exiting, some of
            # which no longer handle it.
            if self._stopping_since is None and _STOPPED & codes:
                self._stopping_since = time.monotonic()
            if self._stopping_since is None or time.monotonic() - self._stopping_since < self.seconds:
                return RunResult(state=WorkerState.HEALTHY)
        self._stopping_since = None
        result = super()._monitor_workers(worker_group)
        failure_codes = {failure.exitcode for failure in result.failures.values()}
        if EXIT_CONFIG in failure_codes:
            self._remaining_restarts = 0
        # SIGTERM ends a rank that waits at the rendezvous; it has nothing to save.
        if failure_codes and failure_codes <= (_STOPPED | {-signal.SIGTERM} if is_early else _STOPPED):
            type(self).exit_code = max(failure_codes)
            self._exit_barrier_timeout = _EXIT_BARRIER_SECONDS
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={rank.global_rank: None for rank in worker_group.workers}
            )
        return result


def _stop_once(number: int, frame: FrameType | None) -> None:
    """Raise SignalException, once: a closing terminal sends SIGHUP twice."""
    for each in signals_to_stop_at():
        signal.signal(each, signal.SIG_IGN)  # until PatientAgent._shutdown passes them on
    raise SignalException(f"Process {os.getpid()} got signal: {signal.Signals(number)}", signal.Signals(number))


def _is_new(record: logging.LogRecord) -> bool:
    """Return False for torch's lines on failed ranks, which log errors themselves."""
    return not str(record.msg).startswith(("Sending process", "failed (exitcode"))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse torchrun's arguments, and confine the launcher's addresses."""
    parser = torchrun.get_args_parser()
    if parser.get_default("master_port") == _DEFAULT_PORT:
        parser.set_defaults(master_port=None)
    args = parser.parse_args(argv)
    if args.master_port is not None and not 0 <= args.master_port < 2**16:
        parser.error(f"--master_port={args.master_port}: must be from 0 to 65535. Fix: --master_port=29501")
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
    """Run torchrun; return the exit code."""
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
    logging.getLogger(multiprocessing_api.__name__).addFilter(_is_new)
    try:
        record(torchrun.run)(args)
    except ChildFailedError as failed:
        # Without ranks that stopped on request.
        failures = {rank: each for rank, each in failed.failures.items() if each.exitcode not in _STOPPED}
        rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
        killed = f"killed by signal {-first.exitcode}"
        how = f"exit code {first.exitcode}; its messages are above" if first.exitcode > 0 else killed
        if first.exitcode != EXIT_CONFIG:  # these messages are complete
            say(f"megatron-cp: rank {rank} failed first: {how}", file=sys.stderr)
        return max(first.exitcode, EXIT_FAILED)
    except (RendezvousError, DistError, PortError) as error:
        for cause in (error, error.__cause__):
            if isinstance(cause, PortError):
                say(f"megatron-cp: {cause}. Fix: {_fix(cause, args)}", file=sys.stderr)
                return EXIT_FAILED
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
        say(f"megatron-cp: lost contact with the launchers on other nodes ({reason})", file=sys.stderr)
        return EXIT_FAILED
    except SignalException as stop:
        return PatientAgent.exit_code or 128 + stop.sigval
    except KeyboardInterrupt:  # before ranks were started
        return EXIT_INTERRUPTED
    return PatientAgent.exit_code


if __name__ == "__main__":
    sys.exit(main())
