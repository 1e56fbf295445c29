// The products of linear.h in vectors that the compiler takes apart for its machine.
#include "linear.h"

constexpr int MOST_ROWS = 4;

#include "linear_tiles.h"

extern "C" void quire_linear_portable(void* call) { run_call(call); }
