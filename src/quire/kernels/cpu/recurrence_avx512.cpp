// Mixers of recurrent layers with AVX-512: see recurrence_body.h.

#include <sched.h>

#include "recurrence.h"
#include "rows.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v4")
#define MOST 8
#include "recurrence_body.h"

const Mix quire_mix_avx512[2] = {mix<float>, mix<bfloat16>};
#else
const Mix quire_mix_avx512[2] = {};
#endif
