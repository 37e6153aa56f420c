#include "core.hpp"

#include <algorithm>
#include <utility>

#include "f16.hpp"

namespace finemoe {

void CoreConfig::validate() const {
    const auto need = [](bool condition, const std::string& problem) {
        if (!condition) {
            throw CoreError(problem);
        }
    };
    need(layers >= 1 && experts >= 1, "layers and experts must be at least 1");
    need(layers <= 4096 && experts <= 65536 && std::int64_t{layers} * experts <= (1 << 24),
         "more than 4096 layers, 65536 experts or 2^24 experts in all");
    need(top_k >= 1 && top_k <= experts, "top_k must lie between 1 and experts");
    need(devices >= 1 && devices <= kMaxDevices && devices <= total_experts(),
         "devices must lie between 1 and 57, and no more than there are experts");
    need(slots_per_device >= 1, "slots_per_device must be at least 1: one expert must fit on every device");
    need(expert_bytes >= 1 && expert_bytes <= std::int64_t{1} << 44,
         "expert_bytes must lie between 1 and 2^44");
    need(prefetch_distance >= 1, "prefetch_distance must be at least 1");
    need(store_capacity >= 1 && store_capacity <= 1000000, "store_capacity must lie between 1 and 1,000,000");
    need(embedding_width >= 0 && embedding_width <= 1 << 20 && embedding_work >= 0 &&
             embedding_work <= 1 << 20,
         "embedding_width and embedding_work must lie between 0 and 2^20");
    need(frequency_decay > 0.0 && frequency_decay <= 1.0, "frequency_decay must lie in (0, 1]");
    need(layer_quota >= 0, "layer_quota must be at least 0");
    need((targets == Targets::distance && !popular_start) || predictor == PredictorKind::activation,
         "targets later and popular_start belong to predictor activation");
}

Core::Core(const CoreConfig& config, std::int64_t log_iterations, std::shared_ptr<UserPolicy> policy)
    : config_((config.validate(), config)),
      experts_(static_cast<std::size_t>(config.total_experts())),
      devices_(static_cast<std::size_t>(config.devices)),
      eviction_(make_eviction(config.eviction)),
      foresight_(config.total_experts()),
      activation_(config.row_counts() ? std::make_unique<Activation>(config.layers, config.experts)
                                      : nullptr),
      user_(std::move(policy)),
      device_outbox_(static_cast<std::size_t>(config.devices)),
      log_iterations_(log_iterations),
      engine_(make_search_engine(config)) {
    const bool plugin = config.predictor == PredictorKind::plugin || config.eviction == EvictionKind::plugin;
    require(plugin == (user_ != nullptr),
            "a policy object is needed exactly where predictor or eviction is plugin");
    log_.on = log_iterations != 0;
    const auto counts = static_cast<std::size_t>(2 * config.layers);
    layer_counts_ = {std::vector<std::int64_t>(counts), std::vector<std::int64_t>(counts),
                     std::vector<std::int64_t>(counts)};
    const float uniform = static_cast<float>(1.0 / config.experts);
    for (Expert& e : experts_) {
        e.p = uniform;
    }
    for (int g = 0; g < config.devices; ++g) {
        device(g).slots.assign(static_cast<std::size_t>(std::min(config.slots_per_device, config.owned(g))),
                               kNone);
    }
}

void Core::require(bool condition, const std::string& problem) const {
    if (!condition) {
        throw CoreError(problem + " (iteration " + std::to_string(iteration_) + ", layer " +
                        std::to_string(layer_now_) + ")");
    }
}

void Core::require_running() const {
    require(!aborted_, "the core stopped after an expert could not be loaded");
}

void Core::check_probabilities(std::span<const std::uint16_t> values, std::size_t expected) const {
    require(values.size() == expected, "probabilities are not [rows, J]");
    bool good = true;
    for (const std::uint16_t h : values) {
        good = good && h <= kHalfOne;  // 0 … 1; a sign bit or a NaN is above
    }
    require(good, "a probability is not in [0, 1]");
}

Record Core::record(RecordKind kind, double time_s) const {
    Record r;
    r.kind = kind;
    r.time_s = time_s;
    r.iteration = static_cast<std::int32_t>(iteration_);
    if (kind == RecordKind::gate) {
        r.layer = layer_now_;
    }
    return r;
}

void Core::take_device(int g, std::vector<Command>& into) {
    into.clear();
    const std::scoped_lock lock(mutex_);
    require(g >= 0 && g < config_.devices, "take_device: no such device");
    into.swap(device_outbox_[static_cast<std::size_t>(g)]);
}

void Core::take_devices(std::vector<Command>& into) {
    into.clear();
    const std::scoped_lock lock(mutex_);
    for (auto& outbox : device_outbox_) {
        into.insert(into.end(), outbox.begin(), outbox.end());
        outbox.clear();
    }
}

void Core::take_searches(std::vector<Command>& into) {
    into.clear();
    const std::scoped_lock lock(mutex_);
    into.swap(search_outbox_);
}

void Core::take_forward(std::vector<Command>& into) {
    into.clear();
    const std::scoped_lock lock(mutex_);
    into.swap(forward_outbox_);
}

std::string Core::abort_reason() {
    const std::scoped_lock lock(mutex_);
    return abort_reason_;
}

std::vector<ExpertId> Core::chunk_ready() {
    const std::scoped_lock lock(mutex_);
    std::vector<ExpertId> ready;
    std::copy_if(chunk_.begin(), chunk_.end(), std::back_inserter(ready),
                 [&](ExpertId e) { return at(e).status == Status::resident; });
    return ready;
}

std::vector<Placed> Core::chunk_slots() {
    const std::scoped_lock lock(mutex_);
    std::vector<Placed> placed;
    std::transform(chunk_.begin(), chunk_.end(), std::back_inserter(placed),
                   [&](ExpertId e) { return Placed{e, resident_slot(e)}; });
    return placed;
}

bool Core::chunk_resident() {
    const std::scoped_lock lock(mutex_);
    return chunk_missing_ == 0;
}

bool Core::prefetch_open() {
    const std::scoped_lock lock(mutex_);
    return next_layer_open();
}

bool Core::idle() {
    const std::scoped_lock lock(mutex_);
    return std::all_of(devices_.begin(), devices_.end(),
                       [](const Device& d) { return d.loading == kNone; }) &&
           std::all_of(tickets_.begin(), tickets_.end(), [](const Ticket& t) { return t.abandoned; });
}

int Core::slot(ExpertId e) {
    const std::scoped_lock lock(mutex_);
    require(e >= 0 && e < config_.total_experts(), "slot: no such expert");
    return resident_slot(e);
}

std::vector<ExpertId> Core::residents(int g) {
    const std::scoped_lock lock(mutex_);
    require(g >= 0 && g < config_.devices, "residents: no such device");
    std::vector<ExpertId> out;
    std::copy_if(device(g).slots.begin(), device(g).slots.end(), std::back_inserter(out),
                 [&](ExpertId e) { return e != kNone && at(e).status == Status::resident; });
    return out;
}

StoreContents Core::store_contents() {
    const std::scoped_lock work(work_mutex_);
    return engine_->contents();
}

Counters Core::counters() {
    const std::scoped_lock lock(mutex_);
    counters_.unused_bytes = config_.expert_bytes * std::count_if(experts_.begin(), experts_.end(),
                                                                  [](const Expert& e) { return e.unused; });
    for (const Device& d : devices_) {
        if (d.partial != kNone && !at(d.partial).pinned) {
            counters_.unused_bytes += d.partial_bytes;
        }
        if (d.loading != kNone && d.loading_kind == LoadKind::prefetch) {
            counters_.unused_bytes += d.loading_offset;
        }
    }
    return counters_;
}

Totals Core::totals() {
    const std::scoped_lock lock(mutex_);
    return {activated_, hits_, late_, counters_.demand_bytes};
}

LayerCounts Core::layer_counts() {
    const std::scoped_lock lock(mutex_);
    return layer_counts_;
}

LogColumns Core::take_log() {
    const std::scoped_lock lock(mutex_);
    return log_.take();
}

}  // namespace finemoe
