// The grammar of `kvasir library`.
#include "commands.h"
#include "grammar.h"

namespace tool {
namespace {

void add_folder(CLI::App* app, LibraryFlags* flags, const char* help) {
  text(app, "library", &flags->folder, "DIR", help)->required();
  count<uint64_t>(app, "--max-bytes", &flags->max_bytes, 1, UINT64_MAX,
                  "Limit of all documents together; the least recently used ones are evicted");
}

CLI::Option* add_document_options(CLI::App* app, LibraryAddArguments* arguments,
                                  const char* folder_help) {
  add_folder(app, &arguments->library, folder_help);
  add_model(app, &arguments->model);
  CLI::Option* document = text(app, "-f,--file", &arguments->document, "FILE",
                               "Document to find or add, plain text; - is standard input");
  text(app, "--name", &arguments->name, "NAME",
       "Name of the added document; a taken name gets an ending [the file's name]");
  flag(app, "--replace", &arguments->replace,
       "Replace the document of that name, also one of another text or model");
  flag(app, "--verify", &arguments->verify,
       "Verify a whole document before use, not each page at its first use");
  add_instructions(app, &arguments->session);
  add_prefill_options(app, &arguments->session);
  return document;
}

constexpr const char* new_folder = "Folder of the library; created if it does not exist";
constexpr const char* old_folder = "Folder of the library";

void add_add(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("add", "Add a document, or find that it is there", run_library_add);
  add_document_options(command, arguments.get(), new_folder)->required();
}

// Options of `library ask` and `library chat`.
template <class Arguments>
void add_library_answering(CLI::App* command, Arguments* arguments) {
  add_document_options(command, &arguments->add, new_folder);
  add_strategy(command, &arguments->add.session);
  add_sampling(command, &arguments->sampling);
}

void add_library_ask(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("ask", "Answer questions about a document of the library", run_library_ask);
  add_library_answering(command, arguments.get());
  add_passages(command, &arguments->passages);
  add_questions(command, &arguments->words,
                "Without -f, the document's name first; then questions [one per line of standard "
                "input]");
  footer(command,
         "Examples:\n"
         "  kvasir library ask books -m model.gguf -f book.txt \"Who is Irene Adler?\"\n"
         "      prefills the book if the library does not have it\n"
         "  kvasir library ask books -m model.gguf book.txt \"Who is Irene Adler?\"\n"
         "      asks the library's document book.txt; the text is not needed any more");
}

void add_library_chat(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("chat", "Hold a conversation about a document of the library", run_library_chat);
  add_library_answering(command, arguments.get());
  text(command, "name", &arguments->document_name, "NAME", "Name of the document, without -f");
}

}  // namespace

void add_library(Grammar& grammar) {
  CLI::App* library =
      grammar.app.add_subcommand("library", "Keep documents in a folder; each is prefilled once");
  library->require_subcommand(1);
  footer(library,
         "A text that is in the library, or that begins one of its documents, is not prefilled "
         "again. Of a text that begins like a document only the rest is prefilled. Any number of "
         "programs may use one folder at once. NAME.kv in it is the document NAME. A second text "
         "of one name, or a second model for one text, gets a document of its own: NAME-, and 8 "
         "digits.\n\n"
         "Examples:\n"
         "  kvasir library ask books -m model.gguf -f book.txt \"Who is Irene Adler?\"\n"
         "  kvasir library list books\n"
         "  kvasir library ask books -m model.gguf book.txt \"Where does she live?\"");
  Grammar inner{*library, grammar.global, grammar.chosen};
  const auto [listing, listed] =
      inner.add("list", "List the documents, the most recently used first", run_library_list);
  add_folder(listing, &listed->library, old_folder);
  add_add(inner);
  add_library_ask(inner);
  add_library_chat(inner);
  const auto [renaming, renamed] = inner.add("rename", "Rename a document", run_library_rename);
  add_folder(renaming, &renamed->library, old_folder);
  text(renaming, "from", &renamed->from, "NAME", "Present name")->required();
  text(renaming, "to", &renamed->to, "NAME", "New name")->required();
  const auto [removing, removed] =
      inner.add("remove", "Remove documents that no session maps", run_library_remove);
  add_folder(removing, &removed->library, old_folder);
  removing->add_option("names", removed->names, "Names of documents")
      ->type_name("NAME")
      ->required()
      ->check(not_empty());
}

}  // namespace tool
