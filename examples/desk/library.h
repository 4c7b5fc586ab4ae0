/* The documents that the user keeps, and the model that reads them. Main loop only; what takes time is done on the library's own thread. */
#ifndef DESK_LIBRARY_H
#define DESK_LIBRARY_H

#include <gio/gio.h>

#include "document.h"

#define DESK_TYPE_LIBRARY (desk_library_get_type())
G_DECLARE_FINAL_TYPE(DeskLibrary, desk_library, DESK, LIBRARY, GObject)

/* In the user's data folder. */
DeskLibrary* desk_library_new(void);

/* Opens the model, and lists the documents. Signal "started" with NULL, or with what went wrong: it may then be started again. */
void desk_library_start(DeskLibrary* library, const char* model_path);

/* NULL before it has started. */
kv_model* desk_library_model(DeskLibrary* library);
/* Of DeskDocument, the last used first when it started, new ones before them. */
GListModel* desk_library_documents(DeskLibrary* library);
DeskDocument* desk_library_find(DeskLibrary* library, const char* name);

/* Takes the text of a file in. Signal "added" with its document, which may be one that was there; or "told". */
void desk_library_add(DeskLibrary* library, GFile* file);
/* Signal "told" where that failed. */
void desk_library_rename(DeskLibrary* library, DeskDocument* document, const char* name);
void desk_library_remove(DeskLibrary* library, DeskDocument* document);
/* Why a document cannot have this name; NULL: it can. */
const char* desk_library_check_name(DeskLibrary* library, const char* name);

/* Stops everything, keeps what was read. Signal "closed" when nothing runs any more. */
void desk_library_close(DeskLibrary* library);

/* Signals: "started" (const char *failure), "added" (DeskDocument *), "told" (const char *what the user should know), "closed". */

#endif
