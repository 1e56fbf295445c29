// Tiles: eight registers of up to 16 rows of 64 bytes, whose products of bfloat16 are AMX's TDPBF16PS.

#pragma once

#include "common.h"

namespace {

constexpr int MOST_TILE_ROWS = 16, TILE_BYTES = 64;  // of a row

// Shapes of all tiles, as LDTILECFG reads them.
struct TileConfig {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int64_t of_rows, int64_t of_bytes) { rows[tile] = (uint8_t)of_rows, bytes[tile] = (uint16_t)of_bytes; }
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace
