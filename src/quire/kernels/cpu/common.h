// What all kernels share: vectors of float32 that any compiler takes apart for its machine, bfloat16, threads.
//
// No header of Python or PyTorch is needed. The threads are those of the OpenMP runtime that PyTorch has loaded, whose entry is
// handed in: a second pool of threads would fight with it for the cores.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// One copy for each generation of vector instructions; the loader takes the best that the processor has.
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
// What stands between these is compiled for such a processor; include other headers before.
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TARGET_BEGIN(names) PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define TARGET_END _Pragma("clang attribute pop")
#else
#define TARGET_BEGIN(names) _Pragma("GCC push_options") PRAGMA(GCC target(names))
#define TARGET_END _Pragma("GCC pop_options")
#endif
#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t bfloat16;

// -- numbers ---------------------------------------------------------------------------------------------------------

template <typename T>
INLINE T loaded(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <typename T>
INLINE void store(void* to, T value) {
    std::memcpy(to, &value, sizeof(T));
}

INLINE Lanes wide(const float* from) { return loaded<Lanes>(from); }
INLINE Lanes wide(const bfloat16* from) {
    return (Lanes)(__builtin_convertvector(loaded<Halves>(from), Bits) << 16);
}

INLINE float wide_one(const float* from) { return *from; }
INLINE float wide_one(const bfloat16* from) {
    uint32_t bits = (uint32_t)*from << 16;
    return loaded<float>(&bits);
}

// Masks have all bits set or none in each lane. Comparisons and ``?:`` of vectors are avoided: where a vector is wider than a
// register, GCC 12 takes them apart into single numbers.
INLINE Bits negative(Lanes value) { return (Bits)((Ints)value >> 31); }
INLINE Bits no_number(Lanes value) { return (Bits)((0x7f800000 - ((Ints)value & 0x7fffffff)) >> 31); }

template <typename V>
INLINE V chosen(Bits mask, V yes, V no) {
    return (V)((mask & (Bits)yes) | (~mask & (Bits)no));
}

// To the nearest, ties to even; what is no number stays none.
INLINE void put(float* to, Lanes value) { store(to, value); }
INLINE void put(bfloat16* to, Lanes value) {
    Bits bits = (Bits)value;
    Bits nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    store(to, __builtin_convertvector(chosen(no_number(value), Bits{} + 0x7fc0u, nearest), Halves));
}

INLINE void put_one(float* to, float value) { *to = value; }
INLINE void put_one(bfloat16* to, float value) {
    uint32_t bits = loaded<uint32_t>(&value);
    *to = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bfloat16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The upper half is added to the lower one until one number is left.
INLINE float total(Lanes lanes) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight eight = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7) +
                  __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15);
    Four four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// -- threads ---------------------------------------------------------------------------------------------------------

// GOMP_parallel, or null.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

// Run ``body`` on so many threads, or fewer: they share out the work by counters in ``data``.
INLINE void run_on(int64_t threads, void (*body)(void*), void* data, Parallel parallel) {
    if (parallel && threads > 1)
        parallel(body, data, (unsigned)threads, 0);
    else
        body(data);
}

}  // namespace
