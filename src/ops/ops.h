#pragma once

#include "ops/wrappers.h"  // until all callers name the op itself
