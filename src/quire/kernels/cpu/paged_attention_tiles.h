// Attention over pages of bfloat16 by tiles; see paged_attention.h. WIDTH is 16.
//
// Scores are transposed: 16 keys, as they lie in memory, times up to 16 query rows, whose words were transposed once for all keys. So a
// vector has the scores of one key and 16 rows, or of 2 keys and 8, or of 4 keys and 4 (``ROWS``), and no sum is across a vector. Weights
// go to tiles as rows of 32 pairs of keys; V is interleaved for them. Both products of a row are sums over tiles of 32 numbers from the
// first to the last, whatever ROWS is and whatever other rows there are.
//
// A pair is a key and the fourth behind it, which are in the same place of two vectors for every ROWS.
//
// ``Tiles`` is the instructions (tiles_amx.h, tiles_emulated.h).

#include "paged_attention_items.h"
#include "tiles.h"

namespace {

constexpr int64_t WORDS = TILE_BYTES / 4;             // of a tile's row
constexpr int64_t PAIRS_OF_BLOCK = BLOCK / 2, CLASSES = 4;  // keys a distance of CLASSES apart share a sum of weights

// The rows of a block's pair: keys ``first`` and first + CLASSES.
INLINE int64_t first_of_pair(int64_t pair) { return pair / CLASSES * 2 * CLASSES + pair % CLASSES; }

// V of a block, [PAIRS_OF_BLOCK, columns]. Of each 32 columns 4 of each 8 come first, as instructions put them that interleave without
// crossing lanes; sums are in that order, too.
INLINE void pack_value_pairs(const Rows* groups, int64_t size, int64_t columns, uint32_t* to) {
    for (int64_t pair = 0; pair < PAIRS_OF_BLOCK; pair++, to += columns) {
        const int64_t key = first_of_pair(pair);
        const Rows& rows = groups[key / GROUP];
        const bfloat16 *a = (const bfloat16*)(rows.at + key % GROUP * rows.stride);
        const bfloat16 *b = (const bfloat16*)(rows.at + (key % GROUP + CLASSES) * rows.stride);
        prefetch(rows, pair * 2 % GROUP, 2 * size), prefetch(rows, pair * 2 % GROUP + 1, 2 * size);
        int64_t d = 0;
#if AVX512
        for (; d + 2 * W <= size; d += 2 * W) {
            const __m512i x = _mm512_loadu_si512(a + d), y = _mm512_loadu_si512(b + d);
            store(to + d, (Words)_mm512_unpacklo_epi16(x, y)), store(to + d + W, (Words)_mm512_unpackhi_epi16(x, y));
        }
        if (d < size) {
            const __mmask32 some = (1u << (size - d)) - 1;
            put_pairs(_mm512_maskz_loadu_epi16(some, a + d), _mm512_maskz_loadu_epi16(some, b + d), pair_index(0), pair_index(16), to + d,
                      d + W < columns);
        }
#else
        for (; d + 2 * W <= size; d += 2 * W)
            for (int i = 0; i < 2 * W; i++) to[d + i % 8 / 4 * W + i / 8 * 4 + i % 4] = (uint32_t)b[d + i] << 16 | a[d + i];
        for (; d < size; d++) to[d] = (uint32_t)b[d] << 16 | a[d];
        for (; d < columns; d++) to[d] = 0;
#endif
    }
}

// Of up to ROWS query rows of a head: the largest score, times scale and log2(e), again and again over a vector; then sums of
// 2^(score - largest), [CLASSES, ROWS].
template <int ROWS>
struct RowSums {
    static constexpr int VECTORS_OF_FOUR = ROWS / 4;  // that have the scores of four keys
    static constexpr int64_t SIZE = W + CLASSES * ROWS;
    float* at;
    INLINE_METHOD void clear() {
        store(at, all(NOTHING));
        for (int u = 0; u < VECTORS_OF_FOUR; u++) store(at + W + u * W, Vector{});
    }
    INLINE_METHOD Tail tail(int64_t row) const {
        const float* sums = at + W + row;
        return {at[row], (sums[0] + sums[2 * ROWS]) + (sums[ROWS] + sums[3 * ROWS])};
    }
};

// The largest of all keys of a vector, again and again.
template <int ROWS>
INLINE Vector folded(Vector x) {
    if constexpr (ROWS <= 8) x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    if constexpr (ROWS <= 4) x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    return x;
}

// Words of the second product: both numbers are rounded to bfloat16, halves upwards.
INLINE Words paired(Vector low, Vector high) {
    return (((Words)low + 0x8000u) >> 16) | (((Words)high + 0x8000u) & 0xffff0000u);
}

// Scores [BLOCK, ROWS] become weights, [ROWS, PAIRS_OF_BLOCK], in the second half of their memory; keep: by what the earlier sums of a
// row shrink. ``seen``: each row's keys, as bits.
template <int ROWS>
INLINE void weigh_tile(float* scores, const uint64_t* seen, bool is_whole, float scale, float cap, RowSums<ROWS> sums, float* keep) {
    uint32_t* const pairs = (uint32_t*)scores;
    constexpr int COUNT = BLOCK * ROWS / W, KEYS = W / ROWS, FOUR = RowSums<ROWS>::VECTORS_OF_FOUR;
    if (cap != 0.0f || !(scale > 0.0f)) {
        for (int v = 0; v < COUNT; v++) {
            const Vector x = loaded<Vector>(scores + v * W) * scale;
            store(scores + v * W, cap != 0.0f ? capped(x, cap) : x);
        }
        scale = 1.0f;
    }
    Vector best[4] = {all(NOTHING), all(NOTHING), all(NOTHING), all(NOTHING)};
    if (is_whole) {
        for (int v = 0; v < COUNT; v += 4)
#pragma GCC unroll 4
            for (int u = 0; u < 4; u++) best[u] = larger(loaded<Vector>(scores + (v + u) * W), best[u]);
    } else {
        uint32_t bits[2][W];
        for (int lane = 0; lane < W; lane++) {
            const uint64_t mine = seen[lane % ROWS] >> (lane / ROWS);
            bits[0][lane] = (uint32_t)mine, bits[1][lane] = (uint32_t)(mine >> 32);
        }
        for (int half = 0; half < 2; half++) {
            Words left = loaded<Words>(bits[half]);
            for (int v = 0; v < COUNT / 2; v += 4)
#pragma GCC unroll 4
                for (int u = 0; u < 4; u++, left >>= KEYS) {
                    float* const at = scores + (half * COUNT / 2 + v + u) * W;
                    const Vector x = (left & 1u) != 0 ? loaded<Vector>(at) : all(NOTHING);
                    store(at, x);
                    best[u] = larger(x, best[u]);
                }
        }
    }
    const Vector top = folded<ROWS>(larger(larger(best[0], best[1]), larger(best[2], best[3])));
    const Vector before = loaded<Vector>(sums.at), now = larger(top * scale, before);
    const Vector shift = now == NOTHING ? Vector{} : now, shrink = before == NOTHING ? all(1.0f) : exp2_of(before - shift);
    store(sums.at, now), store(keep, shrink);
    Vector added[FOUR] = {};
    for (int v = 0; v < COUNT; v += 2 * FOUR)
#pragma GCC unroll 4
        for (int u = 0; u < FOUR; u++) {
            const Vector low = exp2_of(loaded<Vector>(scores + (v + u) * W) * scale - shift);
            const Vector high = exp2_of(loaded<Vector>(scores + (v + FOUR + u) * W) * scale - shift);
            added[u] += low, added[u] += high;
            store(pairs + (v / 2 + u) * W, paired(low, high));
        }
    for (int u = 0; u < FOUR; u++) {
        const Vector kept = loaded<Vector>(sums.at + W + u * W) * shrink;
        store(sums.at + W + u * W, kept + added[u]);
    }
    for (int64_t pair = 0; pair < PAIRS_OF_BLOCK; pair += W) {
        constexpr int STEP_ROWS = ROWS < 8 ? 4 : 8;
        for (int row = 0; row < ROWS; row += STEP_ROWS) {
            Words turned[STEP_ROWS];
            const char* const from = (const char*)(pairs + pair * ROWS + row);
            if constexpr (STEP_ROWS == 8)
                transpose8(from, 4 * ROWS, turned);
            else
                transpose4(from, 4 * ROWS, turned);
            for (int j = 0; j < STEP_ROWS; j++) store(pairs + (ROWS + row + j) * PAIRS_OF_BLOCK + pair, turned[j]);
        }
    }
}

// The shapes of tiles for ``rows`` of a head. Tiles 0 and 1 are scores, 2 and 3 sums. Others are the operands of the products.
template <int ROWS>
struct TileRoles {
    // With 16 rows weights are as K, and V as queries; then 5 and 7 are for a rest of Dk.
    static constexpr int K = 4, QUERIES = 6, WEIGHTS = ROWS == 16 ? 4 : 5, V = ROWS == 16 ? 6 : 7, K_REST = 5, QUERIES_REST = 7;
    static TileConfig config(int64_t key_size) {
        TileConfig config;
        const int64_t rest = key_size % (2 * WORDS);
        config.set(0, 16, 4 * ROWS), config.set(1, 16, 4 * ROWS), config.set(QUERIES, 16, 4 * ROWS);
        config.set(2, ROWS, TILE_BYTES), config.set(3, ROWS, TILE_BYTES), config.set(WEIGHTS, ROWS, TILE_BYTES);
        config.set(K, 16, TILE_BYTES), config.set(V, 16, TILE_BYTES);
        if (rest) config.set(K_REST, 16, 2 * rest), config.set(QUERIES_REST, rest / 2, TILE_BYTES);
        return config;
    }
};

// Products of one thread's items.
template <class Tiles>
struct ByTiles {
    typedef bfloat16 Number;
    const Batch& batch;
    Room room;
    float *sums, *scores, *keep, *row_sums;
    bfloat16* staged;  // queries, [rows, Dk]
    uint32_t *queries, *values;  // queries: [rows / lanes, Dk / 2, lanes]
    char* keys;
    const int64_t words, group;  // of a row of K; query heads of a KV head
    int64_t rows = 0, lanes = 0, shaped = 0;  // of a head; of a tile; tiles are shaped for so many

    ByTiles(const Batch& of, char* place) : batch(of), words(of.key_size / 2), group(of.heads / of.kv_heads) {
        Taker taker{place};
        const int64_t most = batch.most_rows;
        room = rooms<bfloat16>(batch, taker);
        sums = taker.take<float>(4 * most * room.columns), row_sums = taker.take<float>(4 * most * (W + CLASSES * 4) / 4);
        staged = taker.take<bfloat16>(2 * most * batch.key_size), queries = taker.take<uint32_t>(4 * most * words);
        values = taker.take<uint32_t>(4 * room.columns * PAIRS_OF_BLOCK), keys = taker.take<char>(4 * words * BLOCK);
        scores = taker.take<float>(4 * BLOCK * W);
        keep = taker.take<float>(4 * W);
    }
    ~ByTiles() { Tiles::release(); }

    INLINE_METHOD int64_t begin(int64_t of_rows) {
        rows = of_rows, lanes = tile_rows(rows, batch.key_size);
        if (shaped != lanes)
            Tiles::shape(lanes == 4   ? TileRoles<4>::config(batch.key_size)
                         : lanes == 8 ? TileRoles<8>::config(batch.key_size)
                                      : TileRoles<16>::config(batch.key_size));
        shaped = lanes;
        return (rows + lanes - 1) / lanes * lanes;
    }
    INLINE_METHOD void put_query(int64_t row, const bfloat16* from) {
        std::memcpy(staged + row * batch.key_size, from, 2 * batch.key_size);
    }
    INLINE_METHOD void end_queries(int64_t all_rows) {
        const int64_t height = (rows + lanes - 1) / lanes * lanes;
        for (int64_t base = 0; base < all_rows; base += height)
            std::memset(staged + (base + rows) * batch.key_size, 0, 2 * (height - rows) * batch.key_size);
        for (int64_t row = 0; row < all_rows; row += lanes) {
            const char* const from = (const char*)(staged + row * batch.key_size);
            uint32_t* const to = queries + row * words;
            int64_t w = 0;
            if (lanes == W)
                for (Words turned[8]; w + 8 <= words; w += 8) {
                    transpose8(from + 4 * w, 4 * words, turned);
                    for (int i = 0; i < 8; i++) store(to + (w + i) * W, turned[i]);
                }
            for (; w < words; w++)
                for (int64_t lane = 0; lane < lanes; lane++) to[w * lanes + lane] = loaded<uint32_t>(from + 4 * (lane * words + w));
        }
    }
    INLINE_METHOD void clear(int64_t all_rows) {
        std::memset(sums, 0, 4 * all_rows * room.columns);
        with_lanes([&](auto sized) {
            constexpr int ROWS = decltype(sized)::ROWS;
            for (int64_t tile = 0; tile < all_rows / ROWS; tile++) of_tile<ROWS>(tile).clear();
        });
    }
    INLINE_METHOD Tail tail(int64_t row) const {
        Tail found;
        with_lanes([&](auto sized) {
            constexpr int ROWS = decltype(sized)::ROWS;
            found = of_tile<ROWS>(row / ROWS).tail(row % ROWS);
        });
        return found;
    }
    // Put a row's sums into the order of V's columns.
    INLINE_METHOD void put_in_order(float* row) const {
        for (int64_t d = 0; d + 2 * W <= batch.value_size; d += 2 * W) {
            const Vector low = loaded<Vector>(row + d), high = loaded<Vector>(row + d + W);
            store(row + d, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
            store(row + d + W, __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
        }
    }
    INLINE_METHOD void add_block(int64_t base, int64_t from, int64_t some, const Rows* key_rows, const Rows* value_rows, float scale,
                                 float cap) {
        with_lanes([&](auto sized) {
            add_block_of<decltype(sized)::ROWS>(base, from, some, key_rows, value_rows, room.seen, scale, cap);
        });
    }

private:
    template <int N>
    struct Sized {
        static constexpr int ROWS = N;
    };
    template <typename Act>
    INLINE_METHOD void with_lanes(const Act& act) const {
        if (lanes == 4)
            act(Sized<4>());
        else if (lanes == 8)
            act(Sized<8>());
        else
            act(Sized<16>());
    }
    template <int ROWS>
    INLINE_METHOD RowSums<ROWS> of_tile(int64_t tile) const {
        return {row_sums + tile * RowSums<ROWS>::SIZE};
    }

    // Rows of K for all tiles, one behind the other.
    void copy_keys(const Rows* from, Rows* to) {
        const int64_t bytes = 4 * words;
        for (int64_t g = 0; g < BLOCK / GROUP; g++) {
            to[g] = {keys + g * GROUP * bytes, nullptr, bytes, 0};
            for (int64_t i = 0; i < GROUP; i++) {
                prefetch(from[g], i, bytes);
                char* const row = keys + (g * GROUP + i) * bytes;
                const char* const source = from[g].at + i * from[g].stride;
                int64_t at = 0;
                for (; at + TILE_BYTES <= bytes; at += TILE_BYTES) store(row + at, loaded<Words>(source + at));
                if (at < bytes) std::memcpy(row + at, source + at, bytes - at);
            }
        }
    }

    // Two groups' scores of some words of K, behind those that were added before.
    template <int K, int QUERIES>
    INLINE_METHOD void add_scores(const Rows& upper, const Rows& lower, int64_t step, const uint32_t* tile_queries, int64_t line) {
        for (int64_t i = 0; i < GROUP && upper.next; i++) prefetch_line(upper, i, step), prefetch_line(lower, i, step);
        Tiles::template load<QUERIES>((const char*)tile_queries + step * WORDS * line, line);
        Tiles::template load<K>(upper.at + step * TILE_BYTES, upper.stride);
        Tiles::template add<0, K, QUERIES>();
        Tiles::template load<K>(lower.at + step * TILE_BYTES, lower.stride);
        Tiles::template add<1, K, QUERIES>();
    }

    // The scores of a tile's rows, [BLOCK, ROWS].
    template <int ROWS>
    INLINE_METHOD void score(const Rows* groups, const uint32_t* tile_queries, float* to) {
        typedef TileRoles<ROWS> Roles;
        constexpr int64_t LINE = 4 * ROWS;
        const int64_t steps = words / WORDS;
        for (int64_t g = 0; g < BLOCK / GROUP; g += 2) {
            Tiles::template zero<0>(), Tiles::template zero<1>();
            for (int64_t step = 0; step < steps; step++)
                add_scores<Roles::K, Roles::QUERIES>(groups[g], groups[g + 1], step, tile_queries, LINE);
            if constexpr (ROWS == 16)
                if (words % WORDS) add_scores<Roles::K_REST, Roles::QUERIES_REST>(groups[g], groups[g + 1], steps, tile_queries, LINE);
            Tiles::template save<0>(to + g * GROUP * ROWS, LINE), Tiles::template save<1>(to + (g + 1) * GROUP * ROWS, LINE);
        }
    }

    INLINE_METHOD void prefetch_line(const Rows& rows, int64_t row, int64_t line) const {
        // Rows that are one piece of memory are fetched from first to last.
        const bool is_dense = rows.next_stride == 4 * words;
        __builtin_prefetch(rows.next + (is_dense ? (line * GROUP + row) * TILE_BYTES : row * rows.next_stride + line * TILE_BYTES), 0, 2);
    }

    // Make the sums of a tile's rows smaller, where ``keep`` says so.
    INLINE_METHOD void shrink(float* to, int64_t of_rows) {
        const int64_t columns = room.columns;
        for (int64_t row = 0; row < of_rows; row++, to += columns)
            if (keep[row] != 1.0f)
                for (int64_t d = 0; d < columns; d += W) store(to + d, loaded<Vector>(to + d) * keep[row]);
    }

    // Add weights times V to a tile's sums.
    template <int ROWS>
    INLINE_METHOD void add_values(const uint32_t* tile_weights, float* to) {
        typedef TileRoles<ROWS> Roles;
        const int64_t columns = room.columns, line = 4 * columns;
        for (int64_t d = 0; d < columns; d += 2 * W) {
            const bool both = d + W < columns;
            Tiles::template load<2>(to + d, line);
            if (both) Tiles::template load<3>(to + d + W, line);
            for (int64_t pair = 0; pair < PAIRS_OF_BLOCK; pair += WORDS) {
                const uint32_t* const from = values + pair * columns + d;
                Tiles::template load<Roles::WEIGHTS>(tile_weights + pair, 4 * PAIRS_OF_BLOCK);
                Tiles::template load<Roles::V>(from, line);
                Tiles::template add<2, Roles::WEIGHTS, Roles::V>();
                if (both) Tiles::template load<Roles::V>(from + W, line), Tiles::template add<3, Roles::WEIGHTS, Roles::V>();
            }
            Tiles::template save<2>(to + d, line);
            if (both) Tiles::template save<3>(to + d + W, line);
        }
    }

    // ``seen``: the keys of each token, which ``group`` rows ask for.
    template <int ROWS>
    void add_block_of(int64_t base, int64_t from, int64_t some, const Rows* key_rows, const Rows* value_rows, const uint64_t* seen,
                      float scale, float cap) {
        const int64_t first = from / ROWS, last = (from + some - 1) / ROWS;
        Rows copied[BLOCK / GROUP];
        if (last > first) copy_keys(key_rows, copied), key_rows = copied;
        pack_value_pairs(value_rows, batch.value_size, room.columns, values);
        int64_t token = first * ROWS / group, left = group - first * ROWS % group;
        for (int64_t tile = first; tile <= last; tile++) {
            const int64_t row = base + tile * ROWS, end = rows - tile * ROWS < ROWS ? rows - tile * ROWS : ROWS;
            uint64_t bits[ROWS] = {}, any = 0, every = ~(uint64_t)0;
            for (int64_t lane = 0; lane < end; lane++) {
                bits[lane] = seen[token];
                any |= bits[lane], every &= bits[lane];
                if (!--left) token++, left = group;
            }
            if (!any) continue;
            score<ROWS>(key_rows, queries + row * words, scores);
            weigh_tile<ROWS>(scores, bits, every == ~(uint64_t)0, scale, cap, of_tile<ROWS>(row / ROWS), keep);
            shrink(sums + row * room.columns, ROWS);
            add_values<ROWS>((const uint32_t*)scores + PAIRS_OF_BLOCK * ROWS, sums + row * room.columns);
        }
    }
};

}  // namespace
