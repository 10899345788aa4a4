// Attend: exact attention of each row's queries over its pages, chosen ones or all.
//
// The pages of all rows and KV heads lie on one line, which the blocks of a fixed grid share evenly, so lengths may
// differ as they like.  Each warp takes every WARPS-th page of its block's part through a ring of asynchronous copies
// and keeps a running softmax; warps merge at the end of a row and head, blocks through partial results in global
// memory, which the last of them to arrive adds up, in order.
//
// Needs, beside what page.cuh does: PAGES_A_BLOCK, KV_HEADS, LEAST_PAGES, WARPS, STAGES, SHARED_BYTES; FP16
// or not.

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
  int rows, parts, budget_pages;
  float scale;
};

constexpr int TILES = (GROUP + MEMBERS - 1) / MEMBERS;
constexpr int ITEMS = KV_HEADS * TILES;                // a row
constexpr int THREADS = 32 * WARPS;

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

// The physical page of page `page` of the walk's item.
DEVICE int physical_page(const Params& p, const Walk& w, int page) {
  if (w.selects) return p.pages[((i64)w.row * KV_HEADS + w.item / TILES) * p.budget_pages + page];
  return p.block_table[w.row * p.table_stride + page / PAGES_A_BLOCK] * PAGES_A_BLOCK + page % PAGES_A_BLOCK;
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
  const int warp = threadIdx.x >> 5, lane = lane_id();
  const u32 ring = shared_address(raw) + warp * (STAGES * STAGE_BYTES);
  Walk now, ahead;
  now.find(p, low, high, warp);
  ahead = now;
  u32 query[DEPTH][2 * HALVES];
  auto load_item = [&] {
    const u16* queries = p.query + now.row * p.query_stride + now.item / TILES * (GROUP * HEAD_DIM);
    load_queries(query, queries, now.item % TILES * MEMBERS);
  };
  // Of the warp's next 32 pages in the item a lane has one, so that copies do not wait for one load after the other.
  bool more = true;
  int physical = 0, used = 0;
  auto look_ahead = [&] {
    while (more && ahead.page >= ahead.end) more = ahead.next_item(p, low, high, warp);
    const int page = ahead.page + lane * WARPS;
    if (more && page < ahead.end) physical = physical_page(p, ahead, page);
    used = 0;
  };
  look_ahead();
  auto issue = [&](int stage) {
    if (more) {
      const int left = ahead.tokens_of_page(), next = __shfl_sync(FULL, physical, used);
      const i64 base = (i64)(next / PAGES_A_BLOCK) * p.block_stride + (i64)(next % PAGES_A_BLOCK) * PAGE * p.token_stride +
                       (ahead.item / TILES) * p.head_stride;
      const u32 to = ring + stage * STAGE_BYTES;
#pragma unroll
      for (int i = 0; i < PAGE * ROW_CHUNKS / 32; i++)
        copy_chunk(to, p.keys + base, p.values + base, p.token_stride, i * 32 + lane, left);
      ahead.page += WARPS;
      if (++used == 32 || ahead.page >= ahead.end) look_ahead();
    }
    copy_async_commit();
  };
  for (int s = 0; s < STAGES; s++) issue(s);
  load_item();

  int stage = 0;
  bool going = true;
  while (going) {
    const int head = now.item / TILES, tile = now.item % TILES;
    const int first_member = tile * MEMBERS;  // the last tile may be short
    Softmax softmax;
    softmax.clear();

    for (; now.page < now.end; now.page += WARPS) {
      copy_async_wait<STAGES - 1>();
      __syncwarp();
      attend_page(softmax, query, ring + stage * STAGE_BYTES, now.tokens_of_page(), p.scale * LOG2E);
      __syncwarp();
      issue(stage);  // the one just read: all stages but this are on their way meanwhile
      if (++stage == STAGES) stage = 0;
    }

    // Merge the warps.
    store_softmax(softmax, &merge.output[warp][0][0], merge.top[warp], merge.sum[warp]);
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
    if (going) load_item();
    __syncthreads();  // the merge buffer is free again
  }
  copy_async_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS) attend_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 raw[];
  wait_for_previous_kernel();
  const int total = p.attend_start[p.rows] * ITEMS;
  // A block with pages of two items merges twice, one after the other, and both items wait for it: where all rows are as
  // long as each other, no item is cut so if their number divides the blocks'.
  int parts = parts_of(total, p.parts);
  const int odd = parts % (p.rows * ITEMS);
  if (odd < parts && odd * 16 <= parts) parts -= odd;
  if ((int)blockIdx.x < parts) {
    attend_part(p, raw, part_begin(total, blockIdx.x, parts), part_begin(total, blockIdx.x + 1, parts), total, parts);
  }
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {  // padding, which later layers still compute with
    if (p.attend_start[row] != p.attend_start[row + 1]) continue;
    for (int i = threadIdx.x; i < KV_HEADS * GROUP * HEAD_DIM / 2; i += THREADS) ((u32*)(p.output + row * p.output_stride))[i] = 0;
  }
}
