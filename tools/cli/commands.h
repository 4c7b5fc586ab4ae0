// The commands. Each prints its result, or fills context.result for --json; each throws Failure.
#pragma once

#include "arguments.h"
#include "context.h"

namespace tool {

void run_ask(Context& context, const AskArguments& arguments);
void run_prefill(Context& context, const PrefillArguments& arguments);
void run_library_list(Context& context, const LibraryListArguments& arguments);
void run_library_add(Context& context, const LibraryAddArguments& arguments);
void run_library_ask(Context& context, const LibraryAskArguments& arguments);
void run_library_rename(Context& context, const LibraryRenameArguments& arguments);
void run_library_remove(Context& context, const LibraryRemoveArguments& arguments);
void run_chat(Context& context, const ChatArguments& arguments);
void run_inspect(Context& context, const FileArguments& arguments);
void run_verify(Context& context, const FileArguments& arguments);
void run_pack(Context& context, const PackArguments& arguments);
void run_unpack(Context& context, const PackArguments& arguments);
void run_eval(Context& context, const EvalArguments& arguments);
void run_recall(Context& context, const RecallArguments& arguments);
void run_calibrate(Context& context, const CalibrateArguments& arguments);
void run_bench(Context& context, const BenchArguments& arguments);
void run_tokenize(Context& context, const TokenizeArguments& arguments);
void run_logits(Context& context, const LogitsArguments& arguments);

}  // namespace tool
