"""``torch.compile`` leaves attention out of its graphs.

Results and gradients are the same.
"""

import shutil

import pytest
import torch
import torch.distributed as dist

from megatron_cp.attention import context_parallel_attention
from tests.ranks import run_ranks
from tests.unit_tests.attention.harness import COMM_TYPES, Case, make_groups


def _compiled(backend: str, a2a_size: int) -> list[bool]:
    """Return whether a compiled caller gives the same results twice, by transport."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # dist.group.WORLD inside the compiled function would leave all of it to the interpreter.
    pair, world, same = make_groups(a2a_size), dist.group.WORLD, []
    case = Case(heads=8, kv_heads=4, offset=True, dtype=torch.float32)
    inputs, dout = case.draw()

    def around(q, k, v, offset, comm_type):
        group = pair if comm_type == "a2a+p2p" else world
        out = context_parallel_attention(q * 2, k + 1, v, group=group, comm_type=comm_type, softmax_offset=offset)
        return out * 3

    compiled = torch.compile(around, backend=backend)
    for comm_type in COMM_TYPES:
        answers = []
        for function in (around, compiled, compiled):
            mine = [case.shard(x, rank, size).clone().requires_grad_() for x in inputs[:3]]
            mine.append(inputs[3].clone().requires_grad_())
            out = function(*mine, comm_type)
            answers.append([out.detach(), *torch.autograd.grad(out, mine, case.shard(dout, rank, size))])
        for answer in answers[1:]:
            same.append(all(map(torch.equal, answers[0], answer)))
    return same


@pytest.mark.parametrize(
    ("backend", "size", "a2a_size"),
    [
        ("eager", 2, 2),
        pytest.param("eager", 4, 2, marks=pytest.mark.slow),
        pytest.param("aot_eager", 4, 2, marks=pytest.mark.slow),
        pytest.param("inductor", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_caller_gets_the_same(backend, size, a2a_size):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("needs a compiler")
    for same in run_ranks(_compiled, size, backend, a2a_size, timeout=600.0):
        assert same == [True] * 2 * len(COMM_TYPES)


def _graphs() -> tuple[list[int], str]:
    """Return the operations of each compiled graph, and the error with fullgraph."""
    graphs: list[int] = []
    world = dist.group.WORLD

    def backend(graph, inputs):
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    def around(x):
        return context_parallel_attention(x * 2, x, x, group=world) * 3

    x = torch.ones(4, 1, 2, 8)
    around(x)
    torch.compile(around, backend=backend)(x)
    torch._dynamo.reset()
    try:
        torch.compile(around, backend=backend, fullgraph=True)(x)
    except Exception as error:
        return graphs, str(error)
    return graphs, "nothing"


def test_attention_is_in_no_compiled_graph():
    ((graphs, reported),) = run_ranks(_graphs, 1)
    assert graphs == [1, 1]  # the product before it and the one behind it
    assert "torch.compiler.disable" in reported and "it communicates and chooses kernels on the host" in reported
