/* The lines of a page of a PDF file as paragraphs. */
#ifndef DESK_PARAGRAPHS_H
#define DESK_PARAGRAPHS_H

#include <glib.h>

/* Appends the page's text. A line of at least three quarters of the longest one continues in the
 * next line: the break becomes a blank, and a hyphen between two lower-case letters goes. Shorter
 * lines, such as headings, items and the ends of paragraphs, keep their break. page: UTF-8. */
void desk_append_paragraphs(GString* text, const char* page);

#endif
