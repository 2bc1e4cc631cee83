//! Pure: conversion of claims and grants of slots.

use super::*;

fn parse_slots_by_pod(all: Vec<raw::Held>) -> WireResult<SlotsByPod> {
    let entry = |it: raw::Held| Ok((require_nonempty("held.pod", it.pod)?.into(), it.slots));
    let all: WireResult<SlotsByPod> = all.into_iter().map(entry).collect();
    // `SlotsByPod` has no zeros, so that equal states compare equal.
    all.map(|all| all.into_iter().filter(|(_, slots)| *slots > 0).collect())
}

fn raw_slots_by_pod(all: SlotsByPod) -> Vec<raw::Held> {
    all.into_iter().map(|(pod, slots)| raw::Held { pod: pod.into(), slots }).collect()
}

fn to_name_set(all: Vec<String>) -> std::collections::BTreeSet<SmolStr> {
    all.into_iter().map(SmolStr::from).collect()
}

fn parse_claim(message: raw::Claim) -> WireResult<(NamespacedName, SlotClaim)> {
    let former = message
        .former
        .into_iter()
        .map(|message| Ok((message.activator.into(), parse_slots_by_pod(message.held)?)));
    let claim = SlotClaim {
        owner_term: message.epoch,
        applied_grant: message.seen,
        held: parse_slots_by_pod(message.held)?,
        needed: message.need,
        unusable_pods: to_name_set(message.avoid),
        former_grants: former.collect::<WireResult<_>>()?,
        live_activators: to_name_set(message.known),
    };
    Ok((parse_revision_name(&message.revision)?, claim))
}

fn raw_claim(revision: &NamespacedName, value: SlotClaim) -> raw::Claim {
    let former = value.former_grants.into_iter();
    let former = former.map(|(activator, held)| raw::Granted {
        activator: activator.into(),
        held: raw_slots_by_pod(held),
    });
    raw::Claim {
        revision: revision.to_string(),
        epoch: value.owner_term,
        seen: value.applied_grant,
        held: raw_slots_by_pod(value.held),
        need: value.needed,
        avoid: value.unusable_pods.into_iter().map(String::from).collect(),
        former: former.collect(),
        known: value.live_activators.into_iter().map(String::from).collect(),
    }
}

impl TryFrom<raw::ClaimItem> for SlotClaimItem {
    type Error = WireError;

    fn try_from(item: raw::ClaimItem) -> WireResult<Self> {
        use raw::claim_item::What;
        Ok(match require("claim_item.what", item.what)? {
            What::Sender(it) => Self::Sender(it.try_into()?),
            // The first bad part refuses the whole claim: a partial one would misstate the slots in use.
            What::Claim(it) => {
                let (revision, it) = parse_claim(it)?;
                Self::Claim(revision, it)
            }
            What::Gone(name) => Self::Removed(parse_revision_name(&name)?),
            What::Synced(_) => Self::Synced,
            What::Bye(_) => Self::Goodbye,
        })
    }
}

impl From<SlotClaimItem> for raw::ClaimItem {
    fn from(item: SlotClaimItem) -> Self {
        use raw::claim_item::What;
        let what = match item {
            SlotClaimItem::Sender(it) => What::Sender(it.into()),
            SlotClaimItem::Claim(revision, it) => What::Claim(raw_claim(&revision, it)),
            SlotClaimItem::Removed(name) => What::Gone(name.to_string()),
            SlotClaimItem::Synced => What::Synced(raw::Empty {}),
            SlotClaimItem::Goodbye => What::Bye(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}

impl TryFrom<raw::GrantItem> for SlotGrantItem {
    type Error = WireError;

    fn try_from(item: raw::GrantItem) -> WireResult<Self> {
        use raw::grant_item::What;
        Ok(match require("grant_item.what", item.what)? {
            What::Grant(it) => {
                // The owner's state is whole: a missing pod means that the holder has no slot there.
                let raw::Grant { revision, epoch, number, held: slots, keep, acts } = it;
                let held = parse_slots_by_pod(slots)?;
                Self::Grant(
                    parse_revision_name(&revision)?,
                    SlotGrant {
                        owner_term: epoch,
                        grant_number: number,
                        held,
                        keep_limit: keep,
                        is_acting: acts,
                    },
                )
            }
            What::Gone(name) => Self::Removed(parse_revision_name(&name)?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<SlotGrantItem> for raw::GrantItem {
    fn from(item: SlotGrantItem) -> Self {
        use raw::grant_item::What;
        let what = match item {
            SlotGrantItem::Grant(revision, it) => {
                let SlotGrant {
                    owner_term: epoch,
                    grant_number: number,
                    held,
                    keep_limit: keep,
                    is_acting: acts,
                } = it;
                let (revision, held) = (revision.to_string(), raw_slots_by_pod(held));
                What::Grant(raw::Grant { revision, epoch, number, held, keep, acts })
            }
            SlotGrantItem::Removed(name) => What::Gone(name.to_string()),
            SlotGrantItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}
