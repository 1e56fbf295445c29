// The products of linear_by_tiles.h with what the instructions for tiles mean (Intel's manual: LDTILECFG, TILELOADD, TILESTORED,
// TDPBF16PS), so that any machine can test them. It is slow.
#include "linear.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1")  // compilers take minutes to take so many wide vectors apart
#endif
#include "linear_by_tiles.h"

namespace {

struct Emulated {
    static thread_local TileShapes shapes;
    static thread_local char tiles[8][SIDE_ROWS][64];
    static void shape(const TileShapes& given) {
        shapes = given;
        std::memset(tiles, 0, sizeof(tiles));
    }
    static void release() { shape(TileShapes(0)); }
    template <int TILE>
    static void zero() {
        std::memset(tiles[TILE], 0, sizeof(tiles[TILE]));
    }
    template <int TILE>
    static void load(const void* from, int64_t stride) {
        zero<TILE>();
        for (int m = 0; m < shapes.rows[TILE]; m++) std::memcpy(tiles[TILE][m], (const char*)from + m * stride, shapes.bytes[TILE]);
    }
    template <int TILE>
    static void save(void* to, int64_t stride) {
        for (int m = 0; m < shapes.rows[TILE]; m++) std::memcpy((char*)to + m * stride, tiles[TILE][m], shapes.bytes[TILE]);
    }
    // Products of the even and of the odd inputs have a sum of their own, and both are added to what was there. Numbers below 2^-126
    // are 0 to the processor, and not here.
    template <int SUM, int X, int W>
    static void add() {
        for (int m = 0; m < shapes.rows[SUM]; m++) {
            float sums[2][LANES] = {};
            for (int k = 0; k < shapes.bytes[X] / 4; k++)
                for (int o = 0; o < shapes.bytes[SUM] / 4; o++)
                    for (int half = 0; half < 2; half++)
                        sums[half][o] += wide_one((const bfloat16*)tiles[X][m] + 2 * k + half) * wide_one((const bfloat16*)tiles[W][k] + 2 * o + half);
            for (int o = 0; o < LANES; o++) store(tiles[SUM][m] + 4 * o, loaded<float>(tiles[SUM][m] + 4 * o) + (sums[0][o] + sums[1][o]));
        }
    }
};
thread_local TileShapes Emulated::shapes{0};
thread_local char Emulated::tiles[8][SIDE_ROWS][64];

}  // namespace

extern "C" void quire_linear_emulated(LinearCall* call, int64_t thread) { run_form_by_tiles<Emulated>(*call, thread); }
