/* The documents of the user, and the model that prefills them. Main loop only; the library's thread
 * does the slow work. */
#ifndef DESK_LIBRARY_H
#define DESK_LIBRARY_H

#include <gio/gio.h>

#include "document.h"

#define DESK_TYPE_LIBRARY (desk_library_get_type())
G_DECLARE_FINAL_TYPE(DeskLibrary, desk_library, DESK, LIBRARY, GObject)

/* Its folders are in the user's data folder. */
DeskLibrary* desk_library_new(void);

/* Opens the model and lists the documents. Signal "started" with NULL, or with a failure; then it
 * may be started again. */
void desk_library_start(DeskLibrary* library, const char* model_path);

/* NULL before it has started. */
kv_model* desk_library_model(DeskLibrary* library);
/* For work on another thread, while there is a model and a reference to the library. */
const DeskShelf* desk_library_shelf(DeskLibrary* library);
/* Of DeskDocument: new ones, then the most recently used first. */
GListModel* desk_library_documents(DeskLibrary* library);
DeskDocument* desk_library_find(DeskLibrary* library, const char* name);

/* Adds the text of a file. Signal "added" with its document, which may exist already, or
 * "message". */
void desk_library_add(DeskLibrary* library, GFile* file);
/* Signal "message" after a failure. */
void desk_library_rename(DeskLibrary* library, DeskDocument* document, const char* name);
void desk_library_remove(DeskLibrary* library, DeskDocument* document);
/* The reason why a document cannot have this name; NULL: it can. */
const char* desk_library_check_name(DeskLibrary* library, const char* name);

/* Stops all jobs and saves the prefilled parts. Signal "closed" after the last job. */
void desk_library_close(DeskLibrary* library);

/* Signals: "started" (const char* failure), "added" (DeskDocument*), "message" (const char* for the
 * user), "closed". */

#endif
