//! Pure: which owner each name has. Several routes, tags and DomainMappings may ask for one name: the first keeps it, and
//! the others get it when the first goes.
//!
//! A name is that of a Service in its namespace (a route's own, or that of a tag), or a host from outside. "First" is the
//! same for every replica and after every restart, since it is read off the objects: who owns the Service of Kubernetes
//! has the name already; else the earlier `creationTimestamp` counts, then the UID, then the name.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use common::wire::Name;

use super::{Placeholder, Stamp, Uid};

/// Who asks for a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Claimant {
    /// The route of this app.
    Route(Name),
    /// A DomainMapping.
    Mapping(Name),
}

impl std::fmt::Display for Claimant {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Route(name) => write!(out, "Route \"{name}\""),
            Self::Mapping(name) => write!(out, "DomainMapping \"{name}\""),
        }
    }
}

/// One that asks for a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bid {
    /// Who.
    pub by: Claimant,
    /// The Service that the name leads to.
    pub to: Name,
    /// When the route or mapping was made.
    pub created: Stamp,
    /// Its UID.
    pub uid: Uid,
    /// Whether it is for a tag, and not for the route's own name.
    pub is_tag: bool,
    /// Whether it has the numbers of a name on the local node.
    pub held: bool,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum What<'a> {
    Service(&'a Name),
    Host(&'a str),
}

impl What<'_> {
    /// One mistake in 2^64 names.
    fn key(self) -> u64 {
        let mut hash = DefaultHasher::new();
        self.hash(&mut hash);
        hash.finish()
    }
}

/// What one claimant asks for.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Names of Services.
    pub services: Vec<Bid>,
    /// Hosts from outside.
    pub hosts: Vec<(String, Bid)>,
}

/// All names that are asked for.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Bids by name. Names are kept as hashes: ten thousand services sleep here.
    bids: HashMap<u64, Vec<Bid>>,
    /// What each claimant asks for.
    asked: BTreeMap<Claimant, Box<[u64]>>,
    /// Those for whom it may have changed what they have.
    touched: BTreeSet<Claimant>,
}

impl Names {
    /// What a claimant asks for now, and nothing else.
    pub fn ask(&mut self, by: &Claimant, wish: Wish) {
        let services = wish.services.into_iter().map(|it| (What::Service(&it.to).key(), it));
        let hosts = wish.hosts.into_iter().map(|(host, it)| (What::Host(&host).key(), it));
        let bids: Vec<(u64, Bid)> = services.collect::<Vec<_>>().into_iter().chain(hosts).collect();
        let keys: Box<[u64]> = bids.iter().map(|(key, _)| *key).collect();
        let before = if keys.is_empty() {
            self.asked.remove(by)
        } else {
            self.asked.insert(by.clone(), keys.clone())
        };
        let before = before.unwrap_or_default();
        for key in before.iter().filter(|it| !keys.contains(it)) {
            self.drop_bid(*key, by);
        }
        for (key, bid) in bids {
            self.put_bid(key, bid);
        }
    }

    fn drop_bid(&mut self, key: u64, by: &Claimant) {
        let Some(all) = self.bids.get_mut(&key) else { return };
        all.retain(|it| it.by != *by);
        if all.is_empty() {
            self.bids.remove(&key);
        }
        self.touch(key);
    }

    fn put_bid(&mut self, key: u64, bid: Bid) {
        let all = self.bids.entry(key).or_default();
        match all.iter_mut().find(|it| it.by == bid.by) {
            Some(have) if *have == bid => return,
            Some(have) => *have = bid,
            None => {
                // Most names have one.
                all.reserve_exact(1);
                all.push(bid);
            }
        }
        if all.len() > 1 {
            self.touch(key);
        }
    }

    /// Who owns the Service of this name may be another one than before.
    pub fn touch_service(&mut self, service: &Name) {
        self.touch(What::Service(service).key());
    }

    /// The apps that ask for a name, and for another one that those ask for: who loses its Service loses its host too.
    fn touch(&mut self, key: u64) {
        let asks = |key: u64| self.bids.get(&key).into_iter().flatten().map(|it| it.by.clone());
        let near: BTreeSet<Claimant> = asks(key).collect();
        let keys = near.iter().filter_map(|it| self.asked.get(it)).flatten().copied();
        let far: Vec<Claimant> = keys.flat_map(asks).collect();
        self.touched.extend(near);
        self.touched.extend(far);
    }

    /// This claimant may get now what it lacked.
    pub fn touch_claimant(&mut self, claimant: Claimant) {
        self.touched.insert(claimant);
    }

    /// Those for whom it may have changed what they have, since this was asked last.
    pub fn take_touched(&mut self) -> BTreeSet<Claimant> {
        std::mem::take(&mut self.touched)
    }

    /// Who has the name of a Service.
    pub fn owner(&self, service: &Name, seen: &BTreeMap<Name, Placeholder>) -> Option<&Bid> {
        let owner = seen.get(service).map(|it| it.owner);
        let has = |it: &Bid| Reverse((Some(it.uid) == owner, it.held));
        let all = self.bids.get(&What::Service(service).key())?.iter();
        all.min_by(|a, b| (has(a), seniority(a)).cmp(&(has(b), seniority(b))))
    }

    /// Who has a host. A tag has it from when its Service was made, as a route from when that was.
    pub fn host_owner(&self, host: &str, seen: &BTreeMap<Name, Placeholder>) -> Option<&Bid> {
        let has_service = |it: &&Bid| match &it.by {
            Claimant::Route(_) => self.owner(&it.to, seen).is_some_and(|owner| owner.by == it.by),
            Claimant::Mapping(_) => true,
        };
        let since = |it: &Bid| match seen.get(&it.to) {
            _ if !it.is_tag || it.held => it.created,
            Some(seen) if seen.owner == it.uid => seen.created,
            Some(_) | None => Stamp(u64::MAX),
        };
        let all = self.bids.get(&What::Host(host).key())?.iter();
        let all = all.filter(has_service);
        all.min_by(|a, b| (since(a), seniority(a)).cmp(&(since(b), seniority(b))))
    }
}

fn seniority(bid: &Bid) -> (Stamp, bool, Uid, &Claimant) {
    (bid.created, bid.is_tag, bid.uid, &bid.by)
}
