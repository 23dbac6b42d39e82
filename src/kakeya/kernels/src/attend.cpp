// Which slots each row sees, and how the rows of several sessions are cut into tasks.
//
// With S sinks, capacity C and window W = C - S, position p lives in slot p while p < S and in
// S + (p - S) mod R afterwards, where R = slots - S. The row at position t sees every sink and every
// position j with t - W < j <= t.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "operations.h"
#include "scratch.h"
#include "thread_pool.h"

namespace kakeya {
namespace {

constexpr int kQueriesPerBlock = 36;  // enough to pay for transposing the keys, few enough to balance threads

struct Geometry {
  std::int64_t sinks, capacity, slots, local_window;

  std::int64_t ring() const { return slots - sinks; }
  std::int64_t slot(std::int64_t position) const {
    return position < sinks ? position : sinks + (position - sinks) % ring();
  }
  // First visible sink and first visible window position of the row at t. Neither ever goes back.
  std::int64_t first_sink(std::int64_t t) const {
    return local_window ? std::max<std::int64_t>(0, std::min(t, capacity - 1) - local_window + 1) : 0;
  }
  std::int64_t first_windowed(std::int64_t t) const {
    const std::int64_t window = capacity - sinks;
    return std::max(sinks, t + 1 - (local_window ? std::min(local_window, window) : window));
  }

  // The slots that any row from position `first` to position `last` sees; both below the capacity, or neither.
  Visible visible(std::int64_t first, std::int64_t last) const {
    Visible seen = {};
    const auto put = [&](int range, std::int64_t from, std::int64_t until) {
      if (until > from) seen.ranges[range] = {static_cast<int>(from), static_cast<int>(until - from)};
    };
    if (last < capacity) {  // plain causal attention: sinks and window are neighbours and share one query
      put(1, first_sink(first), last + 1);
      return seen;
    }
    put(0, first_sink(first), sinks);
    const std::int64_t oldest = first_windowed(first);
    const std::int64_t low = slot(oldest), high = slot(last);
    if (low <= high) {
      put(1, low, high + 1);
    } else {
      put(1, sinks, high + 1);
      put(2, low, slots);
    }
    return seen;
  }

  // One past the last position that may be written together with `first`: either nothing is overwritten,
  // or only what no row of the piece still sees.
  std::int64_t piece_end(std::int64_t first, std::int64_t last) const {
    return std::min(last, std::max(slots, first + slots - capacity + 1));
  }
};

// Consecutive rows of one segment whose keys and values are in the slab before any of them attends.
struct Piece {
  const Segment* segment;
  Geometry geometry;
  std::int64_t first, rows;  // within the segment
};

struct BlockTask {
  const Piece* piece;
  std::int64_t first, rows;  // within the segment
};

class Step {
 public:
  explicit Step(const Attention& call)
      : call_(call), ops_(active_ops()), pool_(ThreadPool::shared()), group_(call.heads / call.kv_heads) {}

  void run() {
    std::vector<std::int64_t> done(static_cast<std::size_t>(call_.segment_count), 0);
    for (;;) {
      std::vector<Piece> pieces = next_pieces(done);
      if (pieces.empty()) return;
      run_pieces(pieces);
    }
  }

 private:
  std::vector<Piece> next_pieces(std::vector<std::int64_t>& done) const {
    std::vector<Piece> pieces;
    for (std::int64_t i = 0; i < call_.segment_count; ++i) {
      const Segment& segment = call_.segments[i];
      std::int64_t& first = done[static_cast<std::size_t>(i)];
      if (first == segment.rows) continue;
      const Geometry geometry{call_.sinks[i], call_.capacity, call_.slots, call_.local_window};
      const std::int64_t end = geometry.piece_end(segment.start + first, segment.start + segment.rows);
      const std::int64_t rows = end - segment.start - first;
      pieces.push_back({&segment, geometry, first, rows});
      first += rows;
    }
    return pieces;
  }

  void run_pieces(const std::vector<Piece>& pieces) const {
    std::vector<BlockTask> blocks;
    for (const Piece& piece : pieces) cut(piece, blocks);
    const int parts = head_parts(static_cast<int>(blocks.size()) * call_.kv_heads);
    // A piece that is one task writes its own rows; otherwise all rows are written before any task starts.
    const bool write_first = blocks.size() > pieces.size() || parts > 1;
    if (write_first) {
      const std::int64_t rows_written = blocks.size() > pieces.size() ? work(blocks) : 0;
      pool_.run(static_cast<int>(pieces.size()) * call_.kv_heads, rows_written, [&](int task) {
        write(pieces[static_cast<std::size_t>(task / call_.kv_heads)], task % call_.kv_heads);
      });
    }
    pool_.run(static_cast<int>(blocks.size()) * call_.kv_heads * parts, work(blocks), [&](int task) {
      const BlockTask& block = blocks[static_cast<std::size_t>(task / parts / call_.kv_heads)];
      const int kv_head = task / parts % call_.kv_heads, part = task % parts;
      if (!write_first) write(*block.piece, kv_head);
      attend_rows(block, kv_head, group_ * part / parts, group_ * (part + 1) / parts);
    });
  }

  // Into how many parts the query heads of a kv head are cut, where there are fewer tasks than threads.
  // Each part reads the keys anew, so that is worth it for idle threads alone.
  int head_parts(int tasks) const { return std::clamp(pool_.size() / std::max(tasks, 1), 1, group_); }

  // Multiplications in scores and values, as if every row saw all that its slab holds.
  std::int64_t work(const std::vector<BlockTask>& blocks) const {
    std::int64_t seen = 0;
    for (const BlockTask& block : blocks) {
      const std::int64_t end = block.piece->segment->start + block.first + block.rows;
      seen += block.rows * std::min(end, call_.capacity);
    }
    return 2 * seen * call_.heads * call_.head_dim;
  }

  // Blocks of about the same size; none has rows on both sides of the capacity.
  void cut(const Piece& piece, std::vector<BlockTask>& blocks) const {
    const std::int64_t below = call_.capacity - piece.segment->start - piece.first;
    const std::int64_t plain = std::clamp<std::int64_t>(below, 0, piece.rows);
    cut(piece, 0, plain, blocks);
    cut(piece, plain, piece.rows, blocks);
  }
  void cut(const Piece& piece, std::int64_t from, std::int64_t until, std::vector<BlockTask>& blocks) const {
    const std::int64_t rows = until - from, most = std::max(1, kQueriesPerBlock / group_);
    const std::int64_t count = (rows + most - 1) / most;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t first = from + rows * i / count, end = from + rows * (i + 1) / count;
      blocks.push_back({&piece, piece.first + first, end - first});
    }
  }

  // Keys of one kv head of one session; its values follow at the same place of the next plane.
  char* slab(const Segment& segment, int kv_head, int plane) const {
    const std::int64_t head = ((segment.slab * call_.layers + call_.layer) * 2 + plane) * call_.kv_heads + kv_head;
    return static_cast<char*>(call_.pool) + head * call_.slots * slot_bytes();
  }
  std::int64_t slot_bytes() const { return static_cast<std::int64_t>(call_.head_dim) * (call_.bf16 ? 2 : 4); }

  void write(const Piece& piece, int kv_head) const {
    char* keys = slab(*piece.segment, kv_head, 0);
    char* values = slab(*piece.segment, kv_head, 1);
    const std::int64_t head = static_cast<std::int64_t>(kv_head) * call_.head_dim, half = call_.head_dim / 2;
    for (std::int64_t i = piece.first; i < piece.first + piece.rows; ++i) {
      const std::int64_t row = piece.segment->first_row + i;
      const std::int64_t at = piece.geometry.slot(piece.segment->start + i) * slot_bytes();
      const KvRow source = {call_.keys.rows + row * call_.keys.stride + head,
                            call_.values.rows + row * call_.values.stride + head, call_.cos + row * half,
                            call_.sin + row * half};
      ops_.store_kv(source, call_.head_dim, call_.bf16, keys + at, values + at);
    }
  }

  // `from` and `until`: which of the query heads that share the kv head.
  void attend_rows(const BlockTask& task, int kv_head, int from, int until) const {
    static thread_local Scratch scratch;
    const Segment& segment = *task.piece->segment;
    const float *queries[kQueriesPerBlock], *cos[kQueriesPerBlock], *sin[kQueriesPerBlock];
    const float *sink_cos[kQueriesPerBlock], *sink_sin[kQueriesPerBlock];
    float* outputs[kQueriesPerBlock];
    Visible visible[kQueriesPerBlock];
    const std::int64_t head = (static_cast<std::int64_t>(kv_head) * group_ + from) * call_.head_dim;
    const std::int64_t half = call_.head_dim / 2, position = segment.start + task.first;
    for (std::int64_t i = 0; i < task.rows; ++i) {
      const std::int64_t row = segment.first_row + task.first + i;
      queries[i] = call_.queries.rows + row * call_.queries.stride + head;
      cos[i] = call_.cos + row * half;
      sin[i] = call_.sin + row * half;
      sink_cos[i] = call_.sink_cos + row * half;
      sink_sin[i] = call_.sink_sin + row * half;
      outputs[i] = call_.output + row * call_.heads * call_.head_dim + head;
      visible[i] = task.piece->geometry.visible(position + i, position + i);
    }
    const AttentionBlock block = {slab(segment, kv_head, 0),
                                  slab(segment, kv_head, 1),
                                  call_.bf16,
                                  call_.head_dim,
                                  until - from,
                                  static_cast<int>(task.rows),
                                  queries,
                                  cos,
                                  sin,
                                  sink_cos,
                                  sink_sin,
                                  outputs,
                                  visible,
                                  task.piece->geometry.visible(position, position + task.rows - 1),
                                  call_.scale,
                                  call_.softcap};
    ops_.attend(block, scratch.array<float>(attention_scratch(block)));
  }

  const Attention& call_;
  const Ops& ops_;
  ThreadPool& pool_;
  const int group_;  // query heads per kv head
};

[[noreturn]] void refuse(std::int64_t segment, const std::string& why) {
  throw std::invalid_argument("segment " + std::to_string(segment) + ": " + why);
}

void check_segments(const Attention& call) {
  std::int64_t rows = 0;
  std::vector<char> taken(static_cast<std::size_t>(call.slabs), 0);
  for (std::int64_t i = 0; i < call.segment_count; ++i) {
    const Segment& segment = call.segments[i];
    if (segment.slab < 0 || segment.slab >= call.slabs) refuse(i, "no slab " + std::to_string(segment.slab));
    char& used = taken[static_cast<std::size_t>(segment.slab)];
    if (used) refuse(i, "slab " + std::to_string(segment.slab) + " appears twice");
    used = 1;
    if (segment.first_row != rows || segment.rows < 1) refuse(i, "segments must cover the rows in order, without gaps");
    if (segment.start < 0) refuse(i, "start position is negative");
    if (call.sinks[i] < 0 || call.sinks[i] >= call.capacity) refuse(i, "sinks must leave a window of at least one slot");
    rows += segment.rows;
  }
  if (rows != call.row_count) refuse(call.segment_count, "missing: segments must cover every row");
}

}  // namespace

void attend(const Attention& call) {
  check_segments(call);
  Step(call).run();
}

}  // namespace kakeya
