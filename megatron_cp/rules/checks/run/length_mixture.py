"""K69, of data: the form of a length mixture, and the data that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.data.length_mixture import parse_mixture
from megatron_cp.rules.base import Context, Finding, broken, rule


@rule(
    "K69",
    "A length mixture is share, length, share, ..., for packed data.",
    "Each share is above zero, and lengths rise. Samples of one length are cut from a stream of documents. They do not "
    "have the length of a document.",
    broken(
        model=dict(sequence_packing_scheduler="dp_balanced"),
        dataset=dict(kind="mock_documents", length_mixture=[0.4, 8192, 0]),
    ),
)
def length_mixture_has_classes(c: Context) -> Iterator[Finding]:
    given = c.config.dataset.length_mixture
    if given is None:
        return
    if not c.packed:
        packing = f"{NAME.model.sequence_packing_scheduler}=dp_balanced"
        yield Finding(NAME.dataset.length_mixture, "needs packed data of varying length", "=null", packing)
        return
    try:
        parse_mixture(given)
    except ValueError as error:
        yield Finding(NAME.dataset.length_mixture, str(error), "=[0.4,8192,0.6]", "=null")
