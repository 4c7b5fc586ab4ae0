/* Questions about all documents at once. Each answer names its sources. Answers are not kept. */
#ifndef DESK_ALL_H
#define DESK_ALL_H

#include <adwaita.h>

#include "library.h"

#define DESK_TYPE_ALL (desk_all_get_type())
G_DECLARE_FINAL_TYPE(DeskAll, desk_all, DESK, ALL, AdwBin)

/* Signals "changed", and "show-source" with a DeskPassage*. The page activates the window's action
 * "stop". */
GtkWidget* desk_all_new(DeskLibrary* library);
gboolean desk_all_is_busy(DeskAll* all);
/* Stops the running answer. */
void desk_all_stop(DeskAll* all);
/* Stops all answers and waits for the thread. No question follows. */
void desk_all_close(DeskAll* all);
void desk_all_focus_entry(DeskAll* all);

#endif
