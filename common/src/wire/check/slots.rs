//! Pure: conversion of claims and grants of slots.

use super::*;

fn held(all: Vec<raw::Held>) -> Checked<Held> {
    let one = |it: raw::Held| Ok((nonempty("held.pod", it.pod)?.into(), it.slots));
    let all: Checked<Held> = all.into_iter().map(one).collect();
    // `Held` has no zeros, so that equal states compare equal.
    all.map(|all| all.into_iter().filter(|(_, slots)| *slots > 0).collect())
}

fn raw_held(all: Held) -> Vec<raw::Held> {
    all.into_iter().map(|(pod, slots)| raw::Held { pod: pod.into(), slots }).collect()
}

fn names(all: Vec<String>) -> std::collections::BTreeSet<SmolStr> {
    all.into_iter().map(SmolStr::from).collect()
}

fn claim(it: raw::Claim) -> Checked<(Name, Claim)> {
    let former = it.former.into_iter().map(|it| Ok((it.activator.into(), held(it.held)?)));
    let claim = Claim {
        epoch: it.epoch,
        seen: it.seen,
        held: held(it.held)?,
        need: it.need,
        avoid: names(it.avoid),
        former: former.collect::<Checked<_>>()?,
        known: names(it.known),
    };
    Ok((it.revision.parse()?, claim))
}

fn raw_claim(revision: &Name, it: Claim) -> raw::Claim {
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

impl TryFrom<raw::ClaimItem> for ClaimItem {
    type Error = Refused;

    fn try_from(item: raw::ClaimItem) -> Checked<Self> {
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

impl From<ClaimItem> for raw::ClaimItem {
    fn from(item: ClaimItem) -> Self {
        use raw::claim_item::What;
        let what = match item {
            ClaimItem::Sender(it) => What::Sender(it.into()),
            ClaimItem::Claim(revision, it) => What::Claim(raw_claim(&revision, it)),
            ClaimItem::Gone(name) => What::Gone(name.to_string()),
            ClaimItem::Synced => What::Synced(raw::Empty {}),
            ClaimItem::Bye => What::Bye(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}

impl TryFrom<raw::GrantItem> for GrantItem {
    type Error = Refused;

    fn try_from(item: raw::GrantItem) -> Checked<Self> {
        use raw::grant_item::What;
        Ok(match need("grant_item.what", item.what)? {
            What::Grant(it) => {
                // The owner's state is whole: a missing pod means that the holder has no slot there.
                let raw::Grant { revision, epoch, number, held: slots, keep, acts } = it;
                let held = held(slots)?;
                Self::Grant(revision.parse()?, Grant { epoch, number, held, keep, acts })
            }
            What::Gone(name) => Self::Gone(name.parse()?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<GrantItem> for raw::GrantItem {
    fn from(item: GrantItem) -> Self {
        use raw::grant_item::What;
        let what = match item {
            GrantItem::Grant(revision, it) => {
                let Grant { epoch, number, held, keep, acts } = it;
                let (revision, held) = (revision.to_string(), raw_held(held));
                What::Grant(raw::Grant { revision, epoch, number, held, keep, acts })
            }
            GrantItem::Gone(name) => What::Gone(name.to_string()),
            GrantItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}
