/* An open document: the conversation about it, and its text. */
#ifndef DESK_PAGE_H
#define DESK_PAGE_H

#include <adwaita.h>

#include "document.h"

#define DESK_TYPE_PAGE (desk_page_get_type())
G_DECLARE_FINAL_TYPE(DeskPage, desk_page, DESK, PAGE, AdwBin)

/* The page activates the window's actions "open-document", "remove" and "show-text". */
GtkWidget* desk_page_new(DeskDocument* document);
DeskDocument* desk_page_document(DeskPage* page);
/* Holds the text; a narrow window folds it over the conversation. */
AdwFlap* desk_page_flap(DeskPage* page);
void desk_page_show_text(DeskPage* page, gboolean shown);
void desk_page_focus_entry(DeskPage* page);
/* Shows a passage in the text, as soon as the text is known. */
void desk_page_show_passage(DeskPage* page, const DeskPassage* passage);

#endif
