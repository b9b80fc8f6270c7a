//! The places that jobs will take once their prompts are compressed.
//!
//! A prompt is begun only where its sequence will find a row and slots behind it: a job that has
//! told its first token must not wait for its second one. Prompts that are on their way therefore
//! claim their places before they take them.

use std::sync::Arc;

use kv_policies::SlotWeights;
use serde_json::Value;

/// The place that a job's sequence will take.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Place {
    /// A row of an arena whose slots have these weights, and so many slots of every layer.
    Arena { weights: SlotWeights, slots: usize },
    /// A row of a group of the policy's own, which has this configuration, and keeps at least so
    /// many slots in every head. How many rows fit into a new group is known once a prompt is
    /// compressed.
    Own { policy: Arc<Value>, kept: usize },
}

/// The free places of a group.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) kind: OfferKind,
    pub(super) rows: usize,
    /// Whether no job decodes in the group. It may then make room for a group of another kind.
    pub(super) is_idle: bool,
}

/// Which jobs a group takes.
#[derive(Debug)]
pub(super) enum OfferKind {
    /// Jobs whose steps append and whose slots have these weights, which need no more than these
    /// slots of every layer.
    Arena { weights: SlotWeights, slots: usize },
    /// Jobs of one policy, whose heads have no more slots than these.
    Own { policy: Arc<Value>, capacity: usize },
    /// The one that it has.
    Alone,
}

/// The groups that there may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) groups: usize,
    /// Rows of a new arena for the place, and slots of each of its layers.
    pub(super) arena: (usize, usize),
}

impl Place {
    /// Whether a group that is made for one place may be for the other one, too.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Arena { weights: own, .. }, Self::Arena { weights: other, .. }) => own == other,
            (Self::Own { policy: own, .. }, Self::Own { policy: other, .. }) => own == other,
            _ => false,
        }
    }

    fn slots(&self) -> usize {
        match self {
            Self::Arena { slots, .. } => *slots,
            Self::Own { .. } => 0,
        }
    }

    /// The weights that the slots of an arena for the place have.
    pub(super) fn weights(&self) -> SlotWeights {
        match self {
            Self::Arena { weights, .. } => *weights,
            Self::Own { .. } => SlotWeights::NONE,
        }
    }

    pub(super) fn is_arena(&self) -> bool {
        matches!(self, Self::Arena { .. })
    }

    /// Whether a sequence will find this place in a group, or in a new one, once the places that
    /// are `claimed` are taken. Jobs have waited for the `late` places for long, and find none of
    /// them free.
    pub(super) fn is_free(
        &self,
        claimed: &[&Self],
        late: &[Self],
        offers: &[Offer],
        limits: Limits,
    ) -> bool {
        let rivals: Vec<&&Self> = claimed.iter().filter(|claim| claim.is_like(self)).collect();
        let slots = self.slots() + rivals.iter().map(|rival| rival.slots()).sum::<usize>();
        let own: Vec<&Offer> = offers.iter().filter(|offer| offer.serves(self)).collect();
        let has_place = |offer: &&Offer| {
            offer.rows > rivals.len() && offer.has(slots) && !offer.must_empty(late, offers)
        };
        if own.iter().any(has_place) {
            return true;
        }
        if own.iter().any(|group| !group.is_idle) {
            return false;
        }
        if !rivals.is_empty() {
            // An arena that is about to be made has room for several. The first job of another
            // group shows how many others fit into it.
            let (rows, most) = limits.arena;
            return self.is_arena() && own.is_empty() && rivals.len() < rows && slots <= most;
        }
        let [arenas, others] = groups_of(claimed, offers);
        // One of several groups is kept for policies whose steps append.
        let most_others = if limits.groups > 1 { limits.groups - 1 } else { 1 };
        match self {
            Self::Arena { .. } => arenas + others.min(most_others) < limits.groups,
            Self::Own { .. } => others < most_others && arenas + others < limits.groups,
        }
    }
}

/// Arenas and other groups that are in use, or will be once the claimed places are taken.
fn groups_of(claimed: &[&Place], offers: &[Offer]) -> [usize; 2] {
    let mut groups = [0, 0];
    for offer in offers {
        if !offer.is_idle || offer.is_claimed(claimed) {
            groups[usize::from(!offer.is_arena())] += 1;
        }
    }
    for (at, claim) in claimed.iter().enumerate() {
        let is_new = !claimed[..at].iter().any(|earlier| earlier.is_like(claim))
            && !offers.iter().any(|offer| offer.serves(claim));
        groups[usize::from(!claim.is_arena())] += usize::from(is_new);
    }
    groups
}

impl Offer {
    /// Whether the group takes jobs of a place's kind.
    pub(super) fn serves(&self, place: &Place) -> bool {
        match (&self.kind, place) {
            (OfferKind::Arena { weights: own, .. }, Place::Arena { weights, .. }) => own == weights,
            (OfferKind::Own { policy: own, capacity }, Place::Own { policy, kept }) => {
                own == policy && kept <= capacity
            }
            _ => false,
        }
    }

    /// Whether one of these places will be taken in the group.
    pub(super) fn is_claimed(&self, claimed: &[&Place]) -> bool {
        claimed.iter().any(|claim| self.serves(claim))
    }

    /// Whether the group must run empty for a late job: one that no group serves waits for the
    /// groups of its sort (arenas, or other groups), or where there are none, for any.
    fn must_empty(&self, late: &[Place], offers: &[Self]) -> bool {
        late.iter().any(|place| {
            let is_alike = |offer: &Self| offer.is_arena() == place.is_arena();
            let is_served = offers.iter().any(|offer| offer.serves(place));
            !is_served && (is_alike(self) || !offers.iter().any(is_alike))
        })
    }

    fn is_arena(&self) -> bool {
        matches!(self.kind, OfferKind::Arena { .. })
    }

    fn has(&self, needed: usize) -> bool {
        match self.kind {
            OfferKind::Arena { slots, .. } => slots >= needed,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn arena(slots: usize) -> Place {
        Place::Arena { weights: SlotWeights::NONE, slots }
    }

    fn weighted(slots: usize) -> Place {
        Place::Arena { weights: SlotWeights { weighted: true, numerators: false }, slots }
    }

    fn own(policy: &str) -> Place {
        Place::Own { policy: Arc::new(json!({ "policy": policy })), kept: 10 }
    }

    fn limits(groups: usize) -> Limits {
        Limits { groups, arena: (4, 100) }
    }

    fn offer(of: &Place, rows: usize, is_idle: bool) -> Offer {
        let kind = match of {
            Place::Arena { weights, slots } => {
                OfferKind::Arena { weights: *weights, slots: *slots }
            }
            Place::Own { policy, kept } => {
                OfferKind::Own { policy: policy.clone(), capacity: *kept }
            }
        };
        Offer { kind, rows, is_idle }
    }

    #[test]
    fn claims_take_rows_and_slots_of_an_arena() {
        let offers = [offer(&arena(100), 2, false)];
        let claim = arena(60);
        assert!(arena(100).is_free(&[], &[], &offers, limits(2)));
        assert!(!arena(101).is_free(&[], &[], &offers, limits(2)));
        assert!(arena(40).is_free(&[&claim], &[], &offers, limits(2)));
        assert!(!arena(41).is_free(&[&claim], &[], &offers, limits(2)));
        assert!(
            !arena(1).is_free(&[&claim, &arena(1)], &[], &offers, limits(2)),
            "both rows are claimed"
        );
        assert!(arena(100).is_free(&[&own("h2o")], &[], &offers, limits(2)));
    }

    #[test]
    fn a_new_group_is_claimed_once() {
        assert!(own("h2o").is_free(&[], &[], &[], limits(2)));
        // Its rows are not known yet.
        assert!(!own("h2o").is_free(&[&own("h2o")], &[], &[], limits(2)));
        // The other group is kept for an arena.
        assert!(!own("longflow").is_free(&[&own("h2o")], &[], &[], limits(2)));
        assert!(own("longflow").is_free(&[&own("h2o")], &[], &[], limits(3)));
        assert!(arena(8).is_free(&[&own("h2o")], &[], &[], limits(2)));
        assert!(own("h2o").is_free(&[], &[], &[], limits(1)));
        assert!(!arena(8).is_free(&[&own("h2o")], &[], &[], limits(1)));
    }

    #[test]
    fn idle_groups_make_room_unless_they_are_claimed() {
        let groups = |h2o_idle| [offer(&arena(100), 1, false), offer(&own("h2o"), 3, h2o_idle)];
        assert!(own("longflow").is_free(&[], &[], &groups(true), limits(2)));
        assert!(!own("longflow").is_free(&[], &[], &groups(false), limits(2)));
        assert!(!own("longflow").is_free(&[&own("h2o")], &[], &groups(true), limits(2)));
        assert!(own("h2o").is_free(&[&own("h2o"), &own("h2o")], &[], &groups(true), limits(2)));
        assert!(!own("h2o").is_free(&[&own("h2o"); 3], &[], &groups(true), limits(2)));
    }

    #[test]
    fn an_arena_that_is_about_to_be_made_has_room_for_several() {
        let claim = arena(60);
        assert!(arena(40).is_free(&[&claim], &[], &[], limits(1)));
        assert!(!arena(41).is_free(&[&claim], &[], &[], limits(1)));
        assert!(!arena(1).is_free(&[&arena(1); 4], &[], &[], limits(1)), "all rows are claimed");
    }

    #[test]
    fn groups_run_empty_for_late_jobs() {
        let busy = || [offer(&arena(100), 3, false), offer(&own("h2o"), 3, false)];
        let (late, plain) = (own("longflow"), arena(8));
        let is_free = |place: &Place, late: &Place, offers: &[Offer], groups| {
            place.is_free(&[late], std::slice::from_ref(late), offers, limits(groups))
        };
        assert!(!is_free(&own("h2o"), &late, &busy(), 2), "h2o's group runs empty");
        assert!(is_free(&plain, &late, &busy(), 2), "it needs no arena");
        assert!(!is_free(&plain, &late, &[offer(&arena(100), 3, false)], 1), "the only group");
        assert!(!is_free(&plain, &weighted(8), &busy(), 2), "it needs an arena");
        assert!(is_free(&own("h2o"), &weighted(8), &busy(), 2));
        // A group of its own serves the late job: others need not make room.
        let served = [offer(&own("longflow"), 0, false), offer(&own("h2o"), 3, false)];
        assert!(is_free(&own("h2o"), &late, &served, 3));
        // Once h2o's group is empty, the late job takes its place.
        let empty = [offer(&arena(100), 3, false), offer(&own("h2o"), 3, true)];
        assert!(!is_free(&own("h2o"), &late, &empty, 2));
        assert!(late.is_free(&[], &[], &empty, limits(2)));
    }

    #[test]
    fn arenas_of_other_weights_are_other_groups() {
        let plain = |is_idle| [offer(&arena(100), 3, is_idle)];
        assert!(!weighted(8).is_free(&[], &[], &plain(false), limits(1)));
        assert!(weighted(8).is_free(&[], &[], &plain(true), limits(1)));
        assert!(weighted(8).is_free(&[], &[], &plain(false), limits(2)));
        assert!(!weighted(8).is_free(&[&arena(8)], &[], &plain(true), limits(1)), "it is claimed");
        assert!(
            !weighted(8).is_free(&[&arena(8)], &[], &[], limits(1)),
            "another one is to be made"
        );
        assert!(weighted(40).is_free(&[&weighted(60)], &[], &plain(false), limits(2)));
        assert!(!weighted(41).is_free(&[&weighted(60)], &[], &plain(false), limits(2)));
        assert!(
            weighted(100).is_free(&[&arena(60)], &[], &plain(false), limits(2)),
            "no slot is shared"
        );
    }

    #[test]
    fn jobs_that_wait_for_a_group_leave_the_arenas_part_free() {
        // One of two groups is busy with h2o. Two other policies wait for it.
        let offers = [offer(&own("h2o"), 0, false)];
        let waiting = [&own("longflow"), &own("r-kv")];
        assert!(arena(8).is_free(&waiting, &[], &offers, limits(2)));
        assert!(!own("longflow").is_free(&[], &[], &offers, limits(2)));
    }

    #[test]
    fn rows_that_are_too_small_serve_nobody() {
        let longer = Place::Own { policy: Arc::new(json!({"policy": "h2o"})), kept: 11 };
        let groups = |is_idle| [offer(&own("h2o"), 3, is_idle)];
        assert!(
            !longer.is_free(&[], &[], &groups(false), limits(2)),
            "the other group is the arena's"
        );
        assert!(longer.is_free(&[], &[], &groups(false), limits(3)));
        assert!(longer.is_free(&[], &[], &groups(true), limits(2)));
    }

    #[test]
    fn jobs_alone_have_groups_of_their_own() {
        let alone = || Offer { kind: OfferKind::Alone, rows: 0, is_idle: false };
        assert!(own("quest").is_free(&[], &[], &[alone()], limits(3)));
        assert!(!own("quest").is_free(&[], &[], &[alone()], limits(2)), "kept for an arena");
        assert!(arena(8).is_free(&[], &[], &[alone()], limits(2)));
    }
}
