//! Pure: Services of the cluster that want a frontend which one of Rouse's services has.

use std::{
    collections::BTreeMap,
    fmt,
    net::{Ipv6Addr, SocketAddr},
};

use common::wire::NamespacedName;

use super::{BackendListKey, RoutePlanner, draft::MapPlanDraft};

/// A Service of the cluster without a frontend at one of its addresses, because a service of the RouteTable has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutrankedService {
    /// Name of the Service.
    pub service: NamespacedName,
    /// First address that it wants and does not get.
    pub address: SocketAddr,
    /// Service of the RouteTable that has the address.
    pub owner: NamespacedName,
}

impl fmt::Display for OutrankedService {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, owner, .. } = self;
        write!(
            out,
            "{address} leads to Rouse's service {owner}, which has the same address: \
             give one of the two Services another ClusterIP or port"
        )
    }
}

impl RoutePlanner {
    /// Returns the Services of the cluster that `draft` leaves without a frontend, as a service of the RouteTable has
    /// it, and no plan before did. Call it before the draft is committed.
    pub(super) fn newly_outranked(&self, draft: &MapPlanDraft) -> Vec<OutrankedService> {
        let mut outranked = BTreeMap::new();
        for &(key, number) in draft.frontend_claims.difference(&self.frontend_claims) {
            let list = self.lists.get(&BackendListKey::Frontend(key));
            let owner = draft.frontend_owners.get(&key).copied();
            let owner = owner.or_else(|| list.and_then(|list| list.owner));
            let Some(owner) = owner.filter(|it| it.outranks(number)) else { continue };
            // A scaled Service has its own address by the RouteTable, so nothing is taken from it.
            if self.table.is_same_service(owner, number) {
                continue;
            }
            let names = self.table.service_name(number).zip(self.table.shown_name(owner));
            // One address is enough for a message: a Service has several ports and families.
            if let Some((service, owner)) = names {
                let address = Ipv6Addr::from(key.address).to_canonical();
                let address = SocketAddr::new(address, u16::from_be(key.port_be));
                outranked.entry(number).or_insert(OutrankedService { service, address, owner });
            }
        }
        outranked.into_values().collect()
    }
}
