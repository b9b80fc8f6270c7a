//! A policy of a user's, whose private state the cache knows by its trait alone.

use kv_testing::devices;

#[path = "../examples/custom_policy.rs"]
mod custom_policy;

#[test]
fn state_of_a_users_policy_survives_copies_moves_files_and_batches() {
    for tested in devices() {
        custom_policy::survive(&tested.device).unwrap();
    }
}
