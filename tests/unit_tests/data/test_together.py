"""What is built once: by one rank where nodes share a file system, by one of each node where they do not."""

import os
import time
from pathlib import Path

from megatron_cp.common.errors import DataError
from megatron_cp.data.formats.cache import build_cached
from megatron_cp.data.together import once_per_node
from tests.ranks import run_ranks

RANKS_PER_NODE = 2


def _builds(folders: list[Path]) -> int:
    """How often this rank builds what its node keeps in its one of ``folders``."""
    node, os.environ["LOCAL_RANK"] = map(str, divmod(int(os.environ["RANK"]), RANKS_PER_NODE))
    builds = []

    def fill(aside: Path) -> None:
        builds.append(aside)
        time.sleep(0.3)  # nodes that build at once would all begin before one ends
        (aside / "index").write_text("built")

    folder = folders[int(node)]
    once_per_node(lambda: build_cached(fill, folder))
    assert (folder / "index").read_text() == "built" and len(list(folder.parent.iterdir())) == 1
    return len(builds)


def test_nodes_of_one_file_system_build_once(tmp_path: Path) -> None:
    assert run_ranks(_builds, 6, [tmp_path / "cache" / "folder"] * 3, timeout=60) == [1, 0, 0, 0, 0, 0]


def test_nodes_with_file_systems_of_their_own_build_once_each(tmp_path: Path) -> None:
    assert run_ranks(_builds, 4, [tmp_path / node / "folder" for node in "ab"], timeout=60) == [1, 0, 1, 0]


def _outcome(at_fault: int | None) -> str:
    """What ``once_per_node`` says on nodes of one rank each, of which one fails or each finds another value."""
    rank, os.environ["LOCAL_RANK"] = int(os.environ["RANK"]), "0"

    def work() -> int:
        if rank == at_fault:
            raise DataError(f"node {rank} is at fault")
        return rank if at_fault is None else 0

    try:
        return f"no error: {once_per_node(work)}"
    except DataError as error:
        return str(error)


def test_a_fault_of_any_node_reaches_all() -> None:
    for at_fault in (0, 1):
        assert run_ranks(_outcome, 2, at_fault, timeout=60) == [f"node {at_fault} is at fault"] * 2
    first, second = run_ranks(_outcome, 2, None, timeout=60)
    assert first == second and "the nodes do not have the same data" in first
