#include "parallel/context_ring.h"

namespace sbtrain {

template <typename Transfer>
Event ContextRing::start(Stream& s, const Buffer& to, const Buffer& from,
                         const Transfer& transfer) {
  Event now;
  s.record(now);
  communication_.wait(now);
  communication_.use(to);
  communication_.use(from);
  transfer();
  Event done;
  communication_.record(done);
  return done;
}

Event ContextRing::start_shift(Stream& s, const Buffer& to, const Buffer& from, int step) {
  return start(s, to, from, [&] { ranks_.shift(communication_, to, from, step); });
}

Event ContextRing::start_sum(Stream& s, const Buffer& part, const Buffer& parts) {
  return start(s, part, parts, [&] { ranks_.reduce_scatter(communication_, part, parts); });
}

void ContextRing::await(Stream& /*s*/, const Event& started) {
  waits_.wait(started, kAwait);
}

}  // namespace sbtrain
