// Weights in the layouts of linear.h, from rows of float32 or bfloat16, for the processors that the including file chooses after its other
// headers.

namespace {

INLINE bfloat16 nearest(float value) {
    bfloat16 found;
    put_one(&found, value);
    return found;
}

// Two neighbours as bfloat16.
INLINE uint32_t pair_of(const bfloat16* from) { return loaded<uint32_t>(from); }
INLINE uint32_t pair_of(const float* from) { return nearest(from[0]) | (uint32_t)nearest(from[1]) << 16; }

INLINE int64_t byte_of(int output, int input) {
    const int word = 2 * output + input % 2;
    return 16 * (word / 8) + 8 * (input / 2) + word % 8;
}

// Codes and values of one group, LANES at a time.
constexpr int MOST_VECTORS = 128 / LANES;

struct Values {
    Lanes of[MOST_VECTORS];
    int64_t count;  // values; those behind it are 0
};

template <typename T>
INLINE void read(Values& values, const T* from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) values.of[i / LANES] = wide(from + i);
    if (i < count) values.of[i / LANES] = Lanes{};
    for (float* to = (float*)values.of; i < count; i++) to[i] = wide_one(from + i);
    values.count = count;
}

INLINE Lanes chosen_lanes(Bits mask, Lanes yes, Lanes no) { return (Lanes)((mask & (Bits)yes) | (~mask & (Bits)no)); }

// To the nearest whole number, ties to even; below 2^22 that is what remains of a sum with 1.5 * 2^23.
INLINE Lanes codes_of(Lanes values, float scale, float least, float most) {
    if (scale == 0) return Lanes{};
    const float magic = 12582912.0f;
    Lanes ratio = values / scale;
    ratio = chosen_lanes((Bits)(ratio < least), Lanes{} + least, ratio);
    ratio = chosen_lanes((Bits)(ratio > most), Lanes{} + most, ratio);
    return (ratio + magic) - magic;
}

// Sign and magnitude.
INLINE Ints signed_size(Ints code) {
    const Ints sign = code >> 31;
    return ((code ^ sign) - sign) | (sign & 128);
}

INLINE float error_of(const Values& values, float scale) {
    Lanes sum = {};
    for (int64_t i = 0; i < values.count; i += LANES) {
        const Lanes rest = values.of[i / LANES] - scale * codes_of(values.of[i / LANES], scale, -8, 7);
        sum += rest * rest;
    }
    return total(sum);
}

// The value furthest from 0, the first of those that are as far.
INLINE float largest_of(const Values& values) {
    Lanes high = {}, low = {};
    for (int64_t i = 0; i < values.count; i += LANES) {
        const Lanes some = values.of[i / LANES];
        high = chosen_lanes((Bits)(some > high), some, high), low = chosen_lanes((Bits)(some < low), some, low);
    }
    float most = 0, least = 0;
    for (int64_t i = 0; i < LANES; i++) most = lane(high, i) > most ? lane(high, i) : most, least = lane(low, i) < least ? lane(low, i) : least;
    if (most != -least) return most > -least ? most : least;
    for (int64_t i = 0; i < values.count; i++)
        if (const float value = ((const float*)values.of)[i]; value == most || value == least) return value;
    return 0;
}

// INT8: the largest value is code 127. INT4: the largest value is code -8, or the scale is smaller, whichever is nearest to all.
INLINE float scale_of(const Values& values, int64_t form) {
    const float largest = largest_of(values);
    const bfloat16 plain = nearest(form == INT8 ? std::fabs(largest) / 127 : largest / -8);
    float best = wide_one(&plain);
    if (form == INT8 || best == 0) return best;
    float least = error_of(values, best);
    for (int percent = 95; percent >= 75; percent -= 5) {
        const bfloat16 other = nearest(largest / -8 * ((float)percent / 100));
        const float error = error_of(values, wide_one(&other));
        if (error < least) least = error, best = wide_one(&other);
    }
    return best;
}

template <typename T>
INLINE void pack_plain(const PackCall& call, const T* weight, int64_t outputs, uint8_t* to) {
    // Block by block, so that what is written stays in the nearest cache.
    for (int64_t begin = 0; begin < call.inputs; begin += 32) {
        const int64_t end = begin + 32 < call.inputs ? begin + 32 : call.inputs;
        for (int64_t o = 0; o < outputs; o++) {
            const T* row = weight + o * call.stride;
            // Too many rows for the processor to see that each is read on.
            __builtin_prefetch(row + end + 32, 0, 3);
            if (call.form == FLOAT32)
                for (int64_t k = begin; k < end; k++) ((float*)to)[k * PANEL + o] = wide_one(row + k);
            else
                for (int64_t k = begin; k < end; k += 2) store(to + 4 * (k / 2 * PANEL + o), pair_of(row + k));
        }
    }
}

template <typename T>
INLINE void pack_codes(const PackCall& call, const T* weight, int64_t outputs, uint8_t* to, bfloat16* scales) {
    const bool is_int8 = call.form == INT8;
    const float least = is_int8 ? -127 : -8, most = is_int8 ? 127 : 7;
    Values values;
    for (int64_t o = 0; o < PANEL; o++) {
        const int lane = (int)(o % LANES);
        uint8_t* const half = to + o / LANES * 64;
        const int64_t bytes[4] = {byte_of(lane, 0), byte_of(lane, 1), byte_of(lane, 2), byte_of(lane, 3)};
        for (int64_t k = 0; k < call.inputs; k += call.group) {
            if (o < outputs)
                read(values, weight + o * call.stride + k, call.group);
            else
                for (int64_t i = 0; i < MOST_VECTORS; i++) values.of[i] = Lanes{};
            const float scale = o < outputs ? scale_of(values, call.form) : 0;
            scales[k / call.group * PANEL + o] = nearest(scale);
            int32_t codes[128];
            for (int64_t i = 0; i < call.group; i += LANES) {
                const Ints whole = converted<Ints>(codes_of(values.of[i / LANES], scale, least, most));
                store(codes + i, is_int8 ? signed_size(whole) : whole + 8);
            }
            if (is_int8)
                for (int64_t i = 0; i < call.group; i++) half[(k + i) / 4 * (2 * 64) + bytes[i % 4]] = (uint8_t)codes[i];
            else
                for (int64_t i = 0; i < call.group; i += 8) {
                    uint32_t word = 0;
                    for (int j = 0; j < 8; j++) word |= (uint32_t)codes[i + j] << (16 * (j % 2) + j / 2 * 4);
                    store(half + (k + i) / 8 * (2 * 64) + 4 * lane, word);
                }
        }
    }
}

template <typename T>
void pack_panels(void* data) {
    PackCall& call = *(PackCall*)data;
    const int64_t bytes[4] = {4 * PANEL, 2 * PANEL, PANEL, PANEL / 2}, size = call.inputs * bytes[call.form];
    const int64_t panels = (call.outputs + PANEL - 1) / PANEL;
    for (int64_t panel; (panel = call.next_panel.fetch_add(1)) < panels;) {
        const int64_t first = panel * PANEL, outputs = call.outputs - first < PANEL ? call.outputs - first : PANEL;
        const T* weight = (const T*)call.weight + first * call.stride;
        uint8_t* to = call.to + panel * size;
        if (outputs < PANEL) std::memset(to, 0, size);
        if (call.form <= BFLOAT16)
            pack_plain(call, weight, outputs, to);
        else
            pack_codes(call, weight, outputs, to, call.scales + panel * (call.inputs / call.group) * PANEL);
    }
}

bool only_upper_halves(const float* from, int64_t count) {
    Bits any = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) any |= loaded<Bits>(from + i);
    uint32_t rest = 0;
    for (; i < count; i++) rest |= loaded<uint32_t>(from + i);
    for (int n = 0; n < LANES; n++) rest |= lane(any, n);
    return !(rest & 0xffff);
}

}  // namespace
