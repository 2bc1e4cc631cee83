//! Pure: owner of each name. Several Routes, tags and DomainMappings may claim one name. The first keeps it, and the
//! others get it when the first is deleted.
//!
//! A name is that of a Service in its namespace (a Route's own, or that of a tag), an external host, or a gateway port.
//! DomainMappings of one namespace share a host, and claim the host with their path prefix as a further name. "First" is
//! the same for every replica and after every restart, since it is read from the objects. The owner of the placeholder
//! has the name already; else the earlier `creationTimestamp` counts, then the UID, then the name.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    num::NonZeroU16,
};

use common::wire::NamespacedName;

use super::{PlaceholderState, Uid, UnixMillis};

/// Name of the ConfigMap of the system namespace that records the owners of gateway ports.
pub const PORT_RECORD_NAME: &str = "rouse-gateway-ports";

/// Object that claims a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NameClaimant {
    /// The Route of this app, for its own name or a tag's.
    Route(NamespacedName),
    /// The DomainMapping of this name.
    Mapping(NamespacedName),
}

impl std::fmt::Display for NameClaimant {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Route(name) => write!(out, "Route \"{name}\""),
            Self::Mapping(name) => write!(out, "DomainMapping \"{name}\""),
        }
    }
}

/// One claimant's request for one name, with everything that its rank depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameClaim {
    /// Object that makes the claim.
    pub claimant: NameClaimant,
    /// Kubernetes Service that the name stands for.
    pub service: NamespacedName,
    /// Creation time of the Route or DomainMapping.
    pub created: UnixMillis,
    /// UID of the Route or DomainMapping.
    pub uid: Uid,
    /// True if the name is a tag's, false for the Route's own name.
    pub is_tag: bool,
    /// True if the claimant holds the name's allocation on the local node.
    pub holds_allocation: bool,
}

/// Kind and text of a claimed name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ClaimedName<'a> {
    Service(&'a NamespacedName),
    Host(&'a str),
    GatewayPort(NonZeroU16),
}

impl ClaimedName<'_> {
    /// Returns the hash by which the name is kept; two names collide once in 2^64.
    fn hash_key(self) -> u64 {
        let mut hash = DefaultHasher::new();
        self.hash(&mut hash);
        hash.finish()
    }
}

/// Claims of one claimant.
#[derive(Clone, Debug, Default)]
pub struct ClaimantNames {
    /// Claims on names of Kubernetes Services.
    pub services: Vec<NameClaim>,
    /// Claims on external hosts, each with the host.
    pub hosts: Vec<(String, NameClaim)>,
    /// Claim on a gateway port.
    pub gateway_port: Option<(NonZeroU16, NameClaim)>,
}

/// All claimed names, with their claimants.
#[derive(Clone, Debug, Default)]
pub struct NameRegistry {
    /// Claims by hash of the name. Texts would cost memory for ten thousand sleeping services.
    claims: HashMap<u64, Vec<NameClaim>>,
    /// Hashes of the names that each claimant claims.
    keys_by_claimant: BTreeMap<NameClaimant, Box<[u64]>>,
    /// Claimants that may have gained or lost a name.
    changed_claimants: BTreeSet<NameClaimant>,
}

impl NameRegistry {
    /// Replaces all claims of a claimant by those in `names`.
    pub fn set_claims(&mut self, claimant: &NameClaimant, names: ClaimantNames) {
        let services =
            names.services.into_iter().map(|it| (ClaimedName::Service(&it.service).hash_key(), it));
        let hosts =
            names.hosts.into_iter().map(|(host, it)| (ClaimedName::Host(&host).hash_key(), it));
        let port =
            names.gateway_port.map(|(port, it)| (ClaimedName::GatewayPort(port).hash_key(), it));
        let claims: Vec<(u64, NameClaim)> =
            services.collect::<Vec<_>>().into_iter().chain(hosts).chain(port).collect();
        let keys: Box<[u64]> = claims.iter().map(|(key, _)| *key).collect();
        // Claimants without claims have no entry, so that deleted apps leave nothing behind.
        let old_keys = if keys.is_empty() {
            self.keys_by_claimant.remove(claimant)
        } else {
            self.keys_by_claimant.insert(claimant.clone(), keys.clone())
        };
        let old_keys = old_keys.unwrap_or_default();
        for key in old_keys.iter().filter(|it| !keys.contains(it)) {
            self.remove_claim(*key, claimant);
        }
        for (key, claim) in claims {
            self.insert_claim(key, claim);
        }
    }

    fn remove_claim(&mut self, key: u64, claimant: &NameClaimant) {
        let Some(all) = self.claims.get_mut(&key) else { return };
        all.retain(|it| it.claimant != *claimant);
        if all.is_empty() {
            self.claims.remove(&key);
        }
        self.mark_changed(key);
    }

    fn insert_claim(&mut self, key: u64, claim: NameClaim) {
        let all = self.claims.entry(key).or_default();
        match all.iter_mut().find(|it| it.claimant == claim.claimant) {
            Some(existing) if *existing == claim => return,
            Some(existing) => *existing = claim,
            None => {
                // Nearly every name has one claim.
                all.reserve_exact(1);
                all.push(claim);
            }
        }
        // The only claim on a name takes it from no other claimant.
        if all.len() > 1 {
            self.mark_changed(key);
        }
    }

    /// Marks the claimants of a name whose placeholder may have another owner than before.
    pub fn mark_service_changed(&mut self, service: &NamespacedName) {
        self.mark_changed(ClaimedName::Service(service).hash_key());
    }

    /// Marks the claimants of a gateway port whose recorded owner has changed.
    pub fn mark_port_changed(&mut self, port: NonZeroU16) {
        self.mark_changed(ClaimedName::GatewayPort(port).hash_key());
    }

    /// Marks the claimants of a name, and the claimants of their other names: a claimant that loses its Service's name
    /// loses its host, too.
    fn mark_changed(&mut self, key: u64) {
        let claimants_of =
            |key: u64| self.claims.get(&key).into_iter().flatten().map(|it| it.claimant.clone());
        let direct: BTreeSet<NameClaimant> = claimants_of(key).collect();
        let keys = direct.iter().filter_map(|it| self.keys_by_claimant.get(it)).flatten().copied();
        let indirect: Vec<NameClaimant> = keys.flat_map(claimants_of).collect();
        self.changed_claimants.extend(direct);
        self.changed_claimants.extend(indirect);
    }

    /// Marks a claimant that may now get a name that it lacked.
    pub fn mark_claimant_changed(&mut self, claimant: NameClaimant) {
        self.changed_claimants.insert(claimant);
    }

    /// Takes the claimants that may have gained or lost a name since the last call.
    pub fn take_changed_claimants(&mut self) -> BTreeSet<NameClaimant> {
        std::mem::take(&mut self.changed_claimants)
    }

    /// Returns the claim that owns the name of a Service.
    pub fn service_owner(
        &self,
        service: &NamespacedName,
        placeholders: &BTreeMap<NamespacedName, PlaceholderState>,
    ) -> Option<&NameClaim> {
        let owner = placeholders.get(service).map(|it| it.owner_uid);
        // The placeholder's owner has the name already; on the local node the holder of its allocation.
        let holder_first = |it: &NameClaim| Reverse((Some(it.uid) == owner, it.holds_allocation));
        let all = self.claims.get(&ClaimedName::Service(service).hash_key())?.iter();
        all.min_by(|a, b| (holder_first(a), claim_order(a)).cmp(&(holder_first(b), claim_order(b))))
    }

    /// Returns the claim that owns a host. A tag's rank counts from the creation of its placeholder, a Route's from its
    /// own.
    pub fn host_owner(
        &self,
        host: &str,
        placeholders: &BTreeMap<NamespacedName, PlaceholderState>,
    ) -> Option<&NameClaim> {
        let has_service = |claim: &&NameClaim| match &claim.claimant {
            NameClaimant::Route(_) => self
                .service_owner(&claim.service, placeholders)
                .is_some_and(|owner| owner.claimant == claim.claimant),
            NameClaimant::Mapping(_) => true,
        };
        // A tag may be added to an old Route. Ranked by the Route's age it would take the host of a younger owner.
        let since = |claim: &NameClaim| match placeholders.get(&claim.service) {
            _ if !claim.is_tag || claim.holds_allocation => claim.created,
            Some(placeholder) if placeholder.owner_uid == claim.uid => placeholder.created,
            Some(_) | None => UnixMillis(u64::MAX),
        };
        let all = self.claims.get(&ClaimedName::Host(host).hash_key())?.iter();
        let all = all.filter(has_service);
        all.min_by(|a, b| (since(a), claim_order(a)).cmp(&(since(b), claim_order(b))))
    }

    /// Returns the claim that owns a gateway port: that of the Route that is recorded as its owner, else the older one.
    pub fn port_owner(
        &self,
        port: NonZeroU16,
        is_recorded: impl Fn(&NameClaim) -> bool,
        placeholders: &BTreeMap<NamespacedName, PlaceholderState>,
    ) -> Option<&NameClaim> {
        // A Route that does not own its name has no requests that a port could lead to it.
        let has_service = |claim: &&NameClaim| {
            self.service_owner(&claim.service, placeholders)
                .is_some_and(|owner| owner.claimant == claim.claimant)
        };
        let recorded_first = |claim: &NameClaim| Reverse(is_recorded(claim));
        let all = self.claims.get(&ClaimedName::GatewayPort(port).hash_key())?.iter();
        let all = all.filter(has_service);
        all.min_by(|a, b| {
            (recorded_first(a), claim_order(a)).cmp(&(recorded_first(b), claim_order(b)))
        })
    }
}

fn claim_order(claim: &NameClaim) -> (UnixMillis, bool, Uid, &NameClaimant) {
    (claim.created, claim.is_tag, claim.uid, &claim.claimant)
}
