// Attention over pages of bfloat16 with AMX: see paged_attention_tiles.h.

#include "paged_attention.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v4")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in headers of GCC 12
#define WIDTH 16
#define PAIRS 0
#include "paged_attention_tiles.h"
#include "tiles_amx.h"

const Attend quire_attend_amx[3] = {nullptr, attend<ByTiles<AmxTiles>>, nullptr};
#else
const Attend quire_attend_amx[3] = {};
#endif
