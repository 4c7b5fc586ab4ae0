// Scores of answers.
#include <algorithm>

#include "eval_tasks.h"

namespace tool {
namespace {

// Lower-case letters, digits and all that is not ASCII, with one space between words and at both
// ends.
std::string normalised(std::string_view text) {
  std::string words = " ";
  for (const char c : text) {
    const bool upper = c >= 'A' && c <= 'Z';
    const bool part = upper || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                      static_cast<unsigned char>(c) >= 0x80;
    if (part) {
      words += upper ? static_cast<char>(c - 'A' + 'a') : c;
    } else if (words.back() != ' ') {
      words += ' ';
    }
  }
  return words.back() == ' ' ? words : words + " ";
}

double share_found(const Turn& turn, const std::string& answer) {
  const std::string said = normalised(answer);
  const auto found = std::count_if(
      turn.expected.begin(), turn.expected.end(),
      [&](const std::string& value) { return said.find(normalised(value)) != std::string::npos; });
  return static_cast<double>(found) / static_cast<double>(turn.expected.size());
}

// The share of the expected words up to the first wrong one. A model may first repeat the words of
// the question.
double share_quoted(const Turn& turn, const std::string& answer) {
  const std::string expected = normalised(turn.expected.front()), given = normalised(turn.question);
  std::string said = normalised(answer);
  const std::string head = given.substr(given.find(' ', 1));  // without "continue"
  if (said.starts_with(head)) said.erase(0, head.size() - 1);
  const auto words = [](std::string_view text) {
    return std::count(text.begin(), text.end(), ' ') - 1;
  };
  const auto differ =
      std::mismatch(expected.begin(), expected.end(), said.begin(), said.end()).first;
  const size_t agree = expected.rfind(' ', static_cast<size_t>(differ - expected.begin()) - 1) + 1;
  return static_cast<double>(words(expected.substr(0, agree))) /
         static_cast<double>(words(expected));
}

}  // namespace

double score_of(const Question& question, const std::vector<std::string>& answers) {
  if (question.turns.empty()) return 0;
  double sum = 0;
  for (size_t i = 0; i < question.turns.size() && i < answers.size(); ++i)
    sum += question.task == Task::quote ? share_quoted(question.turns[i], answers[i])
                                        : share_found(question.turns[i], answers[i]);
  return sum / static_cast<double>(question.turns.size());
}

}  // namespace tool
