// Tickets: searches and store updates in one order (rule 10).
#include <algorithm>

#include "core.hpp"

namespace finemoe {

namespace {
constexpr int kMostPendingUpdates = 1024;
}

void Core::issue_search(SearchKind kind, int layer, int target, int row, std::int64_t work) {
    const bool update = kind == SearchKind::update;
    if (update) {
        if (pending_updates_ >= kMostPendingUpdates) {
            ++counters_.skipped_updates;
            return;
        }
        ++pending_updates_;
        stored_ = std::min(stored_ + 1, config_.store_capacity);
    } else {
        ++counters_.searches;
    }
    const std::int64_t ticket = next_ticket_++;
    tickets_.push_back(Ticket{SearchRequest{ticket, kind, layer, target, row, rows_}, false, false, {}});
    Command c;
    c.kind = RecordKind::search;
    c.search_kind = kind;
    c.ticket = ticket;
    c.layer = layer;
    c.target = target;
    c.work = work;
    c.blocking = config_.search_blocks && !update;
    emit(c);
    if (c.blocking) {
        c.kind = RecordKind::wait_search;
        emit(c);
    }
}

// The first ticket up to `last` that nobody has run; abandoned ones are passed over.
Core::Ticket* Core::next_to_run(std::int64_t last) {
    for (Ticket& ticket : tickets_) {
        if (ticket.request.ticket > last) {
            break;
        }
        if (!ticket.ran) {
            ticket.ran = true;
            if (!ticket.abandoned) {
                return &ticket;
            }
        }
    }
    return nullptr;
}

void Core::run_searches(std::int64_t ticket) {
    const std::scoped_lock work(work_mutex_);
    for (;;) {
        SearchRequest request;
        {
            const std::scoped_lock lock(mutex_);
            const Ticket* next = next_to_run(ticket);
            if (next == nullptr) {
                return;
            }
            request = next->request;
        }
        SearchResult result = engine_->run(request);
        const std::scoped_lock lock(mutex_);
        const auto mine = std::find_if(tickets_.begin(), tickets_.end(),
                                       [&](const Ticket& t) { return t.request.ticket == request.ticket; });
        if (mine != tickets_.end()) {
            mine->result = std::move(result);
        }
    }
}

bool Core::search_abandoned(std::int64_t ticket) {
    const std::scoped_lock lock(mutex_);
    const auto it = std::find_if(tickets_.begin(), tickets_.end(),
                                 [&](const Ticket& t) { return t.request.ticket == ticket; });
    return it != tickets_.end() && it->abandoned;
}

std::uint64_t Core::search_done(std::int64_t ticket, double time_s) {
    const std::scoped_lock locks(work_mutex_, mutex_);
    require_running();
    const auto it = std::find_if(tickets_.begin(), tickets_.end(),
                                 [&](const Ticket& t) { return t.request.ticket == ticket || !t.abandoned; });
    require(it != tickets_.end() && it->request.ticket == ticket,
            "search_done: ticket " + std::to_string(ticket) + " is not the oldest that is not done");
    // A worker has run it beforehand; in the simulator and in a replay it runs here.
    while (Ticket* next = next_to_run(ticket)) {
        next->result = engine_->run(next->request);
    }
    while (tickets_.front().request.ticket != ticket) {
        tickets_.pop_front();  // abandoned ones may be left out
    }
    const Ticket done = std::move(tickets_.front());
    tickets_.pop_front();
    Record logged = record(RecordKind::search_done, time_s);
    logged.ticket = ticket;
    log_.add(logged);
    if (done.request.kind == SearchKind::update) {
        --pending_updates_;
    } else if (!done.abandoned) {
        const auto row_size =
            static_cast<std::size_t>(rows_->batch()) * static_cast<std::size_t>(config_.experts);
        bool used = false;
        for (int t = 0; t < done.result.targets; ++t) {
            const int layer = done.result.first_target + t;
            if (layer > layer_now_) {
                used = true;
                apply_predictions(
                    layer, {done.result.predicted.data() + static_cast<std::size_t>(t) * row_size, row_size},
                    done.result.scores);
            }
        }
        counters_.late_searches += used ? 0 : 1;
    }
    return settle(time_s);
}

}  // namespace finemoe
