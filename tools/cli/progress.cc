#include "progress.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kvasir.h"
#include "number_text.h"

namespace tool {
namespace {

constexpr double first_draw_after = 0.2;  // seconds; shorter calls draw no line
constexpr double between_draws = 0.1;
constexpr int min_bar = 10, max_bar = 32;  // columns

size_t columns_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

}  // namespace

Progress::Progress(Terminal& terminal, std::string label, Unit unit, uint64_t before)
    : terminal_(terminal), label_(std::move(label)), unit_(unit), before_(before),
      start_(std::chrono::steady_clock::now()) {}

int32_t Progress::callback(int32_t phase, uint64_t done, uint64_t total, void* progress) {
  auto* self = static_cast<Progress*>(progress);
  if (phase == KV_PHASE_PREPARE) {
    self->prepare(done, total);
  } else {
    self->update(done, total);
  }
  return 0;
}

void Progress::prepare(uint64_t done, uint64_t total) {
  if (terminal_.draws())
    terminal_.draw(string_printf("Building the index: %llu of %llu",
                                 static_cast<unsigned long long>(done),
                                 static_cast<unsigned long long>(total)));
}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Progress::update(uint64_t done, uint64_t total) {
  done_ = done;
  total_ = total;
  if (!terminal_.draws()) return;
  const double now = seconds();
  learn(now);
  if (now < first_draw_after || now - drawn_at_ < between_draws) return;
  drawn_at_ = now;
  terminal_.draw(line(terminal_.columns()));
}

// Finished work as a part of the whole, so that the fit is well conditioned. A token costs its part
// of the weights and, for attention, one unit per token before it.
double Progress::cost_in_tokens(uint64_t done) const {
  return static_cast<double>(done) / static_cast<double>(total_);
}

double Progress::cost_in_pairs(uint64_t done) const {
  const auto before = static_cast<double>(before_), all = before + static_cast<double>(total_);
  const double now = before + static_cast<double>(done);
  return (now * now - before * before) / (all * all - before * before);
}

void Progress::learn(double elapsed) {
  if (elapsed - mark_seconds_ >= 1 || speed_ == 0) {
    speed_ = elapsed > mark_seconds_
                 ? static_cast<double>(done_ - mark_done_) / (elapsed - mark_seconds_)
                 : 0;
    if (elapsed - mark_seconds_ >= 1) mark_seconds_ = elapsed, mark_done_ = done_;
  }
  if (total_ == 0) return;
  const double u = cost_in_tokens(done_), v = cost_in_pairs(done_);
  uu_ += u * u, uv_ += u * v, vv_ += v * v, ut_ += u * elapsed, vt_ += v * elapsed;
}

// Least-squares fit of seconds = a * tokens + b * pairs. A plain average underestimates the rest of
// long documents.
double Progress::seconds_left() const {
  double a = uu_ > 0 ? ut_ / uu_ : 0, b = 0;
  const double determinant = uu_ * vv_ - uv_ * uv_;
  if (unit_ == Unit::tokens && determinant > 1e-9 * uu_ * vv_) {
    const double fitted_a = (ut_ * vv_ - vt_ * uv_) / determinant;
    const double fitted_b = (vt_ * uu_ - ut_ * uv_) / determinant;
    if (fitted_a >= 0 && fitted_b >= 0) {
      a = fitted_a, b = fitted_b;
    } else if (fitted_a < 0) {
      a = 0, b = vt_ / vv_;
    }
  }
  return a * (1 - cost_in_tokens(done_)) + b * (1 - cost_in_pairs(done_));
}

// Of the whole sequence, with the tokens before.
double Progress::share() const {
  return static_cast<double>(before_ + done_) / static_cast<double>(before_ + total_);
}

std::string Progress::bar(int columns) const {
  const double filled = share() * columns;
  const auto whole = std::min(static_cast<int>(filled), columns);
  std::string text;
  if (!terminal_.has_utf8()) {
    text = "[" + std::string(static_cast<size_t>(whole), '#');
    return text + std::string(static_cast<size_t>(columns - whole), '.') + "]";
  }
  static constexpr const char* eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  for (int i = 0; i < whole; ++i) text += "█";
  const char* part = whole < columns ? eighths[static_cast<int>((filled - whole) * 8) & 7] : "";
  text += part;
  for (int i = whole + (*part != '\0'); i < columns; ++i) text += "░";
  return text;
}

std::string Progress::line(int columns) const {
  if (total_ == 0) return label_;
  const double now = seconds();
  const bool tokens = unit_ == Unit::tokens;
  const std::string percentage = string_printf("%3.0f%%", std::floor(100 * share()));
  const std::string counts =
      tokens ? grouped(before_ + done_) + " of " + grouped(before_ + total_) + " tokens"
             : byte_count(done_) + " of " + byte_count(total_);
  const std::string speed =
      tokens ? rate(speed_) + " tokens/s" : byte_count(static_cast<uint64_t>(speed_)) + "/s";
  const bool stable = now >= 1 && done_ > 0;  // earlier estimates vary too much
  const std::string left = stable ? clock_time(seconds_left()) + " left" : "-:-- left";
  const std::string elapsed = clock_time(now);

  // The longest form that leaves room for a bar.
  const std::vector<std::string> forms = {
      percentage + "  " + counts + "  " + speed + "  " + elapsed + ", " + left,
      percentage + "  " + speed + "  " + elapsed + ", " + left,
      percentage + "  " + speed + "  " + left,
      percentage + "  " + left,
      percentage,
  };
  const int frame = terminal_.has_utf8() ? 0 : 2;
  for (const std::string& form : forms) {
    const int rest =
        columns - 1 - frame - static_cast<int>(columns_of(label_) + columns_of(form) + 4);
    if (rest >= min_bar) return label_ + "  " + bar(std::min(rest, max_bar)) + "  " + form;
  }
  const std::string shortest = percentage + "  " + left;
  return static_cast<int>(shortest.size()) < columns ? shortest : "";
}

}  // namespace tool
