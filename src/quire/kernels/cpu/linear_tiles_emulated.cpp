// The products of linear_by_tiles.h with emulated tiles.
#include "linear.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1")  // compilers take minutes to take so many wide vectors apart
#endif
#include "linear_by_tiles.h"
#include "tiles_emulated.h"

extern "C" void quire_linear_emulated(LinearCall* call, int64_t thread) { run_form_by_tiles<EmulatedTiles>(*call, thread); }
