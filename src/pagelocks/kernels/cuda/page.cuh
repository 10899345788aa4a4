// Attention of one tile of query heads over one page, by one warp.
//
// A page's K and V lie in shared memory as PAGE rows of HEAD_DIM elements, 16-byte chunks swizzled so that eight rows
// spread over the banks; operands come by ldmatrix and products run on tensor cores.  With lane = 4 g + x a lane holds
// sums of members g and g + 8.
//
// Needs: HEAD_DIM, GROUP.

constexpr int MEMBERS = GROUP < 16 ? GROUP : 16;       // query heads at a time
constexpr bool UPPER = MEMBERS > 8;                    // rows 8 to 15 of an operand are in use
constexpr int HALVES = UPPER ? 2 : 1;
constexpr int DEPTH = HEAD_DIM / 16;
constexpr int ROW_CHUNKS = HEAD_DIM / 8;               // of 16 bytes
constexpr int SWIZZLE = ROW_CHUNKS < 8 ? ROW_CHUNKS - 1 : 7;
constexpr int HALF_STAGE = PAGE * HEAD_DIM * 2;        // bytes of a page's keys; its values follow
constexpr int STAGE_BYTES = 2 * HALF_STAGE;

// Queries as operands, of the members from `first` on.
DEVICE void load_queries(u32 (&query)[DEPTH][2 * HALVES], const u16* queries, int first) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int member = half * 8 + g;
    const bool real = member < MEMBERS && first + member < GROUP;
    const u32* mine = (const u32*)(queries + (first + (real ? member : 0)) * HEAD_DIM) + x;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      query[k][half] = real ? mine[k * 8] : 0u;
      query[k][HALVES + half] = real ? mine[k * 8 + 4] : 0u;
    }
  }
}

// Running softmax of a lane's members: sums of weights times values, of weights, and the largest logit, in base 2.
struct Softmax {
  float output[HEAD_DIM / 8][4];
  float top[2], sum[2];

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) output[n][0] = output[n][1] = output[n][2] = output[n][3] = 0.f;
    top[0] = top[1] = -INF, sum[0] = sum[1] = 0.f;
  }
};

// Copies a chunk of a page's keys and values, number `at` of PAGE * ROW_CHUNKS, to a stage; zeros past `left` tokens,
// which may hold NaN.
DEVICE void copy_chunk(u32 to, const u16* keys, const u16* values, i64 token_stride, int at, int left) {
  const int token = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
  const i64 from = token * token_stride + chunk * 8;
  const u32 place = to + token * (HEAD_DIM * 2) + ((chunk ^ (token & SWIZZLE)) << 4);
  copy_async_16(place, keys + from, token < left);
  copy_async_16(place + HALF_STAGE, values + from, token < left);
}

// Attends the page whose keys are at `key`, of which `left` tokens count; `unit` brings products to logits in base 2.
DEVICE void attend_page(Softmax& s, const u32 (&query)[DEPTH][2 * HALVES], u32 key, int left, float unit) {
  const int lane = lane_id(), x = lane & 3;
  const u32 value = key + HALF_STAGE;
  float logits[2][4] = {};
#pragma unroll
  for (int k = 0; k < DEPTH; k++) {
    // Matrices: tokens 0-7 and 8-15, dimensions 16 k to +7 and +8 to +15.
    const int token = (lane & 7) + ((lane & 16) >> 1), chunk = 2 * k + ((lane & 8) >> 3);
    u32 b[4];
    load_matrices(b, key + token * (HEAD_DIM * 2) + ((chunk ^ (token & SWIZZLE)) << 4));
    const u32 a0 = query[k][0], a1 = UPPER ? query[k][1] : 0u, a2 = query[k][HALVES], a3 = UPPER ? query[k][3] : 0u;
    mma_elements(logits[0], a0, a1, a2, a3, b[0], b[1]);
    mma_elements(logits[1], a0, a1, a2, a3, b[2], b[3]);
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      logits[n][i] = n * 8 + 2 * x + (i & 1) < left ? logits[n][i] * unit : -INF;
    }
  }
  u32 weights[4] = {};
  float shrink[2] = {1.f, 1.f};
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int i = 2 * half;
    float highest = fmaxf(fmaxf(logits[0][i], logits[0][i + 1]), fmaxf(logits[1][i], logits[1][i + 1]));
    highest = fmaxf(quad_max(highest), s.top[half]);
    const float base = highest > -INF ? highest : 0.f;
    shrink[half] = exp2_fast(s.top[half] - base);
    s.top[half] = highest;
    float w0 = exp2_fast(logits[0][i] - base), w1 = exp2_fast(logits[0][i + 1] - base);
    float w2 = exp2_fast(logits[1][i] - base), w3 = exp2_fast(logits[1][i + 1] - base);
    s.sum[half] = s.sum[half] * shrink[half] + ((w0 + w1) + (w2 + w3));
    weights[half] = elements(w0, w1);
    weights[2 + half] = elements(w2, w3);
  }
  if (__any_sync(FULL, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
      s.output[n][0] *= shrink[0], s.output[n][1] *= shrink[0];
      if (UPPER) s.output[n][2] *= shrink[1], s.output[n][3] *= shrink[1];
    }
  }
#pragma unroll
  for (int k = 0; k < DEPTH; k++) {
    // Matrices: tokens 0-7, 8-15 of dimensions 16 k to +7, then of +8 to +15.
    const int token = lane & 15, chunk = 2 * k + (lane >> 4);
    u32 b[4];
    load_matrices_transposed(b, value + token * (HEAD_DIM * 2) + ((chunk ^ (token & SWIZZLE)) << 4));
    mma_elements(s.output[2 * k], weights[0], weights[1], weights[2], weights[3], b[0], b[1]);
    mma_elements(s.output[2 * k + 1], weights[0], weights[1], weights[2], weights[3], b[2], b[3]);
  }
}

// A warp's sums to shared memory: output (MEMBERS, HEAD_DIM), top and sum (16 each).
DEVICE void store_softmax(const Softmax& s, float* output, float* top, float* sum) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int member = half * 8 + g;
    const float all = quad_sum(s.sum[half]);
    if (x == 0) top[member] = s.top[half], sum[member] = all;
    if (member < MEMBERS) {
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n++)
        *(float2*)&output[member * HEAD_DIM + n * 8 + 2 * x] = make_float2(s.output[n][2 * half], s.output[n][2 * half + 1]);
    }
  }
}
