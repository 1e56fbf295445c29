// The products of linear.h in vectors that any processor has.
#define REGISTER 16
#include "linear.h"

#if defined(__aarch64__)
constexpr int MOST_ROWS = 6, MOST_SUMS = 24;
#else
constexpr int MOST_ROWS = 3, MOST_SUMS = 12;
#endif

#include "linear_tiles.h"

extern "C" void quire_linear_portable(LinearCall* call, int64_t thread) { run_call(*call, thread); }
