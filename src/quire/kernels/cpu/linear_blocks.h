// The products of BLOCKS (linear.h). A weight is the float32 nearest to (code - offset) * scale - minimum, as the file's format defines
// it, and sums are made in the order of FLOAT32. WIDE: there are the instructions of AVX-512.

namespace {

// A block of inputs (BLOCK) ends with a group.
constexpr int WIDEST_BLOCK = BLOCK + BLOCK_GROUP;

INLINE int64_t block_step(int64_t inputs) { return (even_part(inputs) + BLOCK_GROUP - 1) / BLOCK_GROUP * BLOCK_GROUP; }

// -- numbers of a group ------------------------------------------------------------------------------------------------

typedef uint8_t SmallBytes __attribute__((vector_size(LANES)));
typedef int8_t SmallInts __attribute__((vector_size(LANES)));
typedef int16_t SmallShorts __attribute__((vector_size(2 * LANES)));

#ifdef WIDE
INLINE Lanes from_halves(const uint8_t* from) { return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
INLINE Lanes from_bytes(const uint8_t* from) { return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from))); }
INLINE Lanes from_ints(const uint8_t* from) { return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from))); }
#else
INLINE Lanes from_halves(const uint8_t* from) {
    const Bits bits = __builtin_convertvector(loaded<Halves>(from), Bits), size = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
    // A small one's leading bit is added and taken away again; no step has a number below 2^-126.
    const Lanes usual = (Lanes)(size + (112u << 23)), small = (Lanes)(size + (113u << 23)) - 0x1p-14f;
    return (Lanes)((Bits)chosen((Bits)((Ints)(size - (1u << 23)) >> 31), small, usual) | sign);
}
// In two steps: GCC 12 takes a conversion to four times the size apart into single numbers.
template <typename TWICE, typename BYTES>
INLINE Lanes widened(BYTES from) { return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(from, TWICE), Whole), Lanes); }
INLINE Lanes from_bytes(const uint8_t* from) { return widened<Halves>(loaded<SmallBytes>(from)); }
INLINE Lanes from_ints(const uint8_t* from) { return widened<SmallShorts>(loaded<SmallInts>(from)); }
#endif

// What codes stand for.
template <int KIND>
struct Values {
    static constexpr int OFFSET = KIND == Q4_0 ? 8 : KIND == Q5_0 ? 16 : KIND == Q6_K ? 32 : 0;
#ifdef WIDE
    __m512 low, high;
    __attribute__((always_inline)) Values() {
        const __m512 count = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        low = _mm512_sub_ps(count, _mm512_set1_ps(OFFSET)), high = _mm512_sub_ps(count, _mm512_set1_ps(OFFSET - 16));
    }
    // Input i of eight. ``above``: its high bits are from bit i or 2i on.
    template <int I>
    __attribute__((always_inline)) Lanes of(Bits words, Bits above) const {
        const __m512i code = (__m512i)(words >> (4 * I));
        if constexpr (Layout<KIND>::HIGH == 0) return (Lanes)_mm512_permutexvar_ps(code, low);
        constexpr int WIDTH = KIND == Q6_K ? 2 : 1, UP = 4 - WIDTH * I;
        const __m512i bits = (__m512i)(UP > 0 ? above << (UP > 0 ? UP : 0) : above >> (UP > 0 ? 0 : -UP));
        // The four low bits of the one, the others of the other.
        const __m512i all = _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), code, bits, 0xca);
        if constexpr (KIND != Q6_K) return (Lanes)_mm512_permutex2var_ps(low, all, high);
        // (code & 63) | 2^23 is 2^23 + code as a float.
        const __m512i whole = _mm512_ternarylogic_epi32(all, _mm512_set1_epi32(63), _mm512_set1_epi32(0x4b000000), 0xea);
        return (Lanes)_mm512_castsi512_ps(whole) - (8388608.0f + OFFSET);
    }
#else
    template <int I>
    __attribute__((always_inline)) Lanes of(Bits words, Bits above) const {
        Bits code = words >> (4 * I) & 15u;
        if (KIND == Q6_K)
            code |= (above >> (2 * I) & 3u) << 4;
        else if (Layout<KIND>::HIGH)
            code |= (above >> I & 1u) << 4;
        return __builtin_convertvector((Whole)code - OFFSET, Lanes);
    }
#endif
};

// Calls use.template at<I>(k, n, weights) for inputs k + I of the group, k = 0, 8, 16, 24, in order; n: half of the outputs.
template <int KIND, int I, typename USE>
INLINE void eight_weights(const USE& use, int64_t k, const Values<KIND>& values, const uint8_t* codes, const Bits (&words)[2],
                          const Bits (&above)[2], const Lanes (&scale)[2], const Lanes (&minimum)[2]) {
    if constexpr (I < 8) {
        for (int n = 0; n < 2; n++) {
            Lanes value;
            if constexpr (KIND == Q8_0)
                value = from_ints(codes + (k + I) * PANEL + n * LANES);
            else
                value = values.template of<I>(words[n], above[n]);
            if constexpr (Layout<KIND>::HAS_MINIMA)
                use.template at<I>(k, n, value * scale[n] - minimum[n]);
            else
                use.template at<I>(k, n, value * scale[n]);
        }
        eight_weights<KIND, I + 1>(use, k, values, codes, words, above, scale, minimum);
    }
}

template <int KIND, typename USE>
INLINE void each_weight(const uint8_t* panel, int64_t group, const USE& use) {
    using L = Layout<KIND>;
    const Values<KIND> values;
    const uint8_t *codes = L::group(panel, group), *high = codes + L::CODES, *scales = high + L::HIGH, *head = L::head(panel, group);
    for (int64_t byte = 0; byte < L::GROUP; byte += 64) __builtin_prefetch(codes + byte + AHEAD, 0, 3);
    Lanes scale[2], minimum[2] = {};
    for (int n = 0; n < 2; n++) {
        if constexpr (!L::HAS_HEAD) scale[n] = from_halves(scales + 2 * n * LANES);
        if constexpr (L::HAS_MINIMA) {
            scale[n] = from_halves(head + 2 * n * LANES) * from_bytes(scales + n * LANES);
            minimum[n] = from_halves(head + 2 * PANEL + 2 * n * LANES) * from_bytes(scales + PANEL + n * LANES);
        }
    }
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        Bits words[2] = {}, above[2] = {};
        for (int n = 0; n < 2; n++) {
            if constexpr (KIND != Q8_0) words[n] = loaded<Bits>(codes + (2 * j + n) * 64);
            if constexpr (KIND == Q6_K) {
                above[n] = loaded<Bits>(high + (j / 2 * 2 + n) * 64) >> (uint32_t)(j % 2 * 16);
                scale[n] = from_halves(head + 2 * n * LANES) * from_ints(scales + j / 2 * PANEL + n * LANES);
            } else if constexpr (L::HIGH)
                above[n] = loaded<Bits>(high + n * 64) >> (uint32_t)(8 * j);
        }
        eight_weights<KIND, 0>(use, 8 * j, values, codes, words, above, scale, minimum);
    }
}

// -- few rows: weights stay in registers -------------------------------------------------------------------------------

template <int M>
struct Products {
    Lanes (&sums)[M][2];
    const char* x;
    int64_t stride;
    template <int I>
    __attribute__((always_inline)) void at(int64_t k, int n, Lanes weights) const {
        const Inputs<M, float> inputs(x + k * sizeof(float), stride);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) sums[m][n] += weights * inputs.of(m, I);
    }
};

template <int KIND, int M>
__attribute__((noinline)) void block_tile(const uint8_t* panel, int64_t inputs, Sums to, const char* x, int64_t stride) {
    const int64_t step = block_step(inputs);
    Lanes totals[1][M][2] = {};
    for (int64_t k = 0; k < inputs; k += step) {
        const int64_t end = k + step < inputs ? k + step : inputs;
        Lanes sums[M][2] = {};
        for (int64_t i = k; i < end; i += BLOCK_GROUP)
            each_weight<KIND>(panel, i / BLOCK_GROUP, Products<M>{sums, x + i * (int64_t)sizeof(float), stride});
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) totals[0][m][n] = k ? totals[0][m][n] + sums[m][n] : sums[m][n];
    }
    to.is_first = true;
    add_tile<M, 1>(to, totals, nullptr);
}

constexpr int FEW_BLOCK_ROWS = MOST_ROWS / 2;

template <int KIND, int M>
INLINE void block_tile_of(int64_t rows, const uint8_t* panel, int64_t inputs, const Sums& to, const char* x, int64_t stride) {
    if constexpr (M > 1)
        if (rows < M) return block_tile_of<KIND, M - 1>(rows, panel, inputs, to, x, stride);
    block_tile<KIND, M>(panel, inputs, to, x, stride);
}

// -- many rows: weights are written to a cache -------------------------------------------------------------------------

struct Write {
    float* to;
    template <int I>
    __attribute__((always_inline)) void at(int64_t k, int n, Lanes weights) const { store(to + (k + I) * PANEL + n * LANES, weights); }
};

template <int KIND>
__attribute__((noinline)) void expand_blocks(float* to, const uint8_t* panel, int64_t first, int64_t inputs) {
    for (int64_t k = 0; k < inputs; k += BLOCK_GROUP) each_weight<KIND>(panel, (first + k) / BLOCK_GROUP, Write{to + k * PANEL});
}

#define OF_KIND(kind, function, ...)                                \
    switch (kind) {                                                 \
        case Q4_0: function(Q4_0, __VA_ARGS__); break;              \
        case Q5_0: function(Q5_0, __VA_ARGS__); break;              \
        case Q8_0: function(Q8_0, __VA_ARGS__); break;              \
        case Q4_K: function(Q4_K, __VA_ARGS__); break;              \
        case Q5_K: function(Q5_K, __VA_ARGS__); break;              \
        default: function(Q6_K, __VA_ARGS__);                       \
    }
#define MULTIPLY_BLOCKS(KIND, ...) block_tile_of<KIND, FEW_BLOCK_ROWS>(__VA_ARGS__)
#define EXPAND_BLOCKS(KIND, ...) expand_blocks<KIND>(__VA_ARGS__)

template <int Q>
INLINE void sum_block_panels(const Linear& map, int64_t panel, const Sums& sums, float* values, const char* x, int64_t stride, int64_t rows) {
    const uint8_t* panels[Q];
    int64_t kinds[Q];
    for (int q = 0; q < Q; q++) panels[q] = panel_place(map, panel + q), kinds[q] = block_part(map, panel + q).kind;
    if (rows <= FEW_BLOCK_ROWS) {
        for (int q = 0; q < Q; q++) OF_KIND(kinds[q], MULTIPLY_BLOCKS, rows, panels[q], map.inputs, sums.from(0, q), x, stride)
        return;
    }
    const int64_t step = block_step(map.inputs);
    for (int64_t k = 0; k < map.inputs; k += step, x += step * sizeof(float)) {
        const int64_t inputs = map.inputs - k < step ? map.inputs - k : step;
        for (int q = 0; q < Q; q++) OF_KIND(kinds[q], EXPAND_BLOCKS, values + q * WIDEST_BLOCK * PANEL, panels[q], k, inputs)
        const Sums to = {sums.to, sums.apart, k == 0, k + step < map.inputs ? Results{} : sums.results};
        tiles<Q, float>(to, rows, x, stride, (const float*)values, WIDEST_BLOCK * PANEL, (const float*)values, inputs, nullptr, nullptr);
    }
}

}  // namespace
