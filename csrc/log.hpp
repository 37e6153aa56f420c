// The decision log: every event and command in one total order, as columns.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "types.hpp"

namespace finemoe {

// Fixed columns of one record. −1 (or 0 for flags) where a column does not apply.
struct Record {
    RecordKind kind = RecordKind::gate;
    std::uint8_t detail = 0;  // LoadKind or SearchKind of a command
    bool blocking = false;
    std::int32_t iteration = -1, layer = -1, target = -1, expert = -1, device = -1, slot = -1, evicts = -1;
    std::int64_t ticket = -1, offset = -1, bytes = -1, work = -1;
    double time_s = 0.0;
};

// Variable-length columns hold one list per record; `ends` are cumulative.
template <typename T>
struct ListColumn {
    std::vector<T> values;
    std::vector<std::int64_t> ends;
    void close() { ends.push_back(static_cast<std::int64_t>(values.size())); }
};

struct LogColumns {
    std::vector<Record> records;
    ListColumn<std::int32_t> experts;       // required, waited for or computed experts; foresight: ids
    ListColumn<std::int32_t> token_counts;  // of the experts; foresight: experts per step
    ListColumn<std::int64_t> requests;      // begin_iteration: request ids; seed_store: ages
    ListColumn<std::int32_t> tokens;        // begin_iteration: tokens per row
    ListColumn<std::uint8_t> phases;        // begin_iteration: phase (0, 1), + 2 with an embedding
    ListColumn<std::uint16_t> values;       // f16: gate rows, speculated rows, embeddings, stored maps
    ListColumn<char> reason;
};

class DecisionLog {
  public:
    bool on = false;

    template <typename Fill>
    void add(const Record& record, Fill&& fill) {
        if (!on) {
            return;
        }
        columns_.records.push_back(record);
        fill(columns_);
        close();
    }
    void add(const Record& record) {
        add(record, [](LogColumns&) {});
    }
    // With the experts of a Wait or the reason of an Abort.
    void add(const Command& command, double time_s, std::int64_t iteration, std::span<const ExpertId> experts,
             std::string_view reason);

    // Hands over what was logged since the last call.
    LogColumns take();

  private:
    void close();
    LogColumns columns_;
};

}  // namespace finemoe
