"""Multi-token prediction"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.config.setting import WEIGHTS, counted, setting, size

MTP = counted("model.mtp_num_layers", 1)


@dataclass
class MultiTokenPrediction:
    mtp_num_layers: int | None = size(None, "depths of multi-token prediction (MTP); null: none", WEIGHTS)
    mtp_loss_scaling_factor: float = setting(0.1, "total weight of the MTP losses", least=0, when=MTP)
    mtp_detach_heads: bool = setting(False, "MTP losses train only the MTP layers", when=MTP)
    mtp_use_repeated_layer: bool = setting(False, "use one MTP layer for all depths", WEIGHTS, when=MTP)
