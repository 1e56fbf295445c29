// Products of codes of four to six bits with rows of bfloat16 in AVX2, by whole numbers: an instruction multiplies four times as many as
// it does of floats.
//
// The inputs of a group of 32 are whole numbers of 16 bits times a power of two, by the largest of them. So what is 2^-7 of that one or
// more loses nothing, and what is less is off by 2^-15 of it at most; bfloat16 rounds the largest by up to 2^-8. Products with codes, and
// sums of those that share a scale, are exact, so their order makes no difference. A sum becomes a float, times the scale, and is added
// to those before it. So a row has the same bits in both ways to make these sums:
//
//   one row    codes are bytes in registers, and a whole number is two digits of 8 bits with signs
//   more rows  codes are numbers of 16 bits in a cache
//
// Letters: M rows of a tile; V vectors of eight outputs of a panel's four.

#pragma once

namespace {

// Compilers would make all products first, more than there are registers, and sum them in an order of their own.
#define KEEP(sum) __asm__("" : "+x"(sum))

constexpr bool has_digits(int64_t kind) { return BLOCK_SHAPES[kind].low == 4 && kind != IQ4_NL && kind != IQ4_XS; }

INLINE bool has_digits(const Linear& map) {
    for (int64_t part = 0; part < map.num_block_parts; part++)
        if (has_digits(map.block_parts[part].kind)) return true;
    return false;
}

// A group of a row. Digits lie as codes become bytes: of each eight inputs 0, 4, 1, 5, 2, 6, 3, 7.
struct DigitGroup {
    int16_t numbers[32];
    int8_t lower[32], upper[32];
    float unit;        // what 1 stands for; no number if an input is none
    float sums[2];     // of the inputs 0 to 15 and 16 to 31
    int32_t whole[2];  // the same as whole numbers
    int32_t unused[3];
};

INLINE int32_t total_of(__m256i x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

INLINE int32_t largest_of(__m256i x) {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

__attribute__((noinline)) void read_digits(DigitGroup* to, const float* x, int64_t inputs) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff), half = _mm256_set1_epi32(128), byte = _mm256_set1_epi32(255);
    const __m128i by_digit = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    for (; inputs > 0; inputs -= 32, x += 32, to++) {
        __m256i sizes = _mm256_setzero_si256();
        for (int i = 0; i < 32; i += 8) sizes = _mm256_max_epi32(sizes, _mm256_and_si256(loaded<__m256i>(x + i), size));
        const int32_t largest = largest_of(sizes);
        // Two digits reach 127 * 256 + 127, so a number shortly below a power of two goes by the next one.
        int32_t exponent = (largest + 66048) >> 23;
        if (exponent < 15) exponent = 15;
        const bool is_finite = largest < 0x7f800000;
        const int32_t factor = is_finite ? (268 - exponent) << 23 : 0, unit = is_finite ? (exponent - 14) << 23 : 0x7fc00000;
        const __m256 factors = _mm256_set1_ps(loaded<float>(&factor));
        to->unit = loaded<float>(&unit);
        for (int i = 0; i < 2; i++) {
            __m256i all = _mm256_setzero_si256();
            for (int j = 2 * i; j < 2 * i + 2; j++) {
                const __m256i number = _mm256_cvtps_epi32(_mm256_mul_ps(loaded<__m256>(x + 8 * j), factors));
                const __m256i upper = _mm256_srai_epi32(_mm256_add_epi32(number, half), 8);
                all = _mm256_add_epi32(all, number);
                store(to->numbers + 8 * j, _mm_packs_epi32(_mm256_castsi256_si128(number), _mm256_extracti128_si256(number, 1)));
                const __m256i both = _mm256_or_si256(_mm256_and_si256(number, byte), _mm256_slli_epi32(_mm256_and_si256(upper, byte), 8));
                const __m128i low = _mm256_castsi256_si128(both), high = _mm256_extracti128_si256(both, 1);
                const __m128i first = _mm_shuffle_epi8(_mm_unpacklo_epi32(low, high), by_digit);
                const __m128i second = _mm_shuffle_epi8(_mm_unpackhi_epi32(low, high), by_digit);
                const __m128i digits = _mm_unpacklo_epi32(first, second);
                _mm_storel_epi64((__m128i*)(to->lower + 8 * j), digits);
                _mm_storel_epi64((__m128i*)(to->upper + 8 * j), _mm_unpackhi_epi64(digits, digits));
            }
            to->whole[i] = total_of(all);
            to->sums[i] = (float)to->whole[i] * to->unit;
        }
    }
}

// Numbers of a kind without a sign: the code, or what it stands for and an offset.
template <int KIND>
struct DigitShape {
    static constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    static constexpr bool IS_TABLE = KIND == MXFP4 || KIND == NVFP4;
    static constexpr int OFFSET = IS_TABLE ? 12 : SHAPE.offset, MOST = IS_TABLE ? 24 : (1 << (SHAPE.low + SHAPE.high)) - 1;
    // A vector has four inputs of eight outputs. So many share a scale, and the products of STEP fit into 16 bits.
    static constexpr int VECTORS = SHAPE.is_halved ? 4 : 8, FIT = 32767 / (2 * 128 * MOST), STEP = FIT >= VECTORS ? VECTORS : FIT >= 4 ? 4 : 2;
    static_assert(FIT >= 2, "two vectors of products fit into 16 bits");
};

// Numbers of vector I of a group's eight, from the panel; ``v``: which eight outputs.
template <int KIND>
struct PanelNumbers {
    const uint8_t* codes;
    template <int I>
    __attribute__((always_inline)) __m256i of(int v) const {
        constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
        constexpr int J = I / 2, ODD = I % 2, UP = 4 - SHAPE.high * ODD - (SHAPE.high == 2 ? J % 2 * 8 : 4 * J);
        constexpr int32_t MASK = 0x00100010 * ((1 << SHAPE.high) - 1);
        __m256i found = loaded<__m256i>(codes + J * 128 + v * 32);
        if (ODD) found = _mm256_srli_epi16(found, 4);
        found = _mm256_and_si256(found, _mm256_set1_epi8(15));
        if constexpr (SHAPE.high > 0) {
            const __m256i above = loaded<__m256i>(codes + SHAPE.codes_size() + (SHAPE.high == 2 ? J / 2 * 128 : 0) + v * 32);
            found = _mm256_or_si256(found, _mm256_and_si256(shifted<UP>(above), _mm256_set1_epi32(MASK)));
            found = _mm256_or_si256(found, _mm256_and_si256(shifted<UP + 8 - 2 * SHAPE.high>(above), _mm256_set1_epi32(MASK << 8)));
        }
        if constexpr (DigitShape<KIND>::IS_TABLE)
            found = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)), found);
        return found;
    }
    template <int UP>
    static __attribute__((always_inline)) __m256i shifted(__m256i x) {
        return UP >= 0 ? _mm256_slli_epi32(x, UP < 0 ? 0 : UP) : _mm256_srli_epi32(x, UP < 0 ? -UP : 0);
    }
};

// Products of the vectors I to END - 1 with both digits.
template <int KIND, int V, int I, int END>
INLINE void add_products(__m256i (&lower)[V], __m256i (&upper)[V], const PanelNumbers<KIND>& numbers, int v, const DigitGroup* x) {
    if constexpr (I < END) {
        const __m256i low = _mm256_set1_epi32(loaded<int32_t>(x->lower + 4 * I)), high = _mm256_set1_epi32(loaded<int32_t>(x->upper + 4 * I));
#pragma GCC unroll 4
        for (int n = 0; n < V; n++) {
            const __m256i found = numbers.template of<I>(v + n);
            lower[n] = _mm256_add_epi16(lower[n], _mm256_maddubs_epi16(found, low));
            KEEP(lower[n]);
            upper[n] = _mm256_add_epi16(upper[n], _mm256_maddubs_epi16(found, high));
            KEEP(upper[n]);
        }
        add_products<KIND, V, I + 1, END>(lower, upper, numbers, v, x);
    }
}

// Whole sums of the vectors I to END - 1.
template <int KIND, int V, int I, int END, bool FIRST = true>
INLINE void add_steps(__m256i (&sums)[V], const PanelNumbers<KIND>& numbers, int v, const DigitGroup* x) {
    if constexpr (I < END) {
        constexpr int NEXT = I + DigitShape<KIND>::STEP;
        __m256i lower[V] = {}, upper[V] = {};
        add_products<KIND, V, I, NEXT>(lower, upper, numbers, v, x);
#pragma GCC unroll 4
        for (int n = 0; n < V; n++) {
            const __m256i both =
                _mm256_add_epi32(_mm256_madd_epi16(lower[n], _mm256_set1_epi16(1)), _mm256_madd_epi16(upper[n], _mm256_set1_epi16(256)));
            sums[n] = FIRST ? both : _mm256_add_epi32(sums[n], both);
        }
        add_steps<KIND, V, NEXT, END, false>(sums, numbers, v, x);
    }
}

// A whole sum times its scale, less the minimum times the sum of the inputs, is added.
template <bool HAS_MINIMA>
INLINE __m256 plus_scaled(__m256 total, __m256i whole, __m256 unit, const float* scale, const float* minimum, __m256 sum) {
    total = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(whole), unit), loaded<__m256>(scale), total);
    return HAS_MINIMA ? _mm256_fnmadd_ps(loaded<__m256>(minimum), sum, total) : total;
}

// The inputs of a scale: all of a group, or its half HALF.
template <int KIND, int V, int HALF>
INLINE void add_scaled(__m256 (&totals)[V], const PanelNumbers<KIND>& numbers, int v, const DigitGroup* x, const float* scale,
                       const float* minimum) {
    typedef DigitShape<KIND> Shape;
    constexpr bool IS_WHOLE = Shape::VECTORS == 8;
    __m256i sums[V];
    add_steps<KIND, V, HALF * 4, HALF * 4 + Shape::VECTORS>(sums, numbers, v, x);
    const __m256i offset = _mm256_set1_epi32((x->whole[HALF] + (IS_WHOLE ? x->whole[1] : 0)) * Shape::OFFSET);
    const __m256 unit = _mm256_set1_ps(x->unit), sum = _mm256_set1_ps(x->sums[HALF] + (IS_WHOLE ? x->sums[1] : 0));
#pragma GCC unroll 4
    for (int n = 0; n < V; n++)
        totals[n] = plus_scaled<BLOCK_SHAPES[KIND].has_minima>(totals[n], _mm256_sub_epi32(sums[n], offset), unit, scale + 8 * n, minimum + 8 * n, sum);
}

template <int KIND, int V>
INLINE void add_group(__m256 (&totals)[V], const PanelNumbers<KIND>& numbers, int v, const DigitGroup* x, const float* scale, const float* minimum) {
    add_scaled<KIND, V, 0>(totals, numbers, v, x, scale + 8 * v, minimum + 8 * v);
    if constexpr (DigitShape<KIND>::VECTORS == 4) add_scaled<KIND, V, 1>(totals, numbers, v, x, scale + PANEL + 8 * v, minimum + PANEL + 8 * v);
}

// Scales and minima of a group: [32] of each, or [2][32] where halves have their own.
template <int KIND>
INLINE void read_group_scales(float* scale, float* minimum, const uint8_t* panel, int64_t group) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    const uint8_t *scales = panel + SHAPE.group(group) + SHAPE.codes_size() + SHAPE.high_size(), *head = panel + SHAPE.head(group);
    for (int half = 0; half <= (int)SHAPE.is_halved; half++) {
        Lanes found[2] = {}, least[2] = {};
        read_scales<KIND, 2>(found, least, scales, head, half);
        for (int n = 0; n < 2; n++) {
            store(scale + half * PANEL + n * LANES, found[n]);
            if (SHAPE.has_minima) store(minimum + half * PANEL + n * LANES, least[n]);
        }
    }
}

INLINE void fetch_group(const uint8_t* codes, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(codes + byte + AHEAD, 0, 3);
}

// Sums of M rows and 16 outputs from vector ``v`` on.
template <int M>
INLINE void put_totals(Sums to, const __m256 (&totals)[M][2], int v) {
    Lanes sums[1][M][1];
    for (int m = 0; m < M; m++) sums[0][m][0] = {(Lanes::Half)totals[m][0], (Lanes::Half)totals[m][1]};
    to.is_first = true;
    add_tile<M, 1, 1>(to.side(v / 2), sums, nullptr);
}

// One row: codes become numbers in registers.
template <int KIND>
__attribute__((noinline)) void digit_row(const uint8_t* panel, int64_t inputs, const Sums& to, const DigitGroup* x) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    __m256 totals[2][1][2] = {};
    alignas(64) float scale[2 * PANEL], minimum[2 * PANEL];
#pragma GCC unroll 1
    for (int64_t group = 0; group < inputs / 32; group++, x++) {
        const uint8_t* codes = panel + SHAPE.group(group);
        fetch_group(codes, SHAPE.group_size());
        read_group_scales<KIND>(scale, minimum, panel, group);
        add_group<KIND, 2>(totals[0][0], PanelNumbers<KIND>{codes}, 0, x, scale, minimum);
        add_group<KIND, 2>(totals[1][0], PanelNumbers<KIND>{codes}, 2, x, scale, minimum);
    }
    put_totals<1>(to, totals[0], 0), put_totals<1>(to, totals[1], 2);
}

// -- more rows -----------------------------------------------------------------------------------------------------------

// Of so many inputs, [2 inputs][32 outputs][2] numbers of 16 bits, and lines of scales and minima.
constexpr int64_t DIGIT_INPUTS = 128;
struct NumberCache {
    alignas(64) int16_t numbers[DIGIT_INPUTS * PANEL];
    float scales[DIGIT_INPUTS / 16 * PANEL], minima[DIGIT_INPUTS / 16 * PANEL];
};

// Vector I of a group: its even bytes are two neighbouring inputs, its odd ones the next two but two.
template <int KIND, int I>
INLINE void write_numbers(int16_t* to, const PanelNumbers<KIND>& numbers) {
    if constexpr (I < 8) {
        const __m256i offset = _mm256_set1_epi16(DigitShape<KIND>::OFFSET);
        int16_t* const pair = to + (I / 2 * 4 + I % 2) * 2 * PANEL;
        for (int v = 0; v < 4; v++) {
            const __m256i found = numbers.template of<I>(v);
            store(pair + 16 * v, _mm256_sub_epi16(_mm256_and_si256(found, _mm256_set1_epi16(255)), offset));
            store(pair + 4 * PANEL + 16 * v, _mm256_sub_epi16(_mm256_srli_epi16(found, 8), offset));
        }
        write_numbers<KIND, I + 1>(to, numbers);
    }
}

// INPUTS of a scale.
template <int M, int INPUTS, bool HAS_MINIMA>
__attribute__((noinline)) void digit_tile(const Sums& to, int64_t groups, const DigitGroup* first, int64_t stride, const NumberCache& from) {
    for (int v = 0; v < 4; v += 2) {
        __m256 totals[M][2];
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) totals[m][n] = to.is_first ? _mm256_setzero_ps() : loaded<__m256>(to.to + m * PANEL + 8 * (v + n));
        const int16_t* numbers = from.numbers + 16 * v;
        const float *scale = from.scales + 8 * v, *minimum = from.minima + 8 * v;
        for (int64_t group = 0; group < groups; group++)
#pragma GCC unroll 1
            for (int half = 0; half < 32 / INPUTS; half++, scale += PANEL, minimum += PANEL) {
                __m256i sums[M][2] = {};
#pragma GCC unroll 4
                for (int i = 0; i < INPUTS / 2; i++, numbers += 2 * PANEL) {
                    const __m256i found[2] = {loaded<__m256i>(numbers), loaded<__m256i>(numbers + 16)};
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++) {
                        const __m256i x = _mm256_set1_epi32(loaded<int32_t>(first[m * stride + group].numbers + half * INPUTS + 2 * i));
                        for (int n = 0; n < 2; n++) {
                            sums[m][n] = _mm256_add_epi32(sums[m][n], _mm256_madd_epi16(found[n], x));
                            KEEP(sums[m][n]);
                        }
                    }
                }
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) {
                    const DigitGroup& x = first[m * stride + group];
                    const __m256 unit = _mm256_set1_ps(x.unit), sum = _mm256_set1_ps(x.sums[half] + (INPUTS == 32 ? x.sums[1] : 0));
                    for (int n = 0; n < 2; n++)
                        totals[m][n] = plus_scaled<HAS_MINIMA>(totals[m][n], sums[m][n], unit, scale + 8 * n, minimum + 8 * n, sum);
                }
            }
        put_totals<M>(to, totals, v);
    }
}

template <int M, int INPUTS, bool HAS_MINIMA>
INLINE void digit_tile_of(int64_t rows, const Sums& to, int64_t groups, const DigitGroup* first, int64_t stride, const NumberCache& from) {
    if constexpr (M > 1)
        if (rows < M) return digit_tile_of<M - 1, INPUTS, HAS_MINIMA>(rows, to, groups, first, stride, from);
    digit_tile<M, INPUTS, HAS_MINIMA>(to, groups, first, stride, from);
}

// Rows of a panel; ``x``: [rows][inputs / 32].
template <int KIND>
__attribute__((noinline)) void digit_rows(const uint8_t* panel, int64_t inputs, const Sums& to, const DigitGroup* x, int64_t rows) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    if (rows == 1) return digit_row<KIND>(panel, inputs, to, x);
    constexpr int INPUTS = SHAPE.is_halved ? 16 : 32, LINE = 32 / INPUTS * PANEL;
    static thread_local NumberCache cache;
    const int64_t all = inputs / 32, most = DIGIT_INPUTS / 32, blocks = (rows + 3) / 4;
    for (int64_t from = 0; from < all; from += most) {
        const int64_t groups = all - from < most ? all - from : most;
        for (int64_t group = 0; group < groups; group++) {
            const uint8_t* codes = panel + SHAPE.group(from + group);
            fetch_group(codes, SHAPE.group_size());
            write_numbers<KIND, 0>(cache.numbers + group * 32 * PANEL, PanelNumbers<KIND>{codes});
            read_group_scales<KIND>(cache.scales + group * LINE, cache.minima + group * LINE, panel, from + group);
        }
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t first = rows * i / blocks;
            Sums some = to.from(first, 0);
            some.is_first = from == 0;
            if (from + groups < all) some.results = Results{};
            digit_tile_of<4, INPUTS, SHAPE.has_minima>(rows * (i + 1) / blocks - first, some, groups, x + first * all + from, all, cache);
        }
    }
}

INLINE void digit_panel(int64_t kind, const uint8_t* panel, int64_t inputs, const Sums& to, const DigitGroup* x, int64_t rows) {
    switch (kind) {
        case Q4_0: return digit_rows<Q4_0>(panel, inputs, to, x, rows);
        case Q4_1: return digit_rows<Q4_1>(panel, inputs, to, x, rows);
        case Q5_0: return digit_rows<Q5_0>(panel, inputs, to, x, rows);
        case Q5_1: return digit_rows<Q5_1>(panel, inputs, to, x, rows);
        case Q4_K: return digit_rows<Q4_K>(panel, inputs, to, x, rows);
        case Q5_K: return digit_rows<Q5_K>(panel, inputs, to, x, rows);
        case Q6_K: return digit_rows<Q6_K>(panel, inputs, to, x, rows);
        case MXFP4: return digit_rows<MXFP4>(panel, inputs, to, x, rows);
        default: return digit_rows<NVFP4>(panel, inputs, to, x, rows);
    }
}

#undef KEEP

}  // namespace
