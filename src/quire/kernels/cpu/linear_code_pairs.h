// Products of BLOCKS (linear_code_groups.h) by instructions for pairs of bfloat16, whose sums and scaled sums stay in registers: of a few
// rows while codes become pairs, of more rows from pairs in a cache. A pair's product has the same bits either way.
//
// Letters: M rows.

#include "linear_code_groups.h"

namespace {

// Rows whose sums, and these times scales, fill the registers.
constexpr int MOST_PAIRED_ROWS = 6;
// Up to so many rows are multiplied while codes become pairs, unless these are bytes, which takes long.
constexpr int FEW_PAIRED_ROWS = 24;
// From so many rows on a part of their inputs meets some panels.
constexpr int MANY_ROWS = 48;
// Inputs whose pairs are in the first cache at a time.
constexpr int64_t PAIRED_INPUTS = 256;

INLINE Lanes minus_product(Lanes sum, Lanes value, float factor) {
    return (Lanes)_mm512_fnmadd_ps((__m512)value, _mm512_set1_ps(factor), (__m512)sum);
}
INLINE Lanes plus_pairs(Lanes sum, Bits pairs, uint32_t x) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)x));
}

// The sums of inputs that share a scale, from pair FIRST of a group on.
template <int M, int FIRST>
struct RowSums {
    const Inputs<M, uint32_t>& x;
    Lanes sums[2][M] = {};
    template <int P>
    __attribute__((always_inline)) void at(int n, Bits pairs) {
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) sums[n][m] = plus_pairs(sums[n][m], pairs, x.of(m, P));
    }
    template <int P>
    __attribute__((always_inline)) void floats(int n, Lanes even, Lanes odd) { at<P>(n, in_pairs(even, odd)); }
};

// to[m][o] of a panel. totals: of x, [M][lines].
template <int SOURCE, int M>
__attribute__((noinline)) void sum_few_rows(float* to, const Linear& map, int64_t number, const char* rows, int64_t stride, const float* totals) {
    constexpr int HALVES = 32 / step_of(SOURCE);
    const CodePanel<SOURCE> panel(map, number);
    const CodeReader<SOURCE> reader;
    const int64_t groups = map.inputs / 32, lines = groups * HALVES;
    Inputs<M, uint32_t> x(rows, stride);
    Lanes whole[2][M] = {};
    const auto add = [&](const Lanes (&sums)[2][M], int64_t group, int half) __attribute__((always_inline)) {
        Lanes scale[2], minimum[2];
        panel.scale(scale, minimum, group, half);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                whole[n][m] = plus_product(whole[n][m], sums[n][m], scale[n]);
                if constexpr (has_minima(SOURCE)) whole[n][m] = minus_product(whole[n][m], minimum[n], totals[m * lines + group * HALVES + half]);
            }
    };
    for (int64_t group = 0; group < groups; group++, x.go(16)) {
        const uint8_t* const codes = panel.codes(group);
        RowSums<M, 0> first{x};
        reader.template read<0, 32 / HALVES / 2>(codes, first);
        add(first.sums, group, 0);
        if constexpr (HALVES == 2) {
            RowSums<M, 8> second{x};
            reader.template read<8, 16>(codes, second);
            add(second.sums, group, 1);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) store(to + m * PANEL + n * LANES, whole[n][m]);
}

template <int SOURCE, int M = MOST_PAIRED_ROWS>
INLINE void sum_few_rows_of(int64_t rows, float* to, const Linear& map, int64_t number, const char* x, int64_t stride, const float* totals) {
    if constexpr (M > 1)
        if (rows < M) return sum_few_rows_of<SOURCE, M - 1>(rows, to, map, number, x, stride, totals);
    sum_few_rows<SOURCE, M>(to, map, number, x, stride, totals);
}

// to[m][o] of M rows and some inputs of a panel, behind those that were summed before. From ``coming`` on ``step`` bytes are fetched for
// each pair.
template <int INPUTS, bool HAS_MINIMA, int M>
__attribute__((noinline)) void sum_block(float* to, bool is_first, const CodeBlock& block, const uint8_t* coming, int64_t step) {
    Inputs<M, uint32_t> x(block.x, block.stride);
    const char* w = block.w;
    const float *scales = block.scales, *minima = block.minima;
    Lanes whole[2][M];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) whole[n][m] = is_first ? Lanes{} : loaded<Lanes>(to + m * PANEL + n * LANES);
    for (int64_t line = 0; line < block.inputs / INPUTS; line++, scales += PANEL, minima += PANEL, x.go(INPUTS / 2)) {
        Lanes sums[2][M] = {};
#pragma GCC unroll 4
        for (int p = 0; p < INPUTS / 2; p++, w += 2 * PANEL * sizeof(bfloat16), coming += step) {
            __builtin_prefetch(coming, 0, 2);
            const Bits first = loaded<Bits>(w), second = loaded<Bits>(w + 64);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                const uint32_t factor = x.of(m, p);
                sums[0][m] = plus_pairs(sums[0][m], first, factor), sums[1][m] = plus_pairs(sums[1][m], second, factor);
            }
        }
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            const Lanes scale = loaded<Lanes>(scales + n * LANES), minimum = HAS_MINIMA ? loaded<Lanes>(minima + n * LANES) : Lanes{};
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                whole[n][m] = plus_product(whole[n][m], sums[n][m], scale);
                if (HAS_MINIMA) whole[n][m] = minus_product(whole[n][m], minimum, block.totals[m * block.totals_stride + line]);
            }
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) store(to + m * PANEL + n * LANES, whole[n][m]);
}

template <int INPUTS, bool HAS_MINIMA, int M = MOST_PAIRED_ROWS>
INLINE void sum_block_of(int64_t rows, float* to, bool is_first, const CodeBlock& block, const uint8_t* coming, int64_t step) {
    if constexpr (M > 1)
        if (rows < M) return sum_block_of<INPUTS, HAS_MINIMA, M - 1>(rows, to, is_first, block, coming, step);
    sum_block<INPUTS, HAS_MINIMA, M>(to, is_first, block, coming, step);
}

// See ``run_codes``.
struct ByPairs {
    static constexpr bool IS_OF_BLOCKS = true;
    template <int SOURCE>
    void sum(const LinearCall& call, const CodeRows& of, int64_t panel, int64_t count) {
        const Linear& map = *call.map;
        constexpr int INPUTS = step_of(SOURCE);
        const int64_t lines = map.inputs / INPUTS;
        const float* const totals = of.totals[INPUTS == 16];
        // Blocks of rows, which differ by one row at most.
        const int64_t blocks = (of.rows + MOST_PAIRED_ROWS - 1) / MOST_PAIRED_ROWS;
        if (of.rows <= (BLOCK_SHAPES[SOURCE].low == 8 ? MOST_PAIRED_ROWS : FEW_PAIRED_ROWS)) {
            for (int64_t q = 0; q < count; q++)
                for (int64_t i = 0; i < blocks; i++) {
                    const int64_t m = of.rows * i / blocks, some = of.rows * (i + 1) / blocks - m;
                    float* const to = of.sums + (q * call.tile_rows + m) * PANEL;
                    sum_few_rows_of<SOURCE>(some, to, map, panel + q, of.x + m * of.stride, of.stride, totals + m * lines);
                }
            return;
        }
        // All inputs of a panel one after the other, unless the rows' would not stay in a cache.
        const int64_t most = of.rows > MANY_ROWS ? PAIRED_INPUTS : map.inputs;
        for (int64_t start = 0; start < map.inputs; start += most)
            for (int64_t q = 0; q < count; q++)
                for (int64_t k = start; k < map.inputs && k < start + most; k += PAIRED_INPUTS) {
                    const int64_t inputs = map.inputs - k < PAIRED_INPUTS ? map.inputs - k : PAIRED_INPUTS;
                    expand_codes<SOURCE>(of.room, map, panel + q, k, inputs);
                    const uint8_t* coming = CodePanel<SOURCE>(map, panel + q).codes((k + inputs) / 32);
                    const int64_t step = PAIRED_INPUTS / 32 * BLOCK_SHAPES[SOURCE].group_size() * 2 / (inputs * blocks);
                    for (int64_t i = 0; i < blocks; i++, coming += inputs / 2 * step) {
                        const int64_t m = of.rows * i / blocks, some = of.rows * (i + 1) / blocks - m;
                        const CodeBlock block = {of.x + m * of.stride + 2 * k, of.stride, (const char*)of.room.pairs, of.room.scales,
                                                 of.room.minima, totals + m * lines + k / INPUTS, lines, inputs, INPUTS};
                        float* const to = of.sums + (q * call.tile_rows + m) * PANEL;
                        sum_block_of<INPUTS, has_minima(SOURCE)>(some, to, k == 0, block, coming, step);
                    }
                }
    }
};

}  // namespace
