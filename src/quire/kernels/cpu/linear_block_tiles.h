// The products of BLOCKS (linear.h) and floats, in the order of FLOAT32.

#include "linear_blocks.h"
#if REGISTER == 32
#include "linear_digits.h"
#endif

namespace {

template <int M, int V>
struct Products {
    Lanes (&sums)[M][V];
    const char* x;
    int64_t stride;
    template <int I>
    __attribute__((always_inline)) void at(int64_t k, int n, Lanes weights) {
        const Inputs<M, float> inputs(x + k * sizeof(float), stride);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sums[m][n] += weights * inputs.of(m, I);
    }
};

// A few rows: weights stay in registers.
template <int KIND, int M>
__attribute__((noinline)) void block_tile(const uint8_t* panel, int64_t inputs, Sums to, const char* x, int64_t stride) {
    // A sum waits for the product before it, so a row or two need all sums of a panel side by side.
    constexpr int V = M * (64 / REGISTER) <= 4 ? 2 : BLOCK_VECTORS;
    const int64_t step = part_of(inputs);
    Lanes totals[2 / V][1][M][V] = {};
    for (int64_t k = 0; k < inputs; k += step) {
        const int64_t end = k + step < inputs ? k + step : inputs;
        Lanes sums[2 / V][M][V] = {};
        for (int64_t i = k; i < end; i += BLOCK_GROUP)
            for (int first = 0; first < 2; first += V)
                each_weight<KIND, V>(panel, i / BLOCK_GROUP, first, Products<M, V>{sums[first / V], x + i * (int64_t)sizeof(float), stride});
        for (int s = 0; s < 2 / V; s++)
            for (int m = 0; m < M; m++)
                for (int n = 0; n < V; n++) totals[s][0][m][n] = k ? totals[s][0][m][n] + sums[s][m][n] : sums[s][m][n];
    }
    to.is_first = true;
    for (int first = 0; first < 2; first += V) add_tile<M, 1, V>(to.side(first), totals[first / V], nullptr);
}

#ifdef WIDE
constexpr int FEW_BLOCK_ROWS = 8, SOME_BLOCK_ROWS = 16;
#else
constexpr int FEW_BLOCK_ROWS = 4, SOME_BLOCK_ROWS = 4;
#endif

template <int KIND, int M>
INLINE void block_tile_of(int64_t rows, const uint8_t* panel, int64_t inputs, const Sums& to, const char* x, int64_t stride) {
    if constexpr (M > 1)
        if (rows < M) return block_tile_of<KIND, M - 1>(rows, panel, inputs, to, x, stride);
    block_tile<KIND, M>(panel, inputs, to, x, stride);
}
#define MULTIPLY_KIND(KIND, ...) block_tile_of<KIND, FEW_BLOCK_ROWS>(__VA_ARGS__)

// Q panels, in floats.
template <int Q>
INLINE void sum_float_panels(const Linear& map, int64_t panel, const Sums& sums, float* room, const char* x, int64_t stride, int64_t rows) {
    if (rows <= SOME_BLOCK_ROWS) {
        const int64_t count = (rows + FEW_BLOCK_ROWS - 1) / FEW_BLOCK_ROWS;
        for (int q = 0; q < Q; q++)
            for (int64_t i = 0; i < count; i++) {
                const int64_t from = rows * i / count;
                OF_KIND(block_part(map, panel + q).kind, MULTIPLY_KIND, rows * (i + 1) / count - from, panel_place(map, panel + q), map.inputs,
                        sums.from(from, q), x + from * stride, stride)
            }
        return;
    }
    // Weights that come behind these panels, as far as there are any.
    const int64_t panels = (map.outputs + PANEL - 1) / PANEL, most = panels - panel - Q < Q ? panels - panel - Q : Q;
    const char* next = (const char*)panel_place(map, panel + Q);
    const int64_t coming = (const char*)panel_place(map, panel + Q + most) - next;
    const int64_t step = part_of(map.inputs);
    for (int64_t k = 0; k < map.inputs; k += step, x += step * sizeof(float)) {
        const int64_t inputs = map.inputs - k < step ? map.inputs - k : step;
        for (int q = 0; q < Q; q++) expand_blocks(room + q * BLOCK * PANEL, map, panel + q, k, inputs);
        const Sums to = {sums.to, sums.apart, k == 0, k + step < map.inputs ? Results{} : sums.results};
        tiles<Q, float>(to, rows, x, stride, (const float*)room, BLOCK * PANEL, (const float*)room, inputs, nullptr, next + coming * k / map.inputs,
                        coming * inputs / map.inputs);
    }
}

// Q panels. ``whole``: the rows as whole numbers, for kinds that are multiplied so; or null.
template <int Q>
INLINE void sum_block_panels(const Linear& map, int64_t panel, const Sums& sums, float* room, const char* x, int64_t stride,
                             const WholeRows* whole, int64_t rows) {
#if REGISTER == 32
    if (whole) {
        for (int q = 0; q < Q; q++) {
            const int64_t kind = block_part(map, panel + q).kind;
            if (is_whole(kind))
                sum_whole_panel(kind, panel_place(map, panel + q), map.inputs, sums.from(0, q), *whole, rows);
            else
                sum_float_panels<1>(map, panel + q, sums.from(0, q), room, x, stride, rows);
        }
        return;
    }
#endif
    sum_float_panels<Q>(map, panel, sums, room, x, stride, rows);
}

}  // namespace
