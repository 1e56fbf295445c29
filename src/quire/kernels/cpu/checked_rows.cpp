// Rows of pieces that are what their checksums say, to the slots of a pool.
//
// The reference is what quire/kv does without: the checksum of quire/statefile/header.py (XXH3, 128 bits, seed 0), then a copy.
// A piece is read from memory once: it is copied from the cache in which its checksum has left it. The copy goes past the
// cache, which belongs to those that compute meanwhile. Pieces have more than 240 bytes; XXH3 has other forms for shorter ones.
#include "common.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

typedef uint64_t Words __attribute__((vector_size(64)));
constexpr int STRIPE = 64, BLOCK = 1024, SECRET_BYTES = 192;

// Constants of XXH3. Their bytes are read from any place on, the first byte of a word being its lowest.
constexpr uint64_t SECRET[SECRET_BYTES / 8] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
constexpr uint64_t PRIME32_1 = 0x9e3779b1, PRIME32_2 = 0x85ebca77, PRIME32_3 = 0xc2b2ae3d;
constexpr uint64_t PRIME64_1 = 0x9e3779b185ebca87, PRIME64_2 = 0xc2b2ae3d27d4eb4f, PRIME64_3 = 0x165667b19e3779f9;
constexpr uint64_t PRIME64_4 = 0x85ebca77c2b2ae63, PRIME64_5 = 0x27d4eb2f165667c5, MIX = 0x165667919e3779f9;

const uint8_t* secret(int64_t byte) { return (const uint8_t*)SECRET + byte; }

// Add ``count`` stripes to the sums. Half of what is added changes places with its neighbour, which one exchange at the end does.
CLONES void add_stripes(uint64_t* sums, const uint8_t* data, const uint8_t* key, int64_t count) {
    Words products = loaded<Words>(sums), values = {};
    for (int64_t i = 0; i < count; i++) {
        Words value = loaded<Words>(data + STRIPE * i), mixed = value ^ loaded<Words>(key + 8 * i);
        products += (mixed & 0xffffffff) * (mixed >> 32);
        values += value;
    }
    for (int i = 0; i < 8; i++) sums[i] = products[i] + values[i ^ 1];
}

uint64_t merged(const uint64_t* sums, const uint8_t* key, uint64_t found) {
    for (int i = 0; i < 8; i += 2) {
        const uint64_t even = sums[i] ^ loaded<uint64_t>(key + 8 * i), odd = sums[i + 1] ^ loaded<uint64_t>(key + 8 * i + 8);
        const auto product = (unsigned __int128)even * odd;
        found += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    found = (found ^ (found >> 37)) * MIX;
    return found ^ (found >> 32);
}

// Whether XXH3 of more than 240 bytes is ``digest``: 16 bytes, the highest first.
bool is_whole(const uint8_t* data, int64_t size, const uint8_t* digest) {
    uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const int64_t blocks = (size - 1) / BLOCK;
    for (int64_t block = 0; block < blocks; block++) {
        add_stripes(sums, data + BLOCK * block, secret(0), BLOCK / STRIPE);
        for (int i = 0; i < 8; i++)
            sums[i] = (sums[i] ^ (sums[i] >> 47) ^ loaded<uint64_t>(secret(SECRET_BYTES - STRIPE + 8 * i))) * PRIME32_1;
    }
    add_stripes(sums, data + BLOCK * blocks, secret(0), (size - 1 - BLOCK * blocks) / STRIPE);
    add_stripes(sums, data + size - STRIPE, secret(SECRET_BYTES - STRIPE - 7), 1);
    const uint64_t low = merged(sums, secret(11), (uint64_t)size * PRIME64_1);
    const uint64_t high = merged(sums, secret(SECRET_BYTES - STRIPE - 11), ~((uint64_t)size * PRIME64_2));
    return high == __builtin_bswap64(loaded<uint64_t>(digest)) && low == __builtin_bswap64(loaded<uint64_t>(digest + 8));
}

void copy_past_cache(uint8_t* to, const uint8_t* from, int64_t size) {
    int64_t done = 0;
#if defined(__SSE2__)
    done = -(uintptr_t)to & 15;
    if (done > size) done = size;
    std::memcpy(to, from, done);
    for (; done + 16 <= size; done += 16)
        _mm_stream_si128((__m128i*)(to + done), _mm_loadu_si128((const __m128i*)(from + done)));
#endif
    std::memcpy(to + done, from + done, size - done);
}

}  // namespace

// Copy rows of ``row`` bytes to the slots of ``target``, piece by piece, each right after its checksum was found to be right, so
// that no byte of a damaged piece is written. Return the number of the first that is damaged, or ``count``.
//
// Of ``count`` pieces: ``places``, ``sizes`` in bytes, ``digests`` of 16 bytes, ``ends``: the number of runs up to its last one.
// Of each run: its first row in its piece, its first slot, how many rows it has.
extern "C" int64_t quire_checked_rows(int64_t count, const uint8_t* const* places, const int64_t* sizes, const uint8_t* digests,
                                      const int64_t* ends, const int64_t* rows, const int64_t* slots, const int64_t* lengths,
                                      uint8_t* target, int64_t row) {
    int64_t piece = 0, run = 0;
    for (; piece < count && is_whole(places[piece], sizes[piece], digests + 16 * piece); piece++)
        for (; run < ends[piece]; run++)
            copy_past_cache(target + slots[run] * row, places[piece] + rows[run] * row, lengths[run] * row);
#if defined(__SSE2__)
    _mm_sfence();  // Other threads read the rows.
#endif
    return piece;
}
