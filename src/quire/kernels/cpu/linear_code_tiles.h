// Products of codes (INT8, INT4, BLOCKS) and rows of bfloat16 by tiles. Codes become pairs of bfloat16 without loss. The sum of the
// inputs that share a scale is a tile; sums times scales are added in float32. So no weight is rounded.
//
// An output's sum is made scale by scale, from the first to the last, whatever other rows there are. One row of BLOCKS is multiplied
// without tiles, by the sums that tiles have: of the even and of the odd inputs of a step, which are then added.

#include "linear_codes.h"

namespace {

// Inputs whose pairs are written at a time for rows of one tile: they leave room in the first cache for what comes.
constexpr int64_t FEW_INPUTS = 128;
// Rows whose sums of a panel stay in registers.
constexpr int MOST_FEW = 8;

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

// Calls use.template at<P>(n, pairs) for inputs 2P and 2P + 1 of a group, P = 0 to 15 in order, and halves n of the outputs, or
// use.template floats<P>(n, even, odd).
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
        return in_pairs(numbers.template of<I>(words, bits), numbers.template of<I + 1>(words, bits));
    }
#endif
    template <typename USE>
    __attribute__((always_inline)) void read(const uint8_t* codes, USE&& use) const {
        for (int64_t byte = 0; byte < SHAPE.group_size(); byte += 64) __builtin_prefetch(codes + byte + AHEAD, 0, 3);
        each<0>(codes, use);
    }
    template <int P, typename USE>
    __attribute__((always_inline)) void each(const uint8_t* codes, USE& use) const {
        if constexpr (P < 16) {
            use.template at<P>(0, pairs<P>(codes, 0)), use.template at<P>(1, pairs<P>(codes, 1));
            each<P + 1>(codes, use);
        }
    }
};

template <int KIND>
struct ByteReader {
    template <typename USE>
    __attribute__((always_inline)) void read(const uint8_t* codes, USE&& use) const {
        for (int64_t byte = 0; byte < BLOCK_SHAPES[KIND].group_size(); byte += 64) __builtin_prefetch(codes + byte + AHEAD, 0, 3);
        each<0>(codes, use);
    }
    template <int P, typename USE>
    __attribute__((always_inline)) void each(const uint8_t* codes, USE& use) const {
        if constexpr (P < 16) {
            const uint8_t *even = codes + 2 * P * PANEL, *odd = even + PANEL;
            use.template floats<P>(0, from_bytes<KIND>(even), from_bytes<KIND>(odd));
            use.template floats<P>(1, from_bytes<KIND>(even + LANES), from_bytes<KIND>(odd + LANES));
            each<P + 1>(codes, use);
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

// -- one row -----------------------------------------------------------------------------------------------------------

// Sum and product are rounded once, also where a compiler would not fuse them.
#ifdef WIDE
INLINE Lanes plus_product(Lanes sum, Lanes value, Lanes factor) { return (Lanes)_mm512_fmadd_ps((__m512)value, (__m512)factor, (__m512)sum); }
#else
INLINE Lanes plus_product(Lanes sum, Lanes value, Lanes factor) { return sum + value * factor; }
#endif

// The sums of even and of odd inputs.
struct PairSums {
    const float* x;
    Lanes even[2] = {}, odd[2] = {};
    template <int P>
    __attribute__((always_inline)) void floats(int n, Lanes first, Lanes second) {
        even[n] = plus_product(even[n], first, Lanes{} + x[2 * P]), odd[n] = plus_product(odd[n], second, Lanes{} + x[2 * P + 1]);
    }
    template <int P>
    __attribute__((always_inline)) void at(int n, Bits pairs) { floats<P>(n, (Lanes)(pairs << 16), (Lanes)(pairs & 0xffff0000u)); }
};

// Only eight pairs, from FIRST on.
template <int FIRST>
struct EightPairs {
    PairSums& sums;
    template <int P>
    __attribute__((always_inline)) void at(int n, Bits pairs) {
        if constexpr (P / 8 == FIRST / 8) sums.template at<P>(n, pairs);
    }
};

// sums[o] of a panel. x: floats; totals: sums of the inputs that share a minimum.
template <int SOURCE>
__attribute__((noinline)) void sum_code_row(float* to, const Linear& map, int64_t number, const float* x, const float* totals) {
    constexpr int HALVES = 32 / step_of(SOURCE);
    const CodePanel<SOURCE> panel(map, number);
    const CodeReader<SOURCE> reader;
    Lanes sums[2] = {}, whole[2] = {}, scale[2], minimum[2];
    PairSums pairs{x};
    const auto end_step = [&] {
        for (int n = 0; n < 2; n++) whole[n] = whole[n] + (pairs.even[n] + pairs.odd[n]), pairs.even[n] = pairs.odd[n] = Lanes{};
    };
    const auto add = [&](int64_t group, int half) {
        panel.scale(scale, minimum, group, half);
        for (int n = 0; n < 2; n++) {
            sums[n] = plus_product(sums[n], whole[n], scale[n]), whole[n] = Lanes{};
            if constexpr (has_minima(SOURCE)) sums[n] = plus_product(sums[n], minimum[n], Lanes{} - totals[group * HALVES + half]);
        }
    };
    for (int64_t k = 0; k < map.inputs; k += 32, pairs.x += 32) {
        const uint8_t* const codes = panel.codes(k / 32);
        if constexpr (HALVES == 2) {
            reader.read(codes, EightPairs<0>{pairs}), end_step(), add(k / 32, 0);
            reader.read(codes, EightPairs<8>{pairs}), end_step(), add(k / 32, 1);
        } else {
            reader.read(codes, pairs), end_step();
            if ((k + 32) % panel.shared == 0) add(k / 32, 0);
        }
    }
    for (int n = 0; n < 2; n++) store(to + n * LANES, sums[n]);
}

// -- tiles -------------------------------------------------------------------------------------------------------------

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

// What tiles multiply: a row's inputs from some on, the pairs of a panel, lines of scales and minima, and totals of these inputs.
struct CodeBlock {
    const char* x;
    int64_t stride;  // bytes from row to row
    const char* w;
    const float *scales, *minima, *totals;
    int64_t totals_stride, inputs, shared;
};

// The sums of inputs that share a scale, for H halves of a panel, in tiles G * H to G * H + H - 1.
template <class Tiles, int INPUTS, int H, int G>
INLINE void sum_shared(const CodeBlock& block, int64_t k) {
    const char *x = block.x + 2 * k, *w = block.w + k * PANEL * 2, *const end = x + 2 * block.shared;
    Tiles::template zero<G * H>();
    if constexpr (H > 1) Tiles::template zero<G * H + 1>();
    for (; x < end; x += 2 * INPUTS, w += INPUTS * PANEL * 2) {
        Tiles::template load<4 + G % 2>(x, block.stride);
        Tiles::template load<6 + G * H % 2>(w, LINE);
        Tiles::template add<G * H, 4 + G % 2, 6 + G * H % 2>();
        if constexpr (H > 1) {
            Tiles::template load<7>(w + LINE / 2, LINE);
            Tiles::template add<G * H + 1, 4 + G % 2, 7>();
        }
    }
}

// COUNT of them that follow each other: a tile is multiplied while earlier ones are added.
template <class Tiles, int INPUTS, bool HAS_MINIMA, int M, int H, int COUNT>
INLINE void add_shared(Lanes (&sums)[H][M], float (&room)[4][M * LANES], const CodeBlock& block, int64_t k, int64_t line) {
    sum_shared<Tiles, INPUTS, H, 0>(block, k);
    if constexpr (COUNT > 1) sum_shared<Tiles, INPUTS, H, 1>(block, k + block.shared);
    if constexpr (COUNT > 2) {
        sum_shared<Tiles, INPUTS, H, 2>(block, k + 2 * block.shared);
        sum_shared<Tiles, INPUTS, H, 3>(block, k + 3 * block.shared);
    }
    Tiles::template save<0>(room[0], 64);
    if constexpr (COUNT * H > 1) Tiles::template save<1>(room[1], 64);
    if constexpr (COUNT * H > 2) Tiles::template save<2>(room[2], 64), Tiles::template save<3>(room[3], 64);
    for (int g = 0; g < COUNT; g++)
        for (int h = 0; h < H; h++) {
            const Lanes scale = loaded<Lanes>(block.scales + (line + g) * PANEL + h * LANES);
            const Lanes minimum = HAS_MINIMA ? loaded<Lanes>(block.minima + (line + g) * PANEL + h * LANES) : Lanes{};
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                sums[h][m] = plus_product(sums[h][m], loaded<Lanes>(room[g * H + h] + m * LANES), scale);
                if (HAS_MINIMA) sums[h][m] = plus_product(sums[h][m], minimum, Lanes{} - block.totals[m * block.totals_stride + line + g]);
            }
        }
}

// sums[m][o] of up to M rows and some inputs of a panel, behind those that were summed before.
template <class Tiles, int INPUTS, bool HAS_MINIMA, int M>
__attribute__((noinline)) void code_block(float* to, bool is_first, CodeBlock block, int64_t rows) {
    constexpr int H = M > MOST_FEW ? 1 : 2, COUNT = 4 / H;  // all sums stay in registers
    alignas(64) float room[4][M * LANES];
    if (rows < M) std::memset(room, 0, sizeof(room));  // tiles have fewer rows
    for (int n = 0; n < 2; n += H, to += LANES, block.w += LINE / 2, block.scales += LANES, block.minima += LANES) {
        Lanes sums[H][M];
        for (int h = 0; h < H; h++)
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) sums[h][m] = is_first || m >= rows ? Lanes{} : loaded<Lanes>(to + m * PANEL + h * LANES);
        int64_t k = 0, line = 0;
        for (; k + COUNT * block.shared <= block.inputs; k += COUNT * block.shared, line += COUNT)
            add_shared<Tiles, INPUTS, HAS_MINIMA, M, H, COUNT>(sums, room, block, k, line);
        for (; k < block.inputs; k += block.shared, line++) add_shared<Tiles, INPUTS, HAS_MINIMA, M, H, 1>(sums, room, block, k, line);
        for (int h = 0; h < H; h++)
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
                if (m < rows) store(to + m * PANEL + h * LANES, sums[h][m]);
    }
}

template <class Tiles, int INPUTS, bool HAS_MINIMA, int M = SIDE_ROWS>
INLINE void code_block_of(int64_t rows, float* to, bool is_first, const CodeBlock& block) {
    if constexpr (M > 4)
        if (rows <= M / 2) return code_block_of<Tiles, INPUTS, HAS_MINIMA, M / 2>(rows, to, is_first, block);
    code_block<Tiles, INPUTS, HAS_MINIMA, M>(to, is_first, block, rows);
}

// -- few rows ------------------------------------------------------------------------------------------------------------

// sums[m][o] of up to M rows and a panel. While tiles multiply a group of inputs, the next one is expanded and an earlier one is added.
template <class Tiles, int SOURCE, int M>
__attribute__((noinline)) void few_code_rows(float* to, const Linear& map, int64_t number, const char* x, int64_t stride, const float* totals,
                                             int64_t rows) {
    constexpr int INPUTS = step_of(SOURCE), HALVES = 32 / INPUTS;
    const CodePanel<SOURCE> panel(map, number);
    const CodeReader<SOURCE> reader;
    const int64_t groups = map.inputs / 32, lines = map.inputs / INPUTS;
    alignas(64) bfloat16 pairs[2][32 * PANEL];
    alignas(64) float room[2][2 * HALVES][M * LANES];
    if (rows < M) std::memset(room, 0, sizeof(room));  // tiles have fewer rows
    Lanes sums[2][M] = {};
    const auto expand = [&](int64_t group) { reader.read(panel.codes(group), WriteCodes{pairs[group % 2]}); };
    const auto multiply = [&](int64_t group) {
        const char *from = x + 64 * group, *w = (const char*)pairs[group % 2];
        float(&saved)[2 * HALVES][M * LANES] = room[group % 2];
        if (HALVES == 2 || group * 32 % panel.shared == 0) Tiles::template zero<0>(), Tiles::template zero<1>();
        Tiles::template load<4>(from, stride);
        Tiles::template load<6>(w, LINE), Tiles::template add<0, 4, 6>();
        Tiles::template load<7>(w + LINE / 2, LINE), Tiles::template add<1, 4, 7>();
        if (HALVES == 2 || (group + 1) * 32 % panel.shared == 0) Tiles::template save<0>(saved[0], 64), Tiles::template save<1>(saved[1], 64);
        if constexpr (HALVES == 2) {
            Tiles::template zero<2>(), Tiles::template zero<3>();
            Tiles::template load<5>(from + 2 * INPUTS, stride);
            Tiles::template load<6>(w + INPUTS * PANEL * 2, LINE), Tiles::template add<2, 5, 6>();
            Tiles::template load<7>(w + INPUTS * PANEL * 2 + LINE / 2, LINE), Tiles::template add<3, 5, 7>();
            Tiles::template save<2>(saved[2], 64), Tiles::template save<3>(saved[3], 64);
        }
    };
    const auto add = [&](int64_t group) {
        if (HALVES == 1 && (group + 1) * 32 % panel.shared) return;
        for (int half = 0; half < HALVES; half++) {
            Lanes scale[2], minimum[2];
            panel.scale(scale, minimum, group, half);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
                for (int n = 0; n < 2; n++) {
                    sums[n][m] = plus_product(sums[n][m], loaded<Lanes>(room[group % 2][2 * half + n] + m * LANES), scale[n]);
                    if constexpr (has_minima(SOURCE))
                        sums[n][m] = plus_product(sums[n][m], minimum[n], Lanes{} - totals[m * lines + group * HALVES + half]);
                }
        }
    };
    expand(0);
    for (int64_t group = 1; group <= groups; group++) {
        if (group < groups) expand(group);
        multiply(group - 1);
        if (group > 1) add(group - 2);
    }
    add(groups - 1);
    for (int n = 0; n < 2; n++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
            if (m < rows) store(to + m * PANEL + n * LANES, sums[n][m]);
}

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

// The sums of up to NEAR_PANELS panels of one source.
template <class Tiles, int SOURCE>
__attribute__((noinline)) void sum_code_panels(const LinearCall& call, const CodeRows& of, int64_t panel, int64_t count, int64_t& shaped) {
    const Linear& map = *call.map;
    constexpr int INPUTS = step_of(SOURCE);
    const int64_t lines = map.inputs / INPUTS;
    const float* const totals = of.totals[INPUTS == 16];
    if (is_kind(SOURCE) && of.rows == 1) {
        for (int64_t q = 0; q < count; q++) sum_code_row<SOURCE>(of.sums + q * call.tile_rows * PANEL, map, panel + q, of.wide, totals);
        return;
    }
    if (of.rows <= MOST_FEW) {
        if (shaped != of.rows * 64 + INPUTS) Tiles::shape(TileShapes(of.rows, INPUTS)), shaped = of.rows * 64 + INPUTS;
        for (int64_t q = 0; q < count; q++) {
            float* const to = of.sums + q * call.tile_rows * PANEL;
            if (of.rows <= MOST_FEW / 2)
                few_code_rows<Tiles, SOURCE, MOST_FEW / 2>(to, map, panel + q, of.x, of.stride, totals, of.rows);
            else
                few_code_rows<Tiles, SOURCE, MOST_FEW>(to, map, panel + q, of.x, of.stride, totals, of.rows);
        }
        return;
    }
    const int64_t most = of.rows > MOST_TILED ? NEAR_INPUTS : FEW_INPUTS, shared = CodePanel<SOURCE>(map, panel).shared;
    for (int64_t k = 0; k < map.inputs; k += most)
        for (int64_t q = 0; q < count; q++) {
            const int64_t inputs = map.inputs - k < most ? map.inputs - k : most;
            expand_codes<SOURCE>(of.room, map, panel + q, k, inputs);
            for (int64_t m = 0; m < of.rows; m += SIDE_ROWS) {
                const int64_t some = of.rows - m < SIDE_ROWS ? of.rows - m : SIDE_ROWS;
                if (shaped != some * 64 + INPUTS) Tiles::shape(TileShapes(some, INPUTS)), shaped = some * 64 + INPUTS;
                const CodeBlock block = {of.x + m * of.stride + 2 * k, of.stride, (const char*)of.room.pairs, of.room.scales, of.room.minima,
                                         totals + m * lines + k / INPUTS, lines, inputs, shared};
                code_block_of<Tiles, INPUTS, has_minima(SOURCE)>(some, of.sums + (q * call.tile_rows + m) * PANEL, k == 0, block);
            }
        }
}

// What all panels share.
INLINE void read_code_rows(const Linear& map, const CodeRows& of, bool in_32, bool in_16) {
    for (int64_t m = 0; m < of.rows; m++) {
        const bfloat16* const x = (const bfloat16*)(of.x + m * of.stride);
        if (of.rows == 1)
            for (int64_t k = 0; k < map.inputs; k++) of.wide[k] = wide_one(x + k);
        if (in_32 || in_16)
            for (int64_t k = 0; k < map.inputs; k += 32) {
                const Lanes first = wide(x + k), second = wide(x + k + LANES);
                if (in_32) of.totals[0][(m * map.inputs + k) / 32] = total(first + second);
                if (in_16) of.totals[1][(m * map.inputs + k) / 16] = total(first), of.totals[1][(m * map.inputs + k) / 16 + 1] = total(second);
            }
    }
}

#define SUM_CODES(SOURCE, ...) sum_code_panels<Tiles, SOURCE>(__VA_ARGS__)

template <class Tiles>
INLINE void run_codes_by_tiles(LinearCall& call, int64_t thread) {
    static thread_local Room room;
    const Linear& map = *call.map;
    const int64_t panels = (map.outputs + PANEL - 1) / PANEL;
    bool in_32 = false, in_16 = false;
    for (int64_t part = 0; map.form == BLOCKS && part < map.num_block_parts; part++) {
        const BlockShape& shape = BLOCK_SHAPES[map.block_parts[part].kind];
        (shape.is_halved ? in_16 : in_32) |= shape.has_minima;
    }
    constexpr int64_t PAIRS_SIZE = NEAR_INPUTS / 2 * PANEL, LINES = NEAR_INPUTS / 16 * PANEL;
    const int64_t sums = NEAR_PANELS * call.tile_rows * PANEL, wide = map.inputs, totals = call.tile_rows * map.inputs / 16;
    float* const place = room.of(PAIRS_SIZE + 2 * LINES + sums + wide + 2 * totals);
    if (!place) {
        call.failed = 1;
        return;
    }
    float *const lines = place + PAIRS_SIZE, *const end = lines + 2 * LINES + sums;
    CodeRows of = {0, nullptr, call.x_stride * (int64_t)sizeof(bfloat16), end, {end + wide, end + wide + totals}, lines + 2 * LINES,
                   {(bfloat16*)place, lines, lines + LINES}};
    int64_t shaped = 0, read = -1;
    Turn turn(call, thread);
    for (int64_t item; (item = turn.next()) >= 0;) {
        const int64_t part = item % call.parts, first = item / call.parts * call.tile_rows;
        of.rows = call.rows - first < call.tile_rows ? call.rows - first : call.tile_rows;
        of.x = (const char*)call.x + first * of.stride;
        if (read != first) read_code_rows(map, of, in_32, in_16), read = first;
        const int64_t stop = panels * (part + 1) / call.parts;
        for (int64_t panel = panels * part / call.parts, count; panel < stop; panel += count) {
            const int source = source_of(map, panel);
            for (count = 1; count < NEAR_PANELS && panel + count < stop && source_of(map, panel + count) == source;) count++;
            switch (source) {
                case CODES_OF_8: SUM_CODES(CODES_OF_8, call, of, panel, count, shaped); break;
                case CODES_OF_4: SUM_CODES(CODES_OF_4, call, of, panel, count, shaped); break;
                default: OF_KIND(source, SUM_CODES, call, of, panel, count, shaped)
            }
            for (int64_t q = 0; q < count; q++) put_rows<bfloat16>(call, panel + q, first, of.rows, of.sums + q * call.tile_rows * PANEL);
        }
        __atomic_fetch_add(&call.done, 1, __ATOMIC_RELEASE);
    }
    if (shaped) Tiles::release();
}

}  // namespace
