// What all kernels share: vectors of float32 that any compiler takes apart for its machine, bfloat16, threads.
//
// No header of Python or PyTorch is needed. The threads are those of the OpenMP runtime that PyTorch has loaded, whose entry is
// handed in: a second pool of threads would fight with it for the cores.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Bytes of a vector register of the processors that a file is for. A file for several of them leaves it at 64.
#ifndef REGISTER
#define REGISTER 64
#endif

// GCC keeps a vector that is wider than a register in memory, and each operation reads and writes it there. Two that fit stay in
// registers.
template <typename V>
struct Two {
    typedef V Half;
    V low, high;
    template <typename U>
    INLINE_METHOD explicit operator Two<U>() const { return {(U)low, (U)high}; }
};
template <typename T>
constexpr bool is_two = false;
template <typename V>
constexpr bool is_two<Two<V>> = true;

#define TWO_OPERATOR(sign)                                                                                                         \
    template <typename V>                                                                                                         \
    INLINE Two<V> operator sign(Two<V> a, Two<V> b) { return {a.low sign b.low, a.high sign b.high}; }                              \
    template <typename V, typename S, typename = std::enable_if_t<std::is_arithmetic<S>::value>>                                  \
    INLINE Two<V> operator sign(Two<V> a, S b) { return {a.low sign b, a.high sign b}; }                                            \
    template <typename V, typename S, typename = std::enable_if_t<std::is_arithmetic<S>::value>>                                  \
    INLINE Two<V> operator sign(S a, Two<V> b) { return {a sign b.low, a sign b.high}; }                                            \
    template <typename V, typename S>                                                                                             \
    INLINE Two<V>& operator sign##=(Two<V>& a, S b) { return a = a sign b; }
TWO_OPERATOR(+)
TWO_OPERATOR(-)
TWO_OPERATOR(*)
TWO_OPERATOR(/)
TWO_OPERATOR(&)
TWO_OPERATOR(|)
TWO_OPERATOR(^)
TWO_OPERATOR(<<)
TWO_OPERATOR(>>)
#undef TWO_OPERATOR
// All bits set or none in each number.
template <typename V, typename S>
INLINE auto operator<(Two<V> a, S b) {
    if constexpr (is_two<S>)
        return Two<decltype(a.low < b.low)>{a.low < b.low, a.high < b.high};
    else
        return Two<decltype(a.low < b)>{a.low < b, a.high < b};
}
template <typename V, typename S>
INLINE auto operator>(Two<V> a, S b) {
    if constexpr (is_two<S>)
        return Two<decltype(a.low > b.low)>{a.low > b.low, a.high > b.high};
    else
        return Two<decltype(a.low > b)>{a.low > b, a.high > b};
}
template <typename V>
INLINE Two<V> operator-(Two<V> a) { return {-a.low, -a.high}; }
template <typename V>
INLINE Two<V> operator~(Two<V> a) { return {~a.low, ~a.high}; }

// COUNT numbers in PARTS vectors.
template <typename T, int COUNT, int PARTS>
struct Parts {
    typedef Two<typename Parts<T, COUNT / 2, PARTS / 2>::type> type;
};
template <typename T, int COUNT>
struct Parts<T, COUNT, 1> {
    typedef T type __attribute__((vector_size(COUNT * sizeof(T))));
};
// LANES numbers, in as many vectors as numbers of 32 bits need registers; or bytes that are as large.
template <typename T, int COUNT = LANES>
using Several = typename Parts<T, COUNT, 64 / REGISTER>::type;

typedef Several<float> Lanes;
typedef Several<uint32_t> Bits;
typedef Several<int32_t> Ints;
typedef Several<uint16_t> Halves;
typedef uint16_t bfloat16;

// -- numbers ---------------------------------------------------------------------------------------------------------

template <typename T>
INLINE T loaded(const void* from) {
    if constexpr (is_two<T>) {
        typedef typename T::Half Half;
        return {loaded<Half>(from), loaded<Half>((const char*)from + sizeof(Half))};
    } else {
        T value;
        std::memcpy(&value, from, sizeof(T));
        return value;
    }
}

template <typename T>
INLINE void store(void* to, T value) {
    if constexpr (is_two<T>)
        store(to, value.low), store((char*)to + sizeof(value.low), value.high);
    else
        std::memcpy(to, &value, sizeof(T));
}

// Number by number.
template <typename To, typename From>
INLINE To converted(From from) {
    if constexpr (is_two<To>)
        return {converted<typename To::Half>(from.low), converted<typename To::Half>(from.high)};
    else
        return __builtin_convertvector(from, To);
}

template <typename V>
INLINE auto lane(V from, int number) {
    if constexpr (is_two<V>) {
        constexpr int COUNT = sizeof(V) / 8;
        return number < COUNT ? lane(from.low, number) : lane(from.high, number - COUNT);
    } else {
        return from[number];
    }
}

// Every two neighbours change places.
template <typename V>
INLINE V swapped(V x) {
    if constexpr (is_two<V>)
        return {swapped(x.low), swapped(x.high)};
    else if constexpr (sizeof(V) == 64)
        return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    else if constexpr (sizeof(V) == 32)
        return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
    else
        return __builtin_shufflevector(x, x, 1, 0, 3, 2);
}

INLINE Lanes wide(const float* from) { return loaded<Lanes>(from); }
INLINE Lanes wide(const bfloat16* from) { return (Lanes)(converted<Bits>(loaded<Halves>(from)) << 16); }

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
    store(to, converted<Halves>(chosen(no_number(value), Bits{} + 0x7fc0u, nearest)));
}

INLINE void put_one(float* to, float value) { *to = value; }
INLINE void put_one(bfloat16* to, float value) {
    uint32_t bits = loaded<uint32_t>(&value);
    *to = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bfloat16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The upper half is added to the lower one until one number is left.
template <typename V>
INLINE float total(V lanes) {
    if constexpr (is_two<V>) {
        return total(lanes.low + lanes.high);
    } else if constexpr (sizeof(V) == 64) {
        return total(__builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15));
    } else if constexpr (sizeof(V) == 32) {
        return total(__builtin_shufflevector(lanes, lanes, 0, 1, 2, 3) + __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7));
    } else {
        return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    }
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
