"""Faults of batches, of losses and of multi-token prediction."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from megatron_cp.attention.placement.layout import PlacedLayout
from megatron_cp.attention.sharding import shard_sequence
from megatron_cp.dynamic_cp.runtime import iterator
from megatron_cp.models import language_model
from megatron_cp.models.layers import chunked_loss, mtp
from megatron_cp.training import batches, forward_backward
from tests.unit_tests.training.layouts.cases import CP2, CP4, PP2, SP, TP2, VPP2
from tests.unit_tests.verify.faults.registry import (
    BACKWARD,
    BATCHES,
    CHECKS,
    FACTOR,
    FORWARD,
    FURTHER,
    REPORTED,
    changed,
    fault,
)
from tests.unit_tests.verify.test_layouts import DYNAMIC, MTP, PACKED, PLACED

# As a long run has it: verify makes several pieces of the few tokens that are left.
PIECES = {"model__cross_entropy_chunk_size": 4096}
Patch = AbstractContextManager[Any]


@fault("batches: sliced twice by what deals them", CP4, CHECKS)
def batch_sliced_twice() -> Patch:
    def change(cut: Callable) -> Callable:
        return lambda batch, rank, size: cut(dict(cut(batch, rank, size)), rank, size)

    return changed(batches, "slice_for_context_parallel", change)


@fault("batches: the two chunks of each rank in the other order", CP4, CHECKS)
def swapped_chunks() -> Patch:
    def change(cut: Callable) -> Callable:
        return lambda batch, rank, size: cut({k: v.roll(v.shape[1] // 2, 1) for k, v in batch.items()}, rank, size)

    return changed(batches, "slice_for_context_parallel", change)


def _in_each_step(change: Callable[[Any, Any], Any]) -> Patch:
    def wrap(following: Callable) -> Callable:
        def step_of(self: Any) -> Any:
            return change(self._run, following(self))

        return step_of

    return changed(batches.StaticSteps, "__next__", wrap)


@fault("batches: sliced again in the step, past all checks", CP2, BATCHES)
def batch_sliced_again_in_the_step() -> Patch:
    def again(run: Any, found: Any) -> Any:
        cp = run.groups.cp
        cut = [{k: shard_sequence(v, 1, cp.rank(), cp.size()) for k, v in each.items()} for each in found.microbatches]
        return replace(found, microbatches=cut)

    return _in_each_step(again)


@fault("batches: the last microbatch is left out", CP4, BATCHES)
def last_microbatch_dropped() -> Patch:
    return _in_each_step(lambda run, found: replace(found, microbatches=found.microbatches[:-1]))


@fault("batches: one rank has the labels of its neighbours' tokens", CP4, FORWARD)
def shifted_labels() -> Patch:
    def shift(run: Any, found: Any) -> Any:
        if run.groups.cp.rank() == 1:
            for each in found.microbatches:
                each["labels"] = each["labels"].roll(1, 1)
        return found

    return _in_each_step(shift)


@fault("packs: padding counts for the loss", DYNAMIC, BATCHES)
def padding_under_the_loss() -> Patch:
    def change(lay_out: Callable) -> Callable:
        def unmasked(parts: Any, rank: int, size: int, **given: Any) -> Any:
            pack = lay_out(parts, rank, size, **given)
            pack.tensors["loss_mask"][pack.tensors["padding_mask"]] = 1.0
            return pack

        return unmasked

    return changed(iterator, "lay_out", change)


def _loss(change: Callable[[torch.Tensor, torch.Tensor, Any], Any]) -> Patch:
    """Patch the result of the loss function.

    ``change``: (loss mask, losses, old result) -> new result.
    """

    def wrap(original: Callable) -> Callable:
        def changed_loss(mask: Any, weights: Any, losses: Any) -> Any:
            return change(mask, losses[0] if weights else losses, original(mask, weights, losses))

        return changed_loss

    return changed(forward_backward, "loss_function", wrap)


@fault("loss: averaged per rank", CP4, BATCHES)
def loss_averaged_per_rank() -> Patch:
    def mean(mask: Any, losses: Any, found: Any) -> Any:
        total, tokens, _ = found
        average, one = total / tokens.clamp(min=1), torch.ones((), dtype=torch.int)
        return average, one, replace(found[2], loss=average.detach().double(), tokens=one.double())

    return _loss(mean)


@fault("loss: the mask is left out of the sum", CP4, REPORTED)
def loss_without_mask() -> Patch:
    def unmasked(mask: Any, losses: Any, found: Any) -> Any:
        total = losses.float().sum()
        return total, found[1], replace(found[2], loss=total.detach().double(), tokens=found[1].double())

    return _loss(unmasked)


@fault("loss: summed in bf16", CP4, REPORTED)
def loss_in_half_precision() -> Patch:
    def rounded(mask: Any, losses: Any, found: Any) -> Any:
        total = found[0].bfloat16().float()
        return total, found[1], replace(found[2], loss=total.detach().double(), tokens=found[1].double())

    return _loss(rounded)


@fault("loss: its gradients are the context-parallel size too large", CP4, FACTOR)
def gradients_scaled() -> Patch:
    return _loss(lambda mask, losses, found: (found[0] * 4, *found[1:]))


@fault("loss in pieces: every piece has the first one's labels", CP4 | PIECES, FORWARD)
def labels_of_the_first_piece() -> Patch:
    def change(labels_of: Callable) -> Callable:
        return lambda piece, labels, hidden: labels_of(
            slice(0, min(piece.stop, hidden.shape[0]) - piece.start), labels, hidden
        )

    return changed(chunked_loss, "_labels_of", change)


@fault(
    "loss in pieces: under sequence parallelism pieces are cut from the whole sequence",
    TP2 | SP | CP2 | PIECES,
    FORWARD,
)
def pieces_of_the_whole_sequence() -> Patch:
    def labels_of(piece: slice, labels: Any, hidden: Any) -> Any:
        parts = labels.shape[1] // hidden.shape[0]
        stop = min(piece.stop, hidden.shape[0])
        return labels[:, piece.start * parts : stop * parts]

    return mock.patch.object(chunked_loss, "_labels_of", labels_of)


@fault("loss in pieces: the last piece's gradient is lost", CP4 | PIECES, BACKWARD)
def gradient_of_the_last_piece() -> Patch:
    def change(backward: Callable) -> Callable:
        def without_last(ctx: Any, *gradients: Any) -> Any:
            last = list(chunked_loss._chunks(ctx.saved_tensors[0], ctx.size))[-1]
            of_losses = gradients[0].clone()
            chunked_loss._chunk_of(last, of_losses, ctx.saved_tensors[0]).zero_()
            return backward(ctx, of_losses)

        return staticmethod(without_last)

    return changed(chunked_loss._ChunkedLosses, "backward", change)


@fault("multi-token prediction: tokens and labels are shifted within each rank", MTP | CP4, FURTHER)
def shifted_within_ranks() -> Patch:
    def roll(values: Any, group: Any, packed: Any = None) -> Any:
        shifted = torch.roll(values, -1, dims=-1)
        shifted[..., -1] = 0
        return shifted

    return _shift_by(roll)


@fault("multi-token prediction in packs: shifted from one document into the next", DYNAMIC | MTP, FURTHER)
def shifted_over_documents() -> Patch:
    shift = mtp.shift_left

    def joined(values: Any, group: Any, packed: Any = None) -> Any:
        padded = packed.cu_seqlens_q_padded
        return shift(values, group, replace(packed, cu_seqlens_q_padded=padded[[0, -1]]))

    return _shift_by(joined)


@fault(
    "multi-token prediction in packs in pieces: a piece ends like its document", PACKED | CP2 | PLACED | MTP, FURTHER
)
def pieces_end_like_documents() -> Patch:
    def change(following: Callable) -> Callable:
        def ended(self: PlacedLayout, rank: int) -> Any:
            places = following(self, rank)
            places[places >= self.rows] = self.rows + self.size * self.most_spans
            return places

        return ended

    return changed(PlacedLayout, "following", change)


@contextmanager
def _shift_by(shift: Callable) -> Iterator[None]:
    """Patch the shift of tokens (in layers), and of labels and masks (in the model)."""
    with mock.patch.object(mtp, "shift_left", shift), mock.patch.object(language_model, "shift_left", shift):
        yield


@fault("multi-token prediction: each rank divides by its own tokens", MTP | CP4, FURTHER)
def tokens_of_the_rank() -> Patch:
    def count(run: Any, microbatches: Any) -> list[float]:
        counts = [
            mtp.unmasked_tokens(each["loss_mask"], each["position_ids"], run.config.model.mtp_num_layers)
            for each in microbatches
        ]
        return torch.stack(counts).sum(dim=0).tolist()

    return mock.patch.object(forward_backward, "_depth_tokens", count)


@fault("multi-token prediction: the embedding gets no gradient of it", MTP | PP2 | VPP2 | CP2, BACKWARD)
def detached_embedding() -> Patch:
    def change(embeddings: Callable) -> Callable:
        def detached(self: Any, *args: Any, **given: Any) -> Any:
            ids, positions, mask, embedded, hidden = embeddings(self, *args, **given)
            return ids, positions, mask, embedded.detach().requires_grad_(), hidden

        return detached

    return changed(mtp.MTPLayer, "_get_embeddings", change)


@fault("packs: one rank's documents are another sample's", PACKED | CP2, CHECKS)
def another_sample() -> Patch:
    def change(check: Callable) -> Callable:
        def spoiled(index: int, sample: Any, length: int) -> None:
            import torch.distributed as dist

            if dist.get_rank() == 3:
                sample["tokens"] += 1
            check(index, sample, length)

        return spoiled

    return changed(iterator, "_check", change)
