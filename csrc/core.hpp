// The policy core: events in, commands out. No clock, no device, no file (docs/core.md is its specification).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core_mutex.hpp"
#include "log.hpp"
#include "rules/activation.hpp"
#include "rules/eviction.hpp"
#include "rules/foresight.hpp"
#include "rules/user_policy.hpp"
#include "search/search_engine.hpp"
#include "types.hpp"

namespace finemoe {

// Activated, hit and late experts per phase and layer.
struct LayerCounts {
    std::vector<std::int64_t> activated, hits, late;  // [2 · L], prefill first
};

// An expert and the slot of its device, -1: not resident.
struct Placed {
    ExpertId expert = kNone;
    int slot = -1;
};

class Core {
  public:
    // `policy`: the user's, exactly where predictor or eviction is `plugin`.
    explicit Core(const CoreConfig& config, std::int64_t log_iterations = 0,
                  std::shared_ptr<UserPolicy> policy = nullptr);

    // Events. Each returns the mask of types.hpp; `time_s` is only written to the log.
    std::uint64_t seed_store(const StoreContents& contents, double time_s = 0.0);
    std::uint64_t preload(std::span<const ExpertId> experts, double time_s = 0.0);
    // embeddings: f16 [B, h] or empty
    std::uint64_t begin_iteration(std::vector<Row> rows, std::span<const std::uint16_t> embeddings,
                                  double time_s = 0.0);
    // probabilities: f16 [B, J]; experts: ascending j with their token counts; row_counts: [B, J] or empty
    std::uint64_t gate(int layer, std::span<const std::uint16_t> probabilities, std::span<const int> experts,
                       std::span<const int> token_counts, double time_s = 0.0,
                       std::span<const std::int32_t> row_counts = {});
    std::uint64_t speculation(int layer, int target, std::span<const std::uint16_t> probabilities,
                              double time_s = 0.0);
    std::uint64_t search_done(std::int64_t ticket, double time_s = 0.0);
    std::uint64_t loaded(ExpertId expert, double time_s = 0.0);
    std::uint64_t loaded_all(std::span<const ExpertId> experts, double time_s = 0.0);  // one event each
    std::uint64_t paused(ExpertId expert, std::int64_t bytes_done, double time_s = 0.0);
    std::uint64_t load_failed(ExpertId expert, const std::string& reason, double time_s = 0.0);
    std::uint64_t computed(int layer, std::span<const ExpertId> experts, double time_s = 0.0);
    std::uint64_t computed_chunk(double time_s = 0.0);  // what is left of the current chunk
    std::uint64_t end_iteration(double time_s = 0.0, const std::vector<std::int64_t>& finished = {});
    std::uint64_t foresight(std::int64_t step, const std::vector<std::vector<ExpertId>>& required,
                            double time_s = 0.0);

    // Outboxes; each consumer drains its own, in order.
    // What was in `into` is dropped, its capacity is kept.
    void take_device(int device, std::vector<Command>& into);
    void take_devices(std::vector<Command>& into);  // of all, device after device
    void take_searches(std::vector<Command>& into);
    void take_forward(std::vector<Command>& into);

    // Runs searches and updates up to `ticket`, away from the core's mutex. search_done does it where nobody
    // did.
    void run_searches(std::int64_t ticket);
    bool search_abandoned(std::int64_t ticket);

    std::string abort_reason();
    // Uncomputed members of the chunk that are resident, and all of them with their slots, -1 where not
    // resident.
    std::vector<ExpertId> chunk_ready();
    std::vector<Placed> chunk_slots();
    // What bits 2 and 5 of a mask say, as of now: another thread's mask may be about an earlier chunk.
    bool chunk_resident();
    bool prefetch_open();
    // No load is in flight, and no search that is neither done nor abandoned.
    bool idle();
    int slot(ExpertId expert);  // -1: not resident
    std::vector<ExpertId> residents(int device);
    StoreContents store_contents();
    Counters counters();
    Totals totals();
    LayerCounts layer_counts();
    LogColumns take_log();
    const CoreConfig& config() const { return config_; }

  private:
    enum class Status : std::uint8_t { absent, loading, partial, resident };
    struct Expert {
        Status status = Status::absent;
        bool pinned = false;
        bool unused = false;  // loaded by prefetch, not yet required
        bool required = false;
        bool kept = false;        // preloaded, never evicted
        bool privileged = false;  // lfru
        bool spare = false;       // layer_quota: beyond its layer's
        float p = 0.0F;
        int slot = -1;
        int failures = 0;
        double frequency = 1.0;
        std::int64_t stamp = 0;
    };
    struct QueueEntry {
        ExpertId expert = kNone;
        float p = 0.0F;
    };
    struct Device {
        std::vector<ExpertId> slots;
        std::size_t kept = 0;
        std::vector<QueueEntry> queue;
        std::vector<ExpertId> demand;  // ascending
        ExpertId loading = kNone;
        LoadKind loading_kind = LoadKind::demand;
        std::int64_t loading_offset = 0, loading_queued_in = -1;
        bool asked_to_pause = false;
        ExpertId partial = kNone;
        std::int64_t partial_bytes = 0;
        std::int64_t oracle_from = 0;  // no step before this one misses an expert of the device
    };
    struct Ticket {
        SearchRequest request;
        bool abandoned = false, ran = false;
        SearchResult result;
    };

    Expert& at(ExpertId e) { return experts_[static_cast<std::size_t>(e)]; }
    Device& device(int g) { return devices_[static_cast<std::size_t>(g)]; }
    const Expert& at(ExpertId e) const { return experts_[static_cast<std::size_t>(e)]; }
    Device& device_of(ExpertId e) { return device(config_.device_of(e)); }
    int layer_of(ExpertId e) const { return e / config_.experts; }
    int resident_slot(ExpertId e) const { return at(e).status == Status::resident ? at(e).slot : -1; }
    std::int64_t step() const { return iteration_ * config_.layers + layer_now_; }
    void require(bool condition, const std::string& problem) const;
    void require_running() const;
    void check_probabilities(std::span<const std::uint16_t> values, std::size_t expected) const;
    Record record(RecordKind kind, double time_s) const;

    // core_requirement.cpp: a layer's requirement, chunk by chunk, and what it leaves behind
    void require_experts(std::span<const int> activated);
    void purge_queues();
    void form_chunk();
    void finish_chunk_member(ExpertId e);
    void count_hits(std::span<const int> activated);

    // core_loads.cpp: slots, victims, loads
    std::uint64_t settle(double time_s);  // pumps every device, logs and counts, returns the mask
    void pump(int g);
    bool demand_anywhere() const;
    bool start_demand(int g);
    void start_prefetch(int g);
    ExpertId next_queued(const Device& d) const;
    bool next_layer_open() const;
    int free_slot(const Device& d) const;
    ExpertId oracle_choice(int g, ExpertId& evicts);
    void became_absent(ExpertId e);
    void start_load(int g, ExpertId e, LoadKind kind, int slot, std::int64_t offset, ExpertId evicts);
    void evict(ExpertId e);
    void drop_partial(Device& d);
    void demand(ExpertId e);
    ExpertId in_flight(ExpertId e, const char* event) const;

    // core_victims.cpp: who may be evicted
    EvictionView view(ExpertId e) const;
    EvictionKey key_of(ExpertId e);
    template <typename Allowed>
    ExpertId victim_if(const Device& d, Allowed&& allowed);
    ExpertId victim(const Device& d);
    ExpertId quota_victim(const Device& d, ExpertId wanted);
    ExpertId spare_victim(const Device& d);
    ExpertId prefetch_victim(const Device& d);
    bool settled(ExpertId e) const;
    int settled_of(int layer) const;
    void trim_layer();
    void privilege(ExpertId e);

    // core_search.cpp: tickets
    void issue_search(SearchKind kind, int layer, int target, int row, std::int64_t work);
    Ticket* next_to_run(std::int64_t last);

    // core_predictions.cpp: prefetch sets
    void apply_predictions(int layer, std::span<const float> predicted, std::span<const float> scores);
    void apply_row(int layer, std::span<const float> row, Selector selector);
    void select(std::span<const float> row, Selector selector, float score);
    void queue_chosen(int layer);
    void queue_popular();
    void check_row_counts(std::span<const std::int32_t> row_counts, std::span<const int> experts,
                          std::span<const int> token_counts) const;
    void count_tokens(std::span<const std::int32_t> row_counts);
    void ask_user(const std::function<UserPredictions()>& question);
    void emit(const Command& command);

    const CoreConfig config_;
    std::vector<Expert> experts_;
    std::vector<Device> devices_;
    std::unique_ptr<EvictionRule> eviction_;
    Foresight foresight_;
    std::unique_ptr<Activation> activation_;  // where gates come with row counts
    std::shared_ptr<UserPolicy> user_;

    std::int64_t iteration_ = -1, gates_ = 0;
    int layer_now_ = -1;
    bool open_ = false, aborted_ = false, preloaded_ = false;
    Phase phase_ = Phase::decode;
    std::shared_ptr<IterationRows> rows_;
    std::vector<ExpertId> chunk_, rest_;  // uncomputed members of the chunk; required and not yet in one
    int chunk_missing_ = 0;

    std::deque<Ticket> tickets_;
    std::int64_t next_ticket_ = 0;
    int stored_ = 0, pending_updates_ = 0;

    std::vector<std::vector<Command>> device_outbox_;
    std::vector<Command> search_outbox_, forward_outbox_, emitted_;
    std::string abort_reason_;
    Counters counters_;
    LayerCounts layer_counts_;
    std::int64_t activated_ = 0, hits_ = 0, late_ = 0;
    DecisionLog log_;
    std::int64_t log_iterations_;

    std::vector<char> chosen_, taken_;  // scratch of predictions
    std::vector<float> rank_;

    CoreMutex work_mutex_;  // taken before mutex_
    std::unique_ptr<SearchEngine> engine_;
    CoreMutex mutex_;
};

}  // namespace finemoe
