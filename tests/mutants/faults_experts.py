"""Faults of calls over mixtures of experts, and over whole blocks."""

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="a-call-forgets-adapters-of-the-shared-expert",
        file="nn/experts.py",
        old=" and (self.shared is None or self.shared.is_plain):\n",
        new=":\n",
        tests=("kernels/test_native_experts.py::test_an_adapter_of_the_shared_expert_counts",),
    ),
    Mutant(
        name="a-block-in-one-call-forgets-adapters-of-the-shared-expert",
        file="models/blocks.py",
        old="(mlp.call, () if mlp.shared is None else mlp.shared.maps)",
        new="(mlp.call, ())",
        tests=("runner/test_joined_hybrids.py::test_an_adapter_of_the_shared_expert_leaves_the_calls",),
    ),
    Mutant(
        name="a-block-takes-experts-of-another-type",
        file="kernels/block.py",
        old="if not isinstance(mlp, NativeMixture) or (mlp.dtype, mlp.width) != (dtype, native.width):",
        new="if not isinstance(mlp, NativeMixture):",
        tests=("kernels/test_expert_blocks.py::test_parts_that_do_not_fit_are_not_joined",),
    ),
    Mutant(
        name="a-block-in-one-call-forgets-gates-of-whole-heads",
        file="models/blocks.py",
        old="gates = maps[1] if len(maps) > 1 else None",
        new="gates = None",
        tests=("runner/test_joined_hybrids.py::test_each_block_by_itself",),
    ),
    Mutant(
        name="a-block-takes-gates-of-another-number-of-heads",
        file="kernels/block.py",
        old="tail.columns % gates.weights.outputs == 0",
        new="True",
        tests=("kernels/test_mixed_blocks.py::test_parts_that_do_not_fit_are_not_joined",),
    ),
    Mutant(
        name="a-call-forgets-the-factors-of-columns",
        file="kernels/block.py",
        old="native.in_factor, native.columns = factor, None if scale_Z is None else scale_Z.data_ptr()",
        new="native.in_factor = factor",
        tests=("kernels/test_bare_blocks.py::test_a_mixer_alone",),
    ),
    Mutant(
        name="attention-reads-the-sum-with-the-mixer-beside-it",
        file="kernels/block.py",
        old="native.aside = 1",
        new="native.aside = 0",
        tests=("kernels/test_bare_blocks.py::test_a_mixer_beside_attention",),
    ),
    Mutant(
        name="wide-rows-run-their-parts",
        file="models/blocks.py",
        old="row_dtype = None if norm.dtype is None else norm.weight.dtype",
        new="row_dtype = None",
        tests=("runner/test_joined_hybrids.py::test_random_steps",),
    ),
    Mutant(
        name="a-token-alone-adds-its-experts-backwards",
        file="nn/experts.py",
        old="in enumerate(experts_TK[0].tolist()):",
        new="in reversed(list(enumerate(experts_TK[0].tolist()))):",
        tests=("kernels/test_native_experts.py::test_every_number_is_that_of_the_parts",),
    ),
    Mutant(
        name="experts-of-several-shapes-in-one-call",
        file="kernels/experts.py",
        old="if len(shapes) != 1 or len(others) != 1:\n        return False\n    (width, columns), (out, inner) = *shapes, *others",
        new="(width, columns), (out, inner) = max(shapes), max(others)",
        tests=("kernels/test_native_experts.py::test_other_parts_run_one_by_one",),
    ),
    Mutant(
        name="every-piece-of-a-batch-has-the-first-weights",
        file="kernels/experts.py",
        old="weights_TK[start:].data_ptr()",
        new="weights_TK.data_ptr()",
        tests=("kernels/test_native_experts.py::test_long_batches_run_in_pieces",),
    ),
    Mutant(
        name="ties-are-decided-in-another-way-than-by-pytorch",
        file="kernels/experts.py",
        old="not (self.decides_ties and weight_XE.is_cpu",
        new="not (weight_XE.is_cpu",
        tests=("kernels/test_native_experts.py::test_other_parts_run_one_by_one",),
    ),
    Mutant(
        name="logits-in-float32-are-rounded-to-the-models-type",
        file="kernels/experts.py",
        old="is_wide = routing.in_float32 or dtype == torch.float32",
        new="is_wide = dtype == torch.float32",
        tests=("kernels/test_native_experts.py::test_sums_of_a_router_are_those_of_float64",),
    ),
    Mutant(
        name="experts-one-by-one-are-said-to-know-no-batch",
        file="runner/row_dependence.py",
        old="return () if part.call is None else (",
        new="return (",
        tests=("runner/test_mixture_rows.py::test_what_pytorch_computes_is_named",),
    ),
)
