// What the codes of INT8 and INT4 (linear.h) stand for, without their scale: floats, or pairs of bfloat16.
//
// PAIRS: there are instructions for products of bfloat16 pairs, and those of AVX512-VBMI.

#pragma once

namespace {

typedef Several<uint8_t, 64> Bytes;

// The codes of a vector as two vectors of pairs: a code in the lower byte of each half of 32 bits.
template <typename V, typename W>
INLINE void spread(V from, W* first, W* second) {
#define EIGHT(none, a) a, none, a + 1, none, a + 2, none, a + 3, none, a + 4, none, a + 5, none, a + 6, none, a + 7, none
    if constexpr (is_two<V>) {
        spread(from.low, &first->low, &second->low), spread(from.high, &first->high, &second->high);
    } else if constexpr (sizeof(V) == 64) {
        *first = (W)__builtin_shufflevector(from, V{}, EIGHT(64, 0), EIGHT(64, 16), EIGHT(64, 32), EIGHT(64, 48));
        *second = (W)__builtin_shufflevector(from, V{}, EIGHT(64, 8), EIGHT(64, 24), EIGHT(64, 40), EIGHT(64, 56));
    } else if constexpr (sizeof(V) == 32) {
        *first = (W)__builtin_shufflevector(from, V{}, EIGHT(32, 0), EIGHT(32, 16));
        *second = (W)__builtin_shufflevector(from, V{}, EIGHT(32, 8), EIGHT(32, 24));
    } else {
        *first = (W)__builtin_shufflevector(from, V{}, EIGHT(16, 0));
        *second = (W)__builtin_shufflevector(from, V{}, EIGHT(16, 8));
    }
#undef EIGHT
}

INLINE Lanes value_of_int8(Bits code) {
    Lanes size = converted<Lanes>((Ints)(code & 0x7fu));
    return (Lanes)((Bits)size | ((code & 0x80u) << 24));
}
// Inputs k and k + 1 from pairs of codes: the lower and the upper halves.
template <bool ODD_FIRST>
INLINE void put_int8(float* to, Bits pairs) {
    store(to + ODD_FIRST * PANEL, value_of_int8(pairs & 0xffffu));
    store(to + !ODD_FIRST * PANEL, value_of_int8(pairs >> 16));
}

INLINE Lanes value_of_int4(Bits code) { return converted<Lanes>((Ints)(code & 15u) - 8); }

// to[k][o]: values without scale of so many inputs of a panel; ODD_FIRST: of codes, with each two inputs in the opposite order.
template <int FORM, bool ODD_FIRST = false>
INLINE void widen_panel(float* to, const uint8_t* from, int64_t inputs) {
    if (FORM == BFLOAT16) {
        for (int64_t k = 0; k < inputs; k += 2)
            for (int half = 0; half < 2; half++, from += 64) {
                Bits pairs = loaded<Bits>(from);
                store(to + k * PANEL + half * LANES, (Lanes)(pairs << 16));
                store(to + (k + 1) * PANEL + half * LANES, (Lanes)(pairs & 0xffff0000u));
            }
    } else if (FORM == INT8) {
        for (int64_t k = 0; k < inputs; k += 4)
            for (int half = 0; half < 2; half++, from += 64) {
                Bits first, second;
                float* column = to + k * PANEL + half * LANES;
                spread(loaded<Bytes>(from), &first, &second);
                put_int8<ODD_FIRST>(column, first), put_int8<ODD_FIRST>(column + 2 * PANEL, second);
            }
    } else {
        for (int64_t k = 0; k < inputs; k += 8)
            for (int half = 0; half < 2; half++, from += 64) {
                Bits codes = loaded<Bits>(from);
                for (int i = 0; i < 8; i++)
                    store(to + (k + (i ^ (int)ODD_FIRST)) * PANEL + half * LANES, value_of_int4(codes >> (16 * (i % 2) + 4 * (i / 2))));
            }
    }
}

// Two floats that bfloat16 has exactly, side by side.
INLINE Bits in_pairs(Lanes even, Lanes odd) { return (Bits)even >> 16 | ((Bits)odd & 0xffff0000u); }

// Reads 64 bytes of codes of 16 outputs as pairs of inputs, without scale, which bfloat16 has exactly.
template <int FORM>
struct PairCodes;

#ifdef PAIRS
constexpr uint32_t bfloat16_of(int value) {
    const uint32_t sign = value < 0 ? 0x8000 : 0, size = value < 0 ? -value : value;
    uint32_t exponent = 0;
    while (size >> (exponent + 1)) exponent++;
    return size == 0 ? 0 : sign | (127 + exponent) << 7 | (size << (7 - exponent) & 0x7f);
}

// The bfloat16 of 0..127, byte by byte, and of -8..7, twice. The compiler computes them: what computes when the library is loaded
// runs on every processor, with the instructions of this target.
struct Tables {
    uint8_t low[128] = {}, high[128] = {};
    bfloat16 int4[32] = {};
    constexpr Tables() {
        for (int code = 0; code < 128; code++)
            low[code] = (uint8_t)bfloat16_of(code), high[code] = (uint8_t)(bfloat16_of(code) >> 8);
        for (int code = 0; code < 32; code++) int4[code] = (bfloat16)bfloat16_of(code % 16 - 8);
    }
};
constexpr Tables tables;

template <>
struct PairCodes<INT8> {
    static constexpr int INPUTS = 4;  // of 64 bytes
    __m512i low, low_rest, high, high_rest, sign;
    __attribute__((always_inline)) PairCodes() {
        low = _mm512_loadu_si512(tables.low), low_rest = _mm512_loadu_si512(tables.low + 64);
        high = _mm512_loadu_si512(tables.high), high_rest = _mm512_loadu_si512(tables.high + 64);
        sign = _mm512_set1_epi8((char)0x80);
    }
    __attribute__((always_inline)) void read(const uint8_t* from, Bits (&pairs)[2]) const {
        const __m512i codes = _mm512_loadu_si512(from), lower = _mm512_permutex2var_epi8(low, codes, low_rest);
        const __m512i size = _mm512_permutex2var_epi8(high, codes, high_rest);
        const __m512i upper = _mm512_ternarylogic_epi32(size, codes, sign, 0xf8);  // size | (codes & sign)
        pairs[0] = (Bits)_mm512_unpacklo_epi8(lower, upper), pairs[1] = (Bits)_mm512_unpackhi_epi8(lower, upper);
    }
};

template <>
struct PairCodes<INT4> {
    static constexpr int INPUTS = 8;
    __m512i table;
    __attribute__((always_inline)) PairCodes() { table = _mm512_loadu_si512(tables.int4); }
    // A look-up takes the lowest five bits; the fifth makes no difference.
    __attribute__((always_inline)) void read(const uint8_t* from, Bits (&pairs)[4]) const {
        const __m512i codes = _mm512_loadu_si512(from);
        pairs[0] = (Bits)_mm512_permutexvar_epi16(codes, table);
        pairs[1] = (Bits)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
        pairs[2] = (Bits)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
        pairs[3] = (Bits)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
    }
};
#else
template <>
struct PairCodes<INT8> {
    static constexpr int INPUTS = 4;
    void read(const uint8_t* from, Bits (&pairs)[2]) const {
        spread(loaded<Bytes>(from), pairs, pairs + 1);
        for (Bits& some : pairs) some = in_pairs(value_of_int8(some & 0xffffu), value_of_int8(some >> 16));
    }
};

template <>
struct PairCodes<INT4> {
    static constexpr int INPUTS = 8;
    void read(const uint8_t* from, Bits (&pairs)[4]) const {
        const Bits codes = loaded<Bits>(from);
        for (uint32_t p = 0; p < 4; p++) pairs[p] = in_pairs(value_of_int4(codes >> 4 * p), value_of_int4(codes >> (16 + 4 * p)));
    }
};
#endif

}  // namespace
