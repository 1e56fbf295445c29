// BLOCKS (linear.h) from rows as GGUF files have them (quire/weights/gguf_blocks.py).
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
    std::atomic<int64_t> next_panel;
    std::atomic<int> is_damaged;
};

// The codes and scales of a block of 32 or 256 numbers. A code's high bits stand above its low ones.
struct Block {
    uint8_t codes[256];
    uint8_t scales[8][4];  // of each group, as a panel has them
    uint8_t head[4];
};

constexpr int64_t BLOCK_BYTES[] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 18, 136, 17};

// 32 codes of four bits: those in the lower halves of 16 bytes first.
INLINE void read_nibbles(uint8_t* codes, const uint8_t* from, int count = 16) {
    for (int i = 0; i < count; i++) codes[i] = from[i] & 15, codes[count + i] = from[i] >> 4;
}

// 32 bits, the lowest first, become bit 4 of codes.
INLINE void read_fifth(uint8_t* codes, const uint8_t* from) {
    for (int i = 0; i < 32; i++) codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

// Scales and minima of six bits.
INLINE void read_six_bits(Block& block, const uint8_t* from) {
    for (int g = 0; g < 4; g++) {
        block.scales[g][0] = from[g] & 63, block.scales[g][1] = from[4 + g] & 63;
        block.scales[4 + g][0] = (from[8 + g] & 15) | (from[g] >> 2 & 48), block.scales[4 + g][1] = from[8 + g] >> 4 | (from[4 + g] >> 2 & 48);
    }
}

template <int KIND>
INLINE void read_block(Block& block, const uint8_t* from) {
    if constexpr (KIND <= Q5_1 || KIND == IQ4_NL) {
        constexpr int SCALES = BLOCK_SHAPES[KIND].scale, HIGH = BLOCK_SHAPES[KIND].high ? 4 : 0;
        std::memcpy(block.scales[0], from, SCALES);
        read_nibbles(block.codes, from + SCALES + HIGH);
        if constexpr (HIGH) read_fifth(block.codes, from + SCALES);
    } else if constexpr (KIND == Q8_0) {
        std::memcpy(block.scales[0], from, 2), std::memcpy(block.codes, from + 2, 32);
    } else if constexpr (KIND == MXFP4) {
        block.scales[0][0] = from[0];
        read_nibbles(block.codes, from + 1);
    } else if constexpr (KIND == Q2_K) {
        std::memcpy(block.head, from + 80, 4);
        for (int i = 0; i < 16; i++) block.scales[i / 2][i % 2] = from[i];
        for (int i = 0; i < 256; i++) block.codes[i] = from[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    } else if constexpr (KIND == Q3_K) {
        std::memcpy(block.head, from + 108, 2);
        for (int i = 0; i < 16; i++) {
            const int low = from[96 + i % 8] >> (i / 8 * 4) & 15, high = from[104 + i % 4] >> (i / 4 * 2) & 3;
            block.scales[i / 2][i % 2] = (uint8_t)((low | high << 4) - 32);
        }
        for (int i = 0; i < 256; i++)
            block.codes[i] = (from[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) | (from[i % 32] >> i / 32 & 1) << 2;
    } else if constexpr (KIND == Q4_K || KIND == Q5_K) {
        std::memcpy(block.head, from, 4);
        read_six_bits(block, from + 4);
        constexpr int CODES = KIND == Q4_K ? 16 : 48;
        for (int part = 0; part < 4; part++) read_nibbles(block.codes + 64 * part, from + CODES + 32 * part, 32);
        if constexpr (KIND == Q5_K)
            for (int g = 0; g < 8; g++)
                for (int i = 0; i < 32; i++) block.codes[32 * g + i] |= (from[16 + i] >> g & 1) << 4;
    } else if constexpr (KIND == Q6_K) {
        std::memcpy(block.head, from + 208, 2);
        for (int i = 0; i < 16; i++) block.scales[i / 2][i % 2] = from[192 + i];
        for (int part = 0; part < 2; part++) {
            uint8_t* codes = block.codes + 128 * part;
            read_nibbles(codes, from + 64 * part, 64);
            for (int q = 0; q < 4; q++)
                for (int i = 0; i < 32; i++) codes[32 * q + i] |= (from[128 + 32 * part + i] >> 2 * q & 3) << 4;
        }
    } else {
        static_assert(KIND == IQ4_XS);
        std::memcpy(block.head, from, 2);
        for (int g = 0; g < 8; g++) {
            const int low = from[4 + g / 2] >> (g % 2 * 4) & 15, high = (from[2] | from[3] << 8) >> 2 * g & 3;
            block.scales[g][0] = (uint8_t)((low | high << 4) - 32);
            read_nibbles(block.codes + 32 * g, from + 8 + 16 * g);
        }
    }
}

// The bits of eight codes from bit FIRST on, side by side.
template <int WIDTH, int FIRST>
INLINE uint32_t eight_bits(const uint8_t* codes) {
    uint64_t bits = loaded<uint64_t>(codes) >> FIRST;
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

// The words of 32 codes.
template <int WIDTH, int FIRST>
INLINE void put_words(uint8_t* to, const uint8_t* codes) {
    constexpr int EACH = 4 / WIDTH;  // eights of codes in a word
    for (int word = 0; word < WIDTH; word++) {
        uint32_t bits = 0;
        for (int i = 0; i < EACH; i++) bits |= eight_bits<WIDTH, FIRST>(codes + 8 * (word * EACH + i)) << 8 * WIDTH * i;
        store(to + 4 * word * PANEL, bits);
    }
}

INLINE bool is_half(const uint8_t* from) { return (loaded<uint16_t>(from) & 0x7c00) != 0x7c00; }

// Whether all weights of a block are finite.
template <int KIND>
INLINE bool is_finite(const Block& block) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    if (KIND == MXFP4) return block.scales[0][0] < 253;  // 12 * 2^(252 - 128) is
    const uint8_t* halves = SHAPE.units ? block.head : block.scales[0];
    return is_half(halves) && (!SHAPE.has_minima || is_half(halves + 2));
}

template <int KIND>
INLINE void pack_panel(PackBlocks& call, int64_t panel) {
    constexpr BlockShape SHAPE = BLOCK_SHAPES[KIND];
    constexpr int GROUPS = SHAPE.units ? 8 : 1;
    const int64_t first = panel * PANEL, outputs = call.outputs - first < PANEL ? call.outputs - first : PANEL;
    const int64_t size = SHAPE.panel_size(call.inputs), blocks = call.inputs / (BLOCK_GROUP * GROUPS);
    uint8_t* const to = call.to + panel * size;
    if (outputs < PANEL) std::memset(to, 0, size);
    bool is_whole = true;
    Block block;
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t* const head = to + SHAPE.head(b * GROUPS);
        for (int64_t o = 0; o < outputs; o++) {
            read_block<KIND>(block, call.rows + (first + o) * call.stride + b * BLOCK_BYTES[KIND]);
            is_whole &= is_finite<KIND>(block);
            for (int unit = 0; unit < SHAPE.units; unit++) std::memcpy(head + 2 * (unit * PANEL + o), block.head + 2 * unit, 2);
            for (int g = 0; g < GROUPS; g++) {
                uint8_t* const codes = to + SHAPE.group(b * GROUPS + g);
                uint8_t *const high = codes + SHAPE.codes_size(), *const scales = high + SHAPE.high_size();
                const uint8_t* const from = block.codes + 32 * g;
                if constexpr (SHAPE.low == 8)
                    for (int i = 0; i < 32; i++) codes[i * PANEL + o] = from[i];
                else
                    put_words<SHAPE.low, 0>(codes + 4 * o, from);
                if constexpr (SHAPE.high > 0) put_words<SHAPE.high, SHAPE.low>(high + 4 * o, from);
                if constexpr (SHAPE.units > 0 || SHAPE.scale == 1)
                    for (int i = 0; i < SHAPE.scale; i++) scales[i * PANEL + o] = block.scales[g][i];
                else
                    for (int i = 0; i < SHAPE.scale; i += 2) std::memcpy(scales + i * PANEL + 2 * o, block.scales[g] + i, 2);
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

template <int KIND>
INLINE void pack_panels(PackBlocks& call) {
    const int64_t panels = (call.outputs + PANEL - 1) / PANEL;
    for (int64_t panel; (panel = call.next_panel.fetch_add(1)) < panels;) {
        pack_panel<KIND>(call, panel);
        const int64_t first = panel * PANEL, rows = call.outputs - first < PANEL ? call.outputs - first : PANEL;
        if (call.is_mapped) drop_pages(call.rows + first * call.stride, rows * call.stride);
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
        default: return pack_panels<MXFP4>(call);
    }
}

}  // namespace

extern "C" {

// Return 0, or 1 if a scale is not finite. ``to`` has whole panels of one kind.
int quire_pack_blocks(const uint8_t* rows, int64_t stride, int64_t outputs, int64_t inputs, int64_t kind, int64_t is_mapped, uint8_t* to,
                      int64_t threads, Parallel parallel) {
    PackBlocks call = {rows, stride, outputs, inputs, kind, is_mapped != 0, to, {0}, {0}};
    run_on(threads, pack_blocks, &call, parallel);
    return call.is_damaged;
}
}
