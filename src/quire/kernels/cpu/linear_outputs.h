// From sums of a panel to outputs. PAIRS: there are instructions for bfloat16 (AVX512-BF16).

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
        T* y = (T*)call.y + (first + m) * map.outputs + from;
        int64_t o = 0;
        for (; o + LANES <= outputs; o += LANES)
            put_output(y + o, map.bias ? loaded<Lanes>(sums + o) + loaded<Lanes>(map.bias + from + o) : loaded<Lanes>(sums + o));
        for (; o < outputs; o++) put_one(y + o, map.bias ? sums[o] + map.bias[from + o] : sums[o]);
    }
}

}  // namespace
