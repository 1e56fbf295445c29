// Products of codes (linear_code_groups.h) by tiles: the sum of the inputs that share a scale is a tile. One row of BLOCKS is multiplied
// without tiles, by the sums that tiles have: of the even and of the odd inputs of a step, which are then added.

#include "linear_code_groups.h"

namespace {

// Inputs whose pairs are written at a time for rows of one tile: they leave room in the first cache for what comes.
constexpr int64_t FEW_INPUTS = 128;
// Rows whose sums of a panel stay in registers.
constexpr int MOST_FEW = 8;

// -- one row -----------------------------------------------------------------------------------------------------------

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
            reader.template read<0, 8>(codes, pairs), end_step(), add(k / 32, 0);
            reader.template read<8, 16>(codes, pairs), end_step(), add(k / 32, 1);
        } else {
            reader.read(codes, pairs), end_step();
            if ((k + 32) % panel.shared == 0) add(k / 32, 0);
        }
    }
    for (int n = 0; n < 2; n++) store(to + n * LANES, sums[n]);
}

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

// -- panels --------------------------------------------------------------------------------------------------------------

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

// See ``run_codes``.
template <class Tiles>
struct ByTiles {
    static constexpr bool IS_OF_BLOCKS = false;
    int64_t shaped = 0;
    ~ByTiles() {
        if (shaped) Tiles::release();
    }
    template <int SOURCE>
    void sum(const LinearCall& call, const CodeRows& of, int64_t panel, int64_t count) {
        sum_code_panels<Tiles, SOURCE>(call, of, panel, count, shaped);
    }
};

}  // namespace
