/* Kvasir Desk: prefills long documents once, saves their KV caches, and answers questions.
 *
 *     kvasir-desk [--model MODEL.gguf] [DOCUMENT...]
 *
 * A window (window.c) shows a library (library.c) of documents (document.c). Each document has a
 * thread that loads, prefills, saves and answers by the public interface of Kvasir (sequence.c,
 * passages.c, job.c). Its results return to the main loop (worker.c), which never waits. */
#include "application.h"

int main(int count, char** values) {
  g_autoptr(DeskApplication) application = desk_application_new();
  return g_application_run(G_APPLICATION(application), count, values);
}
