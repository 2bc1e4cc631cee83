//! Pure: conversion of claims and grants of slots.

use super::*;

fn held(all: Vec<raw::Held>) -> WireResult<SlotsByPod> {
    let one = |it: raw::Held| Ok((nonempty("held.pod", it.pod)?.into(), it.slots));
    let all: WireResult<SlotsByPod> = all.into_iter().map(one).collect();
    // `Held` has no zeros, so that equal states compare equal.
    all.map(|all| all.into_iter().filter(|(_, slots)| *slots > 0).collect())
}

fn raw_held(all: SlotsByPod) -> Vec<raw::Held> {
    all.into_iter().map(|(pod, slots)| raw::Held { pod: pod.into(), slots }).collect()
}

fn names(all: Vec<String>) -> std::collections::BTreeSet<SmolStr> {
    all.into_iter().map(SmolStr::from).collect()
}

fn claim(it: raw::Claim) -> WireResult<(NamespacedName, SlotClaim)> {
    let former = it.former.into_iter().map(|it| Ok((it.activator.into(), held(it.held)?)));
    let claim = SlotClaim {
        epoch: it.epoch,
        seen: it.seen,
        held: held(it.held)?,
        need: it.need,
        avoid: names(it.avoid),
        former: former.collect::<WireResult<_>>()?,
        known: names(it.known),
    };
    Ok((it.revision.parse()?, claim))
}

fn raw_claim(revision: &NamespacedName, it: SlotClaim) -> raw::Claim {
    let former = it.former.into_iter();
    let former = former.map(|(activator, held)| raw::Granted {
        activator: activator.into(),
        held: raw_held(held),
    });
    raw::Claim {
        revision: revision.to_string(),
        epoch: it.epoch,
        seen: it.seen,
        held: raw_held(it.held),
        need: it.need,
        avoid: it.avoid.into_iter().map(String::from).collect(),
        former: former.collect(),
        known: it.known.into_iter().map(String::from).collect(),
    }
}

impl TryFrom<raw::ClaimItem> for SlotClaimItem {
    type Error = WireError;

    fn try_from(item: raw::ClaimItem) -> WireResult<Self> {
        use raw::claim_item::What;
        Ok(match need("claim_item.what", item.what)? {
            What::Sender(it) => Self::Sender(it.try_into()?),
            // The first bad part refuses the whole claim: a partial one would misstate the slots in use.
            What::Claim(it) => {
                let (revision, it) = claim(it)?;
                Self::Claim(revision, it)
            }
            What::Gone(name) => Self::Gone(name.parse()?),
            What::Synced(_) => Self::Synced,
            What::Bye(_) => Self::Bye,
        })
    }
}

impl From<SlotClaimItem> for raw::ClaimItem {
    fn from(item: SlotClaimItem) -> Self {
        use raw::claim_item::What;
        let what = match item {
            SlotClaimItem::Sender(it) => What::Sender(it.into()),
            SlotClaimItem::Claim(revision, it) => What::Claim(raw_claim(&revision, it)),
            SlotClaimItem::Gone(name) => What::Gone(name.to_string()),
            SlotClaimItem::Synced => What::Synced(raw::Empty {}),
            SlotClaimItem::Bye => What::Bye(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}

impl TryFrom<raw::GrantItem> for SlotGrantItem {
    type Error = WireError;

    fn try_from(item: raw::GrantItem) -> WireResult<Self> {
        use raw::grant_item::What;
        Ok(match need("grant_item.what", item.what)? {
            What::Grant(it) => {
                // The owner's state is whole: a missing pod means that the holder has no slot there.
                let raw::Grant { revision, epoch, number, held: slots, keep, acts } = it;
                let held = held(slots)?;
                Self::Grant(revision.parse()?, SlotGrant { epoch, number, held, keep, acts })
            }
            What::Gone(name) => Self::Gone(name.parse()?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<SlotGrantItem> for raw::GrantItem {
    fn from(item: SlotGrantItem) -> Self {
        use raw::grant_item::What;
        let what = match item {
            SlotGrantItem::Grant(revision, it) => {
                let SlotGrant { epoch, number, held, keep, acts } = it;
                let (revision, held) = (revision.to_string(), raw_held(held));
                What::Grant(raw::Grant { revision, epoch, number, held, keep, acts })
            }
            SlotGrantItem::Gone(name) => What::Gone(name.to_string()),
            SlotGrantItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}
