#include "eta.h"

/* A token costs a constant for the weights and, for attention, one unit per token before it:
 * seconds = a * tokens + b * pairs, a fit to the measured times. A plain average is too low for a
 * long document. Both costs are parts of the whole, so that the fit is well conditioned. */
static double in_tokens(const DeskEta* eta) { return eta->done / eta->total; }

static double in_pairs(const DeskEta* eta) {
  const double all = eta->before + eta->total, now = eta->before + eta->done;
  return (now * now - eta->before * eta->before) / (all * all - eta->before * eta->before);
}

void desk_eta_start(DeskEta* eta, guint64 tokens_before) {
  *eta = (DeskEta){.start_us = g_get_monotonic_time(), .before = (double)tokens_before};
}

void desk_eta_update(DeskEta* eta, guint64 done, guint64 total) {
  eta->elapsed = (double)(g_get_monotonic_time() - eta->start_us) * 1e-6;
  eta->done = (double)done;
  eta->total = (double)total;
  if (total == 0) return;
  const double u = in_tokens(eta), v = in_pairs(eta);
  eta->uu += u * u, eta->uv += u * v, eta->vv += v * v, eta->ut += u * eta->elapsed,
      eta->vt += v * eta->elapsed;
}

double desk_eta_part(const DeskEta* eta) {
  return eta->total > 0 ? (eta->before + eta->done) / (eta->before + eta->total) : 0;
}

double desk_eta_seconds_left(const DeskEta* eta) {
  if (eta->total <= 0 || eta->done <= 0 || eta->elapsed < 1) return -1;
  double a = eta->uu > 0 ? eta->ut / eta->uu : 0, b = 0;
  const double determinant = eta->uu * eta->vv - eta->uv * eta->uv;
  if (determinant > 1e-9 * eta->uu * eta->vv) {
    const double fitted_a = (eta->ut * eta->vv - eta->vt * eta->uv) / determinant;
    const double fitted_b = (eta->vt * eta->uu - eta->ut * eta->uv) / determinant;
    if (fitted_a >= 0 && fitted_b >= 0) a = fitted_a, b = fitted_b;
    else if (fitted_a < 0) a = 0, b = eta->vt / eta->vv;
  }
  return a * (1 - in_tokens(eta)) + b * (1 - in_pairs(eta));
}
