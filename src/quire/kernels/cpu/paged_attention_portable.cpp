// Attention over pages with vectors that any compiler has: see paged_attention_body.h.

#include "paged_attention.h"

#define WIDTH 4
#define PAIRS 0
#include "paged_attention_body.h"

const Attend quire_attend_portable[3] = {attend<ByVectors<float>>, attend<ByVectors<bfloat16>>, attend<ByVectors<float16>>};
