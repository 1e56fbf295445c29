// Vectors of one generation of vector instructions, and rows of K and V as words of products; see paged_attention_body.h.

namespace {

// Vectors of 16 are AVX-512's, unless tiles are emulated, which any machine can do.
#if WIDTH == 16 && !defined(EMULATED)
#define AVX512 1
#else
#define AVX512 0
#endif

constexpr int W = WIDTH, VECTORS = BLOCK / W;
constexpr int64_t GROUP = 16;  // keys that are packed at once, if their rows lie one behind the other

typedef float Vector __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Shorts __attribute__((vector_size(2 * W)));

struct float16 {
    uint16_t bits;
};

constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;
constexpr float NOTHING = -__builtin_inff();

INLINE Vector all(float x) { return x - Vector{}; }
INLINE Words all_words(uint32_t x) { return x - Words{}; }

// -- vectors of one machine --------------------------------------------------------------------------------------------

#if AVX512
INLINE Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
INLINE float largest(Vector x) { return _mm512_reduce_max_ps(x); }
// Four words of each of W rows, so many bytes apart: word w of all rows becomes out[w].
INLINE void transpose4(const char* rows, int64_t stride, Words* out) {
    __m512i z[4];
    for (int j = 0; j < 4; j++) {
        z[j] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(rows + j * stride)));
        z[j] = _mm512_inserti32x4(z[j], _mm_loadu_si128((const __m128i*)(rows + (4 + j) * stride)), 1);
        z[j] = _mm512_inserti32x4(z[j], _mm_loadu_si128((const __m128i*)(rows + (8 + j) * stride)), 2);
        z[j] = _mm512_inserti32x4(z[j], _mm_loadu_si128((const __m128i*)(rows + (12 + j) * stride)), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
    __m512i c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = (Words)_mm512_unpacklo_epi64(a, b), out[1] = (Words)_mm512_unpackhi_epi64(a, b);
    out[2] = (Words)_mm512_unpacklo_epi64(c, d), out[3] = (Words)_mm512_unpackhi_epi64(c, d);
}
// The same of eight words, with half as many loads.
INLINE void transpose8(const char* rows, int64_t stride, Words* out) {
    __m512i z[8], u[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const char* from = rows + (j % 4 + j / 4 * 8) * stride;
        z[j] = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)from));
        z[j] = _mm512_inserti64x4(z[j], _mm256_loadu_si256((const __m256i*)(from + 4 * stride)), 1);
    }
#pragma GCC unroll 2
    for (int j = 0; j < 8; j += 4) {
        __m512i a = _mm512_unpacklo_epi32(z[j], z[j + 1]), b = _mm512_unpacklo_epi32(z[j + 2], z[j + 3]);
        __m512i c = _mm512_unpackhi_epi32(z[j], z[j + 1]), d = _mm512_unpackhi_epi32(z[j + 2], z[j + 3]);
        u[j] = _mm512_unpacklo_epi64(a, b), u[j + 1] = _mm512_unpackhi_epi64(a, b);
        u[j + 2] = _mm512_unpacklo_epi64(c, d), u[j + 3] = _mm512_unpackhi_epi64(c, d);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        out[j] = (Words)_mm512_shuffle_i32x4(u[j], u[4 + j], 0x88);
        out[4 + j] = (Words)_mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
    }
}
INLINE Vector widen_half(Words low) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)low)); }
INLINE void put_vector(float16* to, Vector x) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
#elif WIDTH == 8
INLINE Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
INLINE float largest(Vector x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
INLINE void transpose4(const char* rows, int64_t stride, Words* out) {
    __m256i z[4];
    for (int j = 0; j < 4; j++)
        z[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(rows + j * stride))),
                                       _mm_loadu_si128((const __m128i*)(rows + (4 + j) * stride)), 1);
    __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpacklo_epi32(z[2], z[3]);
    __m256i c = _mm256_unpackhi_epi32(z[0], z[1]), d = _mm256_unpackhi_epi32(z[2], z[3]);
    out[0] = (Words)_mm256_unpacklo_epi64(a, b), out[1] = (Words)_mm256_unpackhi_epi64(a, b);
    out[2] = (Words)_mm256_unpacklo_epi64(c, d), out[3] = (Words)_mm256_unpackhi_epi64(c, d);
}
INLINE Vector widen_half(Words low) {
    __m256i x = (__m256i)low;
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
INLINE void put_vector(float16* to, Vector x) { _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
#else
INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }
#if WIDTH == 4
INLINE float largest(Vector x) {
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}
INLINE void transpose4(const char* rows, int64_t stride, Words* out) {
    Words z[4];
    for (int j = 0; j < 4; j++) z[j] = loaded<Words>(rows + j * stride);
    Words a = __builtin_shufflevector(z[0], z[1], 0, 4, 1, 5), b = __builtin_shufflevector(z[2], z[3], 0, 4, 1, 5);
    Words c = __builtin_shufflevector(z[0], z[1], 2, 6, 3, 7), d = __builtin_shufflevector(z[2], z[3], 2, 6, 3, 7);
    out[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5), out[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    out[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5), out[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}
#else
template <int WORDS>
INLINE void transpose(const char* rows, int64_t stride, Words* out) {
    for (int w = 0; w < WORDS; w++)
        for (int j = 0; j < W; j++) out[w][j] = loaded<uint32_t>(rows + j * stride + 4 * w);
}
INLINE void transpose4(const char* rows, int64_t stride, Words* out) { transpose<4>(rows, stride, out); }
INLINE void transpose8(const char* rows, int64_t stride, Words* out) { transpose<8>(rows, stride, out); }
#endif
INLINE Vector widen_half(Words low) {
    Words magnitude = (low & 0x7fffu) << 13;
    Words bits = (Words)((Vector)magnitude * 0x1p112f) | ((low & 0x8000u) << 16);
    return (Vector)(magnitude >= 0x0f800000u ? bits | 0x7f800000u : bits);
}
INLINE void put_vector(float16* to, Vector x) {
    Words bits = (Words)x, magnitude = bits & 0x7fffffffu;
    Words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    Words tiny = (Words)((Vector)magnitude + 0.5f) - 0x3f000000u;
    Words half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x477ff000u ? all_words(0x7c00u) : half;
    half = magnitude > 0x7f800000u ? all_words(0x7e00u) : half;
    half |= (bits >> 16) & 0x8000u;
    for (int i = 0; i < W; i++) to[i].bits = (uint16_t)half[i];
}
#endif

// Register tiles of both products: rows, vectors.
#if WIDTH == 16
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#elif WIDTH == 8
constexpr int TILE_ROWS = 6, TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 4, TILE_VECTORS = 2;
#endif

INLINE void put_vector(float* to, Vector x) { store(to, x); }
INLINE void put_vector(bfloat16* to, Vector x) {
    Words bits = (Words)x;
    Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    nearest = (bits & 0x7fffffffu) > 0x7f800000u ? all_words(0x7fc0u) : nearest;
    store(to, __builtin_convertvector(nearest, Shorts));
}

// 2^x for x <= 0: a power of two times a polynomial for the rest, from -1/2 to 1/2. With these coefficients that is off by 1.1e-7 of
// its value at most; its last sum rounds by 2^-24, the others by less than that together: the error is below 2^-22 of 2^x. 2^0 is 1;
// below -126 it is 0; what is no number stays none.
INLINE Vector exp2_of(Vector x) {
#if AVX512
    const Vector part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), whole = x - part;
#else
    const Vector shifted = x + 12582912.0f, whole = shifted - 12582912.0f, part = x - whole;
#endif
    Vector sum = all(1.3264727e-3f);
    sum = sum * part + 9.6715126e-3f;
    sum = sum * part + 5.5507337e-2f;
    sum = sum * part + 2.4022242e-1f;
    sum = sum * part + 6.9314698e-1f;
    sum = sum * part + 1.0f;
#if AVX512
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(-126.0f), _CMP_NLT_UQ), sum, whole);
#else
    return x < -126.0f ? Vector{} : sum * (Vector)(((Words)shifted << 23) + 0x3f800000u);
#endif
}

// cap * tanh(x), times log2(e), by 2^(-2 |x| log2(e)).
INLINE Vector capped(Vector x, float cap) {
    const Vector t = exp2_of((Vector)((Words)x | 0x80000000u) * (2 * LOG2E));
    const Vector y = (1.0f - t) / (1.0f + t) * (cap * LOG2E);
    return (Vector)((Words)y | ((Words)x & 0x80000000u));
}

INLINE float exp2_one(float x) { return exp2_of(all(x))[0]; }

// -- types of K and V --------------------------------------------------------------------------------------------------

// Numbers of T in a word of a product.
template <typename T>
constexpr int packed = PAIRS && __is_same(T, bfloat16) ? 2 : 1;

INLINE Vector widened(const float* from) { return loaded<Vector>(from); }
INLINE Words word_of_halves(const void* from) {
    return __builtin_convertvector(loaded<Shorts>(from), Words);
}
INLINE Vector widened(const bfloat16* from) { return (Vector)(word_of_halves(from) << 16); }
INLINE Vector widened(const float16* from) { return widen_half(word_of_halves(from)); }

INLINE Vector upper(const bfloat16*, Words x) { return (Vector)(x & 0xffff0000u); }
INLINE Vector lower(const bfloat16*, Words x) { return (Vector)(x << 16); }
INLINE Vector upper(const float16*, Words x) { return widen_half(x >> 16); }
INLINE Vector lower(const float16*, Words x) { return widen_half(x & 0xffffu); }

// Words of a product that four bytes of a row make: floats, unless they stay pairs.
template <typename T>
constexpr int PARTS = sizeof(T) == 4 || packed<T> == 2 ? 1 : 2;

template <typename T>
INLINE Words part_of(Words x, int part) {
    if constexpr (PARTS<T> == 1)
        return x;
    else
        return (Words)(part ? upper((const T*)0, x) : lower((const T*)0, x));
}

// GROUP rows of K or V, so many bytes apart, and rows to prefetch.
struct Rows {
    const char *at, *next;
    int64_t stride, next_stride;
};

INLINE void prefetch(const Rows& rows, int64_t row, int64_t bytes) {
    const char* from = rows.next + row * rows.next_stride;
    if (rows.next_stride == 0) return;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

constexpr int64_t STEP = 16;  // bytes of four words
// While W rows from ``row`` on are read, STEP bytes of each at a time, prefetch as much: many at once would keep reads waiting.
INLINE void prefetch_step(const Rows& rows, int64_t row, int64_t at, int64_t bytes) {
    const bool whole = rows.next_stride == bytes;  // one piece of memory, which is best fetched from first to last
    const char* from = rows.next + row * rows.next_stride + (whole ? at * (W / 4) * 4 : at / STEP % 4 * (W / 4) * rows.next_stride + at / 64 * 64);
    for (int64_t j = 0; j < W / 4; j++) __builtin_prefetch(from + j * (whole ? 64 : rows.next_stride), 0, 2);
}

// K of a block, [words, BLOCK].
template <typename T>
INLINE void pack_keys(const Rows* groups, int64_t size, uint32_t* to) {
    const int64_t bytes = size * sizeof(T), whole = bytes / STEP * STEP;
    for (int64_t key = 0; key < BLOCK; key += W) {
        const Rows& rows = groups[key / GROUP];
        const char* from = rows.at + key % GROUP * rows.stride;
        const auto put = [&](int64_t w, const Words* four) {
            for (int i = 0; i < 4 * PARTS<T>; i++) store(to + (w + i) * BLOCK + key, part_of<T>(four[i / PARTS<T>], i % PARTS<T>));
        };
        Words four[4];
        int64_t w = 0;
        for (int64_t at = 0; at < whole; at += STEP, w += 4 * PARTS<T>) {
            prefetch_step(rows, key % GROUP, at, bytes);
            transpose4(from + at, rows.stride, four);
            put(w, four);
        }
        if (whole < bytes) {
            char rest[W][STEP] = {};
            for (int j = 0; j < W; j++) std::memcpy(rest[j], from + j * rows.stride + whole, bytes - whole);
            transpose4(rest[0], STEP, four);
            put(w, four);
        }
    }
}

#if AVX512
// Which of 64 numbers of two rows are the columns from ``first`` on, number by number.
INLINE __m512i pair_index(short first) {
    return _mm512_add_epi16(_mm512_set1_epi16(first), _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0));
}

// Two rows of bfloat16, number by number, 32 columns at a time.
INLINE void put_pairs(__m512i x, __m512i y, __m512i low, __m512i high, uint32_t* to, bool both) {
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
    if (both) _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(x, high, y));
}
#endif

// V of a block, [BLOCK / packed, columns]; ``columns``: Dv up to a multiple of W.
template <typename T>
INLINE void pack_values(const Rows* groups, int64_t size, int64_t columns, uint32_t* to) {
    const int64_t bytes = size * sizeof(T);
    for (int64_t key = 0; key < BLOCK; key += packed<T>, to += columns) {
        const Rows& rows = groups[key / GROUP];
        const char* from = rows.at + key % GROUP * rows.stride;
        for (int j = 0; j < packed<T>; j++) prefetch(rows, key % GROUP + j, bytes);
        int64_t d = 0;
#if PAIRS
        if constexpr (packed<T> == 2) {
            const T *a = (const T*)from, *b = (const T*)(from + rows.stride);
            const __m512i low = pair_index(0), high = pair_index(16);
            for (; d + 32 <= size; d += 32) put_pairs(_mm512_loadu_si512(a + d), _mm512_loadu_si512(b + d), low, high, to + d, true);
            if (d < size) {
                const __mmask32 some = (1u << (size - d)) - 1;
                put_pairs(_mm512_maskz_loadu_epi16(some, a + d), _mm512_maskz_loadu_epi16(some, b + d), low, high, to + d,
                          d + 16 < columns);
            }
            continue;
        }
#endif
        const T* row = (const T*)from;
        for (; d + W <= size; d += W) store(to + d, widened(row + d));
        if (d < size) {
            T rest[W] = {};
            std::memcpy(rest, row + d, (size - d) * sizeof(T));
            store(to + d, widened(rest));
        }
    }
}

// Queries of one row and head, as words, zeros behind.
template <typename T>
INLINE void pack_query(const T* from, int64_t size, int64_t words, uint32_t* to) {
    if constexpr (packed<T> == 2) {
        to[words - 1] = 0;
        std::memcpy(to, from, size * sizeof(T));
    } else {
        int64_t d = 0;
        for (; d + W <= size; d += W) store(to + d, widened(from + d));
        if (d < size) {
            T rest[W] = {};
            std::memcpy(rest, from + d, (size - d) * sizeof(T));
            Vector wide = widened(rest);
            for (int64_t i = 0; d + i < size; i++) store(to + d + i, (float)wide[i]);
        }
    }
}

}  // namespace
