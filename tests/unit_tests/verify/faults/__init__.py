"""Faults to plant in the verified layout alone: each one line of code that somebody could have written.

``FAULTS`` holds them by name. Each answers with a patch that is in force while the layout is measured on its ranks, not
while the reference is.
"""

from tests.unit_tests.verify.faults import attention, batches, experts, gradients, optimizer, unseen
from tests.unit_tests.verify.faults.registry import FAULTS, Fault, table

__all__ = ["FAULTS", "Fault", "attention", "batches", "experts", "gradients", "optimizer", "table", "unseen"]
