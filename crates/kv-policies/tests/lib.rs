//! Policies against the vectors of other people's code, and on bare queries, keys and values.

#![allow(clippy::unwrap_used)]

mod balanced_spans;
mod balancekv;
mod block_anchors;
mod block_reviver;
mod cam;
mod cis;
mod custom;
mod d2o;
mod depth_bounds;
mod followed;
mod golden_decode;
mod golden_kvpress;
mod golden_prefill;
mod keepkv;
mod keepkv_golden;
mod keepkv_periodic;
mod keepkv_takes;
mod kvmerger;
mod kvreviver;
mod longflow;
mod policies;
mod psaw;
mod pyramid_infer;

mod read_subset;
mod readme;
mod refused;
mod short_prompts;
mod spared;
mod support;
mod write_slots;
