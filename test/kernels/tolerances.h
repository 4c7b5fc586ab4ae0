// Tolerances of the kernel tests, with their reasons. test-kernels and check-kernels use the same.
#pragma once

namespace kvasir::test {

// Relative error of a sum: a handful of roundings of 6e-8 each.
inline constexpr double elementwise_tolerance = 3e-7;

// Largest relative error of an element: 2 units in the last place of the exponential, one each for
// sum, quotient and product.
inline constexpr double activation_tolerance = 4e-7;

// Integer parts are exact; what is left are the roundings, 6e-8 each, of a float sum over cols / 32
// blocks (or cols products of floats), in which a format's offset and product may cancel. Relative
// to the sum of the magnitudes, which no luck makes small.
inline constexpr double product_tolerance = 1e-6;

// Absolute error of `multiply`: at most 40 products of a few units, each rounded once or twice.
inline constexpr double multiply_tolerance = 40 * 10 * 6e-8;

// Integer weights of 14 bits: half a step of 1/16383 of the largest weight a token; over random
// tokens the errors mostly cancel.
inline constexpr double pages_tolerance = 2.5e-4;

// Float sums of up to 512 terms and an exponential good to 2e-7.
inline constexpr double rows_tolerance = 4e-6;

// Integer sums: only the scales are rounded, three times for tokens and twice for bounds and quads.
inline constexpr double token_score_tolerance = 3e-7;
inline constexpr double summary_score_tolerance = 2e-7;

// Relative L2 error of a recurrent state and its outputs: a rounding of 6e-8 for each product and
// sum. A state that decays forgets older ones.
inline constexpr double state_tolerance = 2e-6;

// Steps of the int8 query: half of one and a rounding.
inline constexpr double query_tolerance = 0.5001;

// Steps of a sketch's quad: half of one, and the rounding of its bf16 scale.
inline constexpr double sketch_tolerance = 0.504;

// Sum of the absolute errors of shares, per row.
inline constexpr double shares_tolerance = 1e-5;

// Relative error of the sums of shares.
inline constexpr double share_sums_tolerance = 1e-5;

// Relative error of a division by l, and of a merge by exponentials good to 2e-7.
inline constexpr double finish_tolerance = 1e-6;
inline constexpr double merge_tolerance = 1e-6;

}  // namespace kvasir::test
