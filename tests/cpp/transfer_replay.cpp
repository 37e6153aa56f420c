#include "transfer_replay.hpp"

#include <algorithm>
#include <tuple>

namespace finemoe::stress {

namespace {

template <typename T>
std::span<const T> items(const ListColumn<T>& column, std::size_t i) {
    const std::int64_t begin = i == 0 ? 0 : column.ends[i - 1];
    return std::span(column.values)
        .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(column.ends[i] - begin));
}

template <typename T>
bool same(const ListColumn<T>& one, const ListColumn<T>& other, std::size_t i) {
    return std::ranges::equal(items(one, i), items(other, i));
}

bool same(const Record& a, const Record& b) {
    const auto all = [](const Record& r) {
        return std::tie(r.kind, r.detail, r.blocking, r.iteration, r.layer, r.target, r.expert, r.device,
                        r.slot, r.evicts, r.ticket, r.offset, r.bytes, r.work, r.time_s);
    };
    return all(a) == all(b);
}

std::vector<std::vector<ExpertId>> steps(const LogColumns& log, std::size_t i) {
    std::vector<std::vector<ExpertId>> required;
    auto ids = items(log.experts, i);
    for (const std::int32_t count : items(log.token_counts, i)) {
        const auto n = static_cast<std::size_t>(count);
        required.emplace_back(ids.begin(), ids.begin() + count);
        ids = ids.subspan(n);
    }
    return required;
}

void feed(Core& core, const LogColumns& log, std::size_t i) {
    const Record& r = log.records[i];
    const auto experts = items(log.experts, i);
    const auto values = items(log.values, i);
    switch (r.kind) {
        case RecordKind::preload:
            core.preload(experts, r.time_s);
            break;
        case RecordKind::begin_iteration: {
            std::vector<Row> rows;
            for (std::size_t k = 0; k < items(log.requests, i).size(); ++k) {
                const std::uint8_t flags = items(log.phases, i)[k];
                rows.push_back({items(log.requests, i)[k], (flags & 1U) != 0 ? Phase::decode : Phase::prefill,
                                items(log.tokens, i)[k], (flags & 2U) != 0});
            }
            core.begin_iteration(rows, values, r.time_s);
            break;
        }
        case RecordKind::gate: {
            const auto counts = items(log.token_counts, i);
            core.gate(r.layer, values, experts, counts.first(experts.size()), r.time_s,
                      counts.subspan(experts.size()));
            break;
        }
        case RecordKind::speculation:
            core.speculation(r.layer, r.target, values, r.time_s);
            break;
        case RecordKind::search_done:
            core.search_done(r.ticket, r.time_s);
            break;
        case RecordKind::loaded:
            core.loaded(r.expert, r.time_s);
            break;
        case RecordKind::paused:
            core.paused(r.expert, r.bytes, r.time_s);
            break;
        case RecordKind::load_failed:
            core.load_failed(r.expert, {items(log.reason, i).begin(), items(log.reason, i).end()}, r.time_s);
            break;
        case RecordKind::computed:
            core.computed(r.layer, experts, r.time_s);
            break;
        case RecordKind::end_iteration:
            core.end_iteration(r.time_s, {items(log.requests, i).begin(), items(log.requests, i).end()});
            break;
        case RecordKind::foresight:
            core.foresight(r.ticket, steps(log, i), r.time_s);
            break;
        default:  // a command
            break;
    }
}

}  // namespace

std::string replay_difference(const CoreConfig& config, const LogColumns& log) {
    Core core(config, -1);
    for (std::size_t i = 0; i < log.records.size(); ++i) {
        try {
            feed(core, log, i);
        } catch (const CoreError& error) {
            return "record " + std::to_string(i) + " is rejected: " + error.what();
        }
    }
    const LogColumns again = core.take_log();
    const std::size_t n = std::min(log.records.size(), again.records.size());
    for (std::size_t i = 0; i < n; ++i) {
        if (!same(log.records[i], again.records[i]) || !same(log.experts, again.experts, i) ||
            !same(log.token_counts, again.token_counts, i) || !same(log.requests, again.requests, i) ||
            !same(log.tokens, again.tokens, i) || !same(log.phases, again.phases, i) ||
            !same(log.values, again.values, i) || !same(log.reason, again.reason, i)) {
            return "record " + std::to_string(i) + " differs";
        }
    }
    return log.records.size() == again.records.size() ? "" : "the logs have different lengths";
}

}  // namespace finemoe::stress
