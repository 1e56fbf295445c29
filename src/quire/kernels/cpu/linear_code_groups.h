// Products of codes (INT8, INT4, BLOCKS) and rows of bfloat16: how codes become pairs of bfloat16, which is without loss, and how a call
// goes through its panels. Sums of the inputs that share a scale, times the scale, are added in float32. So no weight is rounded. An
// output's sum is made scale by scale, from the first to the last, whatever other rows there are.

#pragma once

#include "linear_blocks.h"
#include "linear_codes.h"
#include "linear_outputs.h"

namespace {

// Most inputs that many rows meet at a time: their part of a panel stays in the first cache.
constexpr int64_t NEAR_INPUTS = 512;
// Panels that follow each other meanwhile, so that these inputs of the rows stay in the second.
constexpr int64_t NEAR_PANELS = 8;
// Rows behind the last one whose totals a block of rows may read, without use.
constexpr int64_t UNUSED_ROWS = 15;

// -- pairs of a group of 32 inputs -------------------------------------------------------------------------------------

// What reads codes: a Kind, or one of these.
enum Source { CODES_OF_8 = F8_E4M3 + 1, CODES_OF_4 };

constexpr bool is_kind(int source) { return source <= F8_E4M3; }
// Inputs of a tile's step; not more than share a scale.
constexpr int step_of(int source) { return is_kind(source) && BLOCK_SHAPES[source].is_halved ? 16 : 32; }
constexpr bool has_minima(int source) { return is_kind(source) && BLOCK_SHAPES[source].has_minima; }

#ifdef PAIRS
// Numbers of codes of up to six bits as bfloat16. A look-up ignores the bits above.
template <int KIND>
struct PairTable {
    uint16_t of[64];
    constexpr PairTable() : of() {
        const int bits = BLOCK_SHAPES[KIND].low + BLOCK_SHAPES[KIND].high;
        for (int code = 0; code < 64; code++) of[code] = (uint16_t)bfloat16_bits((int)block_number(KIND, code & ((1 << bits) - 1)));
    }
    // Of a whole number of up to eight bits.
    static constexpr uint32_t bfloat16_bits(int number) {
        const uint32_t sign = number < 0 ? 0x8000u : 0;
        uint32_t size = number < 0 ? (uint32_t)-number : (uint32_t)number, exponent = 127 + 7;
        if (!size) return 0;
        while (size < 128) size <<= 1, exponent--;
        return sign | exponent << 7 | (size & 127);
    }
};
template <int KIND>
alignas(64) constexpr PairTable<KIND> pair_table;
#endif

template <int KIND>
INLINE void fetch_ahead(const uint8_t* codes) {
    for (int64_t byte = 0; byte < BLOCK_SHAPES[KIND].group_size(); byte += 64) __builtin_prefetch(codes + byte + AHEAD, 0, 3);
}

// Calls use.template at<P>(n, pairs) for inputs 2P and 2P + 1 of a group, P from FIRST to END - 1 in order, and halves n of the
// outputs, or use.template floats<P>(n, even, odd).
template <int SOURCE>
struct CodeReader {
    static constexpr BlockShape SHAPE = BLOCK_SHAPES[SOURCE];
#ifdef PAIRS
    __m512i low, high;
    __attribute__((always_inline)) CodeReader() : low(_mm512_load_si512(pair_table<SOURCE>.of)), high(_mm512_load_si512(pair_table<SOURCE>.of + 32)) {}
    template <int P>
    __attribute__((always_inline)) Bits pairs(const uint8_t* codes, int n) const {
        constexpr int LOW = SHAPE.low, HIGH = SHAPE.high, EACH = 16 / LOW, UP = HIGH ? LOW - P % (16 / (HIGH ? HIGH : 1)) * HIGH : 0;
        __m512i code = _mm512_srli_epi16(_mm512_loadu_si512(codes + (P / EACH * 2 + n) * 64), P % EACH * LOW);
        if constexpr (HIGH > 0) {
            const __m512i above = _mm512_loadu_si512(codes + SHAPE.codes_size() + (P * HIGH / 16 * 2 + n) * 64);
            const __m512i bits = UP > 0 ? _mm512_slli_epi16(above, UP > 0 ? UP : 0) : _mm512_srli_epi16(above, UP > 0 ? 0 : -UP);
            code = _mm512_ternarylogic_epi32(_mm512_set1_epi16((1 << LOW) - 1), code, bits, 0xca);
        }
        if constexpr (LOW + HIGH <= 5) return (Bits)_mm512_permutexvar_epi16(code, low);
        return (Bits)_mm512_permutex2var_epi16(low, code, high);
    }
#else
    Numbers<SOURCE> numbers;
    template <int P>
    __attribute__((always_inline)) Bits pairs(const uint8_t* codes, int n) const {
        constexpr int J = P / 4, I = P % 4 * 2;
        const uint8_t* above = codes + SHAPE.codes_size();
        const Bits words = SHAPE.low == 4 ? loaded<Bits>(codes + (2 * J + n) * 64) : loaded<Bits>(codes + (J / 2 * 2 + n) * 64) >> (uint32_t)(J % 2 * 8);
        Bits bits = {};
        if (SHAPE.high == 2) bits = loaded<Bits>(above + (J / 2 * 2 + n) * 64) >> (uint32_t)(J % 2 * 8);
        if (SHAPE.high == 1) bits = loaded<Bits>(above + n * 64) >> (uint32_t)(4 * J);
        const auto found = numbers.codes(words, bits);
        return in_pairs(numbers.template of<I>(found), numbers.template of<I + 1>(found));
    }
#endif
    template <int FIRST = 0, int END = 16, typename USE>
    __attribute__((always_inline)) void read(const uint8_t* codes, USE&& use) const {
        if (FIRST == 0) fetch_ahead<SOURCE>(codes);
        each<FIRST, END>(codes, use);
    }
    template <int P, int END, typename USE>
    __attribute__((always_inline)) void each(const uint8_t* codes, USE& use) const {
        if constexpr (P < END) {
            use.template at<P>(0, pairs<P>(codes, 0)), use.template at<P>(1, pairs<P>(codes, 1));
            each<P + 1, END>(codes, use);
        }
    }
};

template <int KIND>
struct ByteReader {
    template <int FIRST = 0, int END = 16, typename USE>
    __attribute__((always_inline)) void read(const uint8_t* codes, USE&& use) const {
        if (FIRST == 0) fetch_ahead<KIND>(codes);
        each<FIRST, END>(codes, use);
    }
    template <int P, int END, typename USE>
    __attribute__((always_inline)) void each(const uint8_t* codes, USE& use) const {
        if constexpr (P < END) {
            const uint8_t *even = codes + 2 * P * PANEL, *odd = even + PANEL;
            use.template floats<P>(0, from_bytes<KIND>(even), from_bytes<KIND>(odd));
            use.template floats<P>(1, from_bytes<KIND>(even + LANES), from_bytes<KIND>(odd + LANES));
            each<P + 1, END>(codes, use);
        }
    }
};
template <>
struct CodeReader<Q8_0> : ByteReader<Q8_0> {
    __attribute__((always_inline)) CodeReader() {}
};
template <>
struct CodeReader<F8_E4M3> : ByteReader<F8_E4M3> {
    __attribute__((always_inline)) CodeReader() {}
};

template <int FORM>
struct FormReader {
    static constexpr int INPUTS = PairCodes<FORM>::INPUTS;
    PairCodes<FORM> codes;
    __attribute__((always_inline)) FormReader() {}
    template <typename USE>
    __attribute__((always_inline)) void read(const uint8_t* from, USE&& use) const {
        each<0>(from, use);
    }
    template <int P, typename USE>
    __attribute__((always_inline)) void each(const uint8_t* from, USE& use) const {
        if constexpr (P < 16) {
            for (int n = 0; n < 2; n++, from += 64) {
                Bits pairs[INPUTS / 2];
                codes.read(from, pairs);
                __builtin_prefetch(from + AHEAD, 0, 3);
                use.template at<P>(n, pairs[0]), use.template at<P + 1>(n, pairs[1]);
                if constexpr (INPUTS == 8) use.template at<P + 2>(n, pairs[2]), use.template at<P + 3>(n, pairs[3]);
            }
            each<P + INPUTS / 2>(from, use);
        }
    }
};
template <>
struct CodeReader<CODES_OF_8> : FormReader<INT8> {
    __attribute__((always_inline)) CodeReader() {}
};
template <>
struct CodeReader<CODES_OF_4> : FormReader<INT4> {
    __attribute__((always_inline)) CodeReader() {}
};

// A panel's codes and scales.
template <int SOURCE>
struct CodePanel {
    const uint8_t* panel;
    const bfloat16* scales;  // of INT8 and INT4
    int64_t shared;          // inputs of a scale
    __attribute__((always_inline)) CodePanel(const Linear& map, int64_t number)
        : panel(panel_place(map, number)), scales(map.scales + (is_kind(SOURCE) ? 0 : number * (map.inputs / map.group) * PANEL)),
          shared(is_kind(SOURCE) ? step_of(SOURCE) : map.group) {}
    __attribute__((always_inline)) const uint8_t* codes(int64_t group) const {
        if constexpr (is_kind(SOURCE)) return panel + BLOCK_SHAPES[SOURCE].group(group);
        return panel + group * (SOURCE == CODES_OF_8 ? 32 : 16) * PANEL;
    }
    // Of the scale of a group's inputs from 16 * half on.
    __attribute__((always_inline)) void scale(Lanes (&scale)[2], Lanes (&minimum)[2], int64_t group, int half) const {
        if constexpr (is_kind(SOURCE)) {
            constexpr BlockShape SHAPE = BLOCK_SHAPES[SOURCE];
            read_scales<SOURCE>(scale, minimum, codes(group) + SHAPE.codes_size() + SHAPE.high_size(), panel + SHAPE.head(group), half);
        } else {
            for (int n = 0; n < 2; n++) scale[n] = wide(scales + group * 32 / shared * PANEL + n * LANES);
        }
    }
};

// -- sums and scales -----------------------------------------------------------------------------------------------------

// Sum and product are rounded once, also where a compiler would not fuse them.
#ifdef WIDE
INLINE Lanes plus_product(Lanes sum, Lanes value, Lanes factor) { return (Lanes)_mm512_fmadd_ps((__m512)value, (__m512)factor, (__m512)sum); }
#else
INLINE Lanes plus_product(Lanes sum, Lanes value, Lanes factor) { return sum + value * factor; }
#endif

// -- pairs in a cache ----------------------------------------------------------------------------------------------------

// Of some inputs of a panel, for all rows: pairs, and a line of scales and of minima for all that share one.
struct Expanded {
    bfloat16* pairs;
    float *scales, *minima;
};

struct WriteCodes {
    bfloat16* to;
    template <int P>
    __attribute__((always_inline)) void at(int n, Bits pairs) { store(to + 2 * P * PANEL + 2 * n * LANES, pairs); }
    template <int P>
    __attribute__((always_inline)) void floats(int n, Lanes even, Lanes odd) { at<P>(n, in_pairs(even, odd)); }
};

template <int SOURCE>
__attribute__((noinline)) void expand_codes(const Expanded& to, const Linear& map, int64_t number, int64_t first, int64_t inputs) {
    const CodePanel<SOURCE> panel(map, number);
    const CodeReader<SOURCE> reader;
    constexpr int HALVES = 32 / step_of(SOURCE);
    int64_t line = 0;
    for (int64_t k = 0; k < inputs; k += 32) {
        const int64_t group = (first + k) / 32;
        reader.read(panel.codes(group), WriteCodes{to.pairs + k * PANEL});
        if (k * HALVES % panel.shared) continue;
        for (int half = 0; half < HALVES; half++, line += PANEL) {
            Lanes scale[2], minimum[2];
            panel.scale(scale, minimum, group, half);
            for (int n = 0; n < 2; n++) {
                store(to.scales + line + n * LANES, scale[n]);
                if (has_minima(SOURCE)) store(to.minima + line + n * LANES, minimum[n]);
            }
        }
    }
}

// What is multiplied then: a row's inputs from some on, the pairs of a panel, lines of scales and minima, and totals of these inputs.
struct CodeBlock {
    const char* x;
    int64_t stride;  // bytes from row to row
    const char* w;
    const float *scales, *minima, *totals;
    int64_t totals_stride, inputs, shared;
};

// -- items ---------------------------------------------------------------------------------------------------------------

INLINE int source_of(const Linear& map, int64_t panel) {
    return map.form == BLOCKS ? (int)block_part(map, panel).kind : map.form == INT8 ? CODES_OF_8 : CODES_OF_4;
}

// Rows of a call, and what is made of them once for all panels.
struct CodeRows {
    int64_t rows;
    const char* x;    // bfloat16
    int64_t stride;   // bytes from row to row
    float* wide;      // [inputs], of one row
    float* totals[2];   // [rows][inputs / 32] and [rows][inputs / 16]: sums of the inputs that share a minimum
    float* sums;        // [NEAR_PANELS][call.tile_rows][PANEL]
    Expanded room;
};

// What all panels share.
INLINE void read_code_rows(const Linear& map, const CodeRows& of, bool in_floats, bool in_32, bool in_16) {
    for (int64_t m = 0; m < of.rows; m++) {
        const bfloat16* const x = (const bfloat16*)(of.x + m * of.stride);
        if (in_floats)
            for (int64_t k = 0; k < map.inputs; k++) of.wide[k] = wide_one(x + k);
        if (in_32 || in_16)
            for (int64_t k = 0; k < map.inputs; k += 32) {
                const Lanes first = wide(x + k), second = wide(x + k + LANES);
                if (in_32) of.totals[0][(m * map.inputs + k) / 32] = total(first + second);
                if (in_16) of.totals[1][(m * map.inputs + k) / 16] = total(first), of.totals[1][(m * map.inputs + k) / 16 + 1] = total(second);
            }
    }
}

#define SUM_CODES(SOURCE, ...) way.template sum<SOURCE>(__VA_ARGS__)

// Way: how sums of up to NEAR_PANELS panels of one source are made. IS_OF_BLOCKS: not those of INT8 and INT4, nor of floats of one row.
template <class Way>
INLINE void run_codes(LinearCall& call, int64_t thread) {
    static thread_local Room room;
    const Linear& map = *call.map;
    const int64_t panels = (map.outputs + PANEL - 1) / PANEL;
    bool in_32 = false, in_16 = false;
    for (int64_t part = 0; map.form == BLOCKS && part < map.num_block_parts; part++) {
        const BlockShape& shape = BLOCK_SHAPES[map.block_parts[part].kind];
        (shape.is_halved ? in_16 : in_32) |= shape.has_minima;
    }
    constexpr int64_t PAIRS_SIZE = NEAR_INPUTS / 2 * PANEL, LINES = NEAR_INPUTS / 16 * PANEL;
    const int64_t sums = NEAR_PANELS * call.tile_rows * PANEL, wide = map.inputs, totals = (call.tile_rows + UNUSED_ROWS) * map.inputs / 16;
    float* const place = room.of(PAIRS_SIZE + 2 * LINES + sums + wide + 2 * totals);
    if (!place) {
        call.failed = 1;
        return;
    }
    float *const lines = place + PAIRS_SIZE, *const end = lines + 2 * LINES + sums;
    CodeRows of = {0, nullptr, call.x_stride * (int64_t)sizeof(bfloat16), end, {end + wide, end + wide + totals}, lines + 2 * LINES,
                   {(bfloat16*)place, lines, lines + LINES}};
    Way way;
    int64_t read = -1;
    Turn turn(call, thread);
    for (int64_t item; (item = turn.next()) >= 0;) {
        const int64_t part = item % call.parts, first = item / call.parts * call.tile_rows;
        of.rows = call.rows - first < call.tile_rows ? call.rows - first : call.tile_rows;
        of.x = (const char*)call.x + first * of.stride;
        if (read != first) read_code_rows(map, of, !Way::IS_OF_BLOCKS && of.rows == 1, in_32, in_16), read = first;
        const int64_t stop = panels * (part + 1) / call.parts;
        for (int64_t panel = panels * part / call.parts, count; panel < stop; panel += count) {
            const int source = source_of(map, panel);
            for (count = 1; count < NEAR_PANELS && panel + count < stop && source_of(map, panel + count) == source;) count++;
            if (is_kind(source)) {
                OF_KIND(source, SUM_CODES, call, of, panel, count)
            } else if constexpr (!Way::IS_OF_BLOCKS) {
                if (source == CODES_OF_8)
                    SUM_CODES(CODES_OF_8, call, of, panel, count);
                else
                    SUM_CODES(CODES_OF_4, call, of, panel, count);
            }
            for (int64_t q = 0; q < count; q++) put_rows<bfloat16>(call, panel + q, first, of.rows, of.sums + q * call.tile_rows * PANEL);
        }
        __atomic_fetch_add(&call.done, 1, __ATOMIC_RELEASE);
    }
}

}  // namespace

