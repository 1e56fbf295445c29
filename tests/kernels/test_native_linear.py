"""The C++ linear maps: layouts equal to the reference's, products against float64, rows to the bit
whatever the batch, the threads and the vectors.

Letters: T rows, I input, O output features.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_native_blocks import rows_of_blocks

from quire.base.errors import InvalidArgument
from quire.contracts.linear import WeightForm
from quire.kernels.linear import cpu_linear
from quire.kernels.linear.cpu_linear import EMULATED, FORMS, TILES, WIDE, NativeLinear, native_linear
from quire.kernels.linear.packed_memory import SLAB
from quire.kernels.native_library import native_library, native_problem
from quire.kernels.rows.cpu_rows import native_rows
from quire.weights import packed
from quire.weights.packed import multiply, pack, unpack

LIBRARY = native_library()
BEST = -1 if LIBRARY is None else NativeLinear(LIBRARY).level
DTYPES = (torch.float32, torch.bfloat16)
CASES: list[tuple[WeightForm, torch.dtype, int]] = [
    *itertools.product(FORMS, DTYPES, range(max(BEST, 0) + 1)),
    *((form, torch.bfloat16, EMULATED) for form in ("bfloat16", "int8", "int4")),
]

pytestmark = pytest.mark.skipif(LIBRARY is None, reason=native_problem())


def kernel(level: int | None = None) -> NativeLinear:
    assert LIBRARY is not None
    return NativeLinear(LIBRARY, level)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def bound(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return how far a float32 sum may be from the exact one, as ``[T, O]``: each of its additions
    rounds by 2^-24 of what was summed, and products of pairs round twice."""
    summed = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    return summed * (weight.shape[1] + 8) * 2.0**-23


@pytest.fixture(params=[0, 1, 2])
def rows_level(request: pytest.FixtureRequest) -> Iterator[int]:
    """Packing at each level; a level that the processor lacks is skipped."""
    rows = native_rows()
    assert rows is not None
    best = rows.use_level(9)
    if request.param > best:
        pytest.skip(f"this processor has no level {request.param}")
    yield rows.use_level(request.param)
    rows.use_level(best)


@pytest.mark.usefixtures("rows_level")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (31, 16), (32, 32), (33, 96), (70, 192), (64, 1032)])
def test_layouts_are_those_of_the_reference(form: WeightForm, outputs: int, inputs: int) -> None:
    torch.manual_seed(outputs)
    for dtype in DTYPES:
        weight = torch.randn(outputs, inputs, dtype=dtype)
        weight[outputs // 2] = 0
        expected, found = pack(weight, form), kernel().pack(weight, None, form).weights
        assert (found.outputs, found.inputs, found.group) == (outputs, inputs, expected.group)
        assert found.values.shape == expected.values.shape
        assert found.values.dtype == expected.values.dtype
        if form == "int4":
            # Of two scales with nearly the same error either may be taken.
            wrong = (unpack(found) - weight).square().sum()
            assert wrong <= (unpack(expected) - weight).square().sum() * 1.001
        else:
            assert torch.equal(found.values, expected.values)
            if expected.scales is not None:
                assert found.scales is not None
                assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_packed_in_parts(form: WeightForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose last one is no whole panel."""
    weight = torch.randn(150, 64)
    whole = kernel().pack(weight, None, form).weights
    monkeypatch.setattr(cpu_linear, "PACKED_AT_ONCE", 2 * 32 * 64 * 4)
    parts = kernel().pack(weight, None, form).weights
    assert torch.equal(parts.values, whole.values)
    assert (parts.scales is None) == (whole.scales is None)
    assert parts.scales is None or whole.scales is None or torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("form", FORMS)
def test_values_are_near_the_weights(form: WeightForm) -> None:
    """float32 keeps all, bfloat16 rounds to 8 bits, codes are off by half a step at most where
    nothing is clipped."""
    weight = torch.randn(64, 128)
    packed = pack(weight, form)
    off = (unpack(packed) - weight).abs()
    if form == "float32":
        assert torch.equal(unpack(packed), weight)
    elif form == "bfloat16":
        assert torch.equal(unpack(packed), weight.bfloat16().float())
    else:
        assert packed.scales is not None
        step = packed.scales.float().abs().mT.reshape(64, -1).repeat_interleave(packed.group, 1)
        most = 127 if form == "int8" else 7
        inside = weight.abs() <= most * step
        assert bool((off[inside] <= step[inside] * 0.5001).all())
        assert inside.float().mean() > 0.9


def test_scales_of_four_bits_clip_where_that_is_nearer() -> None:
    """One large value among small ones: a smaller scale has less error than that of the largest."""
    weight = torch.full((1, 32), 0.6)
    weight[0, 0] = 1.0
    packed = pack(weight, "int4")
    assert packed.scales is not None
    assert abs(float(packed.scales[0, 0, 0])) < 1 / 8


@pytest.mark.product(2)
@pytest.mark.parametrize(("form", "dtype", "level"), CASES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (32, 64), (40, 576), (100, 1032)])
def test_products(form: WeightForm, dtype: torch.dtype, level: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    one = kernel(level).pack(weight, bias, form)
    values = unpack(one.weights)
    for rows in (0, 1, 2, 6, 7, 12, 13, 25):
        x = torch.randn(rows, inputs).to(dtype)
        exact = x.double() @ values.double().T + bias.double()
        found = one(x)
        assert found.dtype == dtype
        assert found.shape == (rows, outputs)
        rounding = exact.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0
        assert bool(((found.double() - exact).abs() <= bound(x, values, bias) + rounding + 1e-30).all())


@pytest.mark.turns(2)
@pytest.mark.parametrize(("form", "dtype", "level"), CASES)
@pytest.mark.parametrize("inputs", [640, 1032])
def test_rows_do_not_know_their_batch(form: WeightForm, dtype: torch.dtype, level: int, inputs: int) -> None:
    """Also of several blocks of inputs."""
    torch.manual_seed(2)
    weight = torch.randn(72, inputs).to(dtype)
    one = kernel(level).pack(weight, None, form)
    x = torch.randn(150, inputs).to(dtype)
    alone = torch.cat([one(row.unsqueeze(0)) for row in x])
    for rows in (2, 5, 6, 7, 12, 13, 30, 150):
        assert torch.equal(one(x[:rows]), alone[:rows])
    assert torch.equal(one(x[100:130]), alone[100:130])


@pytest.mark.parametrize("form", FORMS)
def test_threads_change_nothing(form: WeightForm, three_threads: None) -> None:
    weight = torch.randn(1000, 256)
    one = kernel().pack(weight, None, form)
    for rows in (1, 13, 200):
        x = torch.randn(rows, 256)
        with_three = one(x)
        torch.set_num_threads(1)
        assert torch.equal(one(x), with_three)
        torch.set_num_threads(3)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_against_the_reference(data: st.DataObject) -> None:
    form, dtype, level = data.draw(st.sampled_from(CASES))
    outputs, inputs, rows = (
        data.draw(st.integers(1, 80)),
        8 * data.draw(st.integers(1, 90)),
        data.draw(st.integers(1, 20)),
    )
    torch.manual_seed(data.draw(st.integers(0, 99)))
    size = data.draw(st.sampled_from([1e-6, 1.0, 1e4]))
    weight, bias = (torch.randn(outputs, inputs) * size).to(dtype), torch.randn(outputs).to(dtype)
    wide = torch.randn(rows, inputs + 3).to(dtype)
    x = wide[:, :inputs]  # rows with gaps
    found = kernel(level).pack(weight, bias, form)
    expected = multiply(x, found.weights, bias)
    limit = 2 * bound(x, unpack(found.weights), bias) + expected.double().abs() * 2.0**-8 * (dtype == torch.bfloat16)
    assert bool(((found(x).double() - expected.double()).abs() <= limit + 1e-30).all())


@pytest.mark.parametrize("rows", [1, 15, 17, 33, 600])
def test_tiles_touch_only_what_is_theirs(rows: int) -> None:
    """All roads: one half or two, a last step that is not full, inputs block by block, more than
    one tile of rows, panels that are not full, and gaps between rows that hold no numbers."""
    torch.manual_seed(rows)
    for outputs, inputs in ((1, 2), (33, 30), (300, 34), (64, 544), (290, 1030)):
        weight = (torch.randn(outputs, inputs) / inputs**0.5).bfloat16()
        wide = torch.full((rows, inputs + 5), float("nan"), dtype=torch.bfloat16)
        x = wide[:, 3 : 3 + inputs]
        x.copy_(torch.randn(rows, inputs))
        found = kernel(EMULATED).pack(weight, None, "bfloat16")(x)
        exact = x.double() @ weight.double().T
        limit = bound(x, weight, torch.zeros(outputs)) + exact.abs() * 2.0**-8
        assert bool(((found.double() - exact).abs() <= limit).all())


@pytest.mark.skipif(BEST < TILES, reason="this processor has no tiles of bfloat16 (AMX)")
@pytest.mark.parametrize("inputs", [64, 576, 1030])
def test_emulated_tiles_are_those_of_the_processor(inputs: int) -> None:
    torch.manual_seed(inputs)
    weight = torch.randn(96, inputs).bfloat16()
    real, emulated = (kernel(level).pack(weight, None, "bfloat16") for level in (TILES, EMULATED))
    x = (torch.randn(40, inputs) * torch.randn(40, 1).exp()).bfloat16()
    for rows in (1, 3, 16, 17, 40):
        assert torch.equal(real(x[:rows]), emulated(x[:rows]))


def test_what_is_no_number_reaches_its_rows_only() -> None:
    one = kernel().pack(torch.ones(33, 64), None, "bfloat16")
    x = torch.ones(14, 64)
    x[3, 5], x[7, 6] = float("nan"), float("inf")
    y = one(x)
    assert bool(y[3].isnan().all())
    assert bool(y[7].isposinf().all())
    assert torch.equal(y[[0, 2, 4, 6, 8, 13]], torch.full((6, 33), 64.0))


def test_transposed_weights_and_inputs() -> None:
    weight, x = torch.randn(64, 40).T, torch.randn(64, 5).T
    one = kernel().pack(weight, None, "float32")
    exact = x.double() @ weight.double().T
    assert bool(((one(x).double() - exact).abs() <= bound(x, weight, torch.zeros(40))).all())


@pytest.mark.parametrize(
    ("weight", "form", "reason"),
    [
        (torch.ones(4, 4, dtype=torch.float16), "float32", "float16"),
        (torch.ones(4, 3), "bfloat16", "pairs"),
        (torch.ones(4, 12), "int8", "multiple of 8"),
        (torch.ones(4, 12), "int4", "multiple of 8"),
        (torch.ones(4, 4, device="meta"), "float32", "meta"),
    ],
)
def test_what_is_refused(weight: torch.Tensor, form: WeightForm, reason: str) -> None:
    assert reason in kernel().refusal(weight, form)
    with pytest.raises(InvalidArgument, match=reason):
        kernel().pack(weight, None, form)


def test_calls_are_checked() -> None:
    one = kernel().pack(torch.ones(4, 8), None, "float32")
    with pytest.raises(InvalidArgument, match="float32 activations"):
        one(torch.ones(1, 8, dtype=torch.bfloat16))
    for level in (-1, EMULATED + 1):
        with pytest.raises(InvalidArgument, match="level"):
            kernel(level)


def test_weights_share_memory_as_long_as_they_live() -> None:
    """Small ones lie one behind the other, each at a cache line. What does not fit has its own."""
    one_kernel = kernel()
    maps = [one_kernel.pack(torch.randn(40, 72), None, form) for form in FORMS]
    parts = [part for one in maps for part in (one.weights.values, one.weights.scales) if part is not None]
    slab = parts[0].untyped_storage()
    assert {part.untyped_storage().data_ptr() for part in parts} == {slab.data_ptr()}
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    ends = [part.data_ptr() + part.nbytes for part in parts]
    assert all(0 <= part.data_ptr() - end < 64 for part, end in zip(parts[1:], ends, strict=False))
    memory = one_kernel.memory
    assert slab.nbytes() >= SLAB
    large = memory.empty((slab.nbytes() - 100,), torch.uint8)
    assert large.untyped_storage().data_ptr() != slab.data_ptr()
    holder = memory._slab
    assert holder is not None
    assert holder() is not None
    del large
    assert holder() is None


def test_groups() -> None:
    assert [packed.FORMS["int8"].group(inputs) for inputs in (64, 96, 48, 8, 12)] == [64, 32, 16, 8, 0]
    assert [packed.FORMS["int4"].group(inputs) for inputs in (64, 96, 48, 8, 12)] == [32, 32, 16, 8, 0]
    assert packed.FORMS["bfloat16"].group(64) == 0


HEADS = [(dtype, level) for form, dtype, level in CASES if form == "bfloat16"]


@pytest.mark.product(2)
@pytest.mark.parametrize(("dtype", "level"), HEADS)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(1, 8, 6), (16, 512, 128), (5, 33, 576), (3, 12, 7)])
def test_heads_have_maps_of_their_own(
    dtype: torch.dtype, level: int, heads: int, outputs: int, inputs: int, three_threads: None
) -> None:
    """Rows and heads that lie apart; what lies between is left as it is. Each head has the bits of
    its map alone, in any batch."""
    torch.manual_seed(2)
    found = kernel(level)
    weight_HOI = (torch.randn(heads, outputs, inputs) / inputs**0.5).to(dtype)
    if dtype == torch.bfloat16 and inputs % 2:
        assert found.pack_heads(weight_HOI) is None
        return
    maps = found.pack_heads(weight_HOI)
    assert maps is not None
    x_THI = torch.randn(37, heads, inputs + 3).to(dtype)[..., :inputs]
    wide_THO = torch.full((37, heads, outputs + 5), 7.0, dtype=dtype)
    maps(x_THI, wide_THO[..., :outputs])
    assert wide_THO[..., outputs:].eq(7.0).all()
    form = found.lossless(weight_HOI[0])
    assert form is not None
    for head in range(heads):
        alone = found.pack(weight_HOI[head], None, form)
        assert torch.equal(wide_THO[:, head, :outputs], alone(x_THI[:, head].contiguous()))
    exact = torch.einsum("thi,hoi->tho", x_THI.double(), weight_HOI.double())
    off = torch.einsum("thi,hoi->tho", x_THI.double().abs(), weight_HOI.double().abs()) * (inputs + 8) * 2.0**-23
    error = (wide_THO[..., :outputs].double() - exact).abs()
    assert bool((error <= off + exact.abs() * torch.finfo(dtype).eps).all())
    for rows in (slice(0, 1), slice(36, 37), slice(3, 20)):
        some_THO = torch.empty(rows.stop - rows.start, heads, outputs, dtype=dtype)
        maps(x_THI[rows], some_THO)
        assert torch.equal(some_THO, wide_THO[rows, :, :outputs])


def test_heads_are_packed_without_loss() -> None:
    """Values of bfloat16 in 16 bits, for activations in float32 too; calls are checked."""
    weight_HOI = torch.randn(2, 32, 64).bfloat16()
    for dtype in DTYPES:
        maps = kernel().pack_heads(weight_HOI.to(dtype))
        assert maps is not None
        assert maps.nbytes == weight_HOI.nbytes
        x_THI, y_THO = torch.randn(3, 2, 64).to(dtype), torch.empty(3, 2, 32, dtype=dtype)
        other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
        for x, y in ((x_THI[:, :1], y_THO), (x_THI, y_THO[:2]), (x_THI, y_THO.mT), (x_THI.to(other), y_THO)):
            with pytest.raises(InvalidArgument, match="x is"):
                maps(x, y)
    assert kernel().pack_heads(weight_HOI.half()) is None


@pytest.mark.usefixtures("rows_level")
def test_one_number_that_bfloat16_lacks_keeps_a_weight_in_float32() -> None:
    """Wherever it is, also behind the last whole vector."""
    weight = torch.ones(3, 14)
    assert kernel().lossless(weight) == "bfloat16"
    for place in range(weight.numel()):
        other = weight.clone()
        other.view(-1)[place] += 2.0**-20
        assert kernel().lossless(other) == "float32"


def test_the_kernel_is_made_once() -> None:
    assert native_linear() is native_linear()


@pytest.mark.skipif(BEST < WIDE, reason="the processor has no AVX-512")
def test_weights_in_bfloat16_and_blocks_have_a_level_of_their_own() -> None:
    """On a processor that multiplies pairs of bfloat16 slowly: codes keep the best level."""
    assert LIBRARY is not None
    kernel, wide, best = (NativeLinear(LIBRARY, level) for level in (BEST, WIDE, BEST))
    kernel.float_level = WIDE
    weight_OI, x_TI = torch.randn(70, 96, dtype=torch.bfloat16), torch.randn(9, 96, dtype=torch.bfloat16)
    kernels: dict[WeightForm, NativeLinear] = {"bfloat16": wide, "int8": best, "int4": best}
    for form, other in kernels.items():
        assert torch.equal(kernel.pack(weight_OI, None, form)(x_TI), other.pack(weight_OI, None, form)(x_TI))
    blocks = [rows_of_blocks("Q4_K", 70, 256)]
    found, expected = (one.pack_blocks(blocks, 256, None, torch.bfloat16) for one in (kernel, wide))
    assert found is not None
    assert expected is not None
    x_TI = torch.randn(9, 256, dtype=torch.bfloat16)
    assert torch.equal(found(x_TI), expected(x_TI))
    plain = NativeLinear(LIBRARY)
    assert plain.float_level in (WIDE, plain.level)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_packed_like_the_whole(dtype: torch.dtype) -> None:
    """Rows in several tensors, as a file has queries, keys and values."""
    assert LIBRARY is not None
    kernel = NativeLinear(LIBRARY)
    parts = [torch.randn(rows, 48).to(dtype) for rows in (64, 32, 41)]
    parts[1] = torch.randn(48, 32).to(dtype).t()  # whose rows are no neighbours in memory
    bias_O = torch.randn(137)
    found = kernel.pack_parts(parts, bias_O)
    whole = kernel.pack(torch.cat(parts), bias_O, "bfloat16" if dtype == torch.bfloat16 else "float32")
    assert found is not None
    assert (found.weights.form, found.weights.outputs) == (whole.weights.form, 137)
    assert torch.equal(found.weights.values, whole.weights.values)
    x_TI = torch.randn(5, 48).to(dtype)
    assert torch.equal(found(x_TI), whole(x_TI))
    rounded = [part.bfloat16().float() for part in parts]
    for some, form in ((rounded, "bfloat16"), ([*rounded[:2], torch.full((7, 48), 0.1)], "float32")):
        made = kernel.pack_parts(some, None)
        assert made is not None
        assert made.weights.form == form
    assert kernel.pack_parts(parts[::-1], None) is None  # a panel would have rows of two parts
    assert kernel.pack_parts([part.half() for part in parts], None) is None


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("size", [1.0, 1e-36])
def test_codes_for_many_rows_are_multiplied_as_for_few(form: WeightForm, size: float) -> None:
    """Few rows by pairs of bfloat16, many by floats where pairs are slow: in the order of sums that
    the product of pairs has, with numbers below 2^-126 as 0."""
    assert LIBRARY is not None
    kernel = NativeLinear(LIBRARY)
    made = kernel.pack(torch.randn(70, 96).bfloat16(), torch.randn(70) * size, form)
    x_TI = (torch.randn(151, 96) * size).bfloat16()
    whole = made(x_TI)
    for some in (3, 7):
        assert torch.equal(torch.cat([made(x_TI[first : first + some]) for first in range(0, 151, some)]), whole)
