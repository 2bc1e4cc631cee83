//! Shell: time from a datagram to its answer, through ClusterIPs and to the endpoints themselves.

use anyhow::{Context as _, Result};

use super::{
    BARE, ClusterIpBenchContext, ConnectTargets,
    node::BenchCgroup,
    objects::{ServiceProtocol, ServiceSet},
    proxy::{ProxySubject, RunningProxy},
};
use crate::bench::{
    interleave,
    report::{BenchGoal, BenchRow, case_rows},
};

/// Number of exchanges in a round of sockets that stay open.
const EXCHANGES_PER_ROUND: &str = "2000";
/// Number of exchanges in a round of new sockets. In connection tracking each is an entry for half a minute.
const NEW_SOCKETS_PER_ROUND: &str = "500";

/// Sockets of one case.
#[derive(Clone, Copy, Debug)]
struct DatagramCase {
    /// Begin of the case's name; the number of Services follows.
    name: &'static str,
    /// Arguments of the client.
    args: &'static [&'static str],
}

const CASES: [DatagramCase; 4] = [
    DatagramCase {
        name: "udp_connected",
        args: &["--socket", "connected", "--count", EXCHANGES_PER_ROUND],
    },
    DatagramCase {
        name: "udp_unconnected",
        args: &["--socket", "unconnected", "--count", EXCHANGES_PER_ROUND],
    },
    DatagramCase {
        name: "udp_connected_new",
        args: &["--socket", "connected", "--count", NEW_SOCKETS_PER_ROUND, "--new-sockets"],
    },
    DatagramCase {
        name: "udp_unconnected_new",
        args: &["--socket", "unconnected", "--count", NEW_SOCKETS_PER_ROUND, "--new-sockets"],
    },
];

/// Measures all kinds of sockets with this number of Services.
pub(super) fn measure(context: &ClusterIpBenchContext, services: u32) -> Result<Vec<BenchRow>> {
    let set =
        ServiceSet { services, endpoints_each: 1, switches: false, protocol: ServiceProtocol::Udp };
    let proxies = super::start_all(context, set, &ProxySubject::MODES)?;
    let mut rows = Vec::new();
    for case in CASES {
        rows.extend(measure_case(&proxies, case, context.rounds)?);
    }
    Ok(rows)
}

/// Measures one kind of sockets: all proxies, and the endpoints themselves by a client that no program sees.
fn measure_case(
    proxies: &[RunningProxy],
    case: DatagramCase,
    rounds: u32,
) -> Result<Vec<BenchRow>> {
    let find = |name: &str| proxies.iter().find(|proxy| proxy.subject.name() == name);
    let rouse = find(ProxySubject::Rouse.name()).context("Rouse runs")?;
    let targets = ConnectTargets::of_set(rouse.set);
    let subjects = [&[BARE][..], &ProxySubject::MODES.map(ProxySubject::name)].concat();
    let exchange = |proxy: &RunningProxy, cgroup, addresses: &str| {
        let args = [&["datagrams", "exchange", "--addr", addresses][..], case.args].concat();
        super::run_client(proxy, cgroup, &args)
    };
    let times = interleave(rounds, &subjects, |subject| {
        let times = match find(subject) {
            Some(proxy) => exchange(proxy, BenchCgroup::Client, &targets.services)?,
            // The same node and path: only the programs are missing.
            None => exchange(rouse, BenchCgroup::Outside, &targets.endpoints)?,
        };
        Ok(times.p50_us)
    })?;
    let name = format!("{}_{}", case.name, rouse.set.services);
    Ok(case_rows(&name, "us", &times, BenchGoal::RatioAtMost(1.03)))
}
