// The two products of attention, by registers; see paged_attention_body.h.

namespace {

// -- products ----------------------------------------------------------------------------------------------------------

template <bool pairs>
INLINE void add_product(Vector& sum, uint32_t a, Words b) {
#if PAIRS
    if constexpr (pairs) {
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
        return;
    }
#endif
    float factor;
    std::memcpy(&factor, &a, 4);
    sum += factor * (Vector)b;
}

// c[m] = c[m] * keep[m] + sum over words w, in order, of a[m][w] b[w]. Without ``keep`` c begins as 0.
template <bool pairs, int M, int N>
INLINE void multiply_tile(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t words, float* c, int64_t c_row,
                          const float* keep) {
    Vector sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = keep ? loaded<Vector>(c + m * c_row + n * W) * keep[m] : Vector{};
#pragma GCC unroll 2
    for (int64_t w = 0; w < words; w++) {
        Words factors[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) factors[n] = loaded<Words>(b + w * b_row + n * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) add_product<pairs>(sums[m][n], a[m * a_row + w], factors[n]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(c + m * c_row + n * W, sums[m][n]);
}

template <bool pairs, int M>
INLINE void multiply_rows(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t words, float* c, int64_t c_row,
                          int64_t columns, const float* keep) {
    int64_t n = 0;
    for (; n + TILE_VECTORS * W <= columns; n += TILE_VECTORS * W)
        multiply_tile<pairs, M, TILE_VECTORS>(a, a_row, b + n, b_row, words, c + n, c_row, keep);
    if constexpr (TILE_VECTORS == 4)
        for (; n + 2 * W <= columns; n += 2 * W) multiply_tile<pairs, M, 2>(a, a_row, b + n, b_row, words, c + n, c_row, keep);
    for (; n < columns; n += W) multiply_tile<pairs, M, 1>(a, a_row, b + n, b_row, words, c + n, c_row, keep);
}

template <bool pairs>
void multiply(int64_t rows, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t words, float* c, int64_t c_row,
              int64_t columns, const float* keep) {
    while (rows) {
        int64_t some = rows < TILE_ROWS ? rows : TILE_ROWS;
#define ROWS(M) \
    case M: multiply_rows<pairs, M>(a, a_row, b, b_row, words, c, c_row, columns, keep); break;
        switch (some) {
            ROWS(1)
            ROWS(2)
            ROWS(3)
            ROWS(4)
#if WIDTH > 4
            ROWS(5)
            ROWS(6)
#endif
        }
#undef ROWS
        rows -= some, a += some * a_row, c += some * c_row;
        if (keep) keep += some;
    }
}

// -- scores of a vector of rows, straight from K: the same sums in the same order ------------------------------------------

// W query heads under one KV head, as latent layers may have them: their words lie side by side, [words, W], and meet each word of W keys
// in turn. So K is not transposed, but the scores are, which are fewer. More rows are worth a transposition of K.
template <typename T>
constexpr bool meets_keys = AVX512 && PARTS<T> == 1;

#if AVX512
template <typename T>
INLINE void score_vector(const uint32_t* queries, int64_t words, const Rows* groups, float* scores) {
    static_assert(W == GROUP);
    constexpr int64_t LINE = 64 / sizeof(uint32_t);
    for (int64_t g = 0; g < BLOCK / GROUP; g++) {
        const Rows keys = groups[g];
        const bool is_dense = keys.next_stride == words * 4;  // one piece of memory, which is best fetched from first to last
        Vector sums[W] = {};
        for (int64_t first = 0; first < words; first += LINE) {
            for (int64_t key = 0; key < W; key++)
                __builtin_prefetch(keys.next + (is_dense ? first * W * 4 + key * 64 : key * keys.next_stride + first * 4), 0, 2);
            const int64_t end = first + LINE < words ? first + LINE : words;
            // Places of four keys each are within reach of one register.
            const char* at[W / 4];
            for (int four = 0; four < W / 4; four++) at[four] = keys.at + 4 * four * keys.stride + 4 * first;
            for (int64_t w = first; w < end; w++) {
                const Words query = loaded<Words>(queries + w * W);
#pragma GCC unroll 4
                for (int four = 0; four < W / 4; four++) {
                    asm("" : "+r"(at[four]));
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) add_product<packed<T> == 2>(sums[4 * four + i], loaded<uint32_t>(at[four] + i * keys.stride), query);
                    at[four] += 4;
                }
            }
        }
        float found[W][W];
#pragma GCC unroll 16
        for (int key = 0; key < W; key++) store(found[key], sums[key]);
        Words turned[8];
        for (int half = 0; half < W; half += 8) {
            transpose8((const char*)found + 4 * half, sizeof(found[0]), turned);
            for (int i = 0; i < 8; i++) store(scores + (half + i) * BLOCK + g * GROUP, turned[i]);
        }
    }
}
#endif

// -- products for few rows, straight from K and V: the same sums in the same order ---------------------------------------

#if WIDTH == 16
constexpr int FEW_ROWS = 6;
#else
constexpr int FEW_ROWS = 2;
#endif

// Whether rows of K and V have no rest that needs a copy.
template <typename T>
INLINE bool is_smooth(int64_t key_size, int64_t value_size) {
    return key_size * sizeof(T) % STEP == 0 && value_size % (packed<T> * W) == 0;
}

// The processor takes reads that are a constant distance apart, by one instruction, for a stream, and fetches on behind the end of a page,
// which takes half of the bandwidth. So here lines of K are taken key by key of one group, and reads of V have an instruction each.
#if WIDTH == 16
constexpr int SIDE = 1, UNROLLED = 8;
#else
constexpr int SIDE = 2, UNROLLED = 2;
#endif

// The next STEPS times STEP bytes of SIDE vectors of keys.
template <typename T, int M, int STEPS>
INLINE void add_scores(const uint32_t* queries, int64_t words, const Rows& rows, int64_t key, int64_t at, int64_t bytes,
                       Vector (&sums)[M][SIDE]) {
    Words some[SIDE][4 * STEPS];
#pragma GCC unroll 2
    for (int n = 0; n < SIDE; n++) {
        const char* from = rows.at + (key + n * W) * rows.stride + at;
        for (int step = 0; step < STEPS; step++) prefetch_step(rows, key + n * W, at + step * STEP, bytes);
        if constexpr (STEPS == 2)
            transpose8(from, rows.stride, some[n]);
        else
            transpose4(from, rows.stride, some[n]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4 * STEPS * PARTS<T>; i++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int n = 0; n < SIDE; n++)
                add_product<packed<T> == 2>(sums[m][n], queries[m * words + i], part_of<T>(some[n][i / PARTS<T>], i % PARTS<T>));
}

template <typename T, int M>
INLINE void score_few(const uint32_t* queries, int64_t words, const Rows* groups, int64_t size, float* scores) {
    constexpr int64_t NUMBERS = STEP / sizeof(T) / packed<T>;  // words of STEP bytes
    const int64_t bytes = size * sizeof(T);
    for (int64_t key = 0; key < BLOCK; key += SIDE * W) {
        const Rows rows = groups[key / GROUP];
        Vector sums[M][SIDE] = {};
        int64_t at = 0, w = 0;
#if WIDTH == 16
        for (; at + 2 * STEP <= bytes; at += 2 * STEP, w += 2 * NUMBERS)
            add_scores<T, M, 2>(queries + w, words, rows, key % GROUP, at, bytes, sums);
#endif
        for (; at < bytes; at += STEP, w += NUMBERS) add_scores<T, M, 1>(queries + w, words, rows, key % GROUP, at, bytes, sums);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < SIDE; n++) store(scores + m * BLOCK + key + n * W, sums[m][n]);
    }
}

// N vectors of columns, over the groups ``begin`` to ``end - 1``.
template <typename T, int M, int N>
INLINE void add_values(const uint32_t* weights, const Rows* groups, int64_t begin, int64_t end, int64_t d, float* sums, int64_t columns,
                       const float* keep) {
    Vector kept[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            kept[m][n] = loaded<Vector>(sums + m * columns + n * W);
            if (begin == 0) kept[m][n] *= keep[m];
        }
    for (int64_t group = begin; group < end; group++) {
        const Rows rows = groups[group];
        const char* from = rows.at + d * sizeof(T);
        const bool whole = rows.next_stride == columns * (int64_t)sizeof(T);
        const uint32_t* weight = weights + group * GROUP / packed<T>;
        constexpr int64_t WIDE = N * W * sizeof(T);
        const char* next = rows.next + (whole ? d * (int64_t)sizeof(T) * GROUP : d * (int64_t)sizeof(T));
        const int64_t next_stride = whole ? WIDE : rows.next_stride;
#pragma GCC unroll UNROLLED
        for (int64_t key = 0; key < GROUP; key += packed<T>, from += packed<T> * rows.stride, weight++) {
            for (int j = 0; j < packed<T>; j++, next += next_stride)
                for (int64_t at = 0; at < WIDE; at += 64) __builtin_prefetch(next + at, 0, 2);
#if PAIRS
            if constexpr (packed<T> == 2) {
                const __m512i low = pair_index(0), high = pair_index(16);
#pragma GCC unroll 8
                for (int n = 0; n < N; n += 2) {
                    const __m512i x = _mm512_loadu_si512(from + 4 * n * W / 2), y = _mm512_loadu_si512(from + rows.stride + 4 * n * W / 2);
                    const Words a = (Words)_mm512_permutex2var_epi16(x, low, y), b = (Words)_mm512_permutex2var_epi16(x, high, y);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        add_product<true>(kept[m][n], weight[m * BLOCK], a);
                        add_product<true>(kept[m][n + 1], weight[m * BLOCK], b);
                    }
                }
                continue;
            }
#endif
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const Words x = (Words)widened((const T*)from + n * W);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) add_product<false>(kept[m][n], weight[m * BLOCK], x);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(sums + m * columns + n * W, kept[m][n]);
}

template <typename T, int M>
INLINE void sum_few(const uint32_t* weights, const Rows* groups, float* sums, int64_t columns, const float* keep) {
    constexpr int MOST = WIDTH == 16 && M <= 3 ? 8 : 4;
    // Rows that are read in parts are read group by group, so that neighbours in memory are read at about the same time.
    const int64_t some = columns <= MOST * W ? BLOCK / GROUP : 1;
    for (int64_t begin = 0; begin < BLOCK / GROUP; begin += some) {
        const int64_t end = begin + some;
        int64_t d = 0;
        if constexpr (MOST == 8)
            for (; d + 8 * W <= columns; d += 8 * W) add_values<T, M, 8>(weights, groups, begin, end, d, sums + d, columns, keep);
        for (; d + 4 * W <= columns; d += 4 * W) add_values<T, M, 4>(weights, groups, begin, end, d, sums + d, columns, keep);
        if (d + 2 * W <= columns) add_values<T, M, 2>(weights, groups, begin, end, d, sums + d, columns, keep), d += 2 * W;
        if constexpr (packed<T> == 1)
            if (d < columns) add_values<T, M, 1>(weights, groups, begin, end, d, sums + d, columns, keep);
    }
}

#define FOR_ROWS(M, CALL) \
    switch (M) {          \
        case 1: CALL(1); break; \
        case 2: CALL(2); break; \
        case 3: if constexpr (FEW_ROWS > 2) { CALL(3); } break; \
        case 4: if constexpr (FEW_ROWS > 2) { CALL(4); } break; \
        case 5: if constexpr (FEW_ROWS > 2) { CALL(5); } break; \
        case 6: if constexpr (FEW_ROWS > 2) { CALL(6); } break; \
    }

}  // namespace
