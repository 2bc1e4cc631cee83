//! Shell: wakes on a cluster of two nodes, by clients on the pod's own node and on the other one.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};

use super::{
    BenchClientPod, BenchCluster, BenchGoal, BenchRow, NO_FIRST_POD, RoundValues, SERVICE_LABEL,
    STANDBY, ServicePod, WAKES, WARM, create_services, first_byte_ms, send_request, wait_for_pods,
    wake_rows,
};

/// Cases by the place of the client: 0 on the pod's node, 1 on the other one.
const CASES: [&str; 2] = ["wake_cluster", "wake_other_node"];

/// Measured times by case.
type CaseTimes = BTreeMap<&'static str, RoundValues>;

/// Clients and services of this bench.
struct WakeBench<'a> {
    cluster: &'a BenchCluster,
    clients: &'a [BenchClientPod],
    /// Addresses of the services by name.
    addresses: BTreeMap<String, String>,
    /// Names of the services on standby: for each wake one of each place.
    kept: Vec<String>,
    /// Names of the services without standby.
    cold: Vec<String>,
}

/// Measures all rounds. Half of the services on standby are woken from their pod's node in each round, and the others
/// from the other node. Only the pod that has started shows the place of a cold start.
pub(super) fn run(
    cluster: &BenchCluster,
    clients: &[BenchClientPod],
    rounds: u32,
) -> Result<Vec<BenchRow>> {
    let kept = create_services(cluster, "kept", 2 * WAKES, STANDBY)?;
    let cold = create_services(cluster, "cold", WAKES, NO_FIRST_POD)?;
    let warm = create_services(cluster, "warm", 1, WARM)?;
    let address = |name: &String| Ok((name.clone(), format!("{}:80", cluster.cluster_ip(name)?)));
    let addresses = kept.iter().chain(&cold).map(address);
    let addresses = addresses.collect::<Result<BTreeMap<String, String>>>()?;
    let bench = WakeBench { cluster, clients, addresses, kept, cold };
    let mut times = CaseTimes::new();
    for round in 0..=rounds as usize {
        wait_for_pods(cluster, bench.kept.len(), bench.kept.len() + warm.len())?;
        let measured = bench.measure_round(round, &warm[0])?;
        // The first round finds cold caches.
        for (case, subject, value) in measured.into_iter().filter(|_| round > 0) {
            times.entry(case).or_default().entry(subject).or_default().push(value);
        }
    }
    let goal = BenchGoal::P50P99AtMost(2.0, 10.0);
    Ok(times.iter().flat_map(|(case, times)| wake_rows(case, times, goal)).collect())
}

impl WakeBench<'_> {
    /// Measures one round. Returns the case, the subject and the time of each request, in ms.
    fn measure_round(
        &self,
        round: usize,
        warm: &str,
    ) -> Result<Vec<(&'static str, &'static str, f64)>> {
        let pods = self.running_pods()?;
        let pod_of = |service: &str| {
            let pod = pods.iter().find(|pod| pod.service == service);
            pod.with_context(|| format!("{service} has no pod"))
        };
        let (mut measured, mut cold_starts) = (Vec::new(), Vec::new());
        // The subjects take turns, so that a slow moment of the machine meets all of them.
        for index in 0..WAKES {
            for (place, case) in CASES.into_iter().enumerate() {
                let kept = &self.kept[2 * index + place];
                let client = self.client(&pod_of(kept)?.node, place)?;
                let value = self.measure("rouse", client, &self.addresses[kept], kept)?.0;
                measured.push((case, "rouse", value));
                let pod = pod_of(warm)?;
                let (client, address) =
                    (self.client(&pod.node, place)?, format!("{}:8080", pod.ip));
                measured.push((case, "direct", self.measure("direct", client, &address, warm)?.0));
            }
            // The scheduler chooses the node of this pod, so its place is known only afterwards.
            let cold = &self.cold[index];
            let client = &self.clients[(index + round) % self.clients.len()];
            let (value, pod) = self.measure("cold", client, &self.addresses[cold], cold)?;
            cold_starts.push((client.node.as_str(), pod, value));
        }
        // Read once for all: a pod stays for its window at least, and each reading would disturb a measurement.
        let pods = self.running_pods()?;
        for (client_node, name, value) in cold_starts {
            let pod = pods.iter().find(|pod| pod.name == name);
            // A pod that has ended belongs to no case.
            let Some(pod) = pod else { continue };
            measured.push((CASES[usize::from(pod.node != client_node)], "cold", value));
        }
        Ok(measured)
    }

    /// Sends one request. Returns the time until its first byte in ms, and the name of the pod that responded.
    fn measure(
        &self,
        subject: &str,
        client: &BenchClientPod,
        address: &str,
        host: &str,
    ) -> Result<(f64, String)> {
        let record = send_request(self.cluster, client, address, host)?;
        let value = first_byte_ms(subject, &record).with_context(|| host.to_owned())?;
        Ok((value, record.pod))
    }

    /// Pods of all services.
    fn running_pods(&self) -> Result<Vec<ServicePod>> {
        let pods = self.cluster.list(&["pods", "--selector", SERVICE_LABEL])?;
        Ok(pods.iter().filter_map(ServicePod::read).collect())
    }

    /// Returns the client on the node (place 0), or one on another node (place 1).
    fn client(&self, node: &str, place: usize) -> Result<&BenchClientPod> {
        let client = self.clients.iter().find(|client| (client.node == node) == (place == 0));
        client.with_context(|| format!("no client for {node} at place {place}"))
    }
}
