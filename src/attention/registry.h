// How attention modules make themselves known. A new module is one file with a registrar, plus
// its line in make_registry() of registry.cpp: explicit, so that no linker drops it from a library.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "attention/attention.h"

namespace sbtrain {

using AttentionFactory =
    std::function<std::unique_ptr<Attention>(const AttentionConfig&, const ModelConfig&)>;
using AttentionRegistry = std::map<std::string, AttentionFactory, std::less<>>;

void register_coca(AttentionRegistry& registry);
void register_rebased(AttentionRegistry& registry);
void register_short_conv(AttentionRegistry& registry);
void register_softmax(AttentionRegistry& registry);
void register_stickbreaking(AttentionRegistry& registry);

}  // namespace sbtrain
