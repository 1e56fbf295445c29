// Tiles by what the instructions mean (Intel's manual: LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS), so that any machine can test what
// uses them. It is slow.

#pragma once

#include "tiles.h"

namespace {

struct EmulatedTiles {
    static thread_local TileConfig shapes;
    static thread_local char tiles[8][MOST_TILE_ROWS][TILE_BYTES];
    static void shape(const TileConfig& given) {
        shapes = given;
        std::memset(tiles, 0, sizeof(tiles));
    }
    static void release() { shape(TileConfig()); }
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
    // Products of the even and of the odd numbers of A's rows have a sum of their own, and both are added to what was there. Numbers
    // below 2^-126 are 0 to the processor, and not here.
    template <int SUM, int A, int B>
    static void add() {
        const bool fit = shapes.rows[SUM] == shapes.rows[A] && shapes.bytes[SUM] == shapes.bytes[B] && shapes.bytes[A] == 4 * shapes.rows[B];
        if (!fit) __builtin_trap();
        for (int m = 0; m < shapes.rows[SUM]; m++) {
            float sums[2][LANES] = {};
            for (int k = 0; k < shapes.bytes[A] / 4; k++)
                for (int o = 0; o < shapes.bytes[SUM] / 4; o++)
                    for (int half = 0; half < 2; half++) {
                        const auto *a = (const bfloat16*)tiles[A][m] + 2 * k + half, *b = (const bfloat16*)tiles[B][k] + 2 * o + half;
                        sums[half][o] += wide_one(a) * wide_one(b);
                    }
            for (int o = 0; o < LANES; o++) store(tiles[SUM][m] + 4 * o, loaded<float>(tiles[SUM][m] + 4 * o) + (sums[0][o] + sums[1][o]));
        }
    }
};
thread_local TileConfig EmulatedTiles::shapes;
thread_local char EmulatedTiles::tiles[8][MOST_TILE_ROWS][TILE_BYTES];

}  // namespace
