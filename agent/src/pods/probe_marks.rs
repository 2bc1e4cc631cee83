//! Shell: marks the agent's probes in a kernel map, so that the eBPF programs count none of them as a request.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use aya::maps::{HashMap, MapData};
use common::probe::ProbeConnector;
use datapath::abi::ProbeKey;
use tokio::net::{TcpSocket, TcpStream};
use tracing::debug;

use crate::{clock::monotonic_ns, kernel::maps, lock::lock};

/// Time for which a mark outlives its probe's timeout: a pod may accept a connection that the probe has given up.
const MARK_LINGER: Duration = Duration::from_secs(1);

/// Map of the marks of probes under way; clones share it.
#[derive(Clone, Debug)]
pub struct ProbeMarks(Arc<Mutex<HashMap<MapData, ProbeKey, u64>>>);

/// Mark of one probe. Removed if the probe's connect fails; after a connect, the eBPF programs remove it.
#[derive(Debug)]
struct ProbeMark<'a> {
    marks: &'a ProbeMarks,
    key: ProbeKey,
    connected: bool,
}

impl ProbeMarks {
    /// Opens the map that is pinned in the folder `pins`.
    pub fn open(pins: &Path) -> Result<Self, maps::KernelMapError> {
        maps::open_probe_marks(pins).map(|map| Self(Arc::new(Mutex::new(map))))
    }
}

/// Connects to a pod without being counted.
impl ProbeConnector for ProbeMarks {
    async fn connect(&self, at: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
        let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // The kernel gives a bound port to no other socket until this one closes, so the mark is only of this probe.
        socket.bind(SocketAddr::new(source_address(at)?, 0))?;
        let mut mark = self.insert(socket.local_addr()?, timeout);
        let stream = socket.connect(at).await?;
        if let Some(mark) = &mut mark {
            mark.connected = true;
        }
        Ok(stream)
    }
}

impl ProbeMarks {
    fn insert(&self, local: SocketAddr, timeout: Duration) -> Option<ProbeMark<'_>> {
        let key = probe_key(local);
        let lifetime_ns = u64::try_from((timeout + MARK_LINGER).as_nanos()).unwrap_or(u64::MAX);
        let expires_at_ns = monotonic_ns().saturating_add(lifetime_ns);
        let inserted = lock(&self.0).insert(key, expires_at_ns, 0);
        // Without a mark the probe counts as a request, which is better than a pod that is never ready.
        inserted.inspect_err(|error| debug!(own = %local, %error, "cannot mark probe")).ok()?;
        Some(ProbeMark { marks: self, key, connected: false })
    }
}

impl Drop for ProbeMark<'_> {
    fn drop(&mut self) {
        if !self.connected {
            // The eBPF programs may have removed it already.
            let _none = lock(&self.marks.0).remove(&self.key);
        }
    }
}

/// Returns the address from which this machine reaches `at`.
fn source_address(at: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr =
        if at.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a datagram socket sends nothing; it only looks up the route.
    let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
    socket.connect(at)?;
    Ok(socket.local_addr()?.ip())
}

fn probe_key(local: SocketAddr) -> ProbeKey {
    let octets = match local.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    };
    let mut remote = [0; 4];
    for (word, bytes) in remote.iter_mut().zip(octets.chunks_exact(4)) {
        *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    ProbeKey { remote, remote_port: local.port().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_the_prober_as_a_packet_has_it() {
        let four = probe_key("10.1.2.3:4711".parse().expect("an address"));
        let memory = |bytes: [u8; 4]| u32::from_ne_bytes(bytes);
        let mapped = [0, 0, memory([0, 0, 255, 255]), memory([10, 1, 2, 3])];
        assert_eq!(four, ProbeKey { remote: mapped, remote_port: 4711 });
        let six = probe_key("[fd00:1::7]:80".parse().expect("an address"));
        assert_eq!(six.remote, [memory([0xfd, 0, 0, 1]), 0, 0, memory([0, 0, 0, 7])]);
    }

    #[test]
    fn the_source_is_where_the_routes_say() {
        let to = "127.0.0.1:9".parse().expect("an address");
        assert_eq!(source_address(to).expect("loopback"), IpAddr::from([127, 0, 0, 1]));
    }
}
