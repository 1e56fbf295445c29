// The products of linear_by_tiles.h with emulated tiles.
#include "linear.h"

#include "linear_by_tiles.h"
#include "tiles_emulated.h"

extern "C" void quire_linear_emulated(LinearCall* call, int64_t thread) { run_by_tiles<EmulatedTiles>(*call, thread); }
