//! Kernels against their references, references against f64, and arguments that are refused.

#![allow(clippy::unwrap_used)]

mod add_probabilities;
mod archive;
mod argmin_slots;
mod balance;
mod causal_softmax;
mod cis_select;
mod count_sketch;
mod decode_attention;
mod documented;
mod evicting_attention;
mod golden;
mod heads;
mod linear;
mod merge_nearest;
mod merge_slots;
mod move_slots;
mod nearest_slots;
mod pooled_rows;
mod prefill_attention;
mod problems;
mod quantized;
mod random;
mod range_slots;
mod rankings;
mod reading;
mod refused;
mod rms_norm;
mod sample;
mod scatter_rows;
mod share;
mod sketch_attention;
mod strategies;
mod subset;
mod top_slots;
mod update_sketch;
mod window_starts;
