// Plan: what one step asks of every layer, worked out once a step, on the device.
//
// For the rows of a step (decode rows first): which of them select pages (the others attend everything), running totals
// of the pages to score and to attend, by which the other kernels share their work out evenly, what each block of score
// gets of them, so that no layer has to look for it, and the list of pages that the step completes.  Where their records
// will only be built after the step, they are marked as missing here, in every layer: another row of the step that finds
// such a page in its table then reads it exactly.
//
// Needs: SCORE_PARTS, LEAST_PAGES (score's).

struct Params {
  const int* lengths;        // (rows): tokens of each row after this step; 0 for padding
  const int* query_starts;   // (rows + 1): the rows' first query tokens
  const int* block_table;    // (rows, blocks of a row)
  int* score_start;          // (decode_rows + 1): running total of complete pages of the rows that select
  int* attend_start;         // (decode_rows + 1): of pages to attend, a KV head
  int* planned_lengths;      // (rows): the lengths that the totals were made from
  int* completed_start;      // (rows + 1): of pages that this step completes
  ScorePart* score_parts;    // (SCORE_PARTS)
  int* first_blocks;         // (SCORE_PARTS, 32): physical blocks of each part's first 32 pages, of its first row
  int* completed;            // the completed pages, as physical pages, block * pages a block + page within it
  u8* const* records;        // (layers): each (blocks, pages a block, kv_heads, record_bytes)
  i64 table_stride, block_bytes;
  int rows, decode_rows;
  int budget_pages;
  int dense_below;           // tokens; a row of this many or fewer, or within its budget, attends everything
  int capacity;              // pages whose scores fit the workspace; a row beyond that attends everything
  int pages_a_block;
  int marked_layers;         // layers in which to mark the completed pages' records as missing; 0 for none
  int kv_heads, record_bytes;
};

constexpr int THREADS = 1024;

// Inclusive sum over the block; `carry` is added to all and becomes the total.
DEVICE int scan(int value, int* warps, int& carry) {
  int lane = lane_id(), warp = threadIdx.x >> 5;
  for (int k = 1; k < 32; k <<= 1) {
    int below = __shfl_up_sync(FULL, value, k);
    if (lane >= k) value += below;
  }
  if (lane == 31) warps[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int total = warps[lane];
    for (int k = 1; k < 32; k <<= 1) {
      int below = __shfl_up_sync(FULL, total, k);
      if (lane >= k) total += below;
    }
    warps[lane] = total;
  }
  __syncthreads();
  value += carry + (warp ? warps[warp - 1] : 0);
  carry += warps[31];
  __syncthreads();
  return value;
}

extern "C" __global__ void __launch_bounds__(THREADS) plan_step(const __grid_constant__ Params p) {
  __shared__ int warps[32];
  __shared__ int fitting;  // the total of the last row whose scores fit the workspace
  wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    p.completed_start[0] = p.score_start[0] = p.attend_start[0] = 0;
    fitting = 0;
  }
  int completed = 0, scored = 0, attended = 0;
  for (int first = 0; first < p.rows; first += THREADS) {
    int row = first + threadIdx.x, pages = 0;
    if (row < p.rows) {
      int length = p.planned_lengths[row] = p.lengths[row], queries = p.query_starts[row + 1] - p.query_starts[row];
      if (queries > 0) pages = length / PAGE - (length - queries) / PAGE;
    }
    int end = scan(pages, warps, completed);
    if (row < p.rows) p.completed_start[row + 1] = end;
  }
  for (int first = 0; first < p.decode_rows; first += THREADS) {
    int row = first + threadIdx.x, length = row < p.decode_rows ? p.planned_lengths[row] : 0;
    bool selects = length > p.dense_below && length > p.budget_pages * PAGE;
    int end = scan(selects ? length / PAGE : 0, warps, scored);
    bool fits = end <= p.capacity;  // totals rise: once one row does not fit, no later one does
    if (fits) atomicMax(&fitting, end);
    __syncthreads();
    if (row < p.decode_rows) p.score_start[row + 1] = fits ? end : fitting;
    int touched = (length + PAGE - 1) / PAGE;
    end = scan(selects && fits ? p.budget_pages : touched, warps, attended);
    if (row < p.decode_rows) p.attend_start[row + 1] = end;
  }
  __syncthreads();
  const int total = p.score_start[p.decode_rows], parts = parts_of(total, SCORE_PARTS);
  for (int at = threadIdx.x; at < 32 * SCORE_PARTS; at += THREADS) {
    const int part = at / 32, lane = at % 32;
    ScorePart one = {};
    int block = 0;
    if (part < parts) {
      one.low = part_begin(total, part, parts), one.high = part_begin(total, part + 1, parts);
      one.row = row_of(p.score_start, p.decode_rows, one.low);
      one.limit = row_of(p.score_start, p.decode_rows, one.high - 1) + 1;
      const int first = p.score_start[one.row];
      one.page = one.low - first, one.end = min(one.high, p.score_start[one.row + 1]) - first;
      const int page = one.page + lane;
      if (page < one.end) block = p.block_table[one.row * p.table_stride + page / p.pages_a_block];
    }
    p.first_blocks[at] = block;
    if (lane == 0) p.score_parts[part] = one;
  }
  for (int i = threadIdx.x; i < completed; i += THREADS) {
    int row = row_of(p.completed_start, p.rows, i);
    int computed = p.planned_lengths[row] - (p.query_starts[row + 1] - p.query_starts[row]);
    int page = computed / PAGE + i - p.completed_start[row];
    int block = p.block_table[row * p.table_stride + page / p.pages_a_block], slot = page % p.pages_a_block;
    p.completed[i] = block * p.pages_a_block + slot;
    for (int at = 0; at < p.marked_layers * p.kv_heads; at++) {
      u8* record = p.records[at / p.kv_heads] + block * p.block_bytes;
      *(u16*)(record + (i64)(slot * p.kv_heads + at % p.kv_heads) * p.record_bytes) = 0;
    }
  }
}
