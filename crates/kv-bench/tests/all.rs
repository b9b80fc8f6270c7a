//! All crates' integration tests in one executable, small enough to carry to another machine.
#![allow(clippy::duplicate_mod, reason = "the tests of two crates share a file")]

#[path = "../../kv-core/tests/lib.rs"]
mod kv_core_tests;
#[path = "../../kv-kernels/tests/lib.rs"]
mod kv_kernels_tests;
#[path = "../../kv-models/tests/lib.rs"]
mod kv_models_tests;
#[path = "../../kv-policies/tests/lib.rs"]
mod kv_policies_tests;
