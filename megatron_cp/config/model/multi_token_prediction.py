"""Multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import WEIGHTS, counted, setting, size

MTP = counted("model.mtp_num_layers", 1)


@dataclass
class MultiTokenPrediction:
    mtp_num_layers: int | None = size(None, "further tokens that are predicted; null: none", WEIGHTS)
    mtp_loss_scaling_factor: float = setting(0.1, "weight of their losses, divided among them", least=0, when=MTP)
    mtp_detach_heads: bool = setting(False, "their losses train their own layers alone", when=MTP)
    mtp_use_repeated_layer: bool = setting(False, "one layer predicts all of them", WEIGHTS, when=MTP)
