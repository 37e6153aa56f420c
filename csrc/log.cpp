#include "log.hpp"

#include <utility>

namespace finemoe {

void DecisionLog::close() {
    columns_.experts.close();
    columns_.token_counts.close();
    columns_.requests.close();
    columns_.tokens.close();
    columns_.phases.close();
    columns_.values.close();
    columns_.reason.close();
}

void DecisionLog::add(const Command& c, double time_s, std::int64_t iteration,
                      std::span<const ExpertId> experts, std::string_view reason) {
    if (!on) {
        return;
    }
    Record record;
    record.kind = c.kind;
    record.detail = c.kind == RecordKind::load ? static_cast<std::uint8_t>(c.load_kind)
                                               : static_cast<std::uint8_t>(c.search_kind);
    record.blocking = c.blocking;
    record.iteration = static_cast<std::int32_t>(iteration);
    record.layer = c.layer;
    record.target = c.target;
    record.expert = c.expert;
    record.device = c.device;
    record.slot = c.slot;
    record.evicts = c.evicts;
    record.ticket = c.ticket;
    record.offset = c.offset;
    record.bytes = c.bytes;
    record.work = c.work;
    record.time_s = time_s;
    add(record, [&](LogColumns& columns) {
        columns.experts.values.insert(columns.experts.values.end(), experts.begin(), experts.end());
        columns.reason.values.insert(columns.reason.values.end(), reason.begin(), reason.end());
    });
}

LogColumns DecisionLog::take() { return std::exchange(columns_, LogColumns{}); }

}  // namespace finemoe
