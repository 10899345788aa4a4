// Score: a page's packed summary and a row's queries -> the page's log-mass for every query head.
//
//     s_g(j) = logsumexp_i( (q_g . mu_j + (V_j^T q_g) . c_i) * scale )                                        (Eq. 4)
//
// Each warp streams records of one KV head through a ring of its own in shared memory, eight pages a stage, by bulk
// copies; warps never wait for each other.  All products run on tensor cores:
//
//   V^T q   int8 x int4 -> int32.  A head's query is a 16-bit integer in two bytes, the rows g and g + 8 of one operand,
//           and the step is 2^-15 of the largest or 2^-14.  Nibbles stay biased by 8; the sums start at
//           -8 sum(q).  The order of the head dimension is the records' own: a lane's 16 bytes of a column are its
//           operands as they lie, and the query is permuted to match.
//   c . t   fp16 x fp16 -> fp32 with t = V^T q split into two halves, the two halves of the operand's depth.
//   q . mu  int8 x int8 -> int32, eight pages at once.
//
// The exponentials of a page's 16 tokens are summed without subtracting their maximum: deviations from a centroid are
// centred, so their largest is not below zero, and fp32 holds what is left.  Where it does not (a sum outside
// 1e-30 ... 1e30), the group is computed again with the maximum subtracted.
//
// Needs: PAGES_A_BLOCK, HEAD_DIM, GROUP, KV_HEADS, RANK, RECORD_BYTES, CENTROID, COLUMNS, COLUMN_BYTES, COEFFICIENTS, BASIS_SCALE,
// COEFFICIENT_SCALE, WARPS, HEADS_A_BLOCK, STAGES; FP16 or not.

struct Params {
  const u16* query;          // (rows, KV_HEADS * GROUP, HEAD_DIM)
  const u8* records;         // (blocks, pages a block, KV_HEADS, RECORD_BYTES)
  const int* block_table;    // (rows, blocks of a row)
  const int* start;          // (rows + 1): running total of the rows' pages
  float* log_mass;           // (KV_HEADS, capacity, GROUP), natural log
  float2* partial;           // (KV_HEADS, GROUP, slots): maximum and sum, in base 2; slot (block + row) * SUBS + warp
  i64 query_stride, block_bytes;  // elements; bytes
  i64 table_stride, capacity, slots;
  int rows, parts, least_pages;
  float scale;
};

constexpr int GROUP_PAGES = 8;
constexpr int SUBS = WARPS / HEADS_A_BLOCK;    // warps that share a KV head
constexpr int CHUNKS = HEAD_DIM / 32;
constexpr int TILES = (GROUP + 7) / 8;         // of eight query heads
constexpr int PAIRS = (TILES + 1) / 2;
constexpr int STAGE_BYTES = GROUP_PAGES * RECORD_BYTES;
constexpr float QUERY_STEPS = 32512.f;         // 127 * 256: both bytes stay within -128 ... 127 up to here

// A walk over the groups of eight pages that one warp handles, across the rows of its block's part.
struct Walk {
  int row, page, end;  // the next group is pages page ... of row, none at or past end
  DEVICE_MEMBER void enter(const Params& p, int low, int high, int sub) {
    int first = p.start[row], last = p.start[row + 1];
    page = (low > first ? low : first) - first + GROUP_PAGES * sub;
    end = (high < last ? high : last) - first;
  }
  // Moves on until there is a group; row >= limit where there is none.
  DEVICE_MEMBER void settle(const Params& p, int low, int high, int sub, int limit) {
    while (page >= end) {
      if (++row >= limit) return;
      enter(p, low, high, sub);
    }
  }
};

DEVICE int block_of(const Params& p, const Walk& walk, int limit) {  // this lane's page of the group
  int page = walk.page + lane_id();
  bool mine = walk.row < limit && lane_id() < GROUP_PAGES && page < walk.end;
  return mine ? p.block_table[walk.row * p.table_stride + page / PAGES_A_BLOCK] : -1;
}

struct Query {
  u32 part[TILES][CHUNKS][4];  // operand registers: high bytes, low bytes, of even and of odd dimensions
  int bias_high[TILES], bias_low[TILES];
  float unit[TILES];           // logits, in base 2, per unit of integer query times key
};

DEVICE void load_query(Query& q, const Params& p, int row, int head) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    int query_head = t * 8 + g;
    bool real = query_head < GROUP;
    const u32* from = (const u32*)(p.query + row * p.query_stride + (head * GROUP + (real ? query_head : 0)) * HEAD_DIM +
                                   x * (HEAD_DIM / 4));
    u32 raw[HEAD_DIM / 8];
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) {
      raw[i] = real ? from[i] : 0u;
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
    q.bias_high[t] = -8 * high_sum;
    q.bias_low[t] = -8 * low_sum;
    q.unit[t] = p.scale * LOG2E / inverse;
  }
}

// Sums over one page's tokens of 2^(logit - peak) for query head t * 8 + g, this lane's quarter of the tokens; peak is 0
// unless SAFE.
template <bool SAFE>
DEVICE void score_page(float (&sums)[TILES], float (&peaks)[TILES], const Query& q, const u8* record) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
  constexpr float TO_HALF = 1.f / 32768.f;  // keeps V^T q well inside fp16
  // t = V^T q of columns 2 x, 2 x + 1 for head g: the product's own layout is the next one's operand.
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
    sum[t][0] = sum[t][1] = q.bias_high[t];
    sum[t][2] = sum[t][3] = q.bias_low[t];
  }
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    u32 even = codes[chunk] & 0x0f0f0f0fu, odd = (codes[chunk] >> 4) & 0x0f0f0f0fu;
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_bytes_unsigned(sum[t], q.part[t][chunk], even, odd);
  }
  const int c0 = 2 * x < RANK ? 2 * x : RANK - 1, c1 = 2 * x + 1 < RANK ? 2 * x + 1 : RANK - 1;
  const u16* scales = (const u16*)(record + BASIS_SCALE);
  float scale0 = 2 * x < RANK ? half_to_float(scales[c0]) * TO_HALF : 0.f;
  float scale1 = 2 * x + 1 < RANK ? half_to_float(scales[c1]) * TO_HALF : 0.f;
  u32 high[2 * PAIRS], low[2 * PAIRS];
#pragma unroll
  for (int t = 0; t < 2 * PAIRS; t++) {
    if (t < TILES) {
      float t0 = (float)(sum[t][0] * 256 + sum[t][2]) * scale0, t1 = (float)(sum[t][1] * 256 + sum[t][3]) * scale1;
      high[t] = floats_to_halves(t0, t1);
      low[t] = floats_to_halves(t0 - low_half(high[t]), t1 - high_half(high[t]));
    } else {
      high[t] = low[t] = 0;
    }
  }
  // Coefficients of columns 2 x, 2 x + 1 for tokens 2 g and 2 g + 1, as fp16: a byte beside 0x64 is 1024 + byte.
  const u8* entries = record + COLUMNS + COEFFICIENTS + 2 * g;
  u32 bytes = __byte_perm(*(const u16*)(entries + c0 * COLUMN_BYTES), *(const u16*)(entries + c1 * COLUMN_BYTES), 0x5140);
  bytes ^= 0x80808080u;
  u32 first = __byte_perm(bytes, 0x64646464u, 0x4140), second = __byte_perm(bytes, 0x64646464u, 0x4342);
  asm("sub.f16x2 %0, %0, %1;" : "+r"(first) : "r"(0x64806480u));
  asm("sub.f16x2 %0, %0, %1;" : "+r"(second) : "r"(0x64806480u));
  // Columns 2 x, 2 x + 1 of the two products: tokens 4 x, 4 x + 2 and 4 x + 1, 4 x + 3.
  const u16* steps = (const u16*)(record + COEFFICIENT_SCALE) + 4 * x;
  float step[4];
  if constexpr (COEFFICIENT_SCALE % 8 == 0) {
    uint2 four = *(const uint2*)steps;
    step[0] = low_half(four.x), step[1] = high_half(four.x), step[2] = low_half(four.y), step[3] = high_half(four.y);
  } else {
    for (int i = 0; i < 4; i++) step[i] = half_to_float(steps[i]);
  }
  const float unit = power_of_two((int)*(const u16*)record - 32768) * (1.f / TO_HALF);
#pragma unroll
  for (int pair = 0; pair < PAIRS; pair++) {
    float even[4] = {}, odd[4] = {};
    mma_halves(even, high[2 * pair], high[2 * pair + 1], low[2 * pair], low[2 * pair + 1], first, first);
    mma_halves(odd, high[2 * pair], high[2 * pair + 1], low[2 * pair], low[2 * pair + 1], second, second);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = 2 * pair + half;
      if (t < TILES) {
        const float f = unit * q.unit[t];
        float z0 = even[2 * half] * (step[0] * f), z1 = odd[2 * half] * (step[1] * f);
        float z2 = even[2 * half + 1] * (step[2] * f), z3 = odd[2 * half + 1] * (step[3] * f);
        peaks[t] = 0.f;
        if constexpr (SAFE) {
          peaks[t] = fminf(fmaxf(quad_max(fmaxf(fmaxf(z0, z1), fmaxf(z2, z3))), -1e38f), 1e38f);
          z0 -= peaks[t], z1 -= peaks[t], z2 -= peaks[t], z3 -= peaks[t];
        }
        sums[t] = (exp2_fast(z0) + exp2_fast(z1)) + (exp2_fast(z2) + exp2_fast(z3));
      }
    }
  }
}

// Log-mass, in base 2, of a group's pages x and x + 4 for query head t * 8 + g of this lane.  False where a sum left the
// range in which it can be trusted.
template <bool SAFE> DEVICE bool score_group(float (&mass)[TILES][2], const Query& q, const u8* group) {
  const int g = lane_id() >> 2, x = lane_id() & 3;
  float sums[TILES][2], peaks[TILES][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) sums[t][0] = sums[t][1] = 1.f, peaks[t][0] = peaks[t][1] = 0.f;
#pragma unroll 1
  for (int pair = 0; pair < GROUP_PAGES / 2; pair++) {
    float sum[2][TILES], peak[2][TILES];
    score_page<SAFE>(sum[0], peak[0], q, group + 2 * pair * RECORD_BYTES);
    score_page<SAFE>(sum[1], peak[1], q, group + (2 * pair + 1) * RECORD_BYTES);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      // Quarters of two pages' sums: even lanes of a quad gather the first page's, odd ones the second's.
      float mine = x & 1 ? sum[1][t] : sum[0][t], theirs = x & 1 ? sum[0][t] : sum[1][t];
      float all = mine + __shfl_xor_sync(FULL, theirs, 1);
      all += __shfl_xor_sync(FULL, all, 2);
      if (pair == x >> 1) sums[t][0] = all;
      if (pair == (x >> 1) + 2) sums[t][1] = all;
      if constexpr (SAFE) {
        float top = x & 1 ? peak[1][t] : peak[0][t];
        if (pair == x >> 1) peaks[t][0] = top;
        if (pair == (x >> 1) + 2) peaks[t][1] = top;
      }
    }
  }
  // q . mu of all eight pages; the operand's column 2 n is page n, 2 n + 1 page n + 4, so that a lane gets x and x + 4.
  int centre[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) centre[t][0] = centre[t][1] = centre[t][2] = centre[t][3] = 0;
  const u8* mean = group + ((g >> 1) + 4 * (g & 1)) * RECORD_BYTES + CENTROID + x * (HEAD_DIM / 4);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    uint2 eight = *(const uint2*)(mean + 8 * chunk);
    u32 even = __byte_perm(eight.x, eight.y, 0x6420), odd = __byte_perm(eight.x, eight.y, 0x7531);
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_bytes_signed(centre[t], q.part[t][chunk], even, odd);
  }
  bool good = true;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 header = *(const u32*)(group + (x + 4 * i) * RECORD_BYTES);  // exponent and centroid scale
    const float unit = power_of_two((int)(header & 0xffffu) - 32768) * high_half(header);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float value = (float)(centre[t][i] * 256 + centre[t][2 + i]) * (unit * q.unit[t]) + (peaks[t][i] + log2_fast(sums[t][i]));
      if (value == value) value = fminf(fmaxf(value, -1.4e38f), 1.4e38f);  // finite keys and queries: no infinity
      mass[t][i] = (header & 0xffffu) == 0 ? INF : value;                    // no summary: to be read exactly
      good = good && sums[t][i] > 1e-30f && sums[t][i] < 1e30f;
    }
  }
  return good;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) score_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(8) u64 barriers[WARPS][STAGES];
  const int warp = threadIdx.x >> 5, lane = lane_id();
  const int head = blockIdx.y * HEADS_A_BLOCK + warp % HEADS_A_BLOCK, sub = warp / HEADS_A_BLOCK;
  u8* ring = shared + warp * (STAGES * STAGE_BYTES);
  u32 barrier[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; s++) {
    barrier[s] = shared_address(&barriers[warp][s]);
    if (lane == 0) barrier_init(barrier[s], 1);
  }
  barrier_fence();
  __syncwarp();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int total = p.start[p.rows];
  if (total == 0 || head >= KV_HEADS) return;
  const int useful = (total + p.least_pages - 1) / p.least_pages, parts = p.parts < useful ? p.parts : useful;
  if ((int)blockIdx.x >= parts) return;
  const int low = part_begin(total, blockIdx.x, parts), high = part_begin(total, blockIdx.x + 1, parts);
  const int first_row = row_of(p.start, p.rows, low), limit = row_of(p.start, p.rows, high - 1) + 1;

  Walk ahead{first_row, 0, 0};
  ahead.enter(p, low, high, sub);
  ahead.settle(p, low, high, sub, limit);
  int block = block_of(p, ahead, limit);
  auto issue = [&](int stage) {  // copies the group that `ahead` is at, and moves it on
    if (ahead.row >= limit) return;
    int pages = ahead.end - ahead.page < GROUP_PAGES ? ahead.end - ahead.page : GROUP_PAGES;
    if (lane == 0) barrier_expect(barrier[stage], pages * RECORD_BYTES);
    __syncwarp();
    if (lane < pages) {
      int slot = (ahead.page + lane) % PAGES_A_BLOCK;
      const u8* from = p.records + block * p.block_bytes + (i64)(slot * KV_HEADS + head) * RECORD_BYTES;
      copy_bulk(shared_address(ring + stage * STAGE_BYTES + lane * RECORD_BYTES), from, RECORD_BYTES, barrier[stage]);
    }
    ahead.page += GROUP_PAGES * SUBS;
    ahead.settle(p, low, high, sub, limit);
    block = block_of(p, ahead, limit);  // one group early: the next copy need not wait for it
  };
  for (int s = 0; s < STAGES; s++) issue(s);

  Query q;
  int stage = 0;
  u32 parity = 0;
  Walk now{first_row, 0, 0};
  for (; now.row < limit; now.row++) {
    now.enter(p, low, high, sub);
    float peak[TILES], sum[TILES];
    for (int t = 0; t < TILES; t++) peak[t] = -INF, sum[t] = 0.f;
    if (now.page < now.end) load_query(q, p, now.row, head);
    float* out = p.log_mass + ((i64)head * p.capacity + p.start[now.row]) * GROUP;
    for (; now.page < now.end; now.page += GROUP_PAGES * SUBS) {
      barrier_wait(barrier[stage], parity);
      const u8* group = ring + stage * STAGE_BYTES;
      float mass[TILES][2];
      bool good = score_group<false>(mass, q, group);
      const int page = now.page + (lane & 3);
      good = good || page >= now.end;
      if (!__all_sync(FULL, good)) score_group<true>(mass, q, group);
      __syncwarp();
      issue(stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int query_head = t * 8 + (lane >> 2);
        if (query_head < GROUP) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            if (page + 4 * i < now.end) {
              out[(i64)(page + 4 * i) * GROUP + query_head] = mass[t][i] * LN2;
              if (mass[t][i] < INF) {  // neither NaN nor a page to be read exactly
                float top = fmaxf(peak[t], mass[t][i]);
                sum[t] = sum[t] * exp2_fast(peak[t] - top) + exp2_fast(mass[t][i] - top);
                peak[t] = top;
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int query_head = t * 8 + (lane >> 2);
      float top = quad_max(peak[t]);
      float all = quad_sum(peak[t] > -INF ? sum[t] * exp2_fast(peak[t] - top) : 0.f);
      if ((lane & 3) == 0 && query_head < GROUP) {
        i64 slot = (i64)(blockIdx.x + now.row) * SUBS + sub;
        p.partial[(i64)(head * GROUP + query_head) * p.slots + slot] = make_float2(top, all);
      }
    }
  }
}
