//! Shell: connects one network namespace to the node's bridge by a veth pair.
//!
//! No pod's address is asked for by broadcast. A broadcast goes to every port of the bridge, and each pod there
//! processes it. With a hundred pods the first packet waits 0.2 ms for that. So hardware addresses follow from the IPv4
//! address. The node has a permanent neighbour entry for each pod, and each pod has one for the node. Between pods, the
//! bridge answers ARP requests. Over IPv6 it cannot answer without dropping ARP requests, so the first packet between
//! two pods is preceded by a neighbour solicitation to all.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use futures::TryStreamExt as _;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::{InfoBridgePort, InfoData, InfoVeth, LinkAttribute};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::{Handle, LinkBridgePort, LinkUnspec, LinkVeth, RouteMessageBuilder};

use super::{
    BRIDGE_MAC, ETH0_INDEX, LOOPBACK_INDEX, NetError, add_address, bring_up, connect_netlink,
    current_namespace, enter_namespace, link_error, log_v6_error,
};
use crate::layout::{GATEWAY_V4, GATEWAY_V6, PODS_V4_PREFIX, PODS_V6_PREFIX};

/// IPv4 and IPv6 address of one namespace.
type NamespaceAddresses = (Ipv4Addr, Ipv6Addr);

/// Connects namespace `fd` to the bridge: veth pair, addresses, default routes, neighbour entries.
///
/// The calling thread is in the node's network namespace.
pub(super) async fn connect_namespace(
    handle: &Handle,
    name: &str,
    fd: BorrowedFd<'_>,
    addresses: NamespaceAddresses,
) -> Result<(), NetError> {
    let mac = mac_of(addresses.0);
    // The peer is created directly inside the namespace, so it never appears in the node's.
    let peer = LinkUnspec::new_with_index(ETH0_INDEX)
        .name("eth0")
        .address(mac.to_vec())
        .append_extra_attribute(LinkAttribute::NetNsFd(fd.as_raw_fd()))
        .build();
    let veth = LinkVeth::new(name, "eth0")
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
        .controller(ETH0_INDEX)
        .up();
    handle
        .link()
        .add(veth.build())
        .execute()
        .await
        .map_err(link_error("make the veth pair", name))?;
    // A netlink socket belongs to the namespace in which it is opened. The thread returns before `?` can leave.
    let own_namespace = current_namespace()?;
    enter_namespace(fd)?;
    let inside = connect_netlink();
    enter_namespace(own_namespace.as_fd())?;
    set_up_inside(&inside?, name, addresses).await?;
    set_up_bridge_port(handle, name, mac).await?;
    add_neighbour(handle, addresses.0.into(), mac).await?;
    log_v6_error(add_neighbour(handle, addresses.1.into(), mac).await);
    Ok(())
}

/// Configures the end in the namespace: interfaces, addresses, neighbour entry and default routes.
async fn set_up_inside(
    inside: &Handle,
    name: &str,
    (v4, v6_address): NamespaceAddresses,
) -> Result<(), NetError> {
    bring_up(inside, LOOPBACK_INDEX).await?;
    bring_up(inside, ETH0_INDEX).await?;
    add_address(inside, ETH0_INDEX, v4.into(), PODS_V4_PREFIX).await?;
    add_neighbour(inside, GATEWAY_V4.into(), BRIDGE_MAC).await?;
    let route = RouteMessageBuilder::<Ipv4Addr>::new().gateway(GATEWAY_V4).build();
    inside.route().add(route).execute().await.map_err(link_error("set the route", name))?;
    log_v6_error(set_up_inside_v6(inside, name, v6_address).await);
    Ok(())
}

async fn set_up_inside_v6(inside: &Handle, name: &str, v6: Ipv6Addr) -> Result<(), NetError> {
    add_address(inside, ETH0_INDEX, v6.into(), PODS_V6_PREFIX).await?;
    add_neighbour(inside, GATEWAY_V6.into(), BRIDGE_MAC).await?;
    let route = RouteMessageBuilder::<Ipv6Addr>::new().gateway(GATEWAY_V6).build();
    inside.route().add(route).execute().await.map_err(link_error("set the route", name))
}

/// Configures the end at the bridge: frames for `mac` go there, and the bridge answers ARP requests from there.
async fn set_up_bridge_port(handle: &Handle, name: &str, mac: [u8; 6]) -> Result<(), NetError> {
    let find = link_error("find the veth pair", name);
    let mut links = handle.link().get().match_name(name).execute();
    let Some(port) = links.try_next().await.map_err(find)? else { return Ok(()) };
    let index = port.header.index;
    // With `ProxyARPWifi` the bridge answers in place of this port, and then does not forward the request to it.
    // `ProxyARP` would withhold every broadcast and multicast from the port, answered or not: IPv6's neighbour
    // solicitations would never arrive.
    let quiet = LinkBridgePort::new(index).append_info_data(InfoBridgePort::ProxyARPWifi(true));
    let set = handle.link().set_port(quiet.build()).execute().await;
    set.map_err(link_error("answer for the neighbours", name))?;
    // In a bridge's table "permanent" means an address of the bridge itself, so the state is NOARP.
    let neighbour = handle.neighbours().add_bridge(index, &mac).state(NeighbourState::Noarp);
    let neighbour = neighbour.flags(NeighbourFlags::Controller).replace();
    neighbour.execute().await.map_err(link_error("set the hardware address", name))
}

/// Adds a neighbour entry. The index is [`ETH0_INDEX`] both for the bridge in the node and for `eth0` in a namespace.
async fn add_neighbour(handle: &Handle, ip: IpAddr, mac: [u8; 6]) -> Result<(), NetError> {
    let neighbour = handle.neighbours().add(ETH0_INDEX, ip).link_layer_address(&mac).replace();
    neighbour.execute().await.map_err(link_error("set the neighbour", ip))
}

/// Removes the node's neighbour entries for a namespace that is gone.
pub(super) async fn remove_neighbours(handle: &Handle, (v4, v6): NamespaceAddresses) {
    let families = [
        (AddressFamily::Inet, NeighbourAddress::Inet(v4)),
        (AddressFamily::Inet6, NeighbourAddress::Inet6(v6)),
    ];
    for (family, address) in families {
        let mut neighbour = NeighbourMessage::default();
        neighbour.header.family = family;
        neighbour.header.ifindex = ETH0_INDEX;
        neighbour.attributes.push(NeighbourAttribute::Destination(address));
        // An error means that the entry is gone already, which is the aim.
        let _ = handle.neighbours().del(neighbour).execute().await;
    }
}

/// Returns the hardware address for an IPv4 address: locally administered, and unique on the bridge.
fn mac_of(v4: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = v4.octets();
    [0x02, 0x72, a, b, c, d]
}
