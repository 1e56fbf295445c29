// Attention over pages of bfloat16 with emulated tiles: see paged_attention_tiles.h.

#include "paged_attention.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1")  // compilers take minutes to take so many wide vectors apart
#endif
#define WIDTH 16
#define PAIRS 0
#define EMULATED
#include "paged_attention_tiles.h"
#include "tiles_emulated.h"

const Attend quire_attend_emulated[3] = {nullptr, attend<ByTiles<EmulatedTiles>>, nullptr};
