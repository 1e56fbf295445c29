// Counters in memory that processes of one machine share: each counts for itself and waits for the others.
#include <sched.h>
#include <time.h>

#include "common.h"

namespace {

constexpr int64_t LINE = 64 / sizeof(uint64_t);  // Counters of two processes are not in one cache line.
constexpr int QUICK = 4000;                      // Looks at a counter, some 40 microseconds, before other work may have the core.

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

INLINE void pause_once() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace

// Let all see what was written before: counter ``own`` becomes ``number``.
extern "C" void quire_count(uint64_t* counters, int64_t own, uint64_t number) {
    __atomic_store_n(counters + own * LINE, number, __ATOMIC_RELEASE);
}

// Wait until all ``size`` counters are ``number`` at least. Return 0 if that takes longer than ``nanoseconds``.
extern "C" int quire_await(const uint64_t* counters, int64_t size, uint64_t number, int64_t nanoseconds) {
    int64_t end = 0;
    for (int64_t rank = 0, looks = 0; rank < size; looks++) {
        if (__atomic_load_n(counters + rank * LINE, __ATOMIC_ACQUIRE) >= number)
            rank++;
        else if (looks < QUICK)
            pause_once();
        else if (!end)
            end = now() + nanoseconds;
        else if (now() >= end)
            return 0;
        else
            sched_yield();
    }
    return 1;
}
