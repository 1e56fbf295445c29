// Products of codes of four to eight bits with rows of bfloat16 in AVX2, by whole numbers: an instruction multiplies more of them than
// of floats.
//
// The inputs of a group of 32 are whole numbers of 16 bits times a power of two, by the largest of them. So what is 2^-7 of that one or
// more loses nothing, and what is less is off by 2^-15 of it at most; bfloat16 rounds the largest by up to 2^-8. Products with codes, and
// sums of those that share a scale, are exact, so their order makes no difference. A sum becomes a float, times the scale, and is added
// to those before it. So a row has the same bits in both ways to make these sums:
//
//   one row    codes of up to six bits are bytes in registers, and a whole number is two digits of 8 bits with signs; codes of eight bits
//              are numbers of 16 bits in registers
//   otherwise  codes are numbers of 16 bits in a cache
//
// Letters: M rows of a tile; V vectors of eight outputs of a panel's four.

#pragma once

namespace {

// Compilers would make all products first, more than there are registers, and sum them in an order of their own.
#define KEEP(sum) __asm__("" : "+x"(sum))

constexpr bool is_whole(int64_t kind) { return BLOCK_SHAPES[kind].low == 4 || kind == Q8_0; }

INLINE bool has_whole_parts(const Linear& map) {
    for (int64_t part = 0; part < map.num_block_parts; part++)
        if (is_whole(map.block_parts[part].kind)) return true;
    return false;
}

// -- rows --------------------------------------------------------------------------------------------------------------

// A group of a row.
struct NumberGroup {
    int16_t numbers[32];
    float unit;     // what 1 stands for; no number if an input is none
    float sums[2];  // of the inputs 0 to 15 and 16 to 31
    int32_t unused;
};

// The same in digits, which lie as codes become bytes: of each eight inputs 0, 4, 1, 5, 2, 6, 3, 7.
struct DigitGroup {
    int8_t lower[32], upper[32];
    int32_t sums[2];  // of whole numbers
};

// Rows of a call: [rows][inputs / 32], and of one row its digits, [inputs / 32].
struct WholeRows {
    NumberGroup* numbers = nullptr;
    DigitGroup* digits = nullptr;
    static constexpr int64_t floats(int64_t rows, int64_t inputs) {
        return inputs / 32 * (rows * (int64_t)sizeof(NumberGroup) + (int64_t)sizeof(DigitGroup)) / 4;
    }
    WholeRows(float* room, int64_t rows, int64_t inputs) : numbers((NumberGroup*)room), digits((DigitGroup*)(numbers + rows * inputs / 32)) {}
    void read(const float* x, int64_t rows, int64_t inputs) const;
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

INLINE int32_t whole_sum(const int16_t* numbers) { return total_of(_mm256_madd_epi16(loaded<__m256i>(numbers), _mm256_set1_epi16(1))); }

__attribute__((noinline)) void read_numbers(NumberGroup* to, const float* x, int64_t inputs) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
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
        for (int i = 0; i < 32; i += 8) {
            const __m256i found = _mm256_cvtps_epi32(_mm256_mul_ps(loaded<__m256>(x + i), factors));
            store(to->numbers + i, _mm_packs_epi32(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1)));
        }
        for (int half = 0; half < 2; half++) to->sums[half] = (float)whole_sum(to->numbers + 16 * half) * to->unit;
    }
}

__attribute__((noinline)) void read_digits(DigitGroup* to, const NumberGroup* from, int64_t inputs) {
    const __m128i half = _mm_set1_epi16(128), byte = _mm_set1_epi16(255);
    const __m128i by_digit = _mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15);
    for (; inputs > 0; inputs -= 32, to++, from++) {
        for (int i = 0; i < 32; i += 8) {
            const __m128i number = loaded<__m128i>(from->numbers + i), upper = _mm_srai_epi16(_mm_add_epi16(number, half), 8);
            const __m128i both = _mm_or_si128(_mm_and_si128(number, byte), _mm_slli_epi16(upper, 8));
            const __m128i digits = _mm_shuffle_epi8(both, by_digit);
            _mm_storel_epi64((__m128i*)(to->lower + i), digits);
            _mm_storel_epi64((__m128i*)(to->upper + i), _mm_unpackhi_epi64(digits, digits));
        }
        for (int i = 0; i < 2; i++) to->sums[i] = whole_sum(from->numbers + 16 * i);
    }
}

void WholeRows::read(const float* x, int64_t rows, int64_t inputs) const {
    for (int64_t m = 0; m < rows; m++) read_numbers(numbers + m * inputs / 32, x + m * inputs, inputs);
    if (rows == 1) read_digits(digits, numbers, inputs);
}

// -- codes as bytes ------------------------------------------------------------------------------------------------------

// Numbers of a kind of four to six bits without a sign: the code, or what it stands for and an offset.
template <int KIND>
struct DigitShape {
    static constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    static constexpr bool IS_TABLE = KIND >= IQ4_NL;
    static constexpr int OFFSET = KIND == IQ4_NL || KIND == IQ4_XS ? 127 : IS_TABLE ? 12 : SHAPE.offset;
    static constexpr int MOST = IS_TABLE ? 2 * OFFSET : (1 << (SHAPE.low + SHAPE.high)) - 1;
    // A vector has four inputs of eight outputs. So many share a scale, and the products of STEP fit into 16 bits.
    static constexpr int VECTORS = SHAPE.is_halved ? 4 : 8, FIT = 32767 / (2 * 128 * MOST), STEP = FIT >= VECTORS ? VECTORS : FIT >= 4 ? 4 : 2;
};

// Whether one row is multiplied in registers: two vectors of products fit into 16 bits.
template <int KIND>
constexpr bool BY_DIGITS = KIND != Q8_0 && DigitShape<KIND>::FIT >= 2;

template <int KIND>
struct CountTable {
    uint8_t of[16];
    constexpr CountTable() : of() {
        for (int code = 0; code < 16; code++) of[code] = (uint8_t)(block_number(KIND, code) + DigitShape<KIND>::OFFSET);
    }
};
template <int KIND>
alignas(16) constexpr CountTable<KIND> count_table;

// Numbers of vector I of a group's eight, from the panel; ``v``: which eight outputs.
template <int KIND>
struct PanelNumbers {
    const uint8_t* codes;
    template <int I>
    __attribute__((always_inline)) __m256i of(int v) const {
        constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
        constexpr int J = I / 2;
        typedef typename Bits::Half Words;
        Words above = {};
        if constexpr (SHAPE.high > 0) above = loaded<Words>(codes + SHAPE.codes_size() + (SHAPE.high == 2 ? J / 2 * 128 : 0) + v * 32);
        const __m256i found = (__m256i)code_bytes<KIND, I % 2, SHAPE.high == 2 ? J % 2 * 8 : 4 * J>(loaded<Words>(codes + J * 128 + v * 32), above);
        if constexpr (DigitShape<KIND>::IS_TABLE)
            return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)count_table<KIND>.of)), found);
        return found;
    }
};

// -- one row ---------------------------------------------------------------------------------------------------------------

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
INLINE void add_scaled(__m256 (&totals)[V], const PanelNumbers<KIND>& numbers, int v, const NumberGroup& x, const DigitGroup& digits,
                       const float* scale, const float* minimum) {
    typedef DigitShape<KIND> Shape;
    constexpr bool IS_WHOLE = Shape::VECTORS == 8;
    __m256i sums[V];
    add_steps<KIND, V, HALF * 4, HALF * 4 + Shape::VECTORS>(sums, numbers, v, &digits);
    const __m256i offset = _mm256_set1_epi32((digits.sums[HALF] + (IS_WHOLE ? digits.sums[1] : 0)) * Shape::OFFSET);
    const __m256 unit = _mm256_set1_ps(x.unit), sum = _mm256_set1_ps(x.sums[HALF] + (IS_WHOLE ? x.sums[1] : 0));
#pragma GCC unroll 4
    for (int n = 0; n < V; n++)
        totals[n] = plus_scaled<BLOCK_SHAPES[KIND].has_minima>(totals[n], _mm256_sub_epi32(sums[n], offset), unit, scale + 8 * n, minimum + 8 * n, sum);
}

template <int KIND, int V>
INLINE void add_group(__m256 (&totals)[V], const PanelNumbers<KIND>& numbers, int v, const NumberGroup& x, const DigitGroup& digits,
                      const float* scale, const float* minimum) {
    add_scaled<KIND, V, 0>(totals, numbers, v, x, digits, scale + 8 * v, minimum + 8 * v);
    if constexpr (DigitShape<KIND>::VECTORS == 4)
        add_scaled<KIND, V, 1>(totals, numbers, v, x, digits, scale + PANEL + 8 * v, minimum + PANEL + 8 * v);
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

template <int KIND>
__attribute__((noinline)) void digit_row(const uint8_t* panel, int64_t inputs, const Sums& to, const WholeRows& rows) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    __m256 totals[2][1][2] = {};
    alignas(64) float scale[2 * PANEL], minimum[2 * PANEL];
#pragma GCC unroll 1
    for (int64_t group = 0; group < inputs / 32; group++) {
        const uint8_t* codes = panel + SHAPE.group(group);
        fetch_group(codes, SHAPE.group_size());
        read_group_scales<KIND>(scale, minimum, panel, group);
        const NumberGroup& x = rows.numbers[group];
        add_group<KIND, 2>(totals[0][0], PanelNumbers<KIND>{codes}, 0, x, rows.digits[group], scale, minimum);
        add_group<KIND, 2>(totals[1][0], PanelNumbers<KIND>{codes}, 2, x, rows.digits[group], scale, minimum);
    }
    put_totals<1>(to, totals[0], 0), put_totals<1>(to, totals[1], 2);
}

// Products of pairs and their sums. A compiler would move each sum from register to register.
INLINE void add_pairs(__m256i& sums, __m256i a, __m256i b) {
    __m256i products;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(a), "x"(b));
}

// Two inputs of Q8_0, whose codes are bytes with signs, as pairs of 16 bits.
struct BytePairs {
    __m256i of[4];
    explicit __attribute__((always_inline)) BytePairs(const uint8_t* codes) {
        const __m256i even = loaded<__m256i>(codes), odd = loaded<__m256i>(codes + PANEL);
        const __m256i first = _mm256_unpacklo_epi8(even, odd), second = _mm256_unpackhi_epi8(even, odd);
        of[0] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(first)), of[1] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(second));
        of[2] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(first, 1)), of[3] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(second, 1));
    }
};

__attribute__((noinline)) void byte_row(const uint8_t* panel, int64_t inputs, const Sums& to, const WholeRows& rows) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[Q8_0];
    __m256 totals[2][1][2] = {};
    alignas(64) float scale[PANEL];
    for (int64_t group = 0; group < inputs / 32; group++) {
        const uint8_t* codes = panel + SHAPE.group(group);
        fetch_group(codes, SHAPE.group_size());
        read_group_scales<Q8_0>(scale, nullptr, panel, group);
        const NumberGroup& x = rows.numbers[group];
        __m256i sums[4] = {};
#pragma GCC unroll 1
        for (int pair = 0; pair < 16; pair++) {
            const BytePairs pairs(codes + 2 * PANEL * pair);
            const __m256i both = _mm256_set1_epi32(loaded<int32_t>(x.numbers + 2 * pair));
            for (int v = 0; v < 4; v++) add_pairs(sums[v], pairs.of[v], both);
        }
        const __m256 unit = _mm256_set1_ps(x.unit);
        for (int v = 0; v < 4; v++) totals[v / 2][0][v % 2] = plus_scaled<false>(totals[v / 2][0][v % 2], sums[v], unit, scale + 8 * v, nullptr, unit);
    }
    put_totals<1>(to, totals[0], 0), put_totals<1>(to, totals[1], 2);
}

// -- rows and a cache ------------------------------------------------------------------------------------------------------

// Of so many inputs, [2 inputs][32 outputs][2] numbers of 16 bits, and lines of scales and minima.
constexpr int64_t CACHED_INPUTS = 128;
struct NumberCache {
    alignas(64) int16_t numbers[CACHED_INPUTS * PANEL];
    float scales[CACHED_INPUTS / 16 * PANEL], minima[CACHED_INPUTS / 16 * PANEL];
};
constexpr int MOST_CACHED_ROWS = 6;

// Vector I of a group: its even bytes are two neighbouring inputs, its odd ones the next two but two.
template <int KIND, int I>
INLINE void write_counts(int16_t* to, const PanelNumbers<KIND>& numbers) {
    if constexpr (I < 8) {
        const __m256i offset = _mm256_set1_epi16(DigitShape<KIND>::OFFSET);
        int16_t* const pair = to + (I / 2 * 4 + I % 2) * 2 * PANEL;
        for (int v = 0; v < 4; v++) {
            const __m256i found = numbers.template of<I>(v);
            store(pair + 16 * v, _mm256_sub_epi16(_mm256_and_si256(found, _mm256_set1_epi16(255)), offset));
            store(pair + 4 * PANEL + 16 * v, _mm256_sub_epi16(_mm256_srli_epi16(found, 8), offset));
        }
        write_counts<KIND, I + 1>(to, numbers);
    }
}

template <int KIND>
INLINE void write_numbers(int16_t* to, const uint8_t* codes) {
    if constexpr (KIND == Q8_0)
        for (int pair = 0; pair < 16; pair++)
            for (int v = 0; v < 4; v++) store(to + 2 * PANEL * pair + 16 * v, BytePairs(codes + 2 * PANEL * pair).of[v]);
    else
        write_counts<KIND, 0>(to, PanelNumbers<KIND>{codes});
}

// INPUTS of a scale.
template <int M, int INPUTS, bool HAS_MINIMA>
__attribute__((noinline)) void cached_tile(const Sums& to, int64_t groups, const NumberGroup* first, int64_t stride, const NumberCache& from) {
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
                for (int i = 0; i < INPUTS / 2; i++, numbers += 2 * PANEL) {
                    const __m256i found[2] = {loaded<__m256i>(numbers), loaded<__m256i>(numbers + 16)};
#pragma GCC unroll 6
                    for (int m = 0; m < M; m++) {
                        const __m256i x = _mm256_set1_epi32(loaded<int32_t>(first[m * stride + group].numbers + half * INPUTS + 2 * i));
                        for (int n = 0; n < 2; n++) add_pairs(sums[m][n], found[n], x);
                    }
                }
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    const NumberGroup& x = first[m * stride + group];
                    const __m256 unit = _mm256_set1_ps(x.unit), sum = _mm256_set1_ps(x.sums[half] + (INPUTS == 32 ? x.sums[1] : 0));
                    for (int n = 0; n < 2; n++)
                        totals[m][n] = plus_scaled<HAS_MINIMA>(totals[m][n], sums[m][n], unit, scale + 8 * n, minimum + 8 * n, sum);
                }
            }
        put_totals<M>(to, totals, v);
    }
}

template <int M, int INPUTS, bool HAS_MINIMA>
INLINE void cached_tile_of(int64_t rows, const Sums& to, int64_t groups, const NumberGroup* first, int64_t stride, const NumberCache& from) {
    if constexpr (M > 1)
        if (rows < M) return cached_tile_of<M - 1, INPUTS, HAS_MINIMA>(rows, to, groups, first, stride, from);
    cached_tile<M, INPUTS, HAS_MINIMA>(to, groups, first, stride, from);
}

// Rows of a panel.
template <int KIND>
__attribute__((noinline)) void whole_panel(const uint8_t* panel, int64_t inputs, const Sums& to, const WholeRows& x, int64_t rows) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    if constexpr (BY_DIGITS<KIND>)
        if (rows == 1) return digit_row<KIND>(panel, inputs, to, x);
    if constexpr (KIND == Q8_0)
        if (rows == 1) return byte_row(panel, inputs, to, x);
    constexpr int INPUTS = SHAPE.is_halved ? 16 : 32, LINE = 32 / INPUTS * PANEL;
    static thread_local NumberCache cache;
    const int64_t all = inputs / 32, most = CACHED_INPUTS / 32, blocks = (rows + MOST_CACHED_ROWS - 1) / MOST_CACHED_ROWS;
    for (int64_t from = 0; from < all; from += most) {
        const int64_t groups = all - from < most ? all - from : most;
        for (int64_t group = 0; group < groups; group++) {
            const uint8_t* codes = panel + SHAPE.group(from + group);
            fetch_group(codes, SHAPE.group_size());
            write_numbers<KIND>(cache.numbers + group * 32 * PANEL, codes);
            read_group_scales<KIND>(cache.scales + group * LINE, cache.minima + group * LINE, panel, from + group);
        }
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t first = rows * i / blocks;
            Sums some = to.from(first, 0);
            some.is_first = from == 0;
            if (from + groups < all) some.results = Results{};
            cached_tile_of<MOST_CACHED_ROWS, INPUTS, SHAPE.has_minima>(rows * (i + 1) / blocks - first, some, groups,
                                                                       x.numbers + first * all + from, all, cache);
        }
    }
}

INLINE void sum_whole_panel(int64_t kind, const uint8_t* panel, int64_t inputs, const Sums& to, const WholeRows& x, int64_t rows) {
    switch (kind) {
        case Q4_0: return whole_panel<Q4_0>(panel, inputs, to, x, rows);
        case Q4_1: return whole_panel<Q4_1>(panel, inputs, to, x, rows);
        case Q5_0: return whole_panel<Q5_0>(panel, inputs, to, x, rows);
        case Q5_1: return whole_panel<Q5_1>(panel, inputs, to, x, rows);
        case Q8_0: return whole_panel<Q8_0>(panel, inputs, to, x, rows);
        case Q4_K: return whole_panel<Q4_K>(panel, inputs, to, x, rows);
        case Q5_K: return whole_panel<Q5_K>(panel, inputs, to, x, rows);
        case Q6_K: return whole_panel<Q6_K>(panel, inputs, to, x, rows);
        case IQ4_NL: return whole_panel<IQ4_NL>(panel, inputs, to, x, rows);
        case IQ4_XS: return whole_panel<IQ4_XS>(panel, inputs, to, x, rows);
        case MXFP4: return whole_panel<MXFP4>(panel, inputs, to, x, rows);
        default: return whole_panel<NVFP4>(panel, inputs, to, x, rows);
    }
}

#undef KEEP

}  // namespace
