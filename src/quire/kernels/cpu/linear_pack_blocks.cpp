// BLOCKS (linear.h) from rows as files have them (quire/weights/gguf_blocks.py).
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "linear.h"

namespace {

struct PackBlocks {
    const uint8_t* rows;
    int64_t stride, outputs, inputs, kind;  // stride: bytes from row to row
    bool is_mapped;                         // pages of ``rows`` are of a file that nobody changes
    uint8_t* to;
    bool is_fresh;  // pages of ``to`` are requested before they are written
    std::atomic<int64_t> next_panels;
    std::atomic<int> is_damaged;
};

constexpr int64_t BLOCK_BYTES[] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 18, 136, 17, 36, 36};
// Groups of a block.
template <int KIND>
constexpr int GROUPS = BLOCK_SHAPES[KIND].units ? 8 : KIND == NVFP4 ? 2 : 1;

// The lowest WIDTH bits of eight bytes, side by side.
template <int WIDTH>
INLINE uint32_t eight_bits(uint64_t bits) {
    if (WIDTH == 4) {
        bits &= 0x0f0f0f0f0f0f0f0f, bits = (bits | bits >> 4) & 0x00ff00ff00ff00ff, bits = (bits | bits >> 8) & 0x0000ffff0000ffff;
        return (uint32_t)(bits | bits >> 16);
    }
    if (WIDTH == 2) {
        bits &= 0x0303030303030303, bits = (bits | bits >> 6) & 0x000f000f000f000f, bits = (bits | bits >> 12) & 0x000000ff000000ff;
        return (uint32_t)(bits | bits >> 24) & 0xffff;
    }
    return (uint32_t)((bits & 0x0101010101010101) * 0x0102040810204080 >> 56);
}

// A word whose inputs stand in order becomes one as linear.h has them: the even inputs in the lower half.
template <int WIDTH>
INLINE uint32_t in_halves(uint32_t word) {
    const auto exchange = [&](uint32_t mask, int by) {
        const uint32_t other = (word ^ word >> by) & mask;
        word ^= other ^ other << by;
    };
    if (WIDTH < 2) exchange(0x22222222, 1);
    if (WIDTH < 4) exchange(0x0c0c0c0c, 2);
    exchange(0x00f000f0, 4);
    exchange(0x0000ff00, 8);
    return word;
}

// Eight bytes of each output, N times. Work on all outputs at once goes into vectors.
template <int N>
struct Eights {
    uint64_t of[N][PANEL] = {};
    __attribute__((always_inline)) Eights(const uint8_t* from, int64_t stride, int64_t outputs) {
        for (int64_t o = 0; o < outputs; o++, from += stride)
            for (int i = 0; i < N; i++) of[i][o] = loaded<uint64_t>(from + 8 * i);
    }
};

// A word of each output; bits(o): its codes in order.
template <int WIDTH, typename BITS>
INLINE void put_word(uint8_t* to, BITS&& bits) {
    uint32_t words[PANEL];
    for (int o = 0; o < PANEL; o++) words[o] = in_halves<WIDTH>(bits(o));
    std::memcpy(to, words, sizeof(words));
}

// The words of 32 codes, WIDTH bits of each of 32 bytes.
template <int WIDTH>
INLINE void put_words(uint8_t* to, const uint8_t* from, int64_t stride, int64_t outputs, int shift) {
    constexpr int EACH = 4 / WIDTH;  // eights of codes in a word
    const Eights<4> bytes(from, stride, outputs);
    for (int word = 0; word < WIDTH; word++)
        put_word<WIDTH>(to + 4 * word * PANEL, [&](int o) __attribute__((always_inline)) {
            uint32_t bits = 0;
            for (int i = 0; i < EACH; i++) bits |= eight_bits<WIDTH>(bytes.of[word * EACH + i][o] >> shift) << 8 * WIDTH * i;
            return bits;
        });
}

// The codes of a group of all outputs, and their high bits. ``column``: the block of the first output. Not of codes of 8 bits.
template <int KIND>
INLINE void put_codes(uint8_t* to, uint8_t* high, const uint8_t* column, int64_t stride, int64_t outputs, int g) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    if constexpr (!SHAPE.units || KIND == IQ4_XS) {
        // The lower halves of 16 bytes, then the upper ones; of NVFP4 those of 8 bytes.
        const Eights<2> bytes(column + BLOCK_BYTES[KIND] - 16 * (GROUPS<KIND> - g), stride, outputs);
        for (int word = 0; word < 4; word++) {
            const uint64_t* const half = bytes.of[KIND == NVFP4 ? word / 2 : word % 2];
            const int shift = (KIND == NVFP4 ? word % 2 : word / 2) * 4;
            put_word<4>(to + 4 * word * PANEL, [&](int o) __attribute__((always_inline)) { return eight_bits<4>(half[o] >> shift); });
        }
        if constexpr (SHAPE.high > 0) {
            const Eights<1> bits(column + SHAPE.scale, stride, outputs);
            put_word<1>(high, [&](int o) __attribute__((always_inline)) { return (uint32_t)bits.of[0][o]; });
        }
    } else if constexpr (KIND == Q4_K || KIND == Q5_K) {
        put_words<4>(to, column + (KIND == Q4_K ? 16 : 48) + g / 2 * 32, stride, outputs, g % 2 * 4);
        if constexpr (KIND == Q5_K) put_words<1>(high, column + 16, stride, outputs, g);
    } else if constexpr (KIND == Q6_K) {
        put_words<4>(to, column + g / 4 * 64 + g % 2 * 32, stride, outputs, g / 2 % 2 * 4);
        put_words<2>(high, column + 128 + g / 4 * 32, stride, outputs, g % 4 * 2);
    } else {
        put_words<2>(to, column + (KIND == Q2_K ? 16 : 32) + g / 4 * 32, stride, outputs, g % 4 * 2);
        if constexpr (KIND == Q3_K) put_words<1>(high, column, stride, outputs, g);
    }
}

// Scales of the groups of a block as a panel has them, and the numbers of its head.
struct Scales {
    uint8_t of[8][4], head[4];
};

template <int KIND>
INLINE void read_scales(Scales& scales, const uint8_t* block) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    std::memcpy(scales.head, block + (KIND == Q2_K ? 80 : KIND == Q3_K ? 108 : KIND == Q6_K ? 208 : 0), 2 * SHAPE.units);
    if constexpr (!SHAPE.units) {
        for (int g = 0; g < GROUPS<KIND>; g++) std::memcpy(scales.of[g], block + g * SHAPE.scale, SHAPE.scale);
    } else if constexpr (KIND == Q2_K || KIND == Q6_K) {
        for (int i = 0; i < 16; i++) scales.of[i / 2][i % 2] = block[(KIND == Q2_K ? 0 : 192) + i];
    } else if constexpr (KIND == Q3_K) {
        for (int i = 0; i < 16; i++) {
            const int low = block[96 + i % 8] >> (i / 8 * 4) & 15, high = block[104 + i % 4] >> (i / 4 * 2) & 3;
            scales.of[i / 2][i % 2] = (uint8_t)((low | high << 4) - 32);
        }
    } else if constexpr (KIND == IQ4_XS) {
        for (int g = 0; g < 8; g++) {
            const int low = block[4 + g / 2] >> (g % 2 * 4) & 15, high = (block[2] | block[3] << 8) >> 2 * g & 3;
            scales.of[g][0] = (uint8_t)((low | high << 4) - 32);
        }
    } else {  // of six bits
        const uint8_t* from = block + 4;
        for (int g = 0; g < 4; g++) {
            scales.of[g][0] = from[g] & 63, scales.of[g][1] = from[4 + g] & 63;
            scales.of[4 + g][0] = (from[8 + g] & 15) | (from[g] >> 2 & 48), scales.of[4 + g][1] = from[8 + g] >> 4 | (from[4 + g] >> 2 & 48);
        }
    }
}

// to[k][o]: bytes of 32 outputs, whose rows are ``stride`` bytes apart, input by input.
INLINE void turn_bytes(uint8_t* to, const uint8_t* from, int64_t stride, int64_t outputs) {
    typedef uint8_t Sixteen __attribute__((vector_size(16)));
    for (int half = 0; half < 4; half++) {
        const int64_t first = half / 2 * 16, k = half % 2 * 16;
        Sixteen rows[16], others[16];
        for (int i = 0; i < 16; i++) rows[i] = first + i < outputs ? loaded<Sixteen>(from + (first + i) * stride + k) : Sixteen{};
        for (int step = 0; step < 4; step++) {
            for (int i = 0; i < 8; i++) {
                others[2 * i] = __builtin_shufflevector(rows[i], rows[8 + i], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                others[2 * i + 1] =
                    __builtin_shufflevector(rows[i], rows[8 + i], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            }
            for (int i = 0; i < 16; i++) rows[i] = others[i];
        }
        for (int i = 0; i < 16; i++) store(to + (k + i) * PANEL + first, rows[i]);
    }
}

INLINE bool is_half(const uint8_t* from) { return (loaded<uint16_t>(from) & 0x7c00) != 0x7c00; }

// Whether all weights of a block are finite.
template <int KIND>
INLINE bool is_finite(const Scales& scales) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    if (KIND == NVFP4) return true;  // those of rows are asked
    if (KIND == MXFP4) return scales.of[0][0] < 253;  // 12 * 2^(252 - 128) is
    if (KIND == F8_E4M3) return __builtin_isfinite(loaded<float>(scales.of[0]) * 448);
    const uint8_t* halves = SHAPE.units ? scales.head : scales.of[0];
    return is_half(halves) && (!SHAPE.has_minima || is_half(halves + 2));
}

template <int KIND>
INLINE void pack_panel(PackBlocks& call, int64_t panel) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    const int64_t first = panel * PANEL, outputs = call.outputs - first < PANEL ? call.outputs - first : PANEL;
    const int64_t size = SHAPE.panel_size(call.inputs), blocks = call.inputs / (BLOCK_GROUP * GROUPS<KIND>);
    uint8_t* const to = call.to + panel * size;
    if (outputs < PANEL) std::memset(to, 0, size);
    bool is_whole = true;
    if constexpr (SHAPE.row > 0)
        for (int64_t o = 0; o < outputs; o++) {
            const uint8_t* const row = call.rows + (first + o) * call.stride;
            for (int i = 0; i < SHAPE.row; i += 4) std::memcpy(to + i * PANEL + 4 * o, row + i, 4);
            // The largest scale times the largest number.
            is_whole &= __builtin_isfinite((loaded<float>(row) + loaded<float>(row + 4)) * 480 * 12);
        }
    Scales found;
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t* const head = to + SHAPE.head(b * GROUPS<KIND>);
        const uint8_t* const column = call.rows + first * call.stride + SHAPE.row + b * BLOCK_BYTES[KIND];
        if constexpr (SHAPE.low == 8) turn_bytes(to + SHAPE.group(b), column + SHAPE.scale, call.stride, outputs);
        if constexpr (SHAPE.low < 8)
            for (int g = 0; g < GROUPS<KIND>; g++) {
                uint8_t* const codes = to + SHAPE.group(b * GROUPS<KIND> + g);
                put_codes<KIND>(codes, codes + SHAPE.codes_size(), column, call.stride, outputs, g);
            }
        for (int64_t o = 0; o < outputs; o++) {
            const uint8_t* const block = column + o * call.stride;
            read_scales<KIND>(found, block);
            is_whole &= is_finite<KIND>(found);
            for (int unit = 0; unit < SHAPE.units; unit++) std::memcpy(head + 2 * (unit * PANEL + o), found.head + 2 * unit, 2);
            for (int g = 0; g < GROUPS<KIND>; g++) {
                uint8_t* const scales = to + SHAPE.group(b * GROUPS<KIND> + g) + SHAPE.codes_size() + SHAPE.high_size();
                constexpr int BYTES = SHAPE.scale_bytes();
                for (int i = 0; i < SHAPE.scale; i += BYTES) std::memcpy(scales + i * PANEL + BYTES * o, found.of[g] + i, BYTES);
            }
        }
    }
    if (!is_whole) call.is_damaged = 1;
}

// The system may take the pages of a file away: it has them still.
INLINE void drop_pages(const uint8_t* from, int64_t size) {
#if defined(__linux__)
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)from + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)from + size) / page * page;
    if (first < end) madvise((void*)first, end - first, MADV_DONTNEED);
#endif
}

// Many pages at once cost less than each when it is first written. Threads request theirs at the same time. An old system refuses.
INLINE void request_pages(const uint8_t* from, int64_t size) {
#if defined(__linux__)
    constexpr int POPULATE_WRITE = 23;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)from / page * page;
    madvise((void*)first, (uintptr_t)from + size - first, POPULATE_WRITE);
#endif
}

template <int KIND>
INLINE void pack_panels(PackBlocks& call) {
    const int64_t panels = (call.outputs + PANEL - 1) / PANEL;
    // So many at a time that their pages are dropped together.
    constexpr int64_t SOME = 8;
    for (int64_t some; (some = SOME * call.next_panels.fetch_add(1)) < panels;) {
        const int64_t end = some + SOME < panels ? some + SOME : panels;
        const int64_t size = BLOCK_SHAPES[KIND].panel_size(call.inputs);
        if (call.is_fresh) request_pages(call.to + some * size, (end - some) * size);
        for (int64_t panel = some; panel < end; panel++) pack_panel<KIND>(call, panel);
        const int64_t first = some * PANEL, last = end * PANEL < call.outputs ? end * PANEL : call.outputs;
        if (call.is_mapped) drop_pages(call.rows + first * call.stride, (last - first) * call.stride);
    }
}

CLONES void pack_blocks(void* data) {
    PackBlocks& call = *(PackBlocks*)data;
    switch (call.kind) {
        case Q4_0: return pack_panels<Q4_0>(call);
        case Q4_1: return pack_panels<Q4_1>(call);
        case Q5_0: return pack_panels<Q5_0>(call);
        case Q5_1: return pack_panels<Q5_1>(call);
        case Q8_0: return pack_panels<Q8_0>(call);
        case Q2_K: return pack_panels<Q2_K>(call);
        case Q3_K: return pack_panels<Q3_K>(call);
        case Q4_K: return pack_panels<Q4_K>(call);
        case Q5_K: return pack_panels<Q5_K>(call);
        case Q6_K: return pack_panels<Q6_K>(call);
        case IQ4_NL: return pack_panels<IQ4_NL>(call);
        case IQ4_XS: return pack_panels<IQ4_XS>(call);
        case MXFP4: return pack_panels<MXFP4>(call);
        case NVFP4: return pack_panels<NVFP4>(call);
        default: return pack_panels<F8_E4M3>(call);
    }
}

}  // namespace

extern "C" {

// Return 0, or 1 if a scale is not finite. ``to`` has whole panels of one kind.
int quire_pack_blocks(const uint8_t* rows, int64_t stride, int64_t outputs, int64_t inputs, int64_t kind, int64_t is_mapped, uint8_t* to,
                      int64_t is_fresh, int64_t threads, Parallel parallel) {
    PackBlocks call = {rows, stride, outputs, inputs, kind, is_mapped != 0, to, is_fresh != 0, {0}, {0}};
    run_on(threads, pack_blocks, &call, parallel);
    return call.is_damaged;
}
}
