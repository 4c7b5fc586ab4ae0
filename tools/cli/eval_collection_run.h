// An evaluation of collections: every document is prefilled once, and every question is asked in
// every way.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eval_base.h"
#include "eval_collection.h"
#include "eval_retrieval.h"

namespace tool {

class CollectionEvaluation : public AnyEvaluation {
 public:
  CollectionEvaluation(Console& console, const EvalArguments& arguments);

  void run() override;
  std::vector<const Result*> results() const override;
  uint32_t documents() const { return arguments_.documents > 0 ? arguments_.documents : 8; }
  uint64_t retrieve() const { return arguments_.retrieve > 0 ? arguments_.retrieve : 1024; }

 private:
  struct Job {
    uint64_t length = 0;
    Collection collection;
    std::vector<std::string> names;  // [documents] of cache files
    std::string joined, joined_name;
    std::vector<size_t> starts;  // [documents] in `joined`
    PassageIndex index;
    uint64_t tokens() const { return length * names.size(); }
  };
  struct Asking {  // a way, with the strategy of its decode
    Way way;
    std::string strategy;
  };
  struct Given {
    std::string text;
    std::optional<size_t> document;  // that the answer attended most
    std::vector<size_t> attended;    // documents, in whole or in part
  };

  void make_jobs(const Haystack& haystack);
  Job make_job(const Haystack& haystack, uint64_t length) const;
  std::string key_of(const Job& job, const Asking& asking,
                     const CollectionQuestion& question) const;
  bool is_open(const Job& job, const Asking& asking, const CollectionQuestion& question) const {
    return !stored_.find(key_of(job, asking, question));
  }
  bool fits(const Job& job, Way way) const;
  double cost_of(const Job& job, Way way) const;
  void expect(const Job& job);
  size_t requested() const override;
  void prefill(const Job& job);
  Session compose(const Job& job, const SessionFlags& flags);
  void answer_all(const Job& job, const Asking& asking);
  std::vector<Session> open(const Job& job, const Asking& asking);
  Given ask(const Job& job, const Asking& asking, std::vector<Session>& sessions,
            const std::string& question, Result* result);
  Given ask_composed(kv_session* session, const std::string& question, Result* result);
  Given ask_joined(const Job& job, kv_session* session, const std::string& question,
                   Result* result);
  Given ask_alone(std::vector<Session>& sessions, const std::string& question, Result* result);
  Given ask_retrieved(const Job& job, const SessionFlags& flags, const std::string& question,
                      Result* result);
  kv_answer answer_briefly(kv_session* session, const std::string& question, uint32_t flags,
                           std::string* text, Result* result);
  double certainty(kv_session* session, uint64_t answer_at);
  std::optional<kv_passage> first_passage(kv_session* session);

  std::vector<Asking> askings_;
  std::vector<Job> jobs_;
};

}  // namespace tool
