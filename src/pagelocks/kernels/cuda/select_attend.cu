// Select and attend in one: for few rows, where a launch and its chain of loads cost more than what they read.
//
// One row and KV head is one cluster.  Its blocks select as in select.cuh, each chosen page goes straight to the block
// whose turn it is, and each block attends its own, a warp a page; then block r gathers the r-th part of every block's
// sums and writes it.  All that blocks tell one another are asynchronous stores that count on the receiver's mbarrier.
// A row that attends everything does so in the same way, each block an even part of its pages.
//
// Needs, beside what select.cuh and page.cuh do: STAGES (pages that a block holds at a time), SHARED_BYTES; FP16 or not.

struct Params {
  Scored scored;
  const u16* query;          // (rows, KV_HEADS * GROUP, HEAD_DIM)
  const u16* keys;           // (blocks, tokens, KV_HEADS, HEAD_DIM), strided
  const u16* values;
  u16* output;               // (rows, KV_HEADS * GROUP, HEAD_DIM)
  const int* lengths;        // (rows)
  i64 query_stride, output_stride;              // elements
  i64 block_stride, token_stride, head_stride;  // of keys and values, elements
  float scale;
};

constexpr int SHARE = (BUDGET_PAGES + CLUSTER - 1) / CLUSTER;  // chosen pages a block attends
constexpr int SLICE = GROUP * HEAD_DIM / CLUSTER;              // numbers of the output a block writes
static_assert(GROUP <= 8 && STAGES <= WARPS && GROUP * HEAD_DIM % (2 * CLUSTER) == 0, "one tile, a warp a page");

struct Attention {                     // shared memory, beside the selection's
  __align__(128) u8 pages[STAGES][STAGE_BYTES];  // K and V, then each warp's sums
  float2 received[CLUSTER][SLICE / 2];  // of every block: its sums of weights times values, this block's part
  float2 weights[CLUSTER][GROUP];       // of every block: largest logit and sum of weights
  int list[SHARE];                      // physical pages
  float top[STAGES][16], sum[STAGES][16];
  u64 list_ready, received_ready;       // mbarriers
};
struct Shared {
  Attention attention;
  Selection selection;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the wrapper asks for less shared memory than is used");
static_assert(GROUP * HEAD_DIM * 4 <= STAGE_BYTES, "a warp's sums fit where its page was");

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_attend(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 raw[];
  Attention& a = ((Shared*)raw)->attention;
  Selection& s = ((Shared*)raw)->selection;
  const int warp = threadIdx.x >> 5, rank = (int)cluster_rank();
  const int item = blockIdx.x / CLUSTER, row = item / KV_HEADS, head = item % KV_HEADS;
  const int listed = min(SHARE, max(0, BUDGET_PAGES - rank * SHARE));
  // What the plan and the model wrote is older than the scores: `score` has waited for it before this kernel could start.
  const int start = load_kept(p.scored.start + row), pages = load_kept(p.scored.start + row + 1) - start;
  const int scored = load_kept(p.scored.start + p.scored.rows), length = load_kept(p.lengths + row);
  u32 query[DEPTH][2 * HALVES];
  load_queries(query, p.query + row * p.query_stride + head * (GROUP * HEAD_DIM), 0);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&a.list_ready), 1);
    barrier_expect(shared_address(&a.list_ready), listed * 4);
    barrier_init(shared_address(&a.received_ready), 1);
    barrier_expect(shared_address(&a.received_ready), CLUSTER * (SLICE + 2 * GROUP) * 4);
  }
  prepare_selection(s, rank);
  cluster_arrive();  // waited for before another block's memory is touched
  wait_for_previous_kernel();
  const int blocks = pages <= ALONE ? 1 : CLUSTER, held = (length + PAGE - 1) / PAGE;
  const bool selects = pages > 0;
  u16* out = p.output + row * p.output_stride + head * (GROUP * HEAD_DIM);
  cluster_wait();
  if (length == 0) {  // padding, which later layers still compute with
#pragma unroll 1
    for (int at = threadIdx.x; at < SLICE / 2; at += THREADS) *(u32*)&out[rank * SLICE + 2 * at] = 0;
    return;
  }
  if (selects && rank < blocks) {
    select_row(p.scored, s, row, start, pages, scored, head, length, rank, blocks, [&](int place, int page, int physical) {
      const int to = place / SHARE;
      store_async(remote(&a.list[place % SHARE], to), (u32)physical, remote(&a.list_ready, to));
    });
  }
  if (selects) barrier_wait(shared_address(&a.list_ready), 0);

  // This block's part of the pages that are attended, of which the row's last is the last, and may be short.
  const int attended = selects ? BUDGET_PAGES : held, each = selects ? SHARE : (held + CLUSTER - 1) / CLUSTER;
  const int low = rank * each, mine = min(each, max(0, attended - low));
  const int* table = p.scored.block_table + row * p.scored.table_stride;
  auto physical_page = [&](int i) {
    const int page = low + i;
    return selects ? a.list[i] : table[page / PAGES_A_BLOCK] * PAGES_A_BLOCK + page % PAGES_A_BLOCK;
  };
  auto tokens_of = [&](int i) { return low + i == attended - 1 ? length - (held - 1) * PAGE : PAGE; };
  Softmax softmax;
  softmax.clear();
  for (int first = 0; first < mine; first += STAGES) {
    const int count = min(STAGES, mine - first);
    if (first) __syncthreads();  // the stages are free again
#pragma unroll 4
    for (int at = threadIdx.x; at < count * PAGE * ROW_CHUNKS; at += THREADS) {
      const int stage = at / (PAGE * ROW_CHUNKS), page = physical_page(first + stage);
      const i64 base = (i64)(page / PAGES_A_BLOCK) * p.block_stride + (i64)(page % PAGES_A_BLOCK) * PAGE * p.token_stride +
                       head * p.head_stride;
      copy_chunk(shared_address(a.pages[stage]), p.keys + base, p.values + base, p.token_stride, at % (PAGE * ROW_CHUNKS),
                 tokens_of(first + stage));
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    if (warp < count)
      attend_page(softmax, query, shared_address(a.pages[warp]), tokens_of(first + warp), p.scale * LOG2E);
  }
  const int busy = min(STAGES, mine);  // warps that have attended
  if (warp < busy) {
    __syncwarp();
    store_softmax(softmax, (float*)a.pages[warp], a.top[warp], a.sum[warp]);
  }
  __syncthreads();

  // Every block's sums to the block that writes them, two numbers at a time, and the weights to all.
  auto merge = [&](int member, float (&weight)[STAGES]) {  // of each warp, under the largest logit, which it returns
    float top = -INF;
#pragma unroll
    for (int w = 0; w < STAGES; w++) top = fmaxf(top, weight[w] = w < busy ? a.top[w][member] : -INF);
    const float base = top > -INF ? top : 0.f;
#pragma unroll
    for (int w = 0; w < STAGES; w++) weight[w] = exp2_fast(weight[w] - base);
    return top;
  };
  float weight[STAGES];
#pragma unroll 1
  for (int at = threadIdx.x; at < GROUP * HEAD_DIM / 2; at += THREADS) {
    const int to = at / (SLICE / 2);
    merge(at / (HEAD_DIM / 2), weight);
    float2 all = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < STAGES; w++) {
      const float2 one = w < busy ? ((const float2*)a.pages[w])[at] : make_float2(0.f, 0.f);
      all.x += weight[w] * one.x, all.y += weight[w] * one.y;
    }
    store_async(remote(&a.received[rank][at % (SLICE / 2)], to), all, remote(&a.received_ready, to));
  }
#pragma unroll 1
  for (int at = threadIdx.x; at < GROUP * CLUSTER; at += THREADS) {
    const int member = at % GROUP, to = at / GROUP;
    const float top = merge(member, weight);
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < STAGES; w++) sum += weight[w] * (w < busy ? a.sum[w][member] : 0.f);
    store_async(remote(&a.weights[rank][member], to), make_float2(top, sum), remote(&a.received_ready, to));
  }
  barrier_wait(shared_address(&a.received_ready), 0);
  for (int at = threadIdx.x; at < SLICE / 2; at += THREADS) {
    const int number = rank * SLICE + 2 * at, member = number / HEAD_DIM;
    float top = -INF, sum = 0.f;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) top = fmaxf(top, a.weights[r][member].x);
    const float base = top > -INF ? top : 0.f;
    float2 all = make_float2(0.f, 0.f);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      const float weight = exp2_fast(a.weights[r][member].x - base);
      sum += weight * a.weights[r][member].y;
      all.x += weight * a.received[r][at].x, all.y += weight * a.received[r][at].y;
    }
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    *(u32*)&out[number] = elements(all.x * inverse, all.y * inverse);
  }
}
