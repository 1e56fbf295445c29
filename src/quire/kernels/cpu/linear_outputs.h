// From sums to outputs. PAIRS: there are instructions for bfloat16 (AVX512-BF16).

#pragma once

namespace {

#ifdef PAIRS
// As ``put`` rounds, in one instruction; numbers below 2^-126 become 0.
INLINE void put_output(bfloat16* to, Lanes value) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)value)); }
#else
INLINE void put_output(bfloat16* to, Lanes value) { put(to, value); }
#endif
INLINE void put_output(float* to, Lanes value) { put(to, value); }

template <typename T>
INLINE void put_rows(const LinearCall& call, int64_t panel, int64_t first, int64_t rows, const float* sums) {
    const Linear& map = *call.map;
    const int64_t from = panel * PANEL, outputs = map.outputs - from < PANEL ? map.outputs - from : PANEL;
    for (int64_t m = 0; m < rows; m++, sums += PANEL) {
        T* y = (T*)call.y + (first + m) * call.y_stride + from;
        int64_t o = 0;
        for (; o + LANES <= outputs; o += LANES)
            put_output(y + o, map.bias ? loaded<Lanes>(sums + o) + loaded<Lanes>(map.bias + from + o) : loaded<Lanes>(sums + o));
        for (; o < outputs; o++) put_one(y + o, map.bias ? sums[o] + map.bias[from + o] : sums[o]);
    }
}

// -- of register tiles -----------------------------------------------------------------------------------------------

// Where results go once sums are whole: rows ``stride`` bytes apart, from the first output of some panels on.
struct Results {
    char* y;  // null: they stay sums
    int64_t stride;
    bool is_bfloat16;
    const float* bias;  // of these outputs, or null
    // Of the rows and outputs from these on.
    Results from(int64_t row, int64_t o) const {
        return {y ? y + row * stride + o * size() : nullptr, stride, is_bfloat16, bias ? bias + o : nullptr};
    }
    int64_t size() const { return is_bfloat16 ? sizeof(bfloat16) : sizeof(float); }
    // Results of so many rows are written soon: Q panels of each. Where a line of them is far away, the processor waits for it.
    template <int Q>
    __attribute__((always_inline)) void expect(int64_t rows) const {
        const int64_t bytes = Q * PANEL * size();
        for (int64_t m = 0; y && m < rows; m++)
            for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(y + m * stride + byte, 1, 3);
    }
};

// Where sums go, ``apart`` floats from panel to panel: to[q][m][o]. The first block of inputs writes, the others add, and behind the
// last the sums are results.
struct Sums {
    float* to;
    int64_t apart;
    bool is_first;
    Results results;
    // Of the rows and panels from these on.
    Sums from(int64_t row, int64_t panel) const {
        return {to + panel * apart + row * PANEL, apart, is_first, results.from(row, panel * PANEL)};
    }
    // Of a panel's outputs from vector ``n`` on.
    Sums side(int n) const { return {to + n * LANES, apart, is_first, results.from(0, n * LANES)}; }
};

// Of a group the tile times scale[q][o] is added, also for the first: compilers fuse a product and a sum, or not, by what stands around.
// ENDS: y has the results.
template <int M, int Q, int V, bool ENDS, typename T>
INLINE void put_tile(const Sums& to, const Lanes (&sums)[Q][M][V], const float* scale, T* y) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++)
#pragma GCC unroll 2
            for (int n = 0; n < V; n++) {
                float* place = to.to + q * to.apart + m * PANEL + n * LANES;
                Lanes sum = sums[q][m][n];
                if (scale)
                    sum = loaded<Lanes>(place) + sum * loaded<Lanes>(scale + q * PANEL + n * LANES);
                else if (!to.is_first)
                    sum = loaded<Lanes>(place) + sum;
                const int o = q * PANEL + n * LANES;
                if (!ENDS)
                    store(place, sum);
                else if (to.results.bias)
                    put_output((T*)((char*)y + m * to.results.stride) + o, sum + loaded<Lanes>(to.results.bias + o));
                else
                    put_output((T*)((char*)y + m * to.results.stride) + o, sum);
            }
}

template <int M, int Q, int V>
INLINE void add_tile(const Sums& to, const Lanes (&sums)[Q][M][V], const float* scale) {
    if (!to.results.y)
        put_tile<M, Q, V, false, float>(to, sums, scale, nullptr);
    else if (to.results.is_bfloat16)
        put_tile<M, Q, V, true, bfloat16>(to, sums, scale, (bfloat16*)to.results.y);
    else
        put_tile<M, Q, V, true, float>(to, sums, scale, (float*)to.results.y);
}

}  // namespace
