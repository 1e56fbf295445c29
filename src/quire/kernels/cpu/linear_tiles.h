// The products of linear.h, in the vectors of the file that includes this. That file defines MOST_ROWS, the rows of a tile,
// MOST_SUMS, the registers that hold its sums, and PAIRS if there are instructions for products of bfloat16 pairs.
//
// The sum of an output is made block by block of inputs, each from its first to its last, whatever other rows there are.
//
// Letters: M rows of a tile; Q panels; V vectors of outputs of each, of which a panel has two.

#include "linear_codes.h"
#include "linear_outputs.h"

namespace {

// More rows multiply weights of bfloat16 that are widened once, into a cache, where that takes as many instructions as the products.
constexpr int MOST_WIDENED_ROWS = 48;
constexpr bool WIDENS_ONCE = REGISTER == 32;
// About as many inputs at a time: their part of a panel stays in a cache for all rows, and their sum is added to the others.
constexpr int BLOCK = 640;
constexpr int WIDEST_GROUP = 128;

// -- tiles -----------------------------------------------------------------------------------------------------------

INLINE void widen_scales(float* to, const bfloat16* from) {
    for (int n = 0; n < PANEL; n += LANES) store(to + n, wide(from + n));
}

// How a tile reads inputs and weights: Q panels of weights that are ``apart`` elements from each other, the first of which ends at
// ``end``; inputs where they are.

// Rows of x, ``stride`` bytes apart, from one input on: numbers, or pairs as words (X). An address for every three rows, since a
// processor adds the stride once or twice by itself.
template <int M, typename X>
struct Inputs {
    const char* at[(M + 2) / 3];
    int64_t stride;
    __attribute__((always_inline)) Inputs(const char* x, int64_t apart) : stride(apart) {
        for (int i = 0; i < (M + 2) / 3; i++) at[i] = x + 3 * i * apart;
    }
    // Number ``k`` from here of row ``m``.
    __attribute__((always_inline)) X of(int m, int k) const { return loaded<X>(at[m / 3] + m % 3 * stride + k * sizeof(X)); }
    __attribute__((always_inline)) void go(int count) {
        for (const char*& from : at) from += count * sizeof(X);
    }
};

// How many elements further are fetched. Behind the end of Q panels that are read side by side come Q others.
template <int Q, int BYTES = AHEAD, typename T>
INLINE int64_t ahead_of(const T* w, const T* end, int64_t apart) {
    constexpr int64_t AWAY = BYTES / (int)sizeof(T);
    return AWAY + (Q > 1 && end - w <= AWAY ? (Q - 1) * apart : 0);
}

// The first block of rows fetches weights; the others find them in a cache.
template <bool FETCH, typename T>
INLINE void fetch(const T* from) {
    if (!FETCH) return;
    for (int byte = 0; byte < PANEL * (int)sizeof(T); byte += 64) __builtin_prefetch((const char*)from + byte, 0, 3);
}

// Meanwhile the others fetch what comes behind these panels into a larger cache: so many bytes for each line of weights, 128 at most.
struct Coming {
    const char* at;
    int64_t step;
};

template <bool FETCH>
INLINE void fetch(Coming& coming) {
    if (FETCH) return;
    __builtin_prefetch(coming.at, 0, 2), __builtin_prefetch(coming.at + 64, 0, 2);
    coming.at += coming.step;
}

template <int M, int Q, int V, bool FETCH>
INLINE void tile(const Sums& to, Inputs<M, float> x, const float* w, int64_t apart, const float* end, int64_t inputs, const float* scale,
                 Coming coming) {
    Lanes sums[Q][M][V] = {};
    for (int64_t k = 0; k < inputs; k++, w += PANEL, x.go(1)) {
        fetch<FETCH>(coming);
        const int64_t ahead = ahead_of<Q>(w, end, apart);
        Lanes columns[Q][V];
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) {
#pragma GCC unroll 2
            for (int n = 0; n < V; n++) columns[q][n] = loaded<Lanes>(w + q * apart + n * LANES);
            fetch<FETCH>(w + q * apart + ahead);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const float factor = x.of(m, 0);
#pragma GCC unroll 2
            for (int q = 0; q < Q; q++)
#pragma GCC unroll 2
                for (int n = 0; n < V; n++) sums[q][m][n] += columns[q][n] * factor;
        }
    }
    add_tile<M, Q, V>(to, sums, scale);
}

// Weights of bfloat16 pairs, widened.
template <int M, int Q, int V, bool FETCH>
INLINE void tile(const Sums& to, Inputs<M, float> x, const bfloat16* w, int64_t apart, const bfloat16* end, int64_t inputs,
                 const float* scale, Coming coming) {
    Lanes sums[Q][M][V] = {};
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * PANEL, x.go(2)) {
        fetch<FETCH>(coming);
        const int64_t ahead = ahead_of<Q>(w, end, apart);
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) {
            fetch<FETCH>(w + q * apart + ahead), fetch<FETCH>(w + q * apart + ahead + PANEL);
            Lanes even[V], odd[V];
#pragma GCC unroll 2
            for (int n = 0; n < V; n++) {
                const Bits pairs = loaded<Bits>(w + q * apart + 2 * n * LANES);
                even[n] = (Lanes)(pairs << 16), odd[n] = (Lanes)(pairs & 0xffff0000u);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                const float first_factor = x.of(m, 0), second_factor = x.of(m, 1);
#pragma GCC unroll 2
                for (int n = 0; n < V; n++) sums[q][m][n] += even[n] * first_factor;
#pragma GCC unroll 2
                for (int n = 0; n < V; n++) sums[q][m][n] += odd[n] * second_factor;
            }
        }
    }
    add_tile<M, Q, V>(to, sums, scale);
}

#ifdef PAIRS
template <int M, int Q, int V, bool FETCH>
INLINE void tile(const Sums& to, Inputs<M, uint32_t> x, const bfloat16* w, int64_t apart, const bfloat16* end, int64_t inputs,
                 const float* scale, Coming coming) {
    static_assert(V == 2, "registers hold the sums of a panel");
    Lanes sums[Q][M][V] = {};
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * PANEL, x.go(1)) {
        fetch<FETCH>(coming);
        const int64_t ahead = ahead_of<Q>(w, end, apart);
        __m512bh columns[Q][2];
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) {
            for (int n = 0; n < 2; n++) columns[q][n] = (__m512bh)_mm512_loadu_si512(w + q * apart + n * 2 * LANES);
            fetch<FETCH>(w + q * apart + ahead), fetch<FETCH>(w + q * apart + ahead + PANEL);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            __m512bh factor = (__m512bh)_mm512_set1_epi32((int)x.of(m, 0));
#pragma GCC unroll 2
            for (int q = 0; q < Q; q++)
                for (int n = 0; n < 2; n++) sums[q][m][n] = (Lanes)_mm512_dpbf16_ps((__m512)sums[q][m][n], columns[q][n], factor);
        }
    }
    add_tile<M, Q, V>(to, sums, scale);
}
#endif

template <typename X, int M, int Q, bool FETCH, typename W>
INLINE void tile_of(int64_t rows, const Sums& to, const char* x, int64_t stride, const W* w, int64_t apart, const W* end, int64_t inputs,
                    const float* scale, Coming coming) {
    if constexpr (M > 1)
        if (rows < M) return tile_of<X, M - 1, Q, FETCH>(rows, to, x, stride, w, apart, end, inputs, scale, coming);
    constexpr int V = 2 * M * Q * (64 / REGISTER) <= MOST_SUMS ? 2 : 1;
    tile<M, Q, V, FETCH>(to, Inputs<M, X>(x, stride), w, apart, end, inputs, scale, coming);
    if constexpr (V == 1) {
        const int64_t side = LANES * sizeof(float) / sizeof(W);
        tile<M, Q, V, false>(to.side(1), Inputs<M, X>(x, stride), w + side, apart, end + side, inputs, scale ? scale + LANES : nullptr,
                             {(const char*)w, 0});
    }
}

#ifdef PAIRS
// to[k / 2][o][2]
template <int FORM>
INLINE void pair_panel(bfloat16* to, const uint8_t* from, int64_t inputs) {
    const PairCodes<FORM> codes;
    constexpr int INPUTS = PairCodes<FORM>::INPUTS;
    for (int64_t k = 0; k < inputs; k += INPUTS)
        for (int half = 0; half < 2; half++, from += 64) {
            Bits pairs[INPUTS / 2];
            codes.read(from, pairs);
            __builtin_prefetch(from + AHEAD, 0, 2);
            for (int p = 0; p < INPUTS / 2; p++) store(to + (k + 2 * p) * PANEL + half * 32, pairs[p]);
        }
}

// A few rows multiply codes that become pairs in registers, group by group as sum_panels adds them.
template <int M, int Q, int FORM>
__attribute__((noinline)) void code_tile(const Linear& map, int64_t panel, Sums to, const char* rows, int64_t stride) {
    constexpr int INPUTS = PairCodes<FORM>::INPUTS;
    const PairCodes<FORM> codes;
    const int64_t apart = map.inputs * PANEL / (FORM == INT8 ? 1 : 2), scales_apart = map.inputs / map.group * PANEL;
    const uint8_t *from = (const uint8_t*)map.weights + panel * apart, *end = from + apart;
    const bfloat16 *scales = map.scales + panel * scales_apart, *scales_end = scales + scales_apart;
    Inputs<M, uint32_t> x(rows, stride);
    Lanes totals[Q][M][2] = {};
    for (int64_t k = 0; k < map.inputs; k += map.group, scales += PANEL) {
        Lanes sums[Q][M][2] = {};
        const int64_t ahead = ahead_of<Q>(from, end, apart), scales_ahead = ahead_of<Q, AHEAD / 8>(scales, scales_end, scales_apart);
        for (int64_t i = 0; i < map.group; i += INPUTS, from += 2 * 64, x.go(INPUTS / 2))
#pragma GCC unroll 2
            for (int q = 0; q < Q; q++)
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++) {
                    Bits pairs[INPUTS / 2];
                    const uint8_t* place = from + q * apart + n * 64;
                    codes.read(place, pairs);
                    __builtin_prefetch(place + ahead, 0, 3);
#pragma GCC unroll 4
                    for (int p = 0; p < INPUTS / 2; p++)
#pragma GCC unroll 6
                        for (int m = 0; m < M; m++)
                            sums[q][m][n] = (Lanes)_mm512_dpbf16_ps((__m512)sums[q][m][n], (__m512bh)pairs[p],
                                                                    (__m512bh)_mm512_set1_epi32((int)x.of(m, p)));
                }
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++) {
            __builtin_prefetch(scales + q * scales_apart + scales_ahead, 0, 3);
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const Lanes scale = wide(scales + q * scales_apart + n * LANES);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) totals[q][m][n] = totals[q][m][n] + sums[q][m][n] * scale;
            }
        }
    }
    to.is_first = true;
    add_tile<M, Q, 2>(to, totals, nullptr);
}

// Of up to six rows; all sums and totals stay in registers.
constexpr int FEW_ROWS = 6;

template <int M, int Q, int FORM>
INLINE void code_tile_of(int64_t rows, const Linear& map, int64_t panel, const Sums& to, const char* x, int64_t stride) {
    if constexpr (M > 1)
        if (rows < M) return code_tile_of<M - 1, Q, FORM>(rows, map, panel, to, x, stride);
    constexpr int SIDE = M > FEW_ROWS / 2 ? 1 : Q;
    for (int q = 0; q < Q; q += SIDE) code_tile<M, SIDE, FORM>(map, panel + q, to.from(0, q), x, stride);
}
#endif

// -- a few rows of floats ------------------------------------------------------------------------------------------------

// Rows whose codes become floats in registers; for more rows they are written to a cache once.
constexpr int FEW_FLOAT_ROWS = 4;

// Calls use(input, values) for the next inputs of 16 outputs, in order.
template <int FORM, typename USE>
INLINE void each_code(const uint8_t* from, USE&& use) {
    if constexpr (FORM == INT8) {
        Bits pairs[2];
        spread(loaded<Bytes>(from), pairs, pairs + 1);
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) use(2 * p, value_of_int8(pairs[p] & 0xffffu)), use(2 * p + 1, value_of_int8(pairs[p] >> 16));
    } else {
        const Bits codes = loaded<Bits>(from);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) use(i, value_of_int4(codes >> (16 * (i % 2) + 4 * (i / 2))));
    }
}

template <int FORM, int M>
__attribute__((noinline)) void float_code_tile(const Linear& map, int64_t panel, Sums to, const char* rows, int64_t stride) {
    constexpr int INPUTS = FORM == INT8 ? 4 : 8;
    const uint8_t* const codes = (const uint8_t*)map.weights + panel * panel_bytes(map);
    const bfloat16* const scales = map.scales + panel * (map.inputs / map.group) * PANEL;
    to.is_first = true;
    Lanes totals[2][1][M][1] = {};
    for (int64_t k = 0; k < map.inputs; k += map.group)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            const uint8_t* from = codes + k / INPUTS * 2 * 64 + n * 64;
            Inputs<M, float> x(rows + k * sizeof(float), stride);
            Lanes sums[M] = {};
            for (int64_t i = 0; i < map.group; i += INPUTS, from += 2 * 64, x.go(INPUTS)) {
                __builtin_prefetch(from + AHEAD, 0, 3);
                each_code<FORM>(from, [&](int input, Lanes values) __attribute__((always_inline)) {
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++) sums[m] += values * x.of(m, input);
                });
            }
            const Lanes scale = wide(scales + k / map.group * PANEL + n * LANES);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) totals[n][0][m][0] = totals[n][0][m][0] + sums[m] * scale;
        }
    for (int n = 0; n < 2; n++) add_tile<M, 1, 1>(to.side(n), totals[n], nullptr);
}

template <int FORM, int M>
INLINE void float_code_tile_of(int64_t rows, const Linear& map, int64_t panel, const Sums& to, const char* x, int64_t stride) {
    if constexpr (M > 1)
        if (rows < M) return float_code_tile_of<FORM, M - 1>(rows, map, panel, to, x, stride);
    float_code_tile<FORM, M>(map, panel, to, x, stride);
}

// -- rows ------------------------------------------------------------------------------------------------------------

// Whether panels are read two at a time, by blocks of half as many rows: a few rows need more sums side by side, and many are
// multiplied from a cache, where that loads less for each product. Half panels of long blocks do not gain, as they are read from the
// second cache. In between one panel is read once for all rows.
template <int FORM>
INLINE bool in_twos(int64_t rows) {
    constexpr bool IS_NEAR = REGISTER == 64 || FORM == INT8 || FORM == INT4;
    return rows <= MOST_ROWS / 2 || (IS_NEAR && rows > 4 * MOST_ROWS);
}

// Q panels' part times all rows of x, which begin at these inputs. ``coming``: so many bytes of weights that are needed after these.
template <int Q, typename X, typename W>
__attribute__((noinline)) void tiles(const Sums& sums, int64_t rows, const char* x, int64_t stride, const W* w, int64_t apart, const W* end,
                                     int64_t inputs, const float* scale, const char* coming, int64_t bytes) {
    constexpr int MOST = Q == 2 ? MOST_ROWS / 2 : MOST_ROWS;
    // Blocks of rows, which differ by one row at most.
    const int64_t count = (rows + MOST - 1) / MOST, share = count > 1 ? bytes / (count - 1) : 0, lines = inputs * sizeof(W) / sizeof(float);
    const int64_t step = share / lines;
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = rows * i / count, some = rows * (i + 1) / count - from;
        const Sums to = sums.from(from, 0);
        if (count > 1) to.results.expect<Q>(some);
        if (i == 0)
            tile_of<X, MOST, Q, true>(some, to, x, stride, w, apart, end, inputs, scale, {});
        else
            tile_of<X, MOST, Q, false>(some, to, x + from * stride, stride, w, apart, end, inputs, scale,
                                       {share ? coming + (i - 1) * share : (const char*)w, step});
    }
}

// -- items: some panels and some rows ---------------------------------------------------------------------------------

// The inputs of a block, a multiple of 32: blocks of one map are equally long, but for the last.
INLINE int64_t part_of(int64_t inputs) {
    const int64_t count = (inputs + BLOCK - 1) / BLOCK;
    return ((inputs + count - 1) / count + 31) / 32 * 32;
}

struct WholeRows;

}  // namespace

#include "linear_block_tiles.h"

namespace {

// Q panels. X: what a product reads of x at once, floats or pairs as words. ODD_FIRST: of floats and codes, see ``run_items``.
template <int Q, int FORM, typename X, bool ODD_FIRST>
INLINE void sum_panels(const Linear& map, int64_t panel, const Sums& sums, float* room, const char* x, int64_t stride,
                       const WholeRows* whole, int64_t rows) {
    constexpr bool is_paired = !std::is_same<X, float>::value;
    if constexpr (FORM == BLOCKS) return sum_block_panels<Q>(map, panel, sums, room + 2 * PANEL, x, stride, whole, rows);
#ifdef PAIRS
    if constexpr ((FORM == INT8 || FORM == INT4) && is_paired)
        if (rows <= FEW_ROWS) return code_tile_of<FEW_ROWS, Q, FORM>(rows, map, panel, sums, x, stride);
#endif
    if constexpr ((FORM == INT8 || FORM == INT4) && !is_paired && !ODD_FIRST)
        if (rows <= FEW_FLOAT_ROWS) {
            for (int q = 0; q < Q; q++) float_code_tile_of<FORM, FEW_FLOAT_ROWS>(rows, map, panel + q, sums.from(0, q), x, stride);
            return;
        }
    const int64_t bytes = panel_bytes(map), step = FORM >= INT8 ? map.group : part_of(map.inputs);
    const uint8_t* from = (const uint8_t*)map.weights + panel * bytes;
    if (FORM >= INT8)
        for (int q = 0; q < Q; q++) std::memset(sums.to + q * sums.apart, 0, sizeof(float) * PANEL * rows);
    for (int64_t k = 0; k < map.inputs; k += step, x += step * (is_paired ? sizeof(bfloat16) : sizeof(float))) {
        const int64_t inputs = map.inputs - k < step ? map.inputs - k : step;
        const Sums to = {sums.to, sums.apart, k == 0, k + step < map.inputs ? Results{} : sums.results};
        const bool is_last = (panel + Q) * PANEL >= map.outputs;
        const char* coming = (const char*)from + Q * (bytes + bytes / map.inputs * k);
        const int64_t share = is_last ? 0 : Q * (bytes / map.inputs) * inputs;
        if constexpr (FORM == FLOAT32) {
            tiles<Q, X>(to, rows, x, stride, (const float*)from + k * PANEL, bytes / 4, (const float*)(from + bytes), inputs, nullptr,
                        coming, share);
        } else if constexpr (FORM == BFLOAT16) {
            if constexpr (WIDENS_ONCE && !is_paired)
                if (rows > MOST_WIDENED_ROWS) {
                    float* values = room + 2 * PANEL;
                    for (int q = 0; q < Q; q++) widen_panel<FORM>(values + q * BLOCK * PANEL, from + q * bytes + k * PANEL * sizeof(bfloat16), inputs);
                    tiles<Q, X>(to, rows, x, stride, (const float*)values, BLOCK * PANEL, (const float*)values, inputs, nullptr, coming, share);
                    continue;
                }
            tiles<Q, X>(to, rows, x, stride, (const bfloat16*)from + k * PANEL, bytes / 2, (const bfloat16*)(from + bytes), inputs, nullptr,
                        coming, share);
        } else if constexpr (FORM != BLOCKS) {
            float* scale = room;
            for (int q = 0; q < Q; q++) widen_scales(scale + q * PANEL, map.scales + ((panel + q) * (map.inputs / map.group) + k / map.group) * PANEL);
            const uint8_t* codes = from + k * PANEL / (FORM == INT8 ? 1 : 2);
            if constexpr (is_paired) {
#ifdef PAIRS
                bfloat16* pairs = (bfloat16*)(room + 2 * PANEL);
                for (int q = 0; q < Q; q++) pair_panel<FORM>(pairs + q * WIDEST_GROUP * PANEL, codes + q * bytes, inputs);
                tiles<Q, X>(to, rows, x, stride, (const bfloat16*)pairs, WIDEST_GROUP * PANEL, pairs, inputs, scale, nullptr, 0);
#endif
            } else {
                float* values = room + 2 * PANEL;
                for (int q = 0; q < Q; q++) widen_panel<FORM, ODD_FIRST>(values + q * WIDEST_GROUP * PANEL, codes + q * bytes, inputs);
                tiles<Q, X>(to, rows, x, stride, (const float*)values, WIDEST_GROUP * PANEL, values, inputs, scale, nullptr, 0);
            }
        }
    }
}

template <int Q, int FORM, typename X, typename T, bool ODD_FIRST>
INLINE void run_panels(const LinearCall& call, int64_t panel, int64_t first, int64_t rows, const char* x, int64_t stride,
                       const WholeRows* whole, float* sums, float* room) {
    const Linear& map = *call.map;
    const int64_t apart = call.tile_rows * PANEL;
    Results results = {(char*)((T*)call.y + first * call.y_stride), call.y_stride * (int64_t)sizeof(T), sizeof(T) == sizeof(bfloat16), map.bias};
    const bool is_whole = (panel + Q) * PANEL <= map.outputs;
    sum_panels<Q, FORM, X, ODD_FIRST>(map, panel, {sums, apart, true, is_whole ? results.from(0, panel * PANEL) : Results{}}, room, x, stride,
                                   whole, rows);
    for (int q = 0; !is_whole && q < Q; q++) put_rows<T>(call, panel + q, first, rows, sums + q * apart);
}

// ODD_FIRST: of each two inputs the second one is multiplied first, as the product of a pair does.
template <int FORM, typename X, typename T, bool ODD_FIRST = false>
INLINE void run_items(LinearCall& call, int64_t thread) {
    static thread_local Room room;
    const Linear& map = *call.map;
    // Only for products of floats x is converted: what is as wide as they need it stays where it is.
    constexpr bool is_widened = std::is_same<X, float>::value && !std::is_same<T, float>::value;
    constexpr int64_t WIDEST = FORM == BLOCKS || (FORM == BFLOAT16 && WIDENS_ONCE) ? BLOCK : WIDEST_GROUP;
    const int64_t to_apart = call.tile_rows * PANEL;
    float* panels_room = room.of((2 + 2 * WIDEST) * PANEL + 2 * to_apart + (is_widened ? call.tile_rows * map.inputs : 0));
    if (!panels_room) {
        call.failed = 1;
        return;
    }
    float *sums = panels_room + (2 + 2 * WIDEST) * PANEL, *wider = sums + 2 * to_apart;
    const int64_t stride = is_widened ? map.inputs * sizeof(float) : call.x_stride * sizeof(T);
    const int64_t panels = (map.outputs + PANEL - 1) / PANEL;
    const WholeRows* whole = nullptr;
#if REGISTER == 32
    static thread_local Room whole_room;
    const bool has_whole = FORM == BLOCKS && is_widened && has_whole_parts(map);
    float* const place = has_whole ? whole_room.of(WholeRows::floats(call.tile_rows, map.inputs)) : nullptr;
    if (has_whole && !place) {
        call.failed = 1;
        return;
    }
    const WholeRows whole_rows(place, call.tile_rows, map.inputs);
    if (has_whole) whole = &whole_rows;
#endif
    Turn turn(call, thread);
    for (int64_t item, widened = -1; (item = turn.next()) >= 0;) {
        const int64_t part = item % call.parts, first = item / call.parts * call.tile_rows;
        const int64_t rows = call.rows - first < call.tile_rows ? call.rows - first : call.tile_rows;
        const T* given = (const T*)call.x + first * call.x_stride;
        if (is_widened && widened != first) {
            for (int64_t m = 0; m < rows; m++)
                for (int64_t k = 0; k < map.inputs; k++) wider[m * map.inputs + (k ^ (int64_t)ODD_FIRST)] = wide_one(given + m * call.x_stride + k);
#if REGISTER == 32
            if (whole) whole->read(wider, rows, map.inputs);
#endif
            widened = first;
        }
        const char* x = is_widened ? (const char*)wider : (const char*)given;
        // Of many rows whole pairs of panels; a few rows are read sooner if no thread has a panel more than another.
        const int64_t unit = rows > 4 * MOST_ROWS ? 2 : 1, units = (panels + unit - 1) / unit;
        int64_t panel = units * part / call.parts * unit;
        const int64_t end = units * (part + 1) / call.parts * unit, stop = end < panels ? end : panels;
        if (in_twos<FORM>(rows))
            for (; panel + 2 <= stop; panel += 2) run_panels<2, FORM, X, T, ODD_FIRST>(call, panel, first, rows, x, stride, whole, sums, panels_room);
        for (; panel < stop; panel++) run_panels<1, FORM, X, T, ODD_FIRST>(call, panel, first, rows, x, stride, whole, sums, panels_room);
        __atomic_fetch_add(&call.done, 1, __ATOMIC_RELEASE);
    }
}

#ifndef PAIRS
template <typename T>
INLINE void run_form(LinearCall& call, int64_t thread) {
    switch (call.map->form) {
        case FLOAT32: return run_items<FLOAT32, float, T>(call, thread);
        case BFLOAT16: return run_items<BFLOAT16, float, T>(call, thread);
        case INT8: return run_items<INT8, float, T>(call, thread);
        case INT4: return run_items<INT4, float, T>(call, thread);
        default: return run_items<BLOCKS, float, T>(call, thread);
    }
}

INLINE void run_call(LinearCall& call, int64_t thread) {
    if (call.map->is_bfloat16)
        run_form<bfloat16>(call, thread);
    else
        run_form<float>(call, thread);
}
#endif

}  // namespace
