// Scores of one group of eight pages by one warp: packed records and a KV head's queries -> log-masses.
//
// All products run on tensor cores, and each leaves its result where the next one wants its operand.  With lane = 4 g + x:
//
//   t = V^T q   int8 x int4 -> int32: heads by columns.  A head's query is a 16-bit integer in two bytes, the rows g
//               and g + 8 of one operand, in steps of 2^-15 of the largest or 2^-14.  Nibbles stay biased by 8; the
//               sums start at -8 sum(q).  The order of the head dimension is the records' own: a lane's 16 bytes of a
//               column are its operands as they lie, and the query is permuted to match.
//   C t         fp16 x fp16 -> fp32: tokens by heads, with t in units of logits and split into two halves, which are
//               the two halves of the operand's depth, so that the product keeps 22 bits of it.
//   q . mu      int8 x int8 -> int32: eight pages by heads.
//
// The exponentials of a page's 16 tokens are summed without subtracting their maximum: deviations from a centroid are
// centred, so their largest is not below zero, and fp32 holds what is left.  Where it does not (a sum outside
// 1e-30 ... 1e30, or t beyond fp16), the group is computed again with the maximum subtracted.
//
// Needs: HEAD_DIM, GROUP, RANK, RECORD_BYTES, CENTROID, COLUMNS, COLUMN_BYTES, COEFFICIENTS, BASIS_SCALE,
// COEFFICIENT_SCALE, HEADS_A_BLOCK; FP16 or not.

constexpr int GROUP_PAGES = 8;
constexpr int CHUNKS = HEAD_DIM / 32;
constexpr int TILES = (GROUP + 7) / 8;         // of eight query heads
constexpr int PAGE_BYTES = HEADS_A_BLOCK * RECORD_BYTES;
constexpr float QUERY_STEPS = 32512.f;         // 127 * 256: both bytes stay within -128 ... 127 up to here

struct Query {
  u32 part[TILES][CHUNKS][4];  // of head g: high bytes, low bytes, of even and then of odd dimensions
  int bias[TILES][4];          // where the sums of V^T q start
  float unit[TILES];           // logits, in base 2, per unit of integer query times key: of head g,
  float units[TILES][2];       // of heads 2 x and 2 x + 1
};

// This lane's quarter of the query of head 8 tile + g; `queries` are the KV head's own, GROUP of them.
DEVICE void fetch_query(u32 (&raw)[HEAD_DIM / 8], const u16* queries, int tile) {
  const int query_head = tile * 8 + (lane_id() >> 2);
  const u16* from = queries + (query_head < GROUP ? query_head : 0) * HEAD_DIM + (lane_id() & 3) * (HEAD_DIM / 4);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) {
    const uint4 eight = ((const uint4*)from)[i];
    raw[4 * i] = eight.x, raw[4 * i + 1] = eight.y, raw[4 * i + 2] = eight.z, raw[4 * i + 3] = eight.w;
  }
}

// `raw` is what fetch_query fetched of the first tile.
DEVICE void load_query(Query& q, u32 (&raw)[HEAD_DIM / 8], const u16* queries, float scale) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    if (t > 0) fetch_query(raw, queries, t);
    const bool real = t * 8 + g < GROUP;
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) {
      if (!real) raw[i] = 0;
      largest = fmaxf(largest, fmaxf(fabsf(element_low(raw[i])), fabsf(element_high(raw[i]))));
    }
    largest = quad_max(largest);
    // A power of two, so that a bf16 entry within 2^-7 of the largest is an integer already.
    int exponent = 14 - ((__float_as_int(largest) >> 23) - 127);
    float inverse = power_of_two(exponent);
    if (largest * inverse > QUERY_STEPS) inverse = power_of_two(exponent - 1);
    int high_sum = 0, low_sum = 0;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        u32 high = 0, low = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 pair = raw[chunk * 4 + i];
          int value = __float2int_rn((odd ? element_high(pair) : element_low(pair)) * inverse);
          int rest = (int)(signed char)(value & 0xff);
          int top = (value - rest) >> 8;
          high |= (u32)(top & 0xff) << (8 * i);
          low |= (u32)(rest & 0xff) << (8 * i);
          high_sum += top;
          low_sum += rest;
        }
        q.part[t][chunk][2 * odd] = high;
        q.part[t][chunk][2 * odd + 1] = low;
      }
    }
    high_sum += __shfl_xor_sync(FULL, high_sum, 1);
    high_sum += __shfl_xor_sync(FULL, high_sum, 2);
    low_sum += __shfl_xor_sync(FULL, low_sum, 1);
    low_sum += __shfl_xor_sync(FULL, low_sum, 2);
    q.bias[t][0] = q.bias[t][1] = -8 * high_sum;
    q.bias[t][2] = q.bias[t][3] = -8 * low_sum;
    q.unit[t] = scale * LOG2E / inverse;
    q.units[t][0] = __shfl_sync(FULL, q.unit[t], 8 * x);
    q.units[t][1] = __shfl_sync(FULL, q.unit[t], 8 * x + 4);
  }
}

// Sums over this lane's two tokens, 2 g and 2 g + 1, of 2^(logit - peak) for heads 8 t + 2 x and + 1; peak is 0 unless
// SAFE.
template <bool SAFE>
DEVICE void score_page(float (&sums)[TILES][2], float (&peaks)[TILES][2], const Query& q, const u8* record) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
  u32 codes[CHUNKS];
  const u8* column = record + COLUMNS + (g < RANK ? g : RANK - 1) * COLUMN_BYTES + x * (HEAD_DIM / 8);
  if constexpr (CHUNKS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < CHUNKS / 4; i++) {
      uint4 four = ((const uint4*)column)[i];
      codes[4 * i] = four.x, codes[4 * i + 1] = four.y, codes[4 * i + 2] = four.z, codes[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) codes[i] = ((const u32*)column)[i];
  }
  int sum[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) sum[t][i] = q.bias[t][i];
  }
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    u32 even = codes[chunk] & 0x0f0f0f0fu, odd = (codes[chunk] >> 4) & 0x0f0f0f0fu;
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_bytes_unsigned(sum[t], q.part[t][chunk], even, odd);
  }
  // Coefficients of columns 2 x, 2 x + 1 for tokens 2 g and 2 g + 1, as fp16: a byte beside 0x64 is 1024 + byte.
  const int c0 = 2 * x < RANK ? 2 * x : RANK - 1, c1 = 2 * x + 1 < RANK ? 2 * x + 1 : RANK - 1;
  const u8* entries = record + COLUMNS + COEFFICIENTS + 2 * g;
  u32 bytes = __byte_perm(*(const u16*)(entries + c0 * COLUMN_BYTES), *(const u16*)(entries + c1 * COLUMN_BYTES), 0x5140);
  bytes ^= 0x80808080u;
  u32 first = __byte_perm(bytes, 0x64646464u, 0x4140), second = __byte_perm(bytes, 0x64646464u, 0x4342);
  asm("sub.f16x2 %0, %0, %1;" : "+r"(first) : "r"(0x64806480u));
  asm("sub.f16x2 %0, %0, %1;" : "+r"(second) : "r"(0x64806480u));
  u32 steps;  // scales of the two tokens
  if constexpr (COEFFICIENT_SCALE % 4 == 0) {
    steps = *(const u32*)(record + COEFFICIENT_SCALE + 4 * g);
  } else {
    const u16* two = (const u16*)(record + COEFFICIENT_SCALE) + 2 * g;
    steps = two[0] | (u32)two[1] << 16;
  }
  float step0 = low_half(steps), step1 = high_half(steps);
  u32 scales;  // of the two columns
  if constexpr (RANK % 2 == 0) {
    scales = *(const u32*)(record + BASIS_SCALE + 2 * (2 * x < RANK ? 2 * x : 0));
  } else {
    const u16* all = (const u16*)(record + BASIS_SCALE);
    scales = all[c0] | (u32)all[c1] << 16;
  }
  const float unit = power_of_two((int)*(const u16*)record - 32768);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const float f = SAFE ? 1.f / 32768.f : unit * q.unit[t];  // SAFE keeps t well inside fp16
    float t0 = 2 * x < RANK ? (float)(sum[t][0] * 256 + sum[t][2]) * (low_half(scales) * f) : 0.f;
    float t1 = 2 * x + 1 < RANK ? (float)(sum[t][1] * 256 + sum[t][3]) * (high_half(scales) * f) : 0.f;
    const u32 high = floats_to_halves(t0, t1), low = floats_to_halves(t0 - low_half(high), t1 - high_half(high));
    float z[4] = {};
    mma_halves(z, first, second, first, second, high, low);
    if constexpr (SAFE) {
#pragma unroll
      for (int i = 0; i < 4; i++) z[i] *= 32768.f * unit * q.units[t][i & 1];
    }
    z[0] *= step0, z[1] *= step0, z[2] *= step1, z[3] *= step1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      peaks[t][h] = 0.f;
      if constexpr (SAFE) {
        peaks[t][h] = fminf(fmaxf(octet_max(fmaxf(z[h], z[2 + h])), -1e38f), 1e38f);
        z[h] -= peaks[t][h], z[2 + h] -= peaks[t][h];
      }
      sums[t][h] = exp2_fast(z[h]) + exp2_fast(z[2 + h]);
    }
  }
}

// Log-mass, in base 2, of page g of a group for heads 8 t + 2 x and + 1.  False where a sum left the range in which it
// can be trusted.
template <bool SAFE> DEVICE bool score_group(float (&mass)[TILES][2], const Query& q, const u8* group) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
  float sums[TILES][2][2], peaks[TILES][2];  // of pages 0-3 and of 4-7: a quarter of each, of page g & 3
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    float sum[4][TILES][2], peak[4][TILES][2];
#pragma unroll
    for (int page = 0; page < 4; page++) score_page<SAFE>(sum[page], peak[page], q, group + (4 * half + page) * PAGE_BYTES);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float a = halve(sum[0][t][h], sum[1][t][h], g & 1, 4), b = halve(sum[2][t][h], sum[3][t][h], g & 1, 4);
        const float both = halve(a, b, g & 2, 8);
        if (half == 0) sums[t][h][0] = both; else sums[t][h][1] = both;
        if constexpr (SAFE) {
          const float low = g & 1 ? peak[1][t][h] : peak[0][t][h], high = g & 1 ? peak[3][t][h] : peak[2][t][h];
          if (g >> 2 == half) peaks[t][h] = g & 2 ? high : low;
        } else {
          peaks[t][h] = 0.f;
        }
      }
    }
  }
  int high[TILES][4], low[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) high[t][i] = low[t][i] = 0;
  }
  const u8* mean = group + g * PAGE_BYTES + CENTROID + x * (HEAD_DIM / 4);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const uint2 eight = *(const uint2*)(mean + 8 * chunk);
    const u32 pages[4] = {__byte_perm(eight.x, eight.y, 0x6420), 0, __byte_perm(eight.x, eight.y, 0x7531), 0};
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      mma_bytes_signed(high[t], pages, q.part[t][chunk][0], q.part[t][chunk][2]);
      mma_bytes_signed(low[t], pages, q.part[t][chunk][1], q.part[t][chunk][3]);
    }
  }
  const u32 header = *(const u32*)(group + g * PAGE_BYTES);  // exponent and centroid scale
  const float unit = power_of_two((int)(header & 0xffffu) - 32768) * high_half(header);
  bool good = true;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = halve(sums[t][h][0], sums[t][h][1], g & 4, 16);
      float value = (float)(high[t][h] * 256 + low[t][h]) * (unit * q.units[t][h]) + (peaks[t][h] + log2_fast(sum));
      if constexpr (SAFE) value = fminf(fmaxf(value, -1.4e38f), 1.4e38f);  // finite keys and queries: no infinity
      mass[t][h] = (header & 0xffffu) == 0 ? INF : value;                    // no summary: to be read exactly
      good = good && sum > 1e-30f && sum < 1e30f && fabsf(value) < 1e30f;
    }
  }
  return good;
}

struct Mass {
  float of[TILES][2];
};

// The same with the maxima subtracted, which hardly any group needs: out of line, with a query of its own, so that it
// takes no registers from the usual way.
static __device__ __noinline__ Mass score_group_again(const u16* queries, float scale, const u8* group) {
  Query q;
  u32 raw[HEAD_DIM / 8];
  fetch_query(raw, queries, 0);
  load_query(q, raw, queries, scale);
  Mass mass;
  score_group<true>(mass.of, q, group);
  return mass;
}
