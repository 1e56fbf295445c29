// Products of bfloat16 by tiles: 16 or 32 rows times a panel, which is two tiles of outputs, 32 inputs at a time. Weights lie as
// linear.h says: a tile of them is 16 rows of 16 pairs, every second cache line of a panel. linear_code_tiles.h multiplies codes.
//
// An output's sum goes from its first 32 inputs to its last, through memory in between, whatever other rows there are.
//
// ``Tiles`` is the instructions: those of the processor, or what they mean (tiles_emulated.h).

#include "linear_code_groups.h"
#include "tiles.h"

namespace {

constexpr int SIDE_ROWS = MOST_TILE_ROWS;
constexpr int MOST_TILED = 2 * SIDE_ROWS;  // rows that are multiplied at once
constexpr int STEP = 32;                // inputs that are multiplied at once
constexpr int LINE = PANEL * 2 * sizeof(bfloat16);  // bytes from a tile's row of weights, or of sums, to the next

// Tiles 0 to 3: sums, two of outputs for each 16 rows. 4 and 5: inputs. 6 and 7: weights.
struct TileShapes : TileConfig {
    explicit TileShapes(int64_t count) {
        const int64_t upper = count < SIDE_ROWS ? count : SIDE_ROWS, lower = count - upper;
        const int64_t of[8] = {upper, upper, lower, lower, upper, lower, SIDE_ROWS, SIDE_ROWS};
        for (int tile = 0; tile < 8; tile++) set(tile, of[tile], of[tile] ? TILE_BYTES : 0);
    }
    // Of codes: all sums and inputs are of these rows, and steps of so many inputs.
    TileShapes(int64_t count, int64_t inputs) {
        for (int tile = 0; tile < 8; tile++) set(tile, tile < 6 ? count : inputs / 2, tile == 4 || tile == 5 ? 2 * inputs : TILE_BYTES);
    }
};

template <class Tiles, bool HAS_LOWER>
INLINE void tile_steps(const char* x, int64_t stride, const char* w, int64_t count, bool is_fetching) {
    for (; count; count--, x += 2 * STEP, w += STEP * PANEL * 2) {
        Tiles::template load<6>(w, LINE), Tiles::template load<7>(w + LINE / 2, LINE);
        Tiles::template load<4>(x, stride);
        if (is_fetching)
            for (int line = 0; line < STEP * PANEL * 2; line += 64) __builtin_prefetch(w + AHEAD + line, 0, 3);
        Tiles::template add<0, 4, 6>(), Tiles::template add<1, 4, 7>();
        if (HAS_LOWER) {
            Tiles::template load<5>(x + SIDE_ROWS * stride, stride);
            Tiles::template add<2, 5, 6>(), Tiles::template add<3, 5, 7>();
        }
    }
}

// sums[m][o] of up to 32 rows and some inputs of a panel, behind those that were summed before.
template <class Tiles, bool HAS_LOWER>
INLINE void tile_block(float* sums, bool is_first, const char* x, int64_t stride, int64_t rows, const char* w, int64_t inputs, bool is_fetching) {
    float* const lower = sums + SIDE_ROWS * PANEL;
    if (is_first) {
        Tiles::template zero<0>(), Tiles::template zero<1>();
        if (HAS_LOWER) Tiles::template zero<2>(), Tiles::template zero<3>();
    } else {
        Tiles::template load<0>(sums, LINE), Tiles::template load<1>(sums + LANES, LINE);
        if (HAS_LOWER) Tiles::template load<2>(lower, LINE), Tiles::template load<3>(lower + LANES, LINE);
    }
    const int64_t whole = inputs / STEP, rest = inputs % STEP;
    tile_steps<Tiles, HAS_LOWER>(x, stride, w, whole, is_fetching);
    if (rest) {
        alignas(64) char last_x[MOST_TILED * 2 * STEP] = {}, last_w[STEP * PANEL * 2] = {};
        for (int64_t m = 0; m < rows; m++) std::memcpy(last_x + m * 2 * STEP, x + m * stride + whole * 2 * STEP, 2 * rest);
        std::memcpy(last_w, w + whole * STEP * PANEL * 2, rest * PANEL * 2);
        tile_steps<Tiles, HAS_LOWER>(last_x, 2 * STEP, last_w, 1, false);
    }
    Tiles::template save<0>(sums, LINE), Tiles::template save<1>(sums + LANES, LINE);
    if (HAS_LOWER) Tiles::template save<2>(lower, LINE), Tiles::template save<3>(lower + LANES, LINE);
}

template <class Tiles>
INLINE void run_by_tiles(LinearCall& call, int64_t thread) {
    static thread_local Room room;
    const Linear& map = *call.map;
    const int64_t panels = (map.outputs + PANEL - 1) / PANEL, bytes = panel_bytes(map), stride = call.x_stride * sizeof(bfloat16);
    float* const sums = room.of(NEAR_PANELS * call.tile_rows * PANEL);
    if (!sums) {
        call.failed = 1;
        return;
    }
    int64_t shaped = 0;  // rows that the tiles are made for
    Turn turn(call, thread);
    for (int64_t item; (item = turn.next()) >= 0;) {
        const int64_t part = item % call.parts, first = item / call.parts * call.tile_rows;
        const int64_t rows = call.rows - first < call.tile_rows ? call.rows - first : call.tile_rows;
        const char* const x = (const char*)call.x + first * stride;
        const int64_t end = panels * (part + 1) / call.parts;
        // Few rows read each panel from its first byte to its last. Many meet equal parts of the inputs.
        const int64_t blocks = rows > MOST_TILED ? (map.inputs + NEAR_INPUTS - 1) / NEAR_INPUTS : 1;
        const int64_t most = (map.inputs + STEP * blocks - 1) / (STEP * blocks) * STEP;
        for (int64_t panel = panels * part / call.parts; panel < end; panel += NEAR_PANELS) {
            const int64_t count = end - panel < NEAR_PANELS ? end - panel : NEAR_PANELS;
            for (int64_t k = 0; k < map.inputs; k += most)
                for (int64_t q = 0; q < count; q++) {
                    const int64_t inputs = map.inputs - k < most ? map.inputs - k : most;
                    const char* const w = (const char*)map.weights + (panel + q) * bytes + k * PANEL * 2;
                    for (int64_t m = 0; m < rows; m += MOST_TILED) {
                        const int64_t some = rows - m < MOST_TILED ? rows - m : MOST_TILED;
                        if (some != shaped) Tiles::shape(TileShapes(shaped = some));
                        float* const to = sums + (q * call.tile_rows + m) * PANEL;
                        const char* const from = x + m * stride + 2 * k;
                        if (some > SIDE_ROWS)
                            tile_block<Tiles, true>(to, k == 0, from, stride, some, w, inputs, m == 0);
                        else
                            tile_block<Tiles, false>(to, k == 0, from, stride, some, w, inputs, m == 0);
                    }
                }
            for (int64_t q = 0; q < count; q++) put_rows<bfloat16>(call, panel + q, first, rows, sums + q * call.tile_rows * PANEL);
        }
        __atomic_fetch_add(&call.done, 1, __ATOMIC_RELEASE);
    }
    Tiles::release();
}

}  // namespace

#include "linear_code_tiles.h"

namespace {

// Of BFLOAT16, or codes.
template <class Tiles>
INLINE void run_form_by_tiles(LinearCall& call, int64_t thread) {
    if (call.map->form == BFLOAT16)
        run_by_tiles<Tiles>(call, thread);
    else
        run_codes<ByTiles<Tiles>>(call, thread);
}

}  // namespace
