// Tiles by the processor's instructions.

#pragma once

#include "tiles.h"

namespace {

// By name and not by the compiler's functions: those need each tile's number as written text.
struct AmxTiles {
    static void shape(const TileConfig& shapes) {
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    static void release() { asm volatile("tilerelease"); }
    template <int TILE>
    INLINE void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }
    template <int TILE>
    INLINE void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
    }
    template <int TILE>
    INLINE void save(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
    }
    template <int SUM, int A, int B>
    INLINE void add() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B)); }
};

}  // namespace
