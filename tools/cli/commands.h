// Commands. Each prints its result, or fills console.result for --json, and throws Failure.
#pragma once

#include "arguments.h"
#include "console.h"

namespace tool {

void ask_library(Console& console, const AskArguments& arguments);
void chat_library(Console& console, const ChatArguments& arguments);
void run_ask(Console& console, const AskArguments& arguments);
void run_prefill(Console& console, const PrefillArguments& arguments);
void run_library_list(Console& console, const LibraryListArguments& arguments);
void run_library_add(Console& console, const LibraryAddArguments& arguments);
void run_library_ask(Console& console, const LibraryAskArguments& arguments);
void run_library_chat(Console& console, const LibraryChatArguments& arguments);
void run_library_rename(Console& console, const LibraryRenameArguments& arguments);
void run_library_remove(Console& console, const LibraryRemoveArguments& arguments);
void run_chat(Console& console, const ChatArguments& arguments);
void run_inspect(Console& console, const FileArguments& arguments);
void run_verify(Console& console, const FileArguments& arguments);
void run_pack(Console& console, const PackArguments& arguments);
void run_unpack(Console& console, const PackArguments& arguments);
void run_eval(Console& console, const EvalArguments& arguments);
void run_recall(Console& console, const RecallArguments& arguments);
void run_calibrate(Console& console, const CalibrateArguments& arguments);
void run_bench(Console& console, const BenchArguments& arguments);
void run_tokenize(Console& console, const TokenizeArguments& arguments);
void run_logits(Console& console, const LogitsArguments& arguments);

}  // namespace tool
