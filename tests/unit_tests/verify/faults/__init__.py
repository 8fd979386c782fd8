"""Faults to plant in the verified layout only.

Each is one line of code that someone could write by mistake. ``FAULTS`` contains them by name. Each returns a patch
that is active while the layout is measured on its ranks, not while the reference is.
"""

from tests.unit_tests.verify.faults import attention, batches, experts, gradients, optimizer, unseen
from tests.unit_tests.verify.faults.registry import FAULTS, Fault, table

__all__ = ["FAULTS", "Fault", "attention", "batches", "experts", "gradients", "optimizer", "table", "unseen"]
