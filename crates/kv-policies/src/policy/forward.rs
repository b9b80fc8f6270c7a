//! Methods of a policy that another policy answers.

/// Answers methods of [`crate::Policy`] by those of the policy in a field:
/// `forward!(decode: budget, plan)` within the implementation of a policy with a field `decode`.
///
/// A policy around another names all that it leaves to the other; what it does not name has the
/// trait's default.
macro_rules! forward {
    ($to:ident: $($method:ident),+) => { $(forward!(@$method $to);)+ };
    (@name $to:ident) => { forward!(fn $to.name() -> &'static str); };
    (@budget $to:ident) => { forward!(fn $to.budget() -> Option<kv_core::Budget>); };
    (@needs $to:ident) => { forward!(fn $to.needs() -> $crate::Needs); };
    (@select $to:ident) => {
        forward!(fn $to.select(seen: &$crate::Observation<'_>) -> $crate::Result<$crate::Plan>);
    };
    (@init_cache $to:ident) => {
        forward!(fn $to.init_cache(
            cache: &mut kv_core::LayerCache,
            seen: &$crate::Observation<'_>,
            selection: &kv_core::Selection
        ) -> $crate::Result<()>);
    };
    (@restore $to:ident) => {
        forward!(fn $to.restore(cache: &mut kv_core::LayerCache) -> $crate::Result<()>);
    };
    (@room $to:ident) => {
        forward!(fn $to.room(
            seen: &$crate::Observation<'_>,
            new_tokens: usize
        ) -> $crate::Result<kv_core::Room>);
    };
    (@plan $to:ident) => {
        forward!(fn $to.plan(
            layer: $crate::LayerContext,
            cache: &kv_core::LayerCache
        ) -> $crate::Result<$crate::StepPlan<'_>>);
    };
    (@last_attended $to:ident) => {
        forward!(fn $to.last_attended(
            layer: $crate::LayerContext,
            cache: &kv_core::LayerCache
        ) -> $crate::Result<Option<Vec<Vec<usize>>>>);
    };
    (@prune $to:ident) => {
        forward!(fn $to.prune(
            seen: &$crate::Observation<'_>
        ) -> $crate::Result<Option<Vec<Vec<u32>>>>);
    };
    (@visible_window $to:ident) => {
        forward!(fn $to.visible_window(
            layer: $crate::LayerContext
        ) -> Option<$crate::VisibleWindow>);
    };
    (@frozen_tokens $to:ident) => {
        forward!(fn $to.frozen_tokens(
            layer: $crate::LayerContext,
            tokens: usize
        ) -> Option<$crate::FrozenTokens>);
    };
    (fn $to:ident.$method:ident($($input:ident: $type:ty),*) -> $output:ty) => {
        fn $method(&self, $($input: $type),*) -> $output {
            self.$to.$method($($input),*)
        }
    };
}

pub(crate) use forward;
