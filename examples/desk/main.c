/* Kvasir Desk: reads long documents once, keeps what was read, and answers questions about them.
 *
 *     kvasir-desk [--model MODEL.gguf] [DOCUMENT...]
 *
 * A window (window.c) shows a library (library.c) of documents (document.c). Each has a thread of its own that loads, reads, saves and answers by the
 * public interface of Kvasir (reading.c, passages.c, job.c); what it finds comes back to the main loop (worker.c), which never waits. */
#include "application.h"

int main(int count, char** values) {
  g_autoptr(DeskApplication) application = desk_application_new();
  return g_application_run(G_APPLICATION(application), count, values);
}
