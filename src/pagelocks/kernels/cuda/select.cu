// Select: log-masses -> the pages that each row and KV head attends, as physical pages; one row and head is one
// cluster.  How is in select.cuh.
//
// Needs, beside what select.cuh does: SHARED_BYTES.

struct Params {
  Scored scored;
  const int* lengths;        // (rows)
  int* pages;                // (rows, KV_HEADS, budget_pages): physical pages
  int* logical;              // the same as page numbers of the row, or null
};

static_assert(sizeof(Selection) <= SHARED_BYTES, "the wrapper asks for less shared memory than is used");

extern "C" __global__ void __launch_bounds__(THREADS, CLUSTER > 1 ? 1 : 1024 / THREADS) select_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 raw[];
  Selection& s = *(Selection*)raw;
  const int rank = CLUSTER > 1 ? (int)cluster_rank() : 0;
  const int item = blockIdx.x / CLUSTER, row = item / KV_HEADS, head = item % KV_HEADS;
  prepare_selection(s, rank);
  cluster_arrive();  // waited for before another block's memory is touched
  wait_for_previous_kernel();
  const int start = p.scored.start[row], pages = p.scored.start[row + 1] - start, length = p.lengths[row];
  const int scored = p.scored.start[p.scored.rows];
  const int blocks = pages <= ALONE ? 1 : CLUSTER;
  cluster_wait();
  if (pages == 0 || rank >= blocks) return;  // a row that attends everything, or one that needs fewer blocks
  const i64 out = (i64)item * BUDGET_PAGES;
  select_row(p.scored, s, row, start, pages, scored, head, length, rank, blocks, [&](int place, int page, int physical) {
    p.pages[out + place] = physical;
    if (p.logical) p.logical[out + place] = page;
  });
  let_next_kernel_start();
}
