/* Time left of a prefill. */
#ifndef DESK_ETA_H
#define DESK_ETA_H

#include <glib.h>

typedef struct DeskEta {
  gint64 start_us;
  double before, done, total; /* tokens */
  double elapsed;             /* seconds */
  double uu, uv, vv, ut, vt;  /* sums of the fit */
} DeskEta;

void desk_eta_start(DeskEta* eta, guint64 tokens_before);
void desk_eta_update(DeskEta* eta, guint64 done, guint64 total);
/* Part of the whole text, with what was prefilled before; 0 to 1. */
double desk_eta_part(const DeskEta* eta);
/* Below 0 while unknown. */
double desk_eta_seconds_left(const DeskEta* eta);

#endif
