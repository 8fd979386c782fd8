"""Rules and the installed software: attention, ``auto`` and variables.

The tests check the attention used, the value of ``auto``, and the variables that count.
"""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch

from megatron_cp.attention.modules.te_support import choose_backend, has_te_layers
from megatron_cp.attention.transports.select import choices
from megatron_cp.config.recipes import load_recipe
from megatron_cp.estimate.device import load_device
from megatron_cp.estimate.time import time_estimate
from megatron_cp.rules import Environment, check, resolve_auto
from megatron_cp.rules.environment import PRESETS, installed_version
from megatron_cp.rules.explain import EXAMPLE_RECIPE
from megatron_cp.rules.job import job_of
from megatron_cp.rules.nvml import Driver, Gpu
from megatron_cp.rules.remedies import Case

HYBRID = ["model.architecture=hybrid", "model.hybrid_layer_pattern=M*M*"]


class TestTransformerEngine:
    """The limits depend on the attention in use."""

    WINDOW = ("model.window_size=[64,0]",)

    def rules(self, *overrides, environment="gpu"):
        config = load_recipe(EXAMPLE_RECIPE, ["env_vars.CUDA_DEVICE_MAX_CONNECTIONS=1", *overrides])
        return {(v.rule, v.severity) for v in check(config, 4, environment=environment)}

    def test_ours_has_windows_sinks_packs_and_few_kv_heads_on_every_transport(self):
        for transport in ("p2p", "all_gather", "a2a", "a2a+p2p"):
            sizes = "[2,2]" if transport == "a2a+p2p" else "null"
            found = self.rules(
                *self.WINDOW,
                f"model.cp_comm_type={transport}",
                f"model.hierarchical_context_parallel_sizes={sizes}",
                "model.softmax_type=learnable",
                "model.num_query_groups=1",
                "model.multi_latent_attention=true",
                environment="cpu",
            )
            assert found == {("K19", "warning")}  # of num_query_groups

    def test_by_name_its_gaps_are_errors(self):
        assert self.rules("model.attention_backend=te") == set()
        assert self.rules("model.attention_backend=te", *self.WINDOW) == {("E1", "error")}
        assert self.rules("model.attention_backend=te", "model.num_query_groups=1") == {
            ("D2", "error"),
            ("D3", "warning"),
        }

    def test_packs_in_pieces_use_ours(self):
        placed = ("model.sequence_packing_scheduler=dp_balanced", "model.packed_placement=balanced")
        assert ("F17", "warning") in self.rules(*placed)
        assert ("F17", "error") in self.rules(*placed, "model.attention_backend=te")

    def test_auto_falls_back_and_warns(self):
        assert self.rules(*self.WINDOW) == {("E1", "warning")}
        assert self.rules(*self.WINDOW, "model.attention_dropout=0.1") == {
            ("E1", "warning"),
            ("E2", "warning"),
            ("E11", "error"),  # since ours is used, which has no dropout
        }

    def test_head_dims_that_its_kernels_do_not_take(self):
        """One rank may use plain matrix products, but not for packs."""
        ring = ("model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null")
        latent = ("model.multi_latent_attention=true", "model.qk_head_dim=16", "model.qk_pos_emb_head_dim=8", *ring)
        for dims in (("model.kv_channels=20",), (*latent, "model.v_head_dim=12")):
            assert ("D13", "warning") in self.rules(*dims)
            assert ("D13", "error") in self.rules("model.attention_backend=te", *dims)
            assert not {rule for rule, _ in self.rules("parallel=none", *dims)} & {"D13"}
        assert not {rule for rule, _ in self.rules(*latent, "model.v_head_dim=16")} & {"D13"}
        packs = ("parallel=none", "model.sequence_packing_scheduler=dp_balanced", "model.kv_channels=20")
        assert ("D13", "warning") in self.rules(*packs)

    def test_float32_is_ours_with_and_without_context_parallelism(self):
        """Its products are TF32: one rank would otherwise differ from several."""
        for parallel in ("parallel=none", "model.context_parallel_size=4"):
            config = load_recipe(EXAMPLE_RECIPE, [parallel, "mixed_precision=fp32"])
            backend, why = choose_backend(config.model, "2.17.1", on_gpu=True, packed_sizes=(), fp32=True)
            assert backend == "native" and "E13" in {gap.rule for gap in why}
        config = load_recipe(EXAMPLE_RECIPE, ["parallel=none", "mixed_precision=fp32", "model.attention_backend=te"])
        assert choose_backend(config.model, "2.17.1", on_gpu=True, packed_sizes=(), fp32=True) == ("te", [])

    A2A = ("model.cp_comm_type=a2a", "model.hierarchical_context_parallel_sizes=null")
    DYNAMIC = ("model.dynamic_context_parallel=true", "model.context_parallel_size=1")
    EVALUATION = ("dist.eval_context_parallel_size=4", "validation.eval_iters=1", "model.context_parallel_size=1")

    @pytest.mark.parametrize("groups", [DYNAMIC, EVALUATION])
    def test_an_all_to_all_over_the_groups_of_packs_needs_key_value_heads_too(self, groups):
        overrides = (*self.A2A, *groups, "model.num_query_groups=2", "train.micro_batch_size=1")
        # Evaluation alone is no reason.
        slow = {("F5", "warning"), ("H23", "warning")} if groups is self.DYNAMIC else set()
        assert self.rules(*overrides, "model.attention_backend=te") == {("D1", "error")} | slow
        assert self.rules(*overrides) == {("D1", "warning")} | slow  # ours gives several ranks the same head
        assert self.rules(*overrides, "model.num_query_groups=4") == slow

    def test_dynamic_groups_also_check_the_configured_all_to_all(self):
        heads = ("model.num_attention_heads=6", "model.num_query_groups=6", "model.hidden_size=96")
        overrides = (*self.A2A, *heads, "model.dynamic_context_parallel=true", "train.micro_batch_size=1")
        assert self.rules(*overrides, environment="cpu") == {("D1", "error")}
        assert self.rules(*overrides, "model.context_parallel_size=2", environment="cpu") == set()

    @pytest.mark.parametrize("groups", [DYNAMIC, EVALUATION])
    def test_groups_of_packs_are_context_parallel_too(self, groups):
        one_level = ("model.cp_comm_type=p2p", "model.hierarchical_context_parallel_sizes=null")
        base = (*groups, *one_level, "model.attention_backend=te", "train.micro_batch_size=1")
        off = ("env_vars.NVTE_FUSED_ATTN=0", "env_vars.NVTE_FLASH_ATTN=0")
        alone = {("H23", "warning")} if groups is self.DYNAMIC else set()
        assert self.rules(*base, *off) == {("E13", "error"), ("F3", "error")} | alone
        assert self.rules(*base, "model.kv_channels=256") == {("D5", "warning")} | alone
        assert self.rules(*base, "env_vars.CUDA_DEVICE_MAX_CONNECTIONS=8") == {("A12", "warning")} | alone

    def test_two_levels_are_used_by_packs_without_context_parallelism(self):
        assert self.rules("model.context_parallel_size=1", "train.micro_batch_size=1", environment="cpu") == {
            ("C15", "warning")
        }
        assert self.rules(*self.EVALUATION, "train.micro_batch_size=1", environment="cpu") == set()

    def test_a_window_without_limits_is_no_window(self):
        for window, mask, windowed in (
            ("[-1,0]", "causal", False),
            ("[-1,-1]", "causal", False),
            ("[-1,-1]", "no_mask", False),
            ("[-1,0]", "no_mask", True),
            ("[0,0]", "causal", True),
        ):
            overrides = (f"model.window_size={window}", f"model.attention_mask_type={mask}")
            found = self.rules("model.attention_backend=te", *overrides)
            assert found == ({("E1", "error")} if windowed else set()), (window, mask)

    def test_packs_that_make_the_host_wait_are_ours(self):
        packs = (*self.A2A, "model.sequence_packing_scheduler=dp_balanced", "train.micro_batch_size=1")
        later = dataclasses.replace(PRESETS["gpu"], transformer_engine="2.18.0")
        for overrides, slow in ((packs, True), (self.A2A, False), ((*packs, "model.cp_comm_type=p2p"), False)):
            for more in ((), ("model.attention_backend=te",)):
                assert self.rules(*overrides, *more) == ({("F5", "warning")} if slow else set())
                assert self.rules(*overrides, *more, environment=later) == set()
            config = load_recipe(EXAMPLE_RECIPE, list(overrides))
            for version, expected in (("2.17.1", "native" if slow else "te"), ("2.18.0", "te")):
                backend, _ = choose_backend(config.model, version, on_gpu=True, packed_sizes=(), fp32=False)
                assert backend == expected

    def test_its_version_counts(self):
        def packed(version, transport):
            environment = dataclasses.replace(PRESETS["gpu"], transformer_engine=version)
            overrides = ["model.attention_backend=te", "model.sequence_packing_scheduler=dp_balanced"]
            sizes = "[2,2]" if transport == "a2a+p2p" else "null"
            overrides += [f"model.cp_comm_type={transport}", f"model.hierarchical_context_parallel_sizes={sizes}"]
            return ("F5", "error") not in self.rules(*overrides, environment=environment)

        assert [packed("2.17.1", t) for t in ("p2p", "all_gather", "a2a", "a2a+p2p")] == [True, False, True, False]
        assert [packed("2.18.0", t) for t in ("p2p", "all_gather", "a2a", "a2a+p2p")] == [True, True, True, False]
        assert [packed("2.20.0.dev0", t) for t in ("all_gather", "a2a+p2p")] == [True, True]
        assert not packed("2.9.0", "a2a")

    def test_windows_and_offsets_by_version(self):
        flat = "model.hierarchical_context_parallel_sizes=null"
        a2a, gather = (["model.cp_comm_type=" + name, flat] for name in ("a2a", "all_gather"))
        alone = ["model.context_parallel_size=1", flat]
        packs, full = ["model.sequence_packing_scheduler=dp_balanced"], ["model.attention_mask_type=no_mask"]
        window, offset = ["model.window_size=[64,8]"], ["model.softmax_type=learnable"]
        cases = (
            ("E1", a2a + window + full, "2.16.0", "2.15.0"),
            ("E1", a2a + window + full + packs, "2.12.0", "2.11.0"),
            ("E1", alone + window + full + packs, "2.12.0", "2.11.0"),
            ("E1", alone + window + full, "2.10.0", None),
            ("E1", gather + window + full, None, "2.20.2"),
            ("E1", [*gather, "model.window_size=[64,0]"], "2.10.0", None),
            ("E4", a2a + offset, "2.10.0", None),
            ("E4", a2a + offset + packs, "2.12.0", "2.11.0"),
            ("E4", alone + offset + packs, "2.12.0", "2.11.0"),
        )
        for rule, overrides, good, bad in cases:
            for version, refused in ((good, False), (bad, True)):
                if version is not None:
                    environment = dataclasses.replace(PRESETS["gpu"], transformer_engine=version)
                    found = self.rules("model.attention_backend=te", *overrides, environment=environment)
                    assert ((rule, "error") in found) == refused, (rule, overrides, version)

    def test_odd_heads_need_flash_attention_or_an_older_version(self):
        odd = ("model.num_attention_heads=9", "model.num_query_groups=9", "model.hidden_size=144")
        odd += ("model.hierarchical_context_parallel_sizes=[1,4]", "model.attention_backend=te")
        for changes, expected in (
            ({}, {"warning"}),
            ({"flash_attn": None}, {"error"}),
            ({"transformer_engine": "2.14.1"}, set()),
        ):
            found = self.rules(*odd, environment=dataclasses.replace(PRESETS["gpu"], **changes))
            assert {severity for rule, severity in found if rule == "D3"} == expected, changes
        environment = dataclasses.replace(PRESETS["gpu"], flash_attn=None)
        found = self.rules(*odd[:-1], environment=environment)
        assert ("D3", "warning") in found and "error" not in {severity for _, severity in found}, "ours is used"

    def test_requested_transformer_engine_must_be_installed(self):
        assert ("K8", "error") in self.rules("model.attention_backend=te", environment="cpu")
        assert ("K8", "error") in self.rules("model.attention_backend=te", environment=Environment(device="gpu"))
        assert ("K8", "error") in self.rules("model.attention_backend=te", "model.transformer_impl=local")

    def test_requested_te_layers_must_be_installed_on_a_gpu_machine(self):
        wanted, old = "model.transformer_impl=transformer_engine", Environment(device="gpu", transformer_engine="2.9.0")
        assert self.rules(wanted) == set()
        assert self.rules(wanted, environment="cpu") == {("K8", "warning")}  # as in every recipe of Bridge
        assert ("K8", "error") in self.rules(wanted, environment=Environment(device="gpu"))
        assert ("K8", "error") in self.rules(wanted, environment=old)

    @pytest.mark.parametrize(
        ("overrides", "its"),
        [
            ((), True),
            (("model.attention_backend=native",), True),
            (WINDOW, True),  # its attention cannot
            (("model.transformer_impl=local",), False),
            (("mixed_precision=fp32",), False),
            (("mixed_precision=fp32", "model.transformer_impl=transformer_engine"), True),
            (("mixed_precision=fp32", "model.attention_backend=te", "parallel=none"), True),
        ],
    )
    def test_te_layers_are_used_with_either_attention(self, overrides, its):
        config = load_recipe(EXAMPLE_RECIPE, list(overrides))
        fp32 = config.mixed_precision.fp32
        assert has_te_layers(config.model, "2.17.1", on_gpu=True, fp32=fp32) is its
        for version, on_gpu in (("2.9.0", True), (None, True), ("2.17.1", False)):
            assert not has_te_layers(config.model, version, on_gpu=on_gpu, fp32=fp32)
        assert choose_backend(config.model, "2.17.1", True, (), fp32)[0] == "native" or its

    def test_features_of_te_layers_work_around_our_attention(self):
        experts = ("model.num_moe_experts=4", "model.moe_grouped_gemm=true")
        latent = ("model.multi_latent_attention=true", "model.q_lora_rank=33", "model.tensor_model_parallel_size=2")
        for wanted, rule in ((experts, "K15"), (latent, "K24")):
            wanted += ("model.attention_backend=native", "parallel=none")
            assert rule not in {each for each, _ in self.rules(*wanted)}
            assert (rule, "error") in self.rules(*wanted, "model.transformer_impl=local")


class TestAuto:
    """cp_comm_type=auto is a transport by the time the rules look."""

    def resolve(self, *overrides, node, environment="cpu"):
        unsized = "model.hierarchical_context_parallel_sizes=null"
        config = load_recipe(EXAMPLE_RECIPE, ["model.cp_comm_type=auto", unsized, *overrides])
        resolved, why = resolve_auto(config, 4, node, Environment.of(environment))
        found = [check(each, 4, node, environment) for each in (config, resolved)]
        assert [str(replace(v, fix="")) for v in found[0]] == [str(replace(v, fix="")) for v in found[1]]
        return resolved.model.cp_comm_type, resolved.model.hierarchical_context_parallel_sizes, why

    @pytest.mark.parametrize(
        ("recipe", "ranks", "node", "expected"),
        [
            ("llama31_8b_pretrain_config", 8, 8, "a2a"),
            ("llama3_8b_128k_pretrain_config", 64, 8, "a2a+p2p [2, 4]"),
            ("deepseek_v2_lite_128k_hcp_config", 32, 4, "a2a+p2p [4, 4]"),
            ("deepseek_v2_lite_128k_hcp_config", 32, 8, "a2a+p2p [8, 2]"),
            ("deepseek_v2_lite_128k_hcp_config", 32, 32, "a2a"),
            ("llama3_70b_64k_pretrain_config", 256, 8, "p2p"),
        ],
    )
    def test_the_fastest_by_the_time_model(self, recipe, ranks, node, expected):
        unsized = "model.hierarchical_context_parallel_sizes=null"
        environment = dataclasses.replace(PRESETS["gpu"], gpus_per_node=node)
        config = load_recipe(recipe, ["model.cp_comm_type=auto", unsized])
        resolved, why = resolve_auto(config, ranks, node, environment)
        assert why.startswith(f"model.cp_comm_type=auto is {expected}: the fastest of ")
        assert f"step time on h100: {expected} " in why
        device, seconds = load_device("h100"), {}
        for name, sizes in choices(config.model.context_parallel_size):
            each = load_recipe(
                recipe,
                [f"model.cp_comm_type={name}", f"model.hierarchical_context_parallel_sizes={json.dumps(sizes)}"],
            )
            case = Case(each, ranks, node, environment)
            if not check(**vars(case)):  # a warning: Transformer Engine cannot
                seconds[f"{name} {sizes}" if sizes else name] = time_estimate(job_of(case), device, node).seconds
        assert min(seconds, key=seconds.__getitem__) == expected
        assert resolved.model.cp_comm_type == expected.partition(" ")[0]

    def test_sizes_without_an_estimate_get_the_first_that_is_possible(self):
        kind, _, why = self.resolve("model.pipeline_model_parallel_size=3", node=4)
        assert kind == "a2a" and why.endswith("the first that is possible; these sizes have no time estimate")

    def test_heads_that_do_not_divide_leave_a_ring(self):
        kind, sizes, why = self.resolve("model.num_attention_heads=9", "model.num_query_groups=9", node=4)
        assert (kind, sizes) == ("all_gather", None) and "p2p" in why and "a2a" not in why

    def test_in_a_list(self):
        long = "dataset.seq_length=4096"
        assert self.resolve("model.cp_comm_type=[auto,p2p,auto,p2p]", long, node=4)[:2] == (
            ["a2a", "p2p", "a2a", "p2p"],
            None,
        )

    def test_sizes_that_are_given_are_kept(self):
        sized = ("model.context_parallel_size=8", "model.hierarchical_context_parallel_sizes=[4,2]")
        for node in (2, 4, 8):
            kind, sizes, why = self.resolve(*sized, node=node)
            assert (kind, sizes) == ("a2a+p2p", [4, 2]) and why.startswith("model.cp_comm_type=auto is a2a+p2p [4, 2]")
        for asked in ("[auto,auto,a2a+p2p,a2a+p2p]", "[auto,auto,auto,auto]"):
            assert self.resolve(*sized, f"model.cp_comm_type={asked}", node=2)[:2] == (["a2a+p2p"] * 4, [4, 2])
        asked = "model.cp_comm_type=[auto,p2p,a2a+p2p,p2p]"
        assert self.resolve(*sized, asked, node=2)[:2] == (["a2a+p2p", "p2p", "a2a+p2p", "p2p"], [4, 2])

    @pytest.mark.parametrize(
        ("sizes", "rule"), [("[3,2]", "C5"), ("[2,2,2]", "C6"), ("[-4,-2]", "C7"), ("[8,1]", "D2")]
    )
    def test_sizes_that_cannot_be_are_refused_as_without_auto(self, sizes, rule):
        overrides = ["model.context_parallel_size=8", f"model.hierarchical_context_parallel_sizes={sizes}"]
        overrides += ["model.num_attention_heads=4"] if rule == "D2" else []
        with_auto, without = (
            check(load_recipe(EXAMPLE_RECIPE, [*overrides, f"model.cp_comm_type={kind}"]), 8, environment="cpu")
            for kind in ("auto", "a2a+p2p")
        )
        assert with_auto == without and without[0].rule == rule and without[0].severity == "error"

    def test_auto_respects_limits_of_transformer_engine(self):
        overrides = ("model.attention_backend=te", "model.num_query_groups=1", "model.window_size=[64,0]")
        assert self.resolve(*overrides, node=2, environment="gpu")[0] == "all_gather"

    def test_latent_attention_has_keys_for_every_head(self):
        overrides = ("model.attention_backend=te", "model.num_query_groups=1")
        assert self.resolve(*overrides, node=4, environment="gpu")[0] == "p2p"  # as fast as all_gather, to four digits
        latent = "model.multi_latent_attention=true"
        assert self.resolve(*overrides, latent, node=4, environment="gpu")[:2] == ("a2a", None)

    def test_auto_respects_limits_of_packs(self):
        """A pack's group has one level for Transformer Engine, and must fit an all-to-all."""
        te, packed = "model.attention_backend=te", "model.sequence_packing_scheduler=dp_balanced"
        two = ("model.num_query_groups=2", te)
        assert self.resolve(*two, node=2, environment="gpu")[:2] == ("a2a+p2p", [2, 2])
        assert self.resolve(*two, packed, node=2, environment="gpu")[:2] == ("p2p", None)
        assert self.resolve(te, packed, node=4, environment="gpu")[:2] == ("a2a", None)
        dynamic = (te, "model.dynamic_context_parallel=true", "model.context_parallel_size=2")
        assert self.resolve(*dynamic, node=4, environment="gpu")[:2] == ("a2a", None)
        assert self.resolve(*dynamic, "model.num_query_groups=2", node=4, environment="gpu")[:2] == ("p2p", None)
        evaluation = (te, "model.context_parallel_size=2", "dist.eval_context_parallel_size=4")
        assert self.resolve(*evaluation, "model.num_query_groups=2", node=4, environment="gpu")[:2] == ("p2p", None)
        assert "a2a 0." in self.resolve(packed, "model.num_query_groups=1", node=2)[2]  # ours

    def test_an_assumed_vocabulary_is_in_the_reason(self):
        tokenizer = ("tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model=x.json")
        assert "a vocabulary of 32,768 is assumed" in self.resolve(*tokenizer, node=2)[2]
        assert "assumed" not in self.resolve(node=2)[2]

    def test_nothing_to_choose(self):
        config = load_recipe(EXAMPLE_RECIPE)
        assert resolve_auto(config, 4, None, Environment()) == (config, None)
        unsized = ["model.cp_comm_type=auto", "model.hierarchical_context_parallel_sizes=null"]
        config = load_recipe(EXAMPLE_RECIPE, [*unsized, "model.tensor_model_parallel_size=3"])
        assert {"A4", "C1"} <= {v.rule for v in check(config, 12, environment="cpu")}


class TestEnvironment:
    def test_the_real_environment_is_found(self, monkeypatch):
        monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
        monkeypatch.setenv("UNRELATED", "1")
        environment = Environment.detect()
        assert environment.variables["NVTE_FLASH_ATTN"] == "0" and "UNRELATED" not in environment.variables
        config = load_recipe(EXAMPLE_RECIPE, ["dist.distributed_backend=nccl"])
        monkeypatch.setattr("megatron_cp.rules.environment._gpus", lambda: (0, None))
        assert [v.rule for v in check(config, 4)] == ["K6"]
        monkeypatch.setattr("megatron_cp.rules.environment._gpus", lambda: (2, 9.0))
        installed = installed_version("transformer-engine") is not None
        assert [v.rule for v in check(config, 4)] == (["A12"] if installed else ["A12", "K57"])

    @pytest.mark.parametrize(
        ("missing", "overrides", "warned"),
        [
            ([], [], []),
            (["transformer_engine"], [], ["Transformer Engine is not"]),
            (["transformer_engine"], ["model.transformer_impl=local"], []),
            (["transformer_engine"], ["mixed_precision=fp32"], []),
            (["mamba_ssm", "causal_conv1d"], [], []),
            (["mamba_ssm", "causal_conv1d"], HYBRID, ["mamba-ssm and causal-conv1d are not"]),
            (["causal_conv1d"], HYBRID, ["causal-conv1d is not"]),
            (["causal_conv1d"], [*HYBRID, "mixed_precision=fp32"], []),
            (["transformer_engine", "mamba_ssm"], HYBRID, ["Transformer Engine is not", "mamba-ssm is not"]),
        ],
    )
    def test_missing_optional_packages_are_named(self, missing, overrides, warned):
        environment = dataclasses.replace(PRESETS["gpu"], **dict.fromkeys(missing))
        config = load_recipe(EXAMPLE_RECIPE, overrides)
        found = [v for v in check(config, 4, environment=environment) if v.rule == "K57"]
        assert [v.message.partition(" installed")[0] for v in found] == warned
        assert all(v.severity == "warning" for v in found)

    def test_looking_for_gpus_does_not_start_cuda(self, monkeypatch):
        """Ranks that are forked after CUDA's start could not use it."""
        driver = Driver("580.1", (13, 0), (Gpu("H200", 9.0, 140 << 30),) * 2)
        monkeypatch.setattr("megatron_cp.rules.environment.read_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA started"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        found = Environment.detect()
        assert (found.device, found.gpus_per_node, found.compute_capability) == ("gpu", 2, 9.0)
        monkeypatch.setattr("megatron_cp.rules.environment.read_driver", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        assert Environment.detect().gpus_per_node == 3
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # each rank has access to some only, as Slurm may arrange
        assert Environment.detect().gpus_per_node == 8
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert Environment.detect().device == "cpu"

    def test_a_variable_of_the_configuration_counts_as_set(self):
        config = load_recipe(EXAMPLE_RECIPE, ["env_vars.CUDA_DEVICE_MAX_CONNECTIONS=1"])
        assert check(config, 4, environment="gpu") == []
        environment = dataclasses.replace(PRESETS["gpu"], variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        assert check(load_recipe(EXAMPLE_RECIPE), 4, environment=environment) == []

    def test_an_exported_variable_wins_over_the_configurations(self):
        config = load_recipe(EXAMPLE_RECIPE, ["env_vars.CUDA_DEVICE_MAX_CONNECTIONS=1"])
        environment = dataclasses.replace(PRESETS["gpu"], variables={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
        (found,) = check(config, 4, environment=environment)
        assert found.rule == "A12" and found.message.startswith("is 8:")
        assert found.fix == "export CUDA_DEVICE_MAX_CONNECTIONS=1 (wins over env_vars)"
