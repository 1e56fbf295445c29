// The products of linear.h in vectors that the compiler takes apart for its machine.
#include "linear.h"

constexpr int MOST_ROWS = 4;

#include "linear_tiles.h"

extern "C" void quire_linear_portable(LinearCall* call, int64_t thread) { run_call(*call, thread); }
