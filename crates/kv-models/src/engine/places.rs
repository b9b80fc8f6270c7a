//! The places that jobs will take once their prompts are compressed.
//!
//! A prompt is begun only where its sequence will find a row and slots behind it: a job that has
//! told its first token must not wait for its second one. Prompts that are on their way therefore
//! claim their places before they take them.

use serde_json::Value;

/// The place that a job's sequence will take.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Place {
    /// A row of an arena, and so many slots of every layer.
    Arena { slots: usize },
    /// A row of a group of the policy's own, which has this configuration. How many such rows fit
    /// into a group is known once a prompt is compressed.
    Own { policy: Value },
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
    /// Jobs whose steps append, which need no more than these slots of every layer.
    Arena { slots: usize },
    /// Jobs of one policy.
    Own { policy: Value },
    /// The one that it has.
    Alone,
}

impl Place {
    /// Whether the group of one place takes the other one, too.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Arena { .. }, Self::Arena { .. }) => true,
            (Self::Own { policy: own }, Self::Own { policy: other }) => own == other,
            _ => false,
        }
    }

    fn slots(&self) -> usize {
        match self {
            Self::Arena { slots } => *slots,
            Self::Own { .. } => 0,
        }
    }

    /// Whether a sequence will find this place in a group, or in a new one of `most` groups, once
    /// the places that are `claimed` are taken.
    pub(super) fn is_free(&self, claimed: &[&Self], offers: &[Offer], most: usize) -> bool {
        let rivals: Vec<&&Self> = claimed.iter().filter(|claim| claim.is_like(self)).collect();
        let slots = self.slots() + rivals.iter().map(|rival| rival.slots()).sum::<usize>();
        let mut own = offers.iter().filter(|offer| offer.serves(self)).peekable();
        let is_waited_for = own.peek().is_some_and(|group| !group.is_idle);
        if own.any(|offer| offer.rows > rivals.len() && offer.has(slots)) {
            return true;
        }
        // The first job of a new group shows how many others fit into it.
        if is_waited_for || !rivals.is_empty() {
            return false;
        }
        let is_claimed = |offer: &Offer| claimed.iter().any(|claim| offer.serves(claim));
        let kept = offers.iter().filter(|offer| !offer.is_idle || is_claimed(offer));
        let mut own_kinds = 0;
        let mut groups = 0;
        for offer in kept {
            groups += 1;
            own_kinds += usize::from(!matches!(offer.kind, OfferKind::Arena { .. }));
        }
        for (at, claim) in claimed.iter().enumerate() {
            let is_new = !claimed[..at].iter().any(|earlier| earlier.is_like(claim))
                && !offers.iter().any(|offer| offer.serves(claim));
            groups += usize::from(is_new);
            own_kinds += usize::from(is_new && matches!(claim, Self::Own { .. }));
        }
        // One of several groups is kept for policies whose steps append.
        let is_kept = matches!(self, Self::Own { .. }) && most > 1 && own_kinds + 1 >= most;
        groups < most && !is_kept
    }
}

impl Offer {
    /// Whether the group takes jobs of a place's kind.
    fn serves(&self, place: &Place) -> bool {
        match (&self.kind, place) {
            (OfferKind::Arena { .. }, Place::Arena { .. }) => true,
            (OfferKind::Own { policy: own }, Place::Own { policy }) => own == policy,
            _ => false,
        }
    }

    fn has(&self, needed: usize) -> bool {
        match self.kind {
            OfferKind::Arena { slots } => slots >= needed,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn arena(slots: usize) -> Place {
        Place::Arena { slots }
    }

    fn own(policy: &str) -> Place {
        Place::Own { policy: json!({ "policy": policy }) }
    }

    fn offer(of: &Place, rows: usize, is_idle: bool) -> Offer {
        let kind = match of {
            Place::Arena { slots } => OfferKind::Arena { slots: *slots },
            Place::Own { policy } => OfferKind::Own { policy: policy.clone() },
        };
        Offer { kind, rows, is_idle }
    }

    #[test]
    fn claims_take_rows_and_slots_of_an_arena() {
        let offers = [offer(&arena(100), 2, false)];
        let claim = arena(60);
        assert!(arena(100).is_free(&[], &offers, 2));
        assert!(!arena(101).is_free(&[], &offers, 2));
        assert!(arena(40).is_free(&[&claim], &offers, 2));
        assert!(!arena(41).is_free(&[&claim], &offers, 2));
        assert!(!arena(1).is_free(&[&claim, &arena(1)], &offers, 2), "both rows are claimed");
        assert!(arena(100).is_free(&[&own("h2o")], &offers, 2));
    }

    #[test]
    fn a_new_group_is_claimed_once() {
        assert!(own("h2o").is_free(&[], &[], 2));
        // Its rows are not known yet.
        assert!(!own("h2o").is_free(&[&own("h2o")], &[], 2));
        // The other group is kept for an arena.
        assert!(!own("longflow").is_free(&[&own("h2o")], &[], 2));
        assert!(own("longflow").is_free(&[&own("h2o")], &[], 3));
        assert!(arena(8).is_free(&[&own("h2o")], &[], 2));
        assert!(own("h2o").is_free(&[], &[], 1));
        assert!(!arena(8).is_free(&[&own("h2o")], &[], 1));
    }

    #[test]
    fn idle_groups_make_room_unless_they_are_claimed() {
        let groups = |h2o_idle| [offer(&arena(100), 1, false), offer(&own("h2o"), 3, h2o_idle)];
        assert!(own("longflow").is_free(&[], &groups(true), 2));
        assert!(!own("longflow").is_free(&[], &groups(false), 2));
        assert!(!own("longflow").is_free(&[&own("h2o")], &groups(true), 2));
        assert!(own("h2o").is_free(&[&own("h2o"), &own("h2o")], &groups(true), 2));
        assert!(!own("h2o").is_free(&[&own("h2o"); 3], &groups(true), 2));
    }

    #[test]
    fn jobs_alone_have_groups_of_their_own() {
        let alone = || Offer { kind: OfferKind::Alone, rows: 0, is_idle: false };
        assert!(own("quest").is_free(&[], &[alone()], 3));
        assert!(!own("quest").is_free(&[], &[alone()], 2), "kept for an arena");
        assert!(arena(8).is_free(&[], &[alone()], 2));
    }
}
