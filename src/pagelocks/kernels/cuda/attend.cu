// Attend: exact attention of each row's queries over its pages, chosen ones or all.
//
// The pages of all rows and KV heads lie on one line, which the blocks of a fixed grid share evenly, so lengths may
// differ as they like.  Each warp takes every WARPS-th page of its block's part through a ring of asynchronous copies
// and keeps a running softmax; warps merge at the end of a row and head, blocks through partial results in global
// memory, which the last of them to arrive adds up, in order.
//
// Needs: PAGES_A_BLOCK, HEAD_DIM, GROUP, KV_HEADS, WARPS, STAGES, SHARED_BYTES; FP16 or not.

struct Params {
  const u16* query;          // (rows, KV_HEADS * GROUP, HEAD_DIM)
  const u16* keys;           // (blocks, tokens, KV_HEADS, HEAD_DIM), strided
  const u16* values;
  u16* output;               // (rows, KV_HEADS * GROUP, HEAD_DIM)
  const int* block_table;    // (rows, blocks of a row)
  const int* pages;          // (rows, KV_HEADS, budget_pages): physical pages of rows that select
  const int* score_start;    // (rows + 1): a row that selects has pages here
  const int* attend_start;   // (rows + 1)
  const int* lengths;        // (rows)
  float* partial_output;     // (2 parts, MEMBERS, HEAD_DIM)
  float2* partial_sum;       // (2 parts, MEMBERS): maximum and sum, in base 2
  u32* arrived;              // (rows * ITEMS): zero between launches
  i64 query_stride, output_stride;                // elements
  i64 block_stride, token_stride, head_stride;    // of keys and values, elements
  i64 table_stride;
  int rows, parts, least_pages, budget_pages;
  float scale;
};

constexpr int MEMBERS = GROUP < 16 ? GROUP : 16;       // query heads at a time
constexpr int TILES = (GROUP + MEMBERS - 1) / MEMBERS;
constexpr int ITEMS = KV_HEADS * TILES;                // a row
constexpr bool UPPER = MEMBERS > 8;                    // rows 8 to 15 of an operand are in use
constexpr int DEPTH = HEAD_DIM / 16;
constexpr int THREADS = 32 * WARPS;
constexpr int ROW_CHUNKS = HEAD_DIM / 8;               // of 16 bytes
constexpr int SWIZZLE = ROW_CHUNKS < 8 ? ROW_CHUNKS - 1 : 7;  // spreads eight rows over the banks
constexpr int HALF_STAGE = PAGE * HEAD_DIM * 2;        // bytes of a page's keys
constexpr int STAGE_BYTES = 2 * HALF_STAGE;

struct Merge {
  float output[WARPS][MEMBERS][HEAD_DIM];
  float top[WARPS][16], sum[WARPS][16];
  float total[16];
  u32 last;
};
static_assert(WARPS * STAGES * STAGE_BYTES + sizeof(Merge) <= SHARED_BYTES, "the wrapper asks for less shared memory");
constexpr int WEIGHTS = WARPS * HEAD_DIM;  // parts whose weights fit where the warps' outputs were

// A walk over one warp's pages of its block's part, across rows and heads.
struct Walk {
  int item_start;  // position of the item's first page
  int row, item;   // item: head and tile within the row
  int pages;       // of an item of this row
  int length;      // tokens of this row
  bool selects;    // whether its pages are chosen ones
  int page, begin, end;

  DEVICE_MEMBER void enter(int low, int high, int warp) {
    begin = (low > item_start ? low : item_start) - item_start;
    int stop = item_start + pages;
    end = (high < stop ? high : stop) - item_start;
    page = begin + warp;
  }
  DEVICE_MEMBER int enter_row(const Params& p) {  // returns where the row starts
    const int start = p.attend_start[row], stop = p.attend_start[row + 1];
    const int scored = p.score_start[row], scored_to = p.score_start[row + 1];
    length = p.lengths[row];
    pages = stop - start;
    selects = scored_to > scored;
    return start;
  }
  DEVICE_MEMBER void find(const Params& p, int low, int high, int warp) {
    row = row_of(p.attend_start, p.rows, low / ITEMS);
    const int row_start = enter_row(p) * ITEMS;
    item = (low - row_start) / pages;
    item_start = row_start + item * pages;
    enter(low, high, warp);
  }
  DEVICE_MEMBER bool next_item(const Params& p, int low, int high, int warp) {
    item_start += pages;
    if (item_start >= high) return false;
    if (++item == ITEMS) {
      item = 0;
      do {
        row++;
        enter_row(p);
      } while (pages == 0);
    }
    enter(low, high, warp);
    return true;
  }
  DEVICE_MEMBER int tokens_of_page() const { return page == pages - 1 ? length - (length - 1) / PAGE * PAGE : PAGE; }
};

DEVICE int physical_page(const Params& p, const Walk& w) {
  if (w.selects) return p.pages[((i64)w.row * KV_HEADS + w.item / TILES) * p.budget_pages + w.page];
  return p.block_table[w.row * p.table_stride + w.page / PAGES_A_BLOCK] * PAGES_A_BLOCK + w.page % PAGES_A_BLOCK;
}

// Of `count` blocks that call this for the same counter, true for the last; what the others wrote before is then
// visible to this thread.  The counter is back at zero afterwards.
DEVICE bool is_last(u32* counter, u32 count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count - 1) : "memory");
  return before == count - 1;
}

DEVICE void attend_part(const Params& p, u8* raw, int low, int high, int total, int parts) {
  Merge& merge = *(Merge*)(raw + WARPS * STAGES * STAGE_BYTES);
  const int warp = threadIdx.x >> 5, lane = lane_id(), g = lane >> 2, x = lane & 3;
  const u32 ring = shared_address(raw) + warp * (STAGES * STAGE_BYTES);
  Walk now, ahead;
  now.find(p, low, high, warp);
  ahead = now;
  bool more = true;
  while (more && ahead.page >= ahead.end) more = ahead.next_item(p, low, high, warp);
  int next = more ? physical_page(p, ahead) : 0;
  auto issue = [&](int stage) {
    if (more) {
      const int left = ahead.tokens_of_page();
      const i64 base = (i64)(next / PAGES_A_BLOCK) * p.block_stride + (i64)(next % PAGES_A_BLOCK) * PAGE * p.token_stride +
                       (ahead.item / TILES) * p.head_stride;
      const u32 to = ring + stage * STAGE_BYTES;
#pragma unroll
      for (int i = 0; i < PAGE * ROW_CHUNKS / 32; i++) {
        int at = i * 32 + lane, token = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
        i64 from = base + token * p.token_stride + chunk * 8;
        u32 place = to + token * (HEAD_DIM * 2) + ((chunk ^ (token & SWIZZLE)) << 4);
        copy_async_16(place, p.keys + from, token < left);  // a token past the end may hold NaN: zeros instead
        copy_async_16(place + HALF_STAGE, p.values + from, token < left);
      }
      ahead.page += WARPS;
      while (more && ahead.page >= ahead.end) more = ahead.next_item(p, low, high, warp);
      if (more) next = physical_page(p, ahead);  // one page early: the next copy need not wait for it
    }
    copy_async_commit();
  };
  for (int s = 0; s < STAGES - 1; s++) issue(s);

  int stage = 0;
  bool going = true;
  while (going) {
    const int head = now.item / TILES, tile = now.item % TILES;
    const int first_member = tile * MEMBERS;  // the last tile may be short
    // Queries as operands, scaled so that logits come in base 2.
    u32 query[DEPTH][UPPER ? 4 : 2];
    {
      const u16* from = p.query + now.row * p.query_stride + (head * GROUP + first_member) * HEAD_DIM;
#pragma unroll
      for (int half = 0; half < (UPPER ? 2 : 1); half++) {
        const int member = half * 8 + g;
        const bool real = member < MEMBERS && first_member + member < GROUP;
        const u32* mine = (const u32*)(from + (real ? member : 0) * HEAD_DIM) + x;
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
          query[k][half] = real ? mine[k * 8] : 0u;
          query[k][(UPPER ? 2 : 1) + half] = real ? mine[k * 8 + 4] : 0u;
        }
      }
    }
    const float unit = p.scale * LOG2E;
    float output[HEAD_DIM / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) output[n][0] = output[n][1] = output[n][2] = output[n][3] = 0.f;
    float top[2] = {-INF, -INF}, sum[2] = {0.f, 0.f};

    for (; now.page < now.end; now.page += WARPS) {
      copy_async_wait<STAGES - 2>();
      __syncwarp();
      const u32 key = ring + stage * STAGE_BYTES, value = key + HALF_STAGE;
      float logits[2][4] = {};
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        // Matrices: tokens 0-7 and 8-15, dimensions 16 k to +7 and +8 to +15.
        const int token = (lane & 7) + ((lane & 16) >> 1), chunk = 2 * k + ((lane & 8) >> 3);
        u32 b[4];
        load_matrices(b, key + token * (HEAD_DIM * 2) + ((chunk ^ (token & SWIZZLE)) << 4));
        const u32 a0 = query[k][0], a1 = UPPER ? query[k][1] : 0u, a2 = query[k][UPPER ? 2 : 1], a3 = UPPER ? query[k][3] : 0u;
        mma_elements(logits[0], a0, a1, a2, a3, b[0], b[1]);
        mma_elements(logits[1], a0, a1, a2, a3, b[2], b[3]);
      }
      const int left = now.tokens_of_page();
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
      for (int half = 0; half < (UPPER ? 2 : 1); half++) {
        const int i = 2 * half;
        float highest = fmaxf(fmaxf(logits[0][i], logits[0][i + 1]), fmaxf(logits[1][i], logits[1][i + 1]));
        highest = fmaxf(quad_max(highest), top[half]);
        const float base = highest > -INF ? highest : 0.f;
        shrink[half] = exp2_fast(top[half] - base);
        top[half] = highest;
        float w0 = exp2_fast(logits[0][i] - base), w1 = exp2_fast(logits[0][i + 1] - base);
        float w2 = exp2_fast(logits[1][i] - base), w3 = exp2_fast(logits[1][i + 1] - base);
        sum[half] = sum[half] * shrink[half] + ((w0 + w1) + (w2 + w3));
        weights[half] = elements(w0, w1);
        weights[2 + half] = elements(w2, w3);
      }
      if (__any_sync(FULL, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
          output[n][0] *= shrink[0], output[n][1] *= shrink[0];
          if (UPPER) output[n][2] *= shrink[1], output[n][3] *= shrink[1];
        }
      }
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        // Matrices: tokens 0-7, 8-15 of dimensions 16 k to +7, then of +8 to +15.
        const int token = lane & 15, chunk = 2 * k + (lane >> 4);
        u32 b[4];
        load_matrices_transposed(b, value + token * (HEAD_DIM * 2) + ((chunk ^ (token & SWIZZLE)) << 4));
        mma_elements(output[2 * k], weights[0], weights[1], weights[2], weights[3], b[0], b[1]);
        mma_elements(output[2 * k + 1], weights[0], weights[1], weights[2], weights[3], b[2], b[3]);
      }
      __syncwarp();
      issue((stage + STAGES - 1) % STAGES);
      if (++stage == STAGES) stage = 0;
    }

    // Merge the warps.
#pragma unroll
    for (int half = 0; half < (UPPER ? 2 : 1); half++) {
      const int member = half * 8 + g;
      float all = quad_sum(sum[half]);
      if (x == 0) merge.top[warp][member] = top[half], merge.sum[warp][member] = all;
      if (member < MEMBERS) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
          *(float2*)&merge.output[warp][member][n * 8 + 2 * x] = make_float2(output[n][2 * half], output[n][2 * half + 1]);
      }
    }
    __syncthreads();
    const bool whole = now.begin == 0 && now.end == now.pages;
    const i64 slot = 2 * (i64)blockIdx.x + (now.begin == 0);
    u16* out = p.output + now.row * p.output_stride + (head * GROUP + first_member) * HEAD_DIM;
    constexpr int QUADS = MEMBERS * HEAD_DIM / 4;
    for (int at = threadIdx.x; at < QUADS; at += THREADS) {
      const int member = at / (HEAD_DIM / 4), d = at % (HEAD_DIM / 4) * 4;
      float highest = -INF;
#pragma unroll
      for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, merge.top[w][member]);
      const float base = highest > -INF ? highest : 0.f;
      float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
      float weight_sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float weight = exp2_fast(merge.top[w][member] - base);
        const float4 one = *(float4*)&merge.output[w][member][d];
        weight_sum += weight * merge.sum[w][member];
        all.x += weight * one.x, all.y += weight * one.y, all.z += weight * one.z, all.w += weight * one.w;
      }
      if (whole) {
        const float inverse = weight_sum > 0.f ? 1.f / weight_sum : 0.f;
        if (first_member + member < GROUP)
          *(uint2*)&out[member * HEAD_DIM + d] = make_uint2(elements(all.x * inverse, all.y * inverse), elements(all.z * inverse, all.w * inverse));
      } else {
        *(float4*)&p.partial_output[(slot * MEMBERS + member) * HEAD_DIM + d] = all;
        if (d == 0) p.partial_sum[slot * MEMBERS + member] = make_float2(highest, weight_sum);
      }
    }
    if (!whole) {
      const int first = part_of(total, now.item_start, parts), last = part_of(total, now.item_start + now.pages - 1, parts);
      __syncthreads();
      if (threadIdx.x == 0) merge.last = is_last(&p.arrived[(i64)now.row * ITEMS + now.item], last - first + 1);
      __syncthreads();
      if (merge.last) {
        // A block holds at most one cut item that begins in it (slot 1) and one that began before it (slot 0).
        auto slot_of = [&](int part) { return 2 * (i64)(first + part) + (part == 0); };
        const int count = last - first + 1;
        float* weights = &merge.output[0][0][0];  // [part][member], while there is room
        for (int member = warp; member < MEMBERS; member += WARPS) {
          float highest = -INF, all = 0.f;
#pragma unroll 4
          for (int part = lane; part < count; part += 32)
            highest = fmaxf(highest, __ldcg(&p.partial_sum[slot_of(part) * MEMBERS + member].x));
          highest = warp_max(highest);
          const float base = highest > -INF ? highest : 0.f;
#pragma unroll 4
          for (int part = lane; part < count; part += 32) {
            const float2 one = __ldcg(&p.partial_sum[slot_of(part) * MEMBERS + member]);
            const float weight = exp2_fast(one.x - base);
            all += weight * one.y;
            if (part < WEIGHTS) weights[part * MEMBERS + member] = weight;
          }
          all = warp_sum(all);
          if (lane == 0) merge.total[member] = all, merge.top[0][member] = base;
        }
        __syncthreads();
        for (int at = threadIdx.x; at < QUADS; at += THREADS) {
          const int member = at / (HEAD_DIM / 4), d = at % (HEAD_DIM / 4) * 4;
          const float base = merge.top[0][member];
          float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 16
          for (int part = 0; part < count; part++) {
            const i64 from = slot_of(part) * MEMBERS + member;
            const float4 one = __ldcg((const float4*)&p.partial_output[from * HEAD_DIM + d]);
            const float weight =
                part < WEIGHTS ? weights[part * MEMBERS + member] : exp2_fast(__ldcg(&p.partial_sum[from].x) - base);
            all.x += weight * one.x, all.y += weight * one.y, all.z += weight * one.z, all.w += weight * one.w;
          }
          const float sum = merge.total[member], inverse = sum > 0.f ? 1.f / sum : 0.f;
          if (first_member + member < GROUP)
            *(uint2*)&out[member * HEAD_DIM + d] = make_uint2(elements(all.x * inverse, all.y * inverse), elements(all.z * inverse, all.w * inverse));
        }
      }
    }
    going = now.next_item(p, low, high, warp);
    __syncthreads();  // the merge buffer is free again
  }
  copy_async_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS) attend_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 raw[];
  wait_for_previous_kernel();
  const int total = p.attend_start[p.rows] * ITEMS;
  const int useful = (total + p.least_pages - 1) / p.least_pages, parts = p.parts < useful ? p.parts : useful;
  if ((int)blockIdx.x < parts) {
    attend_part(p, raw, part_begin(total, blockIdx.x, parts), part_begin(total, blockIdx.x + 1, parts), total, parts);
  }
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {  // padding, which later layers still compute with
    if (p.attend_start[row] != p.attend_start[row + 1]) continue;
    for (int i = threadIdx.x; i < KV_HEADS * GROUP * HEAD_DIM / 2; i += THREADS) ((u32*)(p.output + row * p.output_stride))[i] = 0;
  }
}
