// The work of recurrence.h, for the generation of processors that the including file chooses after its other headers. ``MOST``:
// vectors of columns whose sums fit into its registers.

namespace {

constexpr int64_t TILE = 2;  // vectors of columns of a state that stays in the first cache from row to row
// Bytes of states from which on a decode writes them past the caches: they are read in the next forward, behind the model's weights.
constexpr int64_t FAR = 256 << 10;
constexpr int TURNS = 4000;  // of a loop that waits, before another thread may have the core

// -- functions ---------------------------------------------------------------------------------------------------------

INLINE Lanes all(float x) { return x - Lanes{}; }

// e^x as in rows.h; the processor's own instructions round and scale.
#if MOST >= 8
INLINE Lanes power(Lanes x) {
    // Of two numbers of which one is none, these return the second.
    x = (Lanes)_mm512_min_ps(_mm512_set1_ps(89.f), _mm512_max_ps(_mm512_set1_ps(-104.f), (__m512)x));
    const Lanes n = (Lanes)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
    Lanes r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682e-6f;
    Lanes p = r * (1.f / 5040) + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    return (Lanes)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#else
INLINE Lanes power(Lanes x) { return exp_of(x); }
#endif

INLINE Lanes sigmoid(Lanes x) { return 1.f / (1.f + power(-x)); }
INLINE Lanes silu(Lanes x) { return x / (1.f + power(-x)); }

// log(1 + e^x). With y = e^-|x| it is max(x, 0) + 2 atanh(y / (2 + y)), whose argument is at most 1/3.
INLINE Lanes softplus(Lanes x) {
    Lanes y = power((Lanes)((Bits)x | 0x80000000u)), s = y / (y + 2.f), t = s * s;
    Lanes p = t * (2.f / 15) + 2.f / 13;
    p = p * t + 2.f / 11;
    p = p * t + 2.f / 9;
    p = p * t + 2.f / 7;
    p = p * t + 2.f / 5;
    p = p * t + 2.f / 3;
    p = p * t + 2.f;
    return chosen(negative(x), Lanes{}, x) + p * s;
}

#define ALWAYS_INLINE __attribute__((always_inline))

// Call ``item(i, n)`` for numbers ``first`` to ``stop``, n = LANES at a time, and for the rest, whose n is less.
template <typename Item>
INLINE void by_lanes(int64_t first, int64_t stop, Item item) {
    for (; first + LANES <= stop; first += LANES) item(first, (int64_t)LANES);
    if (first < stop) item(first, stop - first);
}

// Up to LANES numbers, the others 0.
template <typename T>
INLINE Lanes some(const T* from, int64_t count) {
    if (count == LANES) return wide(from);
    T held[LANES] = {};
    copy(held, from, count);
    return wide(held);
}

template <typename T>
INLINE void put_some(T* to, Lanes value, int64_t count) {
    if (count == LANES) {
        put(to, value);
        return;
    }
    T held[LANES];
    put(held, value);
    copy(to, held, count);
}

// The number of type T that is nearest.
template <typename T>
INLINE Lanes rounded(Lanes value) {
    if (sizeof(T) == 4) return value;
    Bits bits = (Bits)value;
    return (Lanes)chosen(no_number(value), bits | 0x400000u, (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// -- the convolution ---------------------------------------------------------------------------------------------------

// The last W inputs of a row, oldest first: the ``kept`` first ones are rows of a state.
template <typename T>
struct Inputs {
    const T* rows[TAPS_AT_MOST];
    int64_t kept;
};

template <typename T>
INLINE Inputs<T> inputs_of(const Task& task, int64_t row) {
    const Mixer& mixer = *task.mixer;
    const Forward& forward = *task.forward;
    const int64_t taps = mixer.taps;
    Inputs<T> found;
    int64_t tap = taps - 1, at = row;
    for (;; at = forward.parents[at]) {
        found.rows[tap] = (const T*)task.x + at * task.stride + mixer.x_at;
        if (tap == 0 || forward.parents[at] < 0) break;
        tap--;
    }
    found.kept = tap;
    if (tap) {
        const T* state = (const T*)task.kept + forward.sources[forward.given[at]] * (taps - 1) * mixer.channels;
        for (int64_t t = 0; t < tap; t++) found.rows[t] = state + (t + taps - 1 - tap) * mixer.channels;
    }
    return found;
}

// One input of the convolution at some channels. Of a short convolution it is b * x, in the type of the state.
template <typename T, bool PRODUCT>
INLINE Lanes input_at(const Inputs<T>& inputs, int64_t tap, int64_t channel, int64_t count, int64_t second) {
    const T* from = inputs.rows[tap] + channel;
    Lanes value = some(from, count);
    if (PRODUCT && tap >= inputs.kept) {
        value = rounded<T>(value * some(from + second, count));
    }
    return value;
}

template <typename T, bool PRODUCT>
INLINE Lanes convolved(const Mixer& mixer, const Inputs<T>& inputs, int64_t channel, int64_t count, T* kept) {
    const int64_t channels = mixer.channels, taps = mixer.taps;
    Lanes sum = {};
    if (mixer.bias_C) sum = some(mixer.bias_C + channel, count);
    for (int64_t tap = 0; tap < taps; tap++) {
        Lanes value = input_at<T, PRODUCT>(inputs, tap, channel, count, 2 * channels);
        sum += value * some(mixer.taps_WC + tap * channels + channel, count);
        if (kept && tap) put_some(kept + (tap - 1) * channels + channel, value, count);
    }
    return sum;
}

// Where the inputs after a row are kept, or null.
template <typename T>
INLINE T* kept_after(const Task& task, int64_t row) {
    const int64_t slot = task.forward->targets[row];
    return slot < 0 ? nullptr : (T*)task.kept + slot * (task.mixer->taps - 1) * task.mixer->channels;
}

// A whole row of a short convolution: columns b, c, x.
template <typename T>
INLINE void short_convolution(const Task& task, int64_t row) {
    const Mixer& mixer = *task.mixer;
    const int64_t channels = mixer.channels;
    const Inputs<T> inputs = inputs_of<T>(task, row);
    T *kept = kept_after<T>(task, row), *to = (T*)task.out + row * channels;
    const T* gate = (const T*)task.x + row * task.stride + mixer.gate_at;
    by_lanes(0, channels, [&](int64_t i, int64_t n) ALWAYS_INLINE {
        put_some(to + i, convolved<T, true>(mixer, inputs, i, n, kept) * some(gate + i, n), n);
    });
}

// Channels from ``first`` on of one row, after the convolution and silu; ``unit``: scaled to length 1.
template <typename T>
INLINE void convolve(const Task& task, int64_t row, int64_t place, int64_t first, int64_t count, bool unit) {
    const Mixer& mixer = *task.mixer;
    const Inputs<T> inputs = inputs_of<T>(task, row);
    T* kept = kept_after<T>(task, row);
    float* to = task.mixed + place * mixer.channels + first;
    by_lanes(0, count, [&](int64_t i, int64_t n) ALWAYS_INLINE {
        put_some(to + i, silu(convolved<T, false>(mixer, inputs, first + i, n, kept)), n);
    });
    if (!unit) return;
    const float scale = 1.f / std::sqrt(squares(to, count) + 1e-6f);
    by_lanes(0, count, [&](int64_t i, int64_t n) ALWAYS_INLINE { put_some(to + i, some(to + i, n) * scale, n); });
}

// Decays, and shares (beta, or time steps) of the heads of one row.
template <typename T>
INLINE void gates_of(const Task& task, int64_t row, int64_t place) {
    const Mixer& mixer = *task.mixer;
    const int64_t heads = mixer.heads;
    const bool delta = mixer.kind == DELTA_RULE;
    const T* rates = (const T*)task.rates + row * task.rates_stride;
    float* to = task.gates + place * 2 * heads;
    by_lanes(0, heads, [&](int64_t h, int64_t count) ALWAYS_INLINE {
        Lanes step = softplus(some(rates + (delta ? heads : 0) + h, count) + some(mixer.step_bias_H + h, count));
        Lanes share;
        if (delta) {
            share = sigmoid(some(rates + h, count));
        } else {
            const Lanes least = all((float)mixer.least_step), most = all((float)mixer.greatest_step);
            step = chosen(negative(step - least), least, step);
            share = step = chosen(negative(most - step), most, step);
        }
        put_some(to + h, power(step * some(mixer.rate_H + h, count)), count);
        put_some(to + heads + h, share, count);
    });
}

// -- the states --------------------------------------------------------------------------------------------------------

// Rows of one head, from ``first`` on; places are counted from the first row of the piece.
struct Head {
    const float *q, *k, *v;
    const float *decay, *share;
    float* out;
    int64_t row, gates, out_row, keys, values;
    float scale;
    bool delta, is_far;  // is_far: states are written past the caches
};

template <int N>
INLINE void load(Lanes* to, const float* from) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) to[n] = wide(from + n * LANES);
}

// A line of states that is read ``ahead`` numbers later: processors do not foresee where the next columns begin. 0: none.
INLINE void expect(const float* state, int64_t ahead) {
    if (ahead) __builtin_prefetch(state + ahead, 0, 3);
}

// Store numbers that nobody reads soon, so that their line is not read first. ``to``: a multiple of 64 bytes.
INLINE void store_past(float* to, Lanes value) {
#if MOST >= 8
    _mm512_stream_ps(to, (__m512)value);
#elif MOST >= 2
    _mm256_stream_ps(to, (__m256)value.low), _mm256_stream_ps(to + LANES / 2, (__m256)value.high);
#else
    store(to, value);
#endif
}

// Before others read what was stored past the caches.
INLINE void end_stores_past() {
#if MOST >= 2
    _mm_sfence();
#endif
}

// Sums go over even keys and over odd ones, from first to last; then both are added.
template <int N>
INLINE void read_by_key(Lanes* sum, const float* state, int64_t stride, const float* k, int64_t keys, int64_t ahead = 0) {
    Lanes odd[N] = {};
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[n] = Lanes{};
    int64_t i = 0;
    for (; i + 2 <= keys; i += 2, state += 2 * stride)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            expect(state + n * LANES, ahead), expect(state + stride + n * LANES, ahead);
            sum[n] += k[i] * wide(state + n * LANES);
            odd[n] += k[i + 1] * wide(state + stride + n * LANES);
        }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
        if (i < keys) sum[n] += k[i] * wide(state + n * LANES);
        sum[n] += odd[n];
    }
}

template <int N, bool NEXT, bool PAST>
INLINE void advance_row(const float* from, float* to, float decay, float k, float q, float next, const Lanes* u, Lanes* sum, Lanes* known,
                        int64_t ahead) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
        Lanes state = wide(from + n * LANES) * decay + k * u[n];
        expect(from + n * LANES, ahead);
        if (PAST)
            store_past(to + n * LANES, state);
        else
            store(to + n * LANES, state);
        sum[n] += q * state;
        if (NEXT) known[n] += next * state;
    }
}

// One row: the state decays, takes u at key k, is stored, and is read by q and, for the row behind, by its key.
template <int N, bool NEXT, bool PAST = false>
INLINE void advance(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t keys, float decay, const float* k,
                    const float* q, const float* next, const Lanes* u, Lanes* sum, Lanes* known, int64_t ahead = 0) {
    Lanes odd[N] = {}, odd_known[N] = {};
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[n] = known[n] = Lanes{};
    int64_t i = 0;
    for (; i + 2 <= keys; i += 2, from += 2 * from_stride, to += 2 * to_stride) {
        advance_row<N, NEXT, PAST>(from, to, decay, k[i], q[i], NEXT ? next[i] : 0.f, u, sum, known, ahead);
        advance_row<N, NEXT, PAST>(from + from_stride, to + to_stride, decay, k[i + 1], q[i + 1], NEXT ? next[i + 1] : 0.f, u, odd, odd_known,
                                   ahead);
    }
    if (i < keys) advance_row<N, NEXT, PAST>(from, to, decay, k[i], q[i], NEXT ? next[i] : 0.f, u, sum, known, ahead);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[n] += odd[n], known[n] += odd_known[n];
}

// What is written at a row's key. ``known``: what the state before held there.
template <int N>
INLINE void written(const Head& head, int64_t place, int64_t column, int64_t count, const Lanes* known, Lanes* u) {
    const float* v = head.v + place * head.row + column;
    const float decay = head.decay[place * head.gates], share = head.share[place * head.gates];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
        Lanes value = some(v + n * LANES, N == 1 ? count : LANES);
        u[n] = (head.delta ? value - known[n] * decay : value) * share;
    }
}

template <int N>
INLINE void put_read(const Head& head, int64_t place, int64_t column, int64_t count, const Lanes* sum) {
    float* to = head.out + place * head.out_row + column;
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) put_some(to + n * LANES, sum[n] * head.scale, N == 1 ? count : LANES);
}

// One row from a state to another one, over N vectors of columns, of which the next ones are fetched meanwhile. PAST: past the caches.
template <int N, bool PAST>
__attribute__((noinline)) void step_columns(const Head& head, int64_t place, int64_t column, const float* from, float* to) {
    Lanes known[N], u[N], sum[N];
    const float *q = head.q + place * head.row, *k = head.k + place * head.row;
    const int64_t size = head.keys * head.values, ahead = column + N * LANES < head.values ? N * LANES : size - column;
    if (head.delta) read_by_key<N>(known, from + column, head.values, k, head.keys, ahead);
    written<N>(head, place, column, N * LANES, known, u);
    advance<N, false, PAST>(from + column, head.values, to + column, head.values, head.keys, head.decay[place * head.gates], k, q, nullptr, u,
                            sum, known, head.delta ? 0 : ahead);
    put_read<N>(head, place, column, N * LANES, sum);
}

template <int N>
INLINE void step(const Head& head, int64_t place, int64_t column, const float* from, float* to) {
    if (head.is_far && ((uintptr_t)to | (uintptr_t)(head.values * sizeof(float))) % 64 == 0)
        step_columns<N, true>(head, place, column, from, to);
    else
        step_columns<N, false>(head, place, column, from, to);
}

INLINE void copy_columns(float* to, int64_t to_stride, const float* from, int64_t from_stride, int64_t keys, int64_t count) {
    for (int64_t i = 0; i < keys; i++) copy(to + i * to_stride, from + i * from_stride, count);
}

// Rows one behind the other over up to N vectors of columns, which stay in ``tile``. ``slots``: where the state after each goes, or
// null; the last has a place.
template <int N>
INLINE void walk_tile(const Head& head, int64_t place, int64_t rows, int64_t column, int64_t count, const float* from, float* const* to,
                      float* tile) {
    constexpr int64_t STRIDE = N * LANES;
    const int64_t keys = head.keys;
    copy_columns(tile, STRIDE, from + column, head.values, keys, count);
    if (count < STRIDE)
        for (int64_t i = 0; i < keys; i++)
            for (int64_t c = count; c < STRIDE; c++) tile[i * STRIDE + c] = 0.f;
    Lanes known[N], u[N], sum[N];
    if (head.delta) read_by_key<N>(known, tile, STRIDE, head.k + place * head.row, keys);
    for (int64_t r = 0; r < rows; r++, place++) {
        const float *q = head.q + place * head.row, *k = head.k + place * head.row, decay = head.decay[place * head.gates];
        written<N>(head, place, column, count, known, u);
        if (head.delta && r + 1 < rows)
            advance<N, true>(tile, STRIDE, tile, STRIDE, keys, decay, k, q, k + head.row, u, sum, known);
        else
            advance<N, false>(tile, STRIDE, tile, STRIDE, keys, decay, k, q, nullptr, u, sum, known);
        put_read<N>(head, place, column, count, sum);
        if (to[r]) copy_columns(to[r] + column, head.values, tile, STRIDE, keys, count);
    }
}

// The rows of one entry and one head in a piece that begins at ``origin``.
INLINE void walk(const Task& task, const Head& head, int64_t number, int64_t first, int64_t last, int64_t stop, int64_t origin, float* tile) {
    const Forward& forward = *task.forward;
    const int64_t size = head.keys * head.values, all_heads = task.mixer->heads * size;
    float* const pool = task.states + number * size;
    const auto at = [&](int64_t slot) { return pool + slot * all_heads; };
    // Between two pieces a chain's state lies where its last one goes.
    float* const resting = forward.targets[stop - 1] < 0 ? nullptr : at(forward.targets[stop - 1]);
    for (int64_t row = first; row < last;) {
        const int64_t parent = forward.parents[row];
        const float* from = parent < 0                    ? at(forward.sources[forward.given[row]])
                            : forward.targets[parent] >= 0 ? at(forward.targets[parent])
                                                           : resting;
        float* to[ROWS_AT_MOST];
        int64_t rows = 0;
        do {
            to[rows] = forward.targets[row + rows] < 0 ? nullptr : at(forward.targets[row + rows]);
            rows++;
        } while (row + rows < last && forward.parents[row + rows] == row + rows - 1);
        if (!to[rows - 1]) to[rows - 1] = resting;
        const int64_t place = row - origin, values = head.values;
        int64_t column = 0;
        if (rows == 1) {
#if MOST >= 8
            for (; column + 8 * LANES <= values; column += 8 * LANES) step<8>(head, place, column, from, to[0]);
            for (; column + 4 * LANES <= values; column += 4 * LANES) step<4>(head, place, column, from, to[0]);
#elif MOST >= 2
            for (; column + 2 * LANES <= values; column += 2 * LANES) step<2>(head, place, column, from, to[0]);
#endif
            for (; column + LANES <= values; column += LANES) step<1>(head, place, column, from, to[0]);
        }
#if MOST >= 8
        for (; column + TILE * LANES <= values; column += TILE * LANES)
            walk_tile<TILE>(head, place, rows, column, TILE * LANES, from, to, tile);
#endif
        for (; column < values; column += LANES)
            walk_tile<1>(head, place, rows, column, values - column < LANES ? values - column : LANES, from, to, tile);
        row += rows;
    }
}

// -- the norm ----------------------------------------------------------------------------------------------------------

// One part of a row: D's share, the gate, the norm over the part.
template <typename T>
INLINE void finish(const Task& task, int64_t row, int64_t place, int64_t part) {
    const Mixer& mixer = *task.mixer;
    const int64_t values = mixer.values, width = mixer.heads * values, size = width / mixer.norm_groups, first = part * size;
    float* y = task.read + place * width;
    const float* x = task.mixed + place * mixer.channels;  // SSD's values come first
    const T* gate = (const T*)task.x + row * task.stride + mixer.gate_at;
    T* to = (T*)task.out + row * width;
    const float* weight = mixer.norm ? mixer.norm + first % mixer.norm_width : nullptr;
    for (int64_t h = first / values; mixer.skip_H && h * values < first + size; h++) {
        // A part may begin or end inside of a head.
        const int64_t start = h * values < first ? first : h * values, stop = (h + 1) * values;
        by_lanes(start, stop < first + size ? stop : first + size, [&](int64_t i, int64_t n) ALWAYS_INLINE {
            put_some(y + i, some(y + i, n) + some(x + i, n) * mixer.skip_H[h], n);
        });
    }
    const bool before = !weight || mixer.gate_first;
    if (before)
        by_lanes(first, first + size, [&](int64_t i, int64_t n) ALWAYS_INLINE {
            put_some(y + i, some(y + i, n) * silu(some(gate + i, n)), n);
        });
    const float scale = weight ? 1.f / std::sqrt(squares(y + first, size) / (float)size + (float)mixer.eps) : 1.f;
    by_lanes(first, first + size, [&](int64_t i, int64_t n) ALWAYS_INLINE {
        Lanes value = some(y + i, n) * scale;
        if (weight) value *= some(weight + i - first, n);
        if (!before) value *= silu(some(gate + i, n));
        put_some(to + i, value, n);
    });
}

// -- threads -----------------------------------------------------------------------------------------------------------

template <typename Item>
INLINE void share_out(Phase& phase, int64_t count, int64_t taken, Item item) {
    for (int64_t first; (first = phase.next.fetch_add(taken)) < count;) {
        const int64_t stop = first + taken < count ? first + taken : count;
        for (int64_t index = first; index < stop; index++) item(index);
        __atomic_fetch_add(&phase.done, stop - first, __ATOMIC_RELEASE);
    }
    for (int turn = 0; __atomic_load_n(&phase.done, __ATOMIC_ACQUIRE) < count; turn++) {
        if (turn > TURNS)
            sched_yield();
#if defined(__x86_64__)
        else
            __builtin_ia32_pause();
#endif
    }
}

constexpr int64_t CHANNELS = 256;  // channels of SSD that are convolved at once

template <typename T>
void mix(void* data) {
    const Task& task = *(const Task*)data;
    const Mixer& mixer = *task.mixer;
    const Forward& forward = *task.forward;
    if (mixer.kind == CONVOLUTION) {
        share_out(task.phases[0], forward.rows, piece_of(mixer.channels), [&](int64_t row) { short_convolution<T>(task, row); });
        return;
    }
    const bool delta = mixer.kind == DELTA_RULE;
    const int64_t heads = mixer.heads, keys = mixer.keys, values = mixer.values, width = heads * values;
    const int64_t blocks = 1 + (delta ? 2 * mixer.key_heads + heads : (mixer.channels + CHANNELS - 1) / CHANNELS);
    const int64_t key_columns = mixer.key_heads * keys;
    const bool is_far = forward.entries * width * keys * (int64_t)sizeof(float) >= FAR;
    alignas(64) float tile[KEYS_AT_MOST * TILE * LANES];
    int64_t entry = 0;
    Phase* phase = task.phases;
    for (int64_t origin = 0; origin < forward.rows; origin += task.piece, phase += 3) {
        const int64_t rows = forward.rows - origin < task.piece ? forward.rows - origin : task.piece, stop = origin + rows;
        share_out(phase[0], rows * blocks, 4, [&](int64_t index) {
            const int64_t place = index / blocks, block = index % blocks, row = origin + place;
            if (block == blocks - 1)
                gates_of<T>(task, row, place);
            else if (!delta)
                convolve<T>(task, row, place, block * CHANNELS, mixer.channels - block * CHANNELS < CHANNELS ? mixer.channels - block * CHANNELS : CHANNELS, false);
            else if (block < 2 * mixer.key_heads)
                convolve<T>(task, row, place, block * keys, keys, true);
            else
                convolve<T>(task, row, place, 2 * key_columns + (block - 2 * mixer.key_heads) * values, values, false);
        });
        // Entries without rows are passed over.
        while (forward.starts[entry + 1] <= origin) entry++;
        int64_t entries = 1;
        while (forward.starts[entry + entries] < stop) entries++;
        share_out(phase[1], entries * heads, 1, [&](int64_t index) {
            const int64_t e = entry + index / heads, h = index % heads, group = h / (heads / mixer.key_heads);
            const int64_t first = forward.starts[e] < origin ? origin : forward.starts[e];
            const int64_t last = forward.starts[e + 1] < stop ? forward.starts[e + 1] : stop;
            // The delta rule has q, k, v; SSD has v, k, q.
            const float *q = task.mixed + (delta ? 0 : width + key_columns) + group * keys;
            const float *k = task.mixed + (delta ? key_columns : width) + group * keys, *v = task.mixed + (delta ? 2 * key_columns : 0) + h * values;
            const Head head = {q, k, v, task.gates + h, task.gates + heads + h, task.read + h * values, mixer.channels, 2 * heads, width,
                               keys, values, (float)mixer.scale, delta, is_far};
            walk(task, head, h, first, last, forward.starts[e + 1], origin, tile);
            if (is_far) end_stores_past();
        });
        const int64_t parts = mixer.norm_groups;
        share_out(phase[2], rows * parts, piece_of(width / parts), [&](int64_t index) {
            finish<T>(task, origin + index / parts, index / parts, index % parts);
        });
    }
}

}  // namespace
