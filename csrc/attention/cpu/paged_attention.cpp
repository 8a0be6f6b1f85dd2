// Paged attention for batches of decodes, prefills and anything between: cuts the work into tiles, longest first, and runs
// them.
#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#if defined(PE_SIMD_AMX)
#include "attention_tile_amx.h"
#else
#include "attention_tile.h"
#endif
#include "query_runs.h"

namespace pyengine::cpu {
#if defined(PE_SIMD_AMX)
namespace avx512 {
const char* paged_attention(const PagedAttentionParams& p);
}
#endif
namespace PE_ISA {
namespace {

constexpr int kTilesPerThread =
    4;  // a tile that costs more than this fraction of a thread's share is split by partitions of keys
constexpr int kItemsPerThread = 16;                   // tiles that cost less than this fraction are taken together
constexpr int kPrefixPartCost = 8;                    // of merging a shared partition's state, in keys of a query token
constexpr int64_t kMaxStateBytes = 64 * 1024 * 1024;  // of the partitions' results that await their merge; as much again of
                                                      // shared prefixes
constexpr int64_t kSerialFloats = 16 * 1024;          // of states; to wake a thread for their merge takes longer than it
constexpr int kFewestPrefixRows = 32, kMostQueryRows = 16;  // of a shared prefix's tile; of a sequence's share in it

template <class Runner>
class Launch {
 public:
  explicit Launch(const PagedAttentionParams& p)
      : p_(p),
        threads_(get_num_threads()),
        tokens_(tokens_per_tile(p, tile_rows())),
        shape_(p, tokens_, Runner::kOutColumns),
        prefixes_(find_shared_prefixes(p, prefix_limits())),
        prefix_shape_(p, most_prefix_tokens(), Runner::kOutColumns) {}

  void run() {
    int64_t num_states;
    plan(&num_states);
    const int64_t state_floats = num_states * shape_.state_floats(shape_.max_rows), prefix_floats = place_prefix_states();
    char* memory =
        static_cast<char*>(shared_scratch((state_floats + prefix_floats) * sizeof(float) +
                                          (early_.count + late_.count) * sizeof(Item) + p_.num_tokens * sizeof(QueryRun)));
    states_ = reinterpret_cast<float*>(memory);
    prefix_states_ = states_ + state_floats;
    early_.items = reinterpret_cast<Item*>(prefix_states_ + prefix_floats);
    late_.items = early_.items + early_.count;
    runs_ = reinterpret_cast<QueryRun*>(late_.items + late_.count);
    fill_items(sorted_runs(p_, prefixes_, tokens_, runs_));
    const int64_t num_prefix_items = int64_t{prefixes_.num_tiles} * p_.num_kv_heads;
    parallel_for(num_prefix_items + early_.count, [&](int64_t i, int) {
      if (i < num_prefix_items) {
        run_prefix(i);
      } else {
        run_early(i - num_prefix_items);
      }
    });
    if (prefixes_.num_tiles == 0 && state_floats <= kSerialFloats) {
      for (int64_t i = 0; i < late_.count; i++) run_late(i);
    } else {
      parallel_for(late_.count, [&](int64_t i, int) { run_late(i); });
    }
  }

 private:
  // Early: whole tiles, one after the other, or (state >= 0) one partition of a tile. Late: whole tiles that begin with a
  // shared prefix, or (state >= 0) the merge of a tile's partitions, whose states lie one after the other.
  struct Item {
    int64_t tile, end_tile, partition, state;
  };
  struct ItemList {
    Item* items;
    int64_t count;
  };

  // Splits what would leave threads idle. How the work is cut changes no result: run_whole merges the same partitions in the
  // same order.
  bool is_split(const QueryRun& run) const { return cost(run) > split_above_ && num_partitions(run) > 1; }

  int tokens_of(int rows) const { return rows > shape_.group ? rows / shape_.group : 1; }
  // Twice as many where that leaves enough tiles: keys and values are brought into the products' order once a tile.
  int tile_rows() const {
    const int64_t tiles = int64_t{p_.num_tokens} * p_.num_heads / (2 * Runner::kTileRows);
    return tiles < int64_t{2 * kTilesPerThread} * threads_ ? Runner::kTileRows : 2 * Runner::kTileRows;
  }
  int most_prefix_tokens() const { return tokens_of(Runner::kTileRows); }
  int64_t row_state_bytes() const { return int64_t{shape_.ld_out + 2} * static_cast<int64_t>(sizeof(float)); }
  PrefixLimits prefix_limits() const {
    const int most_query_tokens = tokens_of(kMostQueryRows);
    return {kPartition,
            most_query_tokens < tokens_ ? most_query_tokens : tokens_,
            tokens_of(kFewestPrefixRows),
            most_prefix_tokens(),
            (2 * int64_t{threads_} + p_.num_kv_heads - 1) / p_.num_kv_heads,
            kMaxStateBytes / (row_state_bytes() * p_.num_heads)};
  }

  // Counts the items of both lists, at most, and the states of split tiles.
  void plan(int64_t* num_states) {
    int64_t total = 0;
    for (int i = 0; i < prefixes_.num_tiles; i++)
      total += int64_t{prefixes_.tiles[i].num_tokens} * kPartition * p_.num_kv_heads;
    for_each_run(p_, prefixes_, tokens_, [&](const QueryRun& run) { total += cost(run) * p_.num_kv_heads; });
    split_above_ = threads_ > 1 ? total / (int64_t{kTilesPerThread} * threads_) : INT64_MAX;
    gather_up_to_ = total / (int64_t{kItemsPerThread} * threads_);
    for (;;) {
      int64_t whole = 0, late = 0, parts = 0;
      for_each_run(p_, prefixes_, tokens_, [&](const QueryRun& run) {
        if (is_split(run)) {
          late++, parts += num_partitions(run);
        } else {
          run.num_parts > 0 ? late++ : whole++;
        }
      });
      *num_states = parts * p_.num_kv_heads;
      early_.count = *num_states + whole * p_.num_kv_heads;
      late_.count = late * p_.num_kv_heads;
      if (*num_states * shape_.max_rows * row_state_bytes() <= kMaxStateBytes) return;
      split_above_ = INT64_MAX;
    }
  }

  void fill_items(int num_runs) {
    int64_t state = 0, room = 0;  // room: for cost, in the last item of `open`
    ItemList* open = nullptr;     // whole tiles that are neighbours share an item
    early_.count = late_.count = 0;
    for (int64_t tile = 0; tile < int64_t{num_runs} * p_.num_kv_heads; tile++) {
      const QueryRun& run = run_of(tile);
      if (is_split(run)) {
        late_.items[late_.count++] = {tile, tile + 1, 0, state};
        for (int64_t i = first_partition(run); i < end_partition(run); i++)
          early_.items[early_.count++] = {tile, tile + 1, i, state++};
        open = nullptr;
        continue;
      }
      ItemList* list = run.num_parts > 0 ? &late_ : &early_;
      if (list != open || room <= 0) {
        list->items[list->count++] = {tile, tile, 0, -1};
        open = list;
        room = gather_up_to_;
      }
      list->items[list->count - 1].end_tile = tile + 1;
      room -= cost(run) + int64_t{kPrefixPartCost} * run.num_parts;
    }
  }

  const QueryRun& run_of(int64_t tile) const { return runs_[tile / p_.num_kv_heads]; }
  int head_of(int64_t tile) const { return static_cast<int>(tile % p_.num_kv_heads); }
  AttentionTile tile(int64_t index) const {
    const QueryRun& run = run_of(index);
    return {run.seq,   head_of(index), run.first_token, run.num_tokens, run.num_keys - run.num_tokens,
            run.begin, run.num_keys,   nullptr};
  }
  KeysToRead keys_of(int64_t tile) const {
    return {run_of(tile).seq, head_of(tile), run_of(tile).begin, run_of(tile).num_keys};
  }
  // What a thread takes after item `index` if all are equally fast.
  KeysToRead keys_after(const ItemList& list, int64_t index) const {
    if (index + threads_ >= list.count) return {};
    const Item& item = list.items[index + threads_];
    KeysToRead keys = keys_of(item.tile);
    if (item.partition * kPartition > keys.begin) keys.begin = item.partition * kPartition;
    return keys;
  }

  float* tile_memory(const TileShape& shape) const {
    return static_cast<float*>(thread_scratch(Runner::memory_floats(shape, p_.head_dim) * sizeof(float)));
  }
  SoftmaxState state(int64_t index, int rows) const {
    return shape_.state(states_ + index * shape_.state_floats(shape_.max_rows), rows);
  }

  // Gives the shared prefixes' tiles their places for all KV heads' states. Returns what they need, in floats.
  int64_t place_prefix_states() const {
    int64_t floats = 0;
    for (int i = 0; i < prefixes_.num_tiles; i++) {
      PrefixTile& tile = prefixes_.tiles[i];
      tile.state = floats;
      floats += prefix_shape_.state_floats(tile.num_tokens * prefix_shape_.group) * p_.num_kv_heads;
    }
    return floats;
  }
  SoftmaxState prefix_tile_state(int tile, int kv_head) const {
    const int rows = prefixes_.tiles[tile].num_tokens * prefix_shape_.group;
    return prefix_shape_.state(prefix_states_ + prefixes_.tiles[tile].state + kv_head * prefix_shape_.state_floats(rows), rows);
  }

  void run_prefix(int64_t item) const {
    const int index = static_cast<int>(item / p_.num_kv_heads), kv_head = head_of(item);
    const PrefixTile& prefix = prefixes_.tiles[index];
    const int64_t begin = int64_t{prefix.partition} * kPartition;
    const AttentionTile work = {
        prefix.seq, kv_head, 0, prefix.num_tokens, 0, begin, begin + kPartition, prefixes_.tokens + prefix.first_token};
    const Runner runner(p_, prefix_shape_, work, indices_, tile_memory(prefix_shape_));
    runner.run_partition(prefix.partition, prefix_tile_state(index, kv_head), {});
  }

  void run_early(int64_t index) const {
    const Item& item = early_.items[index];
    if (item.state < 0) return run_tiles(early_, index);
    const AttentionTile work = tile(item.tile);
    const Runner runner(p_, shape_, work, indices_, tile_memory(shape_));
    runner.run_partition(item.partition, state(item.state, runner.rows().count()), {keys_after(early_, index), {}});
  }

  void run_late(int64_t index) const {
    const Item& item = late_.items[index];
    if (item.state < 0) return run_tiles(late_, index);
    const AttentionTile work = tile(item.tile);
    const TileRows rows(p_, shape_, work);
    const int num_parts = run_of(item.tile).num_parts;
    const int64_t num_states = num_partitions(run_of(item.tile));
    const SoftmaxState total = num_parts > 0 ? prefix_state(work) : state(item.state, rows.count());
    for (int64_t i = num_parts > 0 ? 0 : 1; i < num_states; i++)
      merge_rows(total, state(item.state + i, rows.count()), rows.count());
    rows.finish(total);
  }

  void run_tiles(const ItemList& list, int64_t index) const {
    const Item& item = list.items[index];
    for (int64_t tile = item.tile; tile < item.end_tile; tile++)
      run_whole(tile, tile + 1 < item.end_tile ? keys_of(tile + 1) : keys_after(list, index));
  }

  void run_whole(int64_t index, const KeysToRead& after) const {
    const AttentionTile work = tile(index);
    const QueryRun& run = run_of(index);
    const Runner runner(p_, shape_, work, indices_, tile_memory(shape_));
    const SoftmaxState total = run.num_parts > 0 ? prefix_state(work) : runner.scratch_state(0), part = runner.scratch_state(1);
    const int64_t first = first_partition(run), end = end_partition(run);
    for (int64_t i = first; i < end; i++) {
      const bool is_first = i == first && run.num_parts == 0;
      const KeysToRead rest = {work.seq, work.kv_head, (i + 1) * kPartition, work.end};
      runner.run_partition(i, is_first ? total : part, {rest, after});
      if (!is_first) merge_rows(total, part, runner.rows().count());
    }
    runner.rows().finish(total);
  }

  // The state of a sequence's rows after its shared prefix. It takes the place of the first partition's.
  SoftmaxState prefix_state(const AttentionTile& work) const {
    const SequenceParts& parts = prefixes_.seqs[work.seq];
    const SoftmaxState total = prefix_part(prefixes_.parts[parts.first_part], work.kv_head);
    for (int i = 1; i < parts.num_parts; i++)
      merge_rows(total, prefix_part(prefixes_.parts[parts.first_part + i], work.kv_head), work.num_tokens * shape_.group);
    return total;
  }
  // One sequence's rows of a shared prefix's state.
  SoftmaxState prefix_part(const PrefixPart& part, int kv_head) const {
    const SoftmaxState all = prefix_tile_state(part.tile, kv_head);
    const int first = part.first_token * prefix_shape_.group;
    return {all.out + first * all.ld, all.max + first, all.sum + first, all.ld};
  }

  const PagedAttentionParams& p_;
  int threads_, tokens_;
  TileShape shape_;
  SharedPrefixes prefixes_;
  TileShape prefix_shape_;
  LaneIndices indices_;
  int64_t split_above_ = INT64_MAX, gather_up_to_ = 0;
  float *states_ = nullptr, *prefix_states_ = nullptr;
  ItemList early_ = {}, late_ = {};
  QueryRun* runs_ = nullptr;
};

}  // namespace

const char* paged_attention(const PagedAttentionParams& p) {
  if (p.num_tokens == 0 || p.num_heads == 0) return nullptr;
  if (p.block_size > 1 && p.k_token_stride != 1) return "on CPUs, keys must be dimension-major: k_cache.stride(2) == 1";
  if (p.v_dim_stride != 1) return "on CPUs, a value's dimensions must be adjacent: v_cache.stride(3) == 1";
  if (p.dtype != DType::kF32 && p.dtype != DType::kF16 && p.dtype != DType::kBF16)
    return "the query must be fp32, fp16 or bf16";
#if defined(PE_SIMD_AMX)
  if (!serves_in_amx(p)) return avx512::paged_attention(p);
  Launch<AmxTileRunner>(p).run();
  return nullptr;
#else
  return with_cache_type(p.kv_dtype, [&](auto cache) -> const char* {
    Launch<TileRunner<decltype(cache)> >(p).run();
    return nullptr;
  });
#endif
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
