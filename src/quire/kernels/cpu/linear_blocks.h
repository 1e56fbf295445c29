// What BLOCKS (linear.h) stand for. A weight is the float32 nearest to number * scale - minimum, as the file's format defines it: products
// and sums are exact before the last one is rounded, so that it makes no difference whether a compiler fuses them.
//
// WIDE: there are the instructions of AVX-512; PAIRS: those for bfloat16 (AVX512-BF16).

#pragma once

namespace {

// -- numbers of a group ------------------------------------------------------------------------------------------------

typedef Several<uint8_t> SmallBytes;
typedef Several<int8_t> SmallInts;
typedef Several<int16_t> SmallShorts;

#ifdef WIDE
INLINE Lanes from_halves(const uint8_t* from) { return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
INLINE Bits bytes_of(const uint8_t* from) { return (Bits)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
INLINE Lanes from_ints(const uint8_t* from) { return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from))); }
INLINE Lanes from_counts(Bits counts) { return (Lanes)_mm512_cvtepi32_ps((__m512i)counts); }
INLINE Lanes from_floats8(const uint8_t* from) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
    return (Lanes)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff)));
}
#elif REGISTER == 32
INLINE Lanes from_halves(const uint8_t* from) {
    const auto of = [](const uint8_t* half) { return (Lanes::Half)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)half)); };
    return {of(from), of(from + LANES)};
}
INLINE Bits bytes_of(const uint8_t* from) {
    const auto of = [](const uint8_t* half) { return (Bits::Half)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)half)); };
    return {of(from), of(from + LANES / 2)};
}
INLINE Lanes from_ints(const uint8_t* from) {
    const auto of = [](const uint8_t* half) {
        return (Lanes::Half)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)half)));
    };
    return {of(from), of(from + LANES / 2)};
}
INLINE Lanes from_counts(Bits counts) { return converted<Lanes>((Ints)counts); }
INLINE Lanes from_floats8(const uint8_t* from) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
    return {(Lanes::Half)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), (Lanes::Half)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
#else
// Of the bits of float16 numbers.
INLINE Lanes of_halves(Bits bits) {
    const Bits size = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
    // A small one's leading bit is added and taken away again; no step has a number below 2^-126.
    const Lanes usual = (Lanes)(size + (112u << 23)), small = (Lanes)(size + (113u << 23)) - 0x1p-14f;
    return (Lanes)((Bits)chosen((Bits)((Ints)(size - (1u << 23)) >> 31), small, usual) | sign);
}
INLINE Lanes from_halves(const uint8_t* from) { return of_halves(converted<Bits>(loaded<Halves>(from))); }
// In two steps: GCC 12 takes a conversion to four times the size apart into single numbers.
INLINE Bits bytes_of(const uint8_t* from) { return converted<Bits>(converted<Halves>(loaded<SmallBytes>(from))); }
INLINE Lanes from_counts(Bits counts) { return converted<Lanes>((Ints)counts); }
INLINE Lanes from_floats8(const uint8_t* from) {
    const Bits bytes = bytes_of(from);
    return of_halves((bytes & 0x80u) << 8 | (bytes & 0x7fu) << 7);
}
INLINE Lanes from_ints(const uint8_t* from) {
    return converted<Lanes>(converted<Ints>(converted<SmallShorts>(loaded<SmallInts>(from))));
}
#endif

// Numbers of codes that are bytes; those of F8_E4M3 are divided by F8_FACTOR.
template <int KIND>
INLINE Lanes from_bytes(const uint8_t* from) {
    return KIND == F8_E4M3 ? from_floats8(from) : from_ints(from);
}

#if REGISTER == 32
// Byte FROM of each word as byte TO of it, beside zeros.
template <int FROM, int TO>
INLINE Bits moved_byte(Bits words) {
    if constexpr (TO == 0 && FROM == 0) return words & 255u;
    if constexpr (TO == 0 && FROM == 3) return words >> 24u;
    const auto place = [](int word) { return (int)((uint32_t)(4 * word + FROM) << 8 * TO | ~(255u << 8 * TO)); };
    const __m256i places = _mm256_broadcastsi128_si256(_mm_setr_epi32(place(0), place(1), place(2), place(3)));
    return {(Bits::Half)_mm256_shuffle_epi8((__m256i)words.low, places), (Bits::Half)_mm256_shuffle_epi8((__m256i)words.high, places)};
}

template <int UP, typename W>
INLINE W shifted(W words) {
    if constexpr (UP >= 0) return words << (uint32_t)UP;
    return words >> (uint32_t)-UP;
}

// Codes of four bits and more as bytes, since an instruction makes four times as many of them as of words: inputs 0, 4, 1, 5 of an
// output's eight, or (SECOND) 2, 6, 3, 7. ``above``: the words of high bits, of which DOWN belong to earlier inputs.
template <int KIND, int SECOND, int DOWN = 0, typename W>
INLINE W code_bytes(W words, W above) {
    constexpr int HIGH = BLOCK_SHAPES[KIND].high, UP = 4 - HIGH * SECOND - DOWN;
    constexpr uint32_t MASK = 0x00100010u * ((1 << HIGH) - 1);
    W code = shifted<-4 * SECOND>(words) & 0x0f0f0f0fu;
    if constexpr (HIGH > 0) code |= (shifted<UP>(above) & MASK) | (shifted<UP + 8 - 2 * HIGH>(above) & MASK << 8);
    return code;
}

// table[byte] of 16 bytes.
INLINE Bits looked_up_bytes(const int8_t* table, Bits bytes) {
    const __m256i found = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
    return {(Bits::Half)_mm256_shuffle_epi8(found, (__m256i)bytes.low), (Bits::Half)_mm256_shuffle_epi8(found, (__m256i)bytes.high)};
}
#endif

// table[code] of 16 numbers.
#if REGISTER == 32
INLINE Lanes looked_up(const float* table, Bits code) {
    const __m256 low = _mm256_load_ps(table), high = _mm256_load_ps(table + 8);
    const auto of = [&](__m256i half) {
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(half, 28));  // whose sign is the highest bit of the code
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, half), _mm256_permutevar8x32_ps(high, half), upper);
    };
    return {(Lanes::Half)of((__m256i)code.low), (Lanes::Half)of((__m256i)code.high)};
}
#else
template <typename V = Lanes, typename W>
INLINE V looked_up(const float* table, W code) {
    if constexpr (is_two<V>) {
        return {looked_up<typename V::Half>(table, code.low), looked_up<typename V::Half>(table, code.high)};
    } else {
        V found;
        for (int lane = 0; lane < (int)(sizeof(V) / 4); lane++) found[lane] = table[code[lane]];
        return found;
    }
}
#endif

// 2^(byte - 128)
INLINE Lanes from_powers(const uint8_t* from) {
    const Bits bytes = bytes_of(from);
    return (Lanes)chosen((Bits)((Ints)(bytes - 2u) >> 31), (Bits{} + 0x200000u) << (bytes & 1u), (bytes - 1u) << 23);
}

// Numbers of codes by their lowest four or five bits; what is above a shorter code makes no difference.
template <int KIND>
struct NumberTable {
    float of[32];
    constexpr NumberTable() : of() {
        const int bits = BLOCK_SHAPES[KIND].low + BLOCK_SHAPES[KIND].high;
        for (int code = 0; code < 32; code++) of[code] = block_number(KIND, code & ((bits < 5 ? 1 << bits : 32) - 1));
    }
};
template <int KIND>
alignas(64) constexpr NumberTable<KIND> number_table;

// The same of codes of four bits, as bytes.
template <int KIND>
struct ByteTable {
    int8_t of[16];
    constexpr ByteTable() : of() {
        for (int code = 0; code < 16; code++) of[code] = (int8_t)block_number(KIND, code);
    }
};
template <int KIND>
alignas(16) constexpr ByteTable<KIND> byte_table;

// Where a number is the code itself, the offset of codes times the scale is subtracted behind the product, as minima are. All of these
// products are exact.
template <int KIND>
constexpr bool PLAIN_CODES = REGISTER < 64 && KIND < IQ4_NL && BLOCK_SHAPES[KIND].offset != 0;

// Numbers of codes, eight inputs of an output at a time.
template <int KIND>
struct Numbers {
    static constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    struct Codes {
        Bits first, second;
    };
#if REGISTER == 32
    static constexpr bool ARE_BYTES = SHAPE.low == 4;
    static __attribute__((always_inline)) Codes codes(Bits words, Bits above) {
        if constexpr (ARE_BYTES) return {bytes<0>(words, above), bytes<1>(words, above)};
        return {words, above};
    }
    template <int SECOND>
    static __attribute__((always_inline)) Bits bytes(Bits words, Bits above) {
        const Bits code = code_bytes<KIND, SECOND>(words, above);
        if constexpr (KIND >= IQ4_NL) return looked_up_bytes(byte_table<KIND>.of, code);
        return code;
    }
#else
    static __attribute__((always_inline)) Codes codes(Bits words, Bits above) { return {words, above}; }
#endif
#ifdef WIDE
    __m512 low, high;
    __attribute__((always_inline)) Numbers() : low(_mm512_load_ps(number_table<KIND>.of)), high(_mm512_load_ps(number_table<KIND>.of + 16)) {}
    // Input I of eight.
    template <int I>
    __attribute__((always_inline)) Lanes of(const Codes& from) const {
        const __m512i code = (__m512i)(from.first >> (16 * (I % 2) + SHAPE.low * (I / 2)));
        if constexpr (!SHAPE.high) return (Lanes)_mm512_permutexvar_ps(code, low);
        constexpr int UP = SHAPE.low - 16 * (I % 2) - SHAPE.high * (I / 2);
        const __m512i bits = (__m512i)(UP > 0 ? from.second << (UP > 0 ? UP : 0) : from.second >> (UP > 0 ? 0 : -UP));
        // The low bits of the one, the others of the other.
        const __m512i all = _mm512_ternarylogic_epi32(_mm512_set1_epi32((1 << SHAPE.low) - 1), code, bits, 0xca);
        if constexpr (SHAPE.low + SHAPE.high <= 4) return (Lanes)_mm512_permutexvar_ps(all, low);
        if constexpr (SHAPE.low + SHAPE.high == 5) return (Lanes)_mm512_permutex2var_ps(low, all, high);
        // (code & 63) | 2^23 is 2^23 + code as a float.
        const __m512i whole = _mm512_ternarylogic_epi32(all, _mm512_set1_epi32(63), _mm512_set1_epi32(0x4b000000), 0xea);
        return (Lanes)_mm512_castsi512_ps(whole) - (8388608.0f + SHAPE.offset);
    }
#else
    template <int I>
    __attribute__((always_inline)) Lanes of(const Codes& from) const {
        Bits code;
#if REGISTER == 32
        if constexpr (ARE_BYTES) {
            constexpr int BYTE = I % 2 * 2 + I / 4;
            const Bits four = I / 2 % 2 ? from.second : from.first;
            if constexpr (KIND >= IQ4_NL) return converted<Lanes>((Ints)moved_byte<BYTE, 3>(four) >> 24);
            code = moved_byte<BYTE, 0>(four);
        } else
#endif
        {
            code = from.first >> (16 * (I % 2) + SHAPE.low * (I / 2)) & ((1u << SHAPE.low) - 1);
            if constexpr (SHAPE.high > 0) {
                constexpr int UP = SHAPE.low - 16 * (I % 2) - SHAPE.high * (I / 2);
                constexpr uint32_t MASK = ((1u << SHAPE.high) - 1) << SHAPE.low;
                if constexpr (UP > 0)
                    code |= from.second << UP & MASK;
                else
                    code |= from.second >> -UP & MASK;
            }
        }
        if constexpr (KIND < IQ4_NL) return from_counts(PLAIN_CODES<KIND> ? code : code - (uint32_t)SHAPE.offset);
        return looked_up(number_table<KIND>.of, code);
    }
#endif
};

// Calls use.template at<I>(k, n, weights) for inputs k + I of the group, k = 0, 8, 16, 24, in order; n: one of V vectors of outputs.
template <int KIND, int I, int V, typename USE>
INLINE void eight_weights(USE& use, int64_t k, const Numbers<KIND>& numbers, const uint8_t* bytes,
                          const typename Numbers<KIND>::Codes (&codes)[V], const Lanes (&scale)[V], const Lanes (&minimum)[V]) {
    if constexpr (I < 8) {
        for (int n = 0; n < V; n++) {
            Lanes number;
            if constexpr (BLOCK_SHAPES[KIND].low == 8)
                number = from_bytes<KIND>(bytes + (k + I) * PANEL + n * LANES);
            else
                number = numbers.template of<I>(codes[n]);
            if constexpr (BLOCK_SHAPES[KIND].has_minima || PLAIN_CODES<KIND>)
                use.template at<I>(k, n, number * scale[n] - minimum[n]);
            else
                use.template at<I>(k, n, number * scale[n]);
        }
        eight_weights<KIND, I + 1, V>(use, k, numbers, bytes, codes, scale, minimum);
    }
}

// The scales of a group, or of half of one.
template <int KIND, int V>
INLINE void read_scales(Lanes (&scale)[V], Lanes (&minimum)[V], const uint8_t* scales, const uint8_t* head, int half) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    for (int n = 0; n < V; n++) {
        if constexpr (KIND == MXFP4) {
            scale[n] = from_powers(scales + n * LANES);
        } else if constexpr (KIND == NVFP4) {
            const Lanes found = from_floats8(scales + half * PANEL + n * LANES) * F8_FACTOR;
            scale[n] = found * loaded<Lanes>(head + 4 * n * LANES) + found * loaded<Lanes>(head + 4 * (PANEL + n * LANES));
        } else if constexpr (KIND == F8_E4M3) {
            scale[n] = loaded<Lanes>(scales + 4 * n * LANES) * F8_FACTOR;
        } else if constexpr (!SHAPE.units) {
            scale[n] = from_halves(scales + 2 * n * LANES);
            if constexpr (SHAPE.has_minima) minimum[n] = -from_halves(scales + 2 * PANEL + 2 * n * LANES);
        } else {
            const uint8_t* from = scales + (SHAPE.is_halved ? half * PANEL : 0) + n * LANES;
            const Lanes unit = from_halves(head + 2 * n * LANES);
            if constexpr (!SHAPE.has_minima) {
                scale[n] = unit * from_ints(from);
            } else {
                const Lanes minima = from_halves(head + 2 * PANEL + 2 * n * LANES);
                const Bits both = bytes_of(from);
                scale[n] = unit * from_counts(KIND == Q2_K ? both & 15u : both);
                minimum[n] = minima * from_counts(KIND == Q2_K ? both >> 4 : bytes_of(from + PANEL));
            }
        }
        if constexpr (PLAIN_CODES<KIND>) minimum[n] = scale[n] * (float)SHAPE.offset;
    }
}

// V vectors of outputs of a group, from vector ``first`` on.
template <int KIND, int V, typename USE>
INLINE void each_weight(const uint8_t* panel, int64_t group, int first, USE&& use) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    const Numbers<KIND> numbers;
    const uint8_t *from = panel + SHAPE.group(group), *codes = from + first * (SHAPE.low == 8 ? LANES : 64);
    const uint8_t *high = from + SHAPE.codes_size() + first * 64;
    const uint8_t* scales = from + SHAPE.codes_size() + SHAPE.high_size() + first * LANES * SHAPE.scale_bytes();
    const uint8_t* head = panel + SHAPE.head(group) + (SHAPE.row ? 4 : 2) * first * LANES;
    if (first == 0)
        for (int64_t byte = 0; byte < SHAPE.group_size(); byte += 64) __builtin_prefetch(from + byte + AHEAD, 0, 3);
    Lanes scale[V] = {}, minimum[V] = {};
    if constexpr (!SHAPE.is_halved) read_scales<KIND, V>(scale, minimum, scales, head, 0);
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        if constexpr (SHAPE.is_halved)
            if (j % 2 == 0) read_scales<KIND, V>(scale, minimum, scales, head, j / 2);
        typename Numbers<KIND>::Codes read[V];
        for (int n = 0; n < V; n++) {
            Bits words = {}, above = {};
            if constexpr (SHAPE.low == 4) words = loaded<Bits>(codes + (2 * j + n) * 64);
            if constexpr (SHAPE.low == 2) words = loaded<Bits>(codes + (j / 2 * 2 + n) * 64) >> (uint32_t)(j % 2 * 8);
            if constexpr (SHAPE.high == 2) above = loaded<Bits>(high + (j / 2 * 2 + n) * 64) >> (uint32_t)(j % 2 * 8);
            if constexpr (SHAPE.high == 1) above = loaded<Bits>(high + n * 64) >> (uint32_t)(4 * j);
            read[n] = numbers.codes(words, above);
        }
        eight_weights<KIND, 0, V>(use, 8 * j, numbers, codes, read, scale, minimum);
    }
}

// -- weights in a cache ------------------------------------------------------------------------------------------------

// Vectors of outputs whose weights are made together.
constexpr int BLOCK_VECTORS = REGISTER == 64 ? 2 : 1;

// As FLOAT32 lies in a panel.
struct WriteFloats {
    float* to;
    template <int I>
    __attribute__((always_inline)) void at(int64_t k, int n, Lanes weights) { store(to + (k + I) * PANEL + n * LANES, weights); }
};

template <int KIND>
__attribute__((noinline)) void expand_kind(float* to, const uint8_t* panel, int64_t first, int64_t inputs) {
    for (int64_t k = 0; k < inputs; k += BLOCK_GROUP)
        for (int n = 0; n < 2; n += BLOCK_VECTORS)
            each_weight<KIND, BLOCK_VECTORS>(panel, (first + k) / BLOCK_GROUP, n, WriteFloats{to + k * PANEL + n * LANES});
}

// Calls function(kind, ...) with a kind that the compiler knows.
#define OF_KIND(kind, function, ...)                     \
    switch (kind) {                                      \
        case Q4_0: function(Q4_0, __VA_ARGS__); break;   \
        case Q4_1: function(Q4_1, __VA_ARGS__); break;   \
        case Q5_0: function(Q5_0, __VA_ARGS__); break;   \
        case Q5_1: function(Q5_1, __VA_ARGS__); break;   \
        case Q8_0: function(Q8_0, __VA_ARGS__); break;   \
        case Q2_K: function(Q2_K, __VA_ARGS__); break;   \
        case Q3_K: function(Q3_K, __VA_ARGS__); break;   \
        case Q4_K: function(Q4_K, __VA_ARGS__); break;   \
        case Q5_K: function(Q5_K, __VA_ARGS__); break;   \
        case Q6_K: function(Q6_K, __VA_ARGS__); break;   \
        case IQ4_NL: function(IQ4_NL, __VA_ARGS__); break; \
        case IQ4_XS: function(IQ4_XS, __VA_ARGS__); break; \
        case MXFP4: function(MXFP4, __VA_ARGS__); break; \
        case NVFP4: function(NVFP4, __VA_ARGS__); break; \
        default: function(F8_E4M3, __VA_ARGS__);         \
    }
#define EXPAND_KIND(KIND, ...) expand_kind<KIND>(__VA_ARGS__)

// Write the weights of so many inputs of a panel, from ``first`` on, which a group begins.
INLINE void expand_blocks(float* to, const Linear& map, int64_t panel, int64_t first, int64_t inputs) {
    const uint8_t* from = panel_place(map, panel);
    OF_KIND(block_part(map, panel).kind, EXPAND_KIND, to, from, first, inputs)
}

}  // namespace
