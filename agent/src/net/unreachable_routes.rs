//! Shell: routes of type `unreachable` in the main table, which end connects at once instead of sending them off.
//!
//! The agent knows its own routes by their routing protocol, and leaves all others alone.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{
        RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
        RouteType,
    },
};
use netlink_sys::protocols::NETLINK_ROUTE;

use crate::net::netlink::NetlinkSocket;

/// Routing protocol of the agent's routes: `ip route show proto 82`. No protocol of `/etc/iproute2/rt_protos` has it.
const OWN_PROTOCOL: u8 = 82;
/// Metric of the agent's routes. A route of the operator to the same range has a lower one by default, and counts.
const METRIC: u32 = 1_000_000;

/// Changes that a call has made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnreachableRouteChanges {
    /// Ranges that have a route now and had none before.
    pub added: BTreeSet<IpNet>,
    /// Ranges whose route was removed.
    pub removed: BTreeSet<IpNet>,
    /// First change that the kernel refused: the range and the reason. The next call tries it again.
    pub failure: Option<String>,
}

impl UnreachableRouteChanges {
    fn record_failure(&mut self, range: IpNet, error: &io::Error) {
        self.failure.get_or_insert_with(|| format!("{range}: {error}"));
    }
}

/// Makes these ranges unreachable in the network namespace of the calling thread, and no others. Needs CAP_NET_ADMIN.
///
/// A change that fails holds up no other one. Returns an error if the present routes cannot be listed.
pub fn set_unreachable(wanted: &BTreeSet<IpNet>) -> io::Result<UnreachableRouteChanges> {
    let netlink = NetlinkSocket::open(NETLINK_ROUTE)?;
    let present = own_ranges(&netlink)?;
    let mut changes = UnreachableRouteChanges::default();
    for &range in present.difference(wanted) {
        match netlink.command(RouteNetlinkMessage::DelRoute(unreachable_route(range))) {
            Ok(()) => changes.removed.extend([range]),
            Err(error) => changes.record_failure(range, &error),
        }
    }
    for &range in wanted.difference(&present) {
        match netlink.create(RouteNetlinkMessage::NewRoute(unreachable_route(range))) {
            Ok(()) => changes.added.extend([range]),
            // Without the family in the kernel, no packet to the range leaves the node.
            Err(error) if is_family_missing(&error) => {}
            Err(error) => changes.record_failure(range, &error),
        }
    }
    Ok(changes)
}

/// Returns the ranges that [`set_unreachable`] has made unreachable in the network namespace of the calling thread.
pub fn unreachable_ranges() -> io::Result<BTreeSet<IpNet>> {
    own_ranges(&NetlinkSocket::open(NETLINK_ROUTE)?)
}

/// Returns true if the kernel has no routes of this family, as one that is booted with `ipv6.disable=1`.
fn is_family_missing(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|it| [libc::EOPNOTSUPP, libc::EAFNOSUPPORT].contains(&it))
}

/// Returns the ranges of the agent's routes.
fn own_ranges(netlink: &NetlinkSocket) -> io::Result<BTreeSet<IpNet>> {
    // With the check the kernel lists routes of this protocol only. A router's table may have a million others.
    netlink.socket().set_netlink_get_strict_chk(true)?;
    let mut ranges = BTreeSet::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.protocol = OWN_PROTOCOL.into();
        netlink.dump(RouteNetlinkMessage::GetRoute(request), |response| {
            if let RouteNetlinkMessage::NewRoute(route) = response {
                ranges.extend(own_range(&route));
            }
        })?;
    }
    Ok(ranges)
}

/// Returns the range of a route; `None` if it is none of the agent's.
fn own_range(route: &RouteMessage) -> Option<IpNet> {
    let RouteHeader { kind, protocol, table, destination_prefix_length, .. } = route.header;
    let is_own = kind == RouteType::Unreachable
        && u8::from(protocol) == OWN_PROTOCOL
        && table == RouteHeader::RT_TABLE_MAIN
        && route.attributes.contains(&RouteAttribute::Priority(METRIC));
    let destination = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(four)) => Some(IpAddr::V4(*four)),
        RouteAttribute::Destination(RouteAddress::Inet6(six)) => Some(IpAddr::V6(*six)),
        _ => None,
    });
    // A route to all addresses has no destination.
    let any = match route.header.address_family {
        AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    IpNet::new(destination.unwrap_or(any), destination_prefix_length).ok().filter(|_| is_own)
}

fn unreachable_route(range: IpNet) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = match range {
        IpNet::V4(_) => AddressFamily::Inet,
        IpNet::V6(_) => AddressFamily::Inet6,
    };
    route.header.destination_prefix_length = range.prefix_len();
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.protocol = RouteProtocol::from(OWN_PROTOCOL);
    route.header.scope = RouteScope::Universe;
    route.header.kind = RouteType::Unreachable;
    // Metric and protocol are part of the key of a removal: a foreign route to the same range stays.
    route.attributes =
        vec![RouteAttribute::Destination(range.network().into()), RouteAttribute::Priority(METRIC)];
    route
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routes_of_its_own_protocol_are_the_agents() {
        for range in ["10.96.0.0/12", "fd00:10:96::/112"] {
            let range: IpNet = range.parse().expect("a range");
            let own = unreachable_route(range);
            assert_eq!(own_range(&own), Some(range));
            let mut foreign = own.clone();
            foreign.header.protocol = RouteProtocol::Static;
            assert_eq!(own_range(&foreign), None, "of an operator");
            let mut other_table = own.clone();
            other_table.header.table = 100;
            assert_eq!(own_range(&other_table), None);
            let mut other_metric = own;
            other_metric.attributes.pop();
            assert_eq!(own_range(&other_metric), None, "a removal would not find it");
        }
    }
}
