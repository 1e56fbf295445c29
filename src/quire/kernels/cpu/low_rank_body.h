// Low-rank products of a ragged batch on a CPU, for the processors that the including file chooses after its other headers: y[row] += (x[row] A^T) B for rows under adapters, in float32.
//
// The reference is quire/ops/low_rank.py; quire/kernels/linear/low_rank.py calls this through ctypes and says what the arguments are.
// A row's sums are made in one order, whatever other rows there are: over the inputs in LANES sums side by side, over the rank
// one after the other. So a row's result does not depend on the batch, to the bit.
//
// Letters: M rows of a block, which are under one adapter; N rank rows at a time; I input, O output features of a piece.

namespace {

// A and B are read once, and one adapter for each row of a batch is a matter of memory only: what comes so many bytes later is
// fetched before it is needed, which took a quarter off the time.
constexpr int AHEAD = 4096;

// -- products --------------------------------------------------------------------------------------------------------

// As much as N rows of LANES take, of rows that lie one behind the other. An address beyond the end does no harm.
template <typename T, int N>
INLINE void fetch(const T* from) {
    for (int byte = 0; byte < N * LANES * (int)sizeof(T); byte += 64) __builtin_prefetch((const char*)from + AHEAD + byte, 0, 2);
}

// h[m][n] = sum over i of x[m][i] a[n][i]
template <typename T, int M, int N>
INLINE void shrink(float* h, int64_t h_stride, const float* x, int64_t inputs, const T* a) {
    Lanes sums[M][N] = {};
    int64_t i = 0;
    for (; i + LANES <= inputs; i += LANES) {
        fetch<T, N>(a + N * i);
        Lanes factors[N];
        for (int n = 0; n < N; n++) factors[n] = wide(a + n * inputs + i);
        for (int m = 0; m < M; m++) {
            Lanes row = loaded<Lanes>(x + m * inputs + i);
            for (int n = 0; n < N; n++) sums[m][n] += row * factors[n];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float sum = total(sums[m][n]);
            for (int64_t j = i; j < inputs; j++) sum += x[m * inputs + j] * wide_one(a + n * inputs + j);
            h[m * h_stride + n] = sum;
        }
}

// sum[m][o] += h[m][n] b[n][o], one n after the other
template <typename T, int M, int N>
INLINE void expand(float* sum, const float* h, int64_t h_stride, const T* b, int64_t outputs) {
    int64_t o = 0;
    for (; o + LANES <= outputs; o += LANES) {
        fetch<T, N>(b + N * o);
        Lanes factors[N];
        for (int n = 0; n < N; n++) factors[n] = wide(b + n * outputs + o);
        for (int m = 0; m < M; m++) {
            Lanes value = loaded<Lanes>(sum + m * outputs + o);
            for (int n = 0; n < N; n++) value += h[m * h_stride + n] * factors[n];
            store(sum + m * outputs + o, value);
        }
    }
    for (; o < outputs; o++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) sum[m * outputs + o] += h[m * h_stride + n] * wide_one(b + n * outputs + o);
}

template <typename T>
INLINE void widen(float* to, const T* from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, wide(from + i));
    for (; i < count; i++) to[i] = wide_one(from + i);
}

template <typename T>
INLINE void add(T* y, const float* sum, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) put(y + i, wide(y + i) + loaded<Lanes>(sum + i));
    for (; i < count; i++) put_one(y + i, wide_one(y + i) + sum[i]);
}

template <typename T, int M>
INLINE void run_block(const Call& call, const int64_t* block, float* room) {
    constexpr int N = 4;
    const Work& work = *call.work;
    const int64_t inputs = work.inputs, first = block[2], rank = block[3];
    const int64_t* rows = work.rows + block[0];
    float *xs = room, *h = xs + MOST_ROWS * inputs, *sum = h + MOST_ROWS * work.largest_rank;
    for (int m = 0; m < M; m++) widen(xs + m * inputs, (const T*)call.x + rows[m] * call.x_stride, inputs);
    for (int64_t p = 0; p < work.num_pieces; p++) {
        const Piece& piece = work.pieces[p];
        const int64_t outputs = piece.outputs;
        const T* a = (const T*)piece.a + first * inputs;
        const T* b = (const T*)piece.b + first * outputs;
        int64_t r = 0;
        for (; r + N <= rank; r += N) shrink<T, M, N>(h + r, rank, xs, inputs, a + r * inputs);
        for (; r < rank; r++) shrink<T, M, 1>(h + r, rank, xs, inputs, a + r * inputs);
        std::memset(sum, 0, sizeof(float) * M * outputs);
        r = 0;
        for (; r + N <= rank; r += N) expand<T, M, N>(sum, h + r, rank, b + r * outputs, outputs);
        for (; r < rank; r++) expand<T, M, 1>(sum, h + r, rank, b + r * outputs, outputs);
        for (int m = 0; m < M; m++) add((T*)call.y + rows[m] * call.y_stride + piece.column, sum + m * outputs, outputs);
    }
}

template <typename T>
void run(void* data) {
    Call& call = *(Call*)data;
    const Work& work = *call.work;
    float* room = work.room + call.next_room.fetch_add(1) * work.room_of_one;
    for (int64_t i; (i = call.next_block.fetch_add(1)) < work.num_blocks;) {
        const int64_t* block = work.blocks + 4 * i;
        switch (block[1]) {
            case 1: run_block<T, 1>(call, block, room); break;
            case 2: run_block<T, 2>(call, block, room); break;
            case 3: run_block<T, 3>(call, block, room); break;
            default: run_block<T, MOST_ROWS>(call, block, room);
        }
    }
}

}  // namespace
