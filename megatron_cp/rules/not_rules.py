"""The constraints that are no rule of the table, each with what happens to it instead.

The ids are those of the collection that the rules come from, so that none is lost: every id is either in the table or
here. ``kind`` is one of

- ``composing``: found while the configuration is composed, with the same kind of message;
- ``running``: checked by the run itself, since no configuration can tell;
- ``right``: cannot be broken, because we do it right by construction;
- ``covered``: the same as another rule;
- ``not offered``: about something that this project does not have.
"""

from __future__ import annotations

from typing import NamedTuple


class Elsewhere(NamedTuple):
    kind: str
    title: str
    what: str


KINDS = {
    "composing": "Found while the configuration is composed",
    "running": "Checked by the run itself",
    "right": "Right by construction",
    "covered": "The same as another rule",
    "not offered": "About something that is not offered",
}

# Where upstream goes on silently: training runs, and the model is wrong. None of these may come back.
# fmt: off
SILENT_UPSTREAM = frozenset([
    "A11", "A13", "A19",
    "B3", "B7", "B8", "B9", "B10", "B12",
    "C4", "C9", "C10", "C11", "C12", "C13",
    "E8", "E9", "E12",
    "F2", "F4", "F10", "F11", "F14",
    "G2", "G3", "G4",
    "H4", "H5", "H6", "H8", "H9", "H12",
    "I12",
    "K1", "K21", "K22", "K33", "K36",
])
# fmt: on

# Constraint -> the test, below tests/unit_tests/, that fails if it is broken. Rules of the table are tested by their
# own examples.
GUARDS = {
    "A10": "training/layouts/test_equivalence.py::test_layout_trains_like_one_rank",
    "A11": "training/layouts/test_decentralized_pg.py::test_nothing_stale_remains_after_another_initialization",
    "A14": "parallel/test_layout.py::test_the_all_to_all_level_is_contiguous",
    "B7": "data/test_batches.py::test_unknown_keys_are_refused",
    "B8": "data/samples/test_datasets.py::test_no_square_mask",
    "B9": "data/test_batches.py::test_a_batch_is_sliced_once",
    "B10": "rules/test_batch_rules.py::test_anything_else",
    "C2": "config/test_recipes.py::test_a_wrong_override_is_explained",
    "C10": "training/layouts/test_decentralized_pg.py::test_a_missing_group_is_noticed_at_once",
    "C11": "training/layouts/test_decentralized_pg.py::test_decentralized_groups_are_the_mpus_groups",
    "C12": "attention/modules/test_te.py::test_setting_a_group_keeps_the_transport",
    "C13": "training/layouts/test_transports.py::test_layers_past_a_per_layer_list_use_its_last_entry",
    "C14": "training/layouts/test_equivalence.py::test_layout_trains_like_one_rank",
    "C17": "training/layouts/test_equivalence.py::test_layout_trains_like_one_rank",
    "E5": "attention/modules/test_native.py::test_what_it_does_not_compute_is_refused_when_called",
    "E12": "../functional_tests/test_known_upstream_faults.py::"
    "test_dropout_differs_between_cp_ranks_and_weights_do_not",
    "F1": "rules/test_batch_rules.py::test_bad_packs",
    "F2": "rules/test_batch_rules.py::test_bad_packs",
    "F4": "rules/test_batch_rules.py::test_bad_packs",
    "F6": "attention/modules/test_native.py::test_packed_sequences",
    "F10": "dynamic_cp/runtime/test_training.py::"
    "test_a_pack_is_zigzag_within_each_sample_and_padded_to_twice_the_group",
    "F14": "models/layers/test_mtp_targets.py::test_packed_sequences_are_shifted_by_their_padded_lengths",
    "F15": "rules/test_batch_rules.py::test_a_pack_of_two_rows",
    "F16": "attention/test_sharding.py::test_packs_are_cut_sequence_by_sequence",
    "G3": "training/layouts/test_equivalence.py::test_layout_trains_like_one_rank",
    "G4": "training/layouts/test_decentralized_pg.py::test_a_missing_group_is_noticed_at_once",
    "G5": "training/layouts/test_equivalence.py::test_layout_trains_like_one_rank",
    "G8": "training/monitor/test_flops.py::test_documents_of_a_pack_do_not_attend_to_each_other",
    "H1": "training/layouts/test_equivalence.py::test_decentralized_groups_train_bit_for_bit_like_the_mpu",
    "H2": "training/layouts/test_decentralized_pg.py::test_decentralized_groups_are_the_mpus_groups",
    "H3": "training/layouts/test_equivalence.py::test_decentralized_groups_train_bit_for_bit_like_the_mpu",
    "H4": "training/layouts/test_decentralized_pg.py::test_every_group_has_the_configured_timeout",
    "H7": "training/test_run.py::test_evaluation_in_groups_of_its_own",
    "H11": "attention/modules/test_te.py::test_the_stream_is_there_where_groups_may_change",
    "H12": "training/layouts/test_decentralized_pg.py::test_a_missing_group_is_noticed_at_once",
    "H13": "training/layouts/test_decentralized_pg.py::test_a_failed_initialization_leaves_nothing_behind",
    "I1": "models/layers/test_mtp_targets.py::test_shifting_equals_the_naive_reference",
    "I4": "dynamic_cp/runtime/test_hybrid_training.py::test_packed_training_equals_one_rank",
    "I6": "training/checkpoint/test_checkpoint.py::test_resuming_under_another_layout",
    "I7": "training/checkpoint/test_checkpoint.py::test_resuming_under_another_layout",
    "I11": "mcore/test_patches.py::test_packs_are_rotated_as_one_by_one",
    "I12": "training/layouts/test_equivalence.py::test_decentralized_groups_train_bit_for_bit_like_the_mpu",
    "I13": "training/layouts/test_model_variants.py::test_feature_trains_like_one_rank",
    "K1": "config/test_recipes.py::test_a_wrong_override_is_explained",
    "K2": "config/test_recipes.py::test_a_wrong_override_is_explained",
    "K3": "config/test_recipes.py::test_a_wrong_override_is_explained",
    "K4": "config/test_recipes.py::test_unknown_recipe_suggests_the_nearest",
    "K20": "training/test_consistency.py::test_a_difference_names_ranks_and_fields",
    "K35": "cli/test_cli.py::test_a_launcher_that_says_nonsense",
}

_BATCH = "megatron_cp.rules.batch checks it on every batch."

ELSEWHERE: dict[str, Elsewhere] = {
    "A10": Elsewhere("right", "Pipeline stages need a pipeline dtype.", "It is set to the parameters' dtype."),
    "A11": Elsewhere(
        "right",
        "Process groups can be built again in one process.",
        "Ending a run also clears the hierarchical and hybrid groups that megatron-core leaves behind.",
    ),
    "A14": Elsewhere("right", "The all-to-all level is contiguous.", "Both rank orders place cp right after tp."),
    "B5": Elsewhere(
        "covered",
        "The evaluation's sequence length divides too.",
        "Evaluation has the training's length and cp: B1, B2.",
    ),
    "B6": Elsewhere(
        "covered", "The padding multiple of fine-tuning collators.", "One sequence length for all: B1, B2."
    ),
    "B7": Elsewhere("running", "A batch holds known keys of shape [b, s] only.", _BATCH),
    "B8": Elsewhere("right", "Attention masks would be sliced by rows only.", "No mask is ever built; see E8."),
    "B9": Elsewhere("running", "A batch is sliced exactly once.", _BATCH),
    "B10": Elsewhere("running", "Position ids are the global ones, in zigzag order.", _BATCH),
    "B11": Elsewhere("not offered", "FP8 needs 16 (MXFP8: 32) tokens a rank.", "There is no FP8."),
    "B12": Elsewhere("covered", "Mamba needs an even local sequence.", "2 * cp divides the sequence: B1."),
    "C2": Elsewhere("composing", "cp_comm_type is a text or a list of texts.", "A wrong type, as K2."),
    "C10": Elsewhere(
        "running",
        "The groups exist when attention is built.",
        "An attention module whose groups are missing or of other sizes refuses to be built; the start-up probe then "
        "proves that they communicate.",
    ),
    "C11": Elsewhere("right", "Every way of initializing passes the hierarchical sizes.", "There is one way."),
    "C12": Elsewhere(
        "right", "Setting a group keeps the transport.", "Our subclass of Transformer Engine's attention passes both."
    ),
    "C13": Elsewhere(
        "right", "Layers past a per-layer list have a transport of their own.", "They use the last entry of the list."
    ),
    "C14": Elsewhere(
        "right", "Mixed lists need flat and hierarchical groups.", "Both are built; all transports share one slicing."
    ),
    "C17": Elsewhere(
        "right",
        "Context parallelism is only supported by TEDotProductAttention!",
        "megatron-core's own attention has none; ours takes its place where Transformer Engine's is not used (K8).",
    ),
    "D8": Elsewhere("not offered", "Gated delta nets divide their heads over tp * cp.", "There are none."),
    "D9": Elsewhere("not offered", "Sparse attention (DSA) wants all keys and values gathered.", "There is none."),
    "D10": Elsewhere("not offered", "Batch-invariant mode wants cp 1.", "There is no such mode."),
    "D11": Elsewhere("not offered", "Other experimental attention variants.", "There are none."),
    "E3": Elsewhere(
        "covered",
        "Windows need flash attention 2.3.",
        "Transformer Engine 2.10 and later need a newer one anyway: C16.",
    ),
    "E5": Elsewhere(
        "right",
        "Mask types fit the layout of the data.",
        "The type follows from attention_mask_type and packing: causal or no_mask, padding variants when packed.",
    ),
    "E6": Elsewhere(
        "not offered", "Padding masks on unpacked data.", "Padding is packed away; attention refuses masks."
    ),
    "E7": Elsewhere("not offered", "Bottom-right, arbitrary and cross-attention masks.", "Attention refuses them."),
    "E10": Elsewhere("not offered", "Attention bias and ALiBi.", "Attention refuses a bias."),
    "E12": Elsewhere(
        "right",
        "Dropout differs between context-parallel ranks.",
        "Each rank's random stream is its own once the weights are drawn.",
    ),
    "E14": Elsewhere(
        "right", "Flash attention under CP wants bshd.", "Only direct callers of Transformer Engine meet it."
    ),
    "E17": Elsewhere("not offered", "Inference with a KV cache.", "There is no inference."),
    "E18": Elsewhere("not offered", "QK-clip and the largest logit.", "There is neither."),
    "E19": Elsewhere("covered", "The local sequence is even.", "2 * cp divides the sequence: B1."),
    "F1": Elsewhere("running", "Packed attention under CP needs the padded cu_seqlens.", _BATCH),
    "F2": Elsewhere("running", "Every packed sequence's padded length divides by 2 * cp.", _BATCH),
    "F4": Elsewhere("running", "cu_seqlens cover the whole pack.", _BATCH),
    "F6": Elsewhere("right", "Packed data has a padding mask type.", "It follows from packing; see E5."),
    "F7": Elsewhere("not offered", "FP8 attention on packed data.", "There is no FP8."),
    "F8": Elsewhere(
        "not offered", "Offline and in-batch packing.", "Packing is the scheduler's, always of whole samples."
    ),
    "F9": Elsewhere("not offered", "pad_cu_seqlens and packed CUDA graphs.", "There are no CUDA graphs."),
    "F10": Elsewhere(
        "right", "Offline packing pads to 2 * cp.", "Lengths are padded once the size of their group is known."
    ),
    "F11": Elsewhere(
        "covered",
        "Documents are kept apart under CP.",
        "megatron-core 0.19's inter-document masking slices per document and attends wrongly; here E8 refuses the mask "
        "and packing does it right.",
    ),
    "F12": Elsewhere("covered", "Fine-tuning needs per-token loss.", "Everything does: G1, G2."),
    "F13": Elsewhere("not offered", "Energon packing.", "There is none."),
    "F14": Elsewhere(
        "right",
        "Multi-token prediction shifts packed tokens by padded lengths.",
        "Our shift follows the padded lengths, by which sequences are sliced; upstream's follows the real ones.",
    ),
    "F15": Elsewhere("running", "A pack is one row.", _BATCH),
    "F16": Elsewhere("right", "Slicing packs needs Transformer Engine's CUDA code.", "Ours is plain index arithmetic."),
    "G3": Elsewhere(
        "right", "A loss function returns what megatron-core expects.", "There is one loss function: per token."
    ),
    "G4": Elsewhere(
        "running",
        "Gradients are reduced over dp and cp.",
        "All process groups are held against the rank layout when they are built.",
    ),
    "G5": Elsewhere("right", "The reported loss is that of all ranks.", "Sums and counts are reduced over dp and cp."),
    "G6": Elsewhere("not offered", "Megatron-FSDP.", "There is none."),
    "G7": Elsewhere("not offered", "FP8 attention.", "There is none."),
    "G8": Elsewhere("right", "TFLOP/s count what was computed.", "Real tokens and real causal attention are counted."),
    "H1": Elsewhere(
        "right", "Decentralized groups exclude gloo twins.", "No twins are made; gloo itself is a backend like NCCL."
    ),
    "H2": Elsewhere(
        "right", "Decentralized hierarchical groups.", "They are built, from the same rank layout as MPU's."
    ),
    "H3": Elsewhere("right", "Decentralized groups without CUDA.", "They work with gloo."),
    "H4": Elsewhere(
        "right", "Decentralized groups ignore the timeout.", "Ours pass dist.distributed_timeout_minutes on."
    ),
    "H5": Elsewhere("not offered", "ModelOpt with decentralized groups.", "There is no ModelOpt."),
    "H7": Elsewhere(
        "right", "Evaluation under another cp with two levels.", "Its groups have their two levels, as dynamic ones do."
    ),
    "H9": Elsewhere(
        "covered",
        "Dynamic CP excludes pipelines, MLA and averaged losses.",
        "Upstream's limits; ours are the per-token loss, G2, and for latent attention H19.",
    ),
    "H11": Elsewhere(
        "right", "Transformer Engine's CP stream exists when cp is 1.", "Our subclass makes it where groups may change."
    ),
    "H12": Elsewhere("running", "A group collection has its hierarchical groups.", "As C10."),
    "H13": Elsewhere(
        "right", "A failed set-up leaves nothing behind.", "Everything is checked first, and cleared at the end."
    ),
    "I1": Elsewhere(
        "right",
        "Multi-token prediction under CP exchanges neighbours' tokens.",
        "Over the group that sliced the microbatch, configured or its own.",
    ),
    "I4": Elsewhere(
        "right",
        "Packed Mamba under CP.",
        "Convolution and state start anew with each sequence of a pack.",
    ),
    "I5": Elsewhere("covered", "The experts' grid.", "A3, A8, A18; --dry-run prints its groups."),
    "I6": Elsewhere(
        "right", "A checkpoint loads under another cp.", "Weights do not depend on cp; torch_dist reshards."
    ),
    "I7": Elsewhere(
        "right",
        "A checkpoint trained with hierarchical CP loads on one rank.",
        "With cp 1 the transport is ignored: C15.",
    ),
    "I8": Elsewhere("not offered", "CUDA graphs.", "There are none."),
    "I10": Elsewhere("not offered", "Tensor-parallel communication overlap.", "There is none."),
    "I11": Elsewhere(
        "right", "Rotary embeddings of packs under CP.", "Fused or not, they take rank, size and cu_seqlens."
    ),
    "I12": Elsewhere(
        "right", "Rotary embeddings use the group that sliced the batch.", "Both take it from the same collection."
    ),
    "I13": Elsewhere(
        "right", "Learned positions under CP.", "They use position_ids, which are sliced with the tokens."
    ),
    "K1": Elsewhere(
        "composing", "Every key is known.", "In overrides, also with '+', in recipes and in --config files."
    ),
    "K2": Elsewhere(
        "composing", "Every value has its setting's type.", "Nothing is converted silently, and numbers are finite."
    ),
    "K3": Elsewhere("composing", "Every override can be parsed.", "Hydra's grammar, without sweeps and deletions."),
    "K4": Elsewhere(
        "composing", "Every file and recipe named exists and can be read.", "The nearest name is suggested."
    ),
    "K20": Elsewhere(
        "running",
        "All ranks have the same configuration, code, libraries and key variables.",
        "Compared at the start (megatron_cp.training.consistency); a difference names the ranks and the fields.",
    ),
    "K35": Elsewhere(
        "running",
        "What the launcher and the command line say has a meaning.",
        "The launcher's variables are numbers, RANK below WORLD_SIZE, and no process of several goes without (mpirun's "
        "would each be a run of its own; srun's tell their rank); --explain names a rule, and --environment gpu, cpu "
        "or a file.",
    ),
}
