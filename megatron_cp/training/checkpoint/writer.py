"""Write one rank's part of a checkpoint with megatron-core's plan and file writer.

megatron-core's finalization is not used: an error on one rank (a full disk while rank 0 writes the index) leaves the
other ranks in a collective and loses the cause.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed import ProcessGroup

from megatron_cp.launch.process import end_with_parent
from megatron_cp.training.checkpoint.checksums import FileSum, SummingTransforms, write_checksums


@dataclass
class WriteResult:
    """Torch's ``WriteResult`` of each part of a rank, and each file's checksum."""

    parts: list[Any] = field(default_factory=list)
    files: dict[str, FileSum] = field(default_factory=dict)


class Writer:
    """One save of a rank: :meth:`start`, :meth:`finish`, rank 0's :meth:`write_index`."""

    def __init__(self) -> None:
        self._strategy = _Strategy()
        self._caller = TemporalAsyncCaller()
        self._report: IO[bytes] | None = None

    @property
    def writing(self) -> bool:
        """Whether the background process still runs."""
        return self._caller.process is not None and self._caller.process.is_alive()

    def start(
        self,
        state: dict[str, Any],
        folder: Path,
        *,
        content_metadata: dict[str, Any],
        replicas: ProcessGroup | None,
        background: bool,
    ) -> None:
        """Plan the save and write this rank's files, or fork a writer. Collective.

        On return ``state`` may change: a forked process has a copy of memory, and GPU tensors were copied.

        Args:
            replicas: ranks with copies of the same parameters that share the work; None: each rank writes its own.
        """
        strategy: Any = self._strategy
        if replicas is not None:
            strategy = FullyParallelSaveStrategyWrapper(strategy, replicas)
        request = dist_checkpointing.save(
            state,
            str(folder),
            strategy,
            async_sharded_save=True,
            async_strategy="mcore",
            content_metadata=content_metadata,
        )
        assert request is not None
        self._report = tempfile.TemporaryFile()  # noqa: SIM115 - read and closed by finish
        if background:
            arguments = [self._report, None, os.getpid()]  # the second argument is the result of preload_fn
            self._caller.schedule_async_call(request._replace(async_fn=_write, async_fn_args=arguments))
        else:
            _write(self._report, request.preload_fn() if request.preload_fn else None, os.getpid())

    def finish(self) -> WriteResult:
        """Wait for this rank's files.

        Raises:
            OSError: the files could not be written.
        """
        report, process = self._report, self._caller.process
        assert report is not None
        self._caller.close()  # waits for the process
        code = 0 if process is None else process.exitcode
        with report:
            report.seek(0)
            try:
                written = pickle.load(report)
            except (EOFError, pickle.UnpicklingError) as error:
                raise OSError(f"the background writer exited early (exit code {code})") from error
        self._report = None
        if isinstance(written, BaseException):
            raise written
        return written

    def write_index(self, folder: Path, written: list[WriteResult]) -> None:
        """Complete the checkpoint in ``folder`` from all ranks' results; on rank 0."""
        self._strategy.writer.finish(self._strategy.metadata, [each.parts for each in written])
        save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(folder))
        write_checksums(folder, {name: file for each in written for name, file in each.files.items()})

    def close(self) -> None:
        """Stop the background process, if any."""
        self._caller.close(abort=True)


class _Strategy(TorchDistSaveShardedStrategy):
    """Keeps megatron-core's plan, so that the save can be finalized separately."""

    writer: FileSystemWriterAsync
    metadata: Any

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> AsyncRequest:
        self.writer, self.metadata = writer, planned[1]
        _, preload, _ = writer.get_save_function_and_args()
        return AsyncRequest(None, (), [], preload_fn=preload)


def _write(report: IO[bytes], buckets: list[Any] | None, parent: int) -> None:
    """Write files and report the results or the error, in this or a forked process."""
    if os.getpid() != parent:
        # A writer that outlives its rank would keep the rank's connections open.
        end_with_parent(parent=parent)
    outcome: Any = WriteResult()
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # torch's CRC is never compared, and costs more than ours
    try:
        for number, bucket in enumerate(buckets or []):
            summing = SummingTransforms()
            _, parts = FileSystemWriterAsync.write_preloaded_data([summing], number, bucket, None, None, use_fsync=True)
            if isinstance(parts, Exception):
                raise parts
            outcome.parts += parts
            outcome.files[Path(bucket[0]).name] = summing.result
    except Exception as error:
        outcome = _root_of(error)
    finally:
        torch.serialization.set_crc32_options(checked)
    pickle.dump(outcome, report)
    report.flush()


def _root_of(error: BaseException) -> BaseException:
    """Return the underlying disk error, if any; torch's own message is misleading."""
    root: BaseException | None = error
    while root is not None and not isinstance(root, OSError):
        root = root.__cause__ or root.__context__
    return root or error
