// A decision log fed to a fresh core, as `finemoe replay` does.
#pragma once

#include <string>

#include "core.hpp"

namespace finemoe::stress {

// Empty where the fresh core logs the same, event by event and command by command; else what differs first.
std::string replay_difference(const CoreConfig& config, const LogColumns& log);

}  // namespace finemoe::stress
