// Attention over pages for one generation of vector instructions; see paged_attention.h.
//
// Included by one file for each, which sets WIDTH (floats of a vector: 4, 8 for AVX2, 16 for AVX-512) and PAIRS (1: bfloat16 goes
// in pairs through AVX512-BF16's dot product). Both products are sums over "words": a float, or with PAIRS two bfloat16. K is
// transposed and V interleaved into scratch for them, once for all rows of an item.

#include "paged_attention_items.h"
#include "paged_attention_products.h"

namespace {

// -- softmax -----------------------------------------------------------------------------------------------------------

// A row's running state over a split: the largest score, times log2(e), and sums of 2^(score - largest), lane by lane.
struct Running {
    float top;
    Vector sum;
};

// Scores of a row times scale and log2(e), capped, and nothing where it sees none; return the largest.
INLINE float scaled(float* row, uint64_t seen, float scale, float cap) {
    Vector top = all(NOTHING);
    Words lane;
    for (int i = 0; i < W; i++) lane[i] = 1u << i;
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) {
        Vector x = loaded<Vector>(row + i * W) * scale;
        if (cap != 0.0f) x = capped(x, cap);
        if (seen != ~(uint64_t)0) {
            Words bits = all_words((uint32_t)(seen >> (i * W))) & lane;
            x = bits != 0 ? x : all(NOTHING);
        }
        store(row + i * W, x);
        top = larger(x, top);
    }
    return largest(top);
}

// Scores of up to W rows become weights, in the words of the second product; keep[i]: by what the earlier sums of a row shrink. More
// than a few rows do each step together, so that none waits for its largest score.
template <bool pairs, typename Seen>
INLINE void weigh(float* scores, int64_t rows, const Seen& seen, float scale, float cap, Running* running, float* keep) {
    float tops[W], before[W], shifts[W], shrink[W];
    const bool few = rows <= FEW_ROWS;
    for (int64_t r = few ? W : rows; r < W; r++) tops[r] = before[r] = NOTHING;
    for (int64_t r = 0; r < rows; r++) {
        const float top = scaled(scores + r * BLOCK, seen(r), scale, cap), earlier = running[r].top;
        tops[r] = top, before[r] = earlier;
        if (few) {
            tops[r] = top > earlier ? top : earlier, shifts[r] = tops[r] == NOTHING ? 0.0f : tops[r];
            shrink[r] = tops[r] != earlier ? exp2_one(earlier - shifts[r]) : 1.0f;
        }
    }
    if (!few) {
        const Vector earlier = loaded<Vector>(before), now = larger(loaded<Vector>(tops), earlier);
        const Vector shift = now == NOTHING ? Vector{} : now;
        store(tops, now), store(shifts, shift), store(shrink, exp2_of(earlier - shift));
    }
    for (int64_t r = 0; r < rows; r++) {
        float* row = scores + r * BLOCK;
        Vector x[VECTORS], sum{};
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) {
            x[i] = exp2_of(loaded<Vector>(row + i * W) - shifts[r]);
            sum += x[i];
        }
        running[r].top = tops[r], running[r].sum = running[r].sum * shrink[r] + sum, keep[r] = shrink[r];
#if PAIRS
        if constexpr (pairs) {
            for (int i = 0; i < VECTORS; i += 2) store(row + i / 2 * W, (__m512i)_mm512_cvtne2ps_pbh(x[i + 1], x[i]));
            continue;
        }
#endif
        for (int i = 0; i < VECTORS; i++) store(row + i * W, x[i]);
    }
}

INLINE float sum_of(Vector x) {
    float part[W];
    store(part, x);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

// -- products of an item -----------------------------------------------------------------------------------------------

// ``words``: of a query.
template <typename T>
struct ByVectors {
    typedef T Number;
    static constexpr bool pairs = packed<T> == 2;
    const Batch& batch;
    Room room;
    float *sums, *scores, *keep;
    uint32_t *keys, *values, *queries;
    Running* running;
    const int64_t words, group;
    const bool smooth;
    bool is_vector = false;  // the item's queries are one, [words, W], under each KV head

    ByVectors(const Batch& of, char* place)
        : batch(of),
          words((of.key_size + packed<T> - 1) / packed<T>),
          group(of.heads / of.kv_heads),
          smooth(is_smooth<T>(of.key_size, of.value_size)) {
        Taker taker{place};
        const int64_t rows = batch.most_rows;
        room = rooms<T>(batch, taker);
        keys = taker.take<uint32_t>(4 * (words + 8) * BLOCK), values = taker.take<uint32_t>(4 * room.columns * BLOCK);
        queries = taker.take<uint32_t>(4 * rows * words), scores = taker.take<float>(4 * rows * BLOCK);
        sums = taker.take<float>(4 * rows * room.columns), keep = taker.take<float>(4 * rows);
        running = taker.take<Running>(sizeof(Running) * rows);
    }

    INLINE_METHOD int64_t begin(int64_t rows) {
        is_vector = meets_keys<T> && rows == W && group == W && batch.key_size % packed<T> == 0;
        return rows;
    }
    INLINE_METHOD void put_query(int64_t row, const T* from) {
        if (!is_vector) return pack_query(from, batch.key_size, words, queries + row * words);
        uint32_t* to = queries + row / W * W * words + row % W;
        for (int64_t w = 0; w < words; w++, to += W) *to = loaded<uint32_t>((const char*)from + 4 * w);
    }
    INLINE_METHOD void end_queries(int64_t) {}
    INLINE_METHOD void clear(int64_t rows) {
        std::memset(sums, 0, 4 * rows * room.columns);
        for (int64_t r = 0; r < rows; r++) running[r] = {NOTHING, Vector{}};
    }
    INLINE_METHOD Tail tail(int64_t row) const { return {running[row].top, sum_of(running[row].sum)}; }

    INLINE_METHOD void put_in_order(float*) const {}
    INLINE_METHOD void add_block(int64_t base, int64_t from, int64_t some, const Rows* key_rows, const Rows* value_rows, float scale,
                                 float cap) {
        const int64_t r = base + from, columns = room.columns;
        const bool few = some <= FEW_ROWS && smooth;
        if (few) {
#define SCORE(M) score_few<T, M>(queries + r * words, words, key_rows, batch.key_size, scores)
            FOR_ROWS(some, SCORE)
#if AVX512
        } else if (is_vector) {
            if constexpr (meets_keys<T>) score_vector<T>(queries + r * words, words, key_rows, scores);
#endif
        } else {
            pack_keys<T>(key_rows, batch.key_size, keys);
            multiply<pairs>(some, queries + r * words, words, keys, BLOCK, words, scores, BLOCK, BLOCK, nullptr);
        }
        for (int64_t i = 0; i < some; i += W)
            weigh<pairs>(scores + i * BLOCK, some - i < W ? some - i : W, [&](int64_t j) { return room.seen[(from + i + j) / group]; }, scale,
                         cap, running + r + i, keep + i);
        if (few) {
#define SUM(M) sum_few<T, M>((const uint32_t*)scores, value_rows, sums + r * columns, columns, keep)
            FOR_ROWS(some, SUM)
        } else {
            pack_values<T>(value_rows, batch.value_size, columns, values);
            multiply<pairs>(some, (const uint32_t*)scores, BLOCK, values, columns, BLOCK / packed<T>, sums + r * columns, columns, columns,
                            keep);
        }
    }
};

}  // namespace
